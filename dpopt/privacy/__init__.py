"""The kernel: what a run released (ledger), what that costs (accountants), and the only way to the data (oracles)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpopt._lazy import attach
from dpopt.privacy.accountants import ACCOUNTANTS, Accountant, epsilon
from dpopt.privacy.ledger import Draw, Ledger, NonPrivate, Plan, Unit

if TYPE_CHECKING:
    from dpopt.privacy.calibration import calibrate
    from dpopt.privacy.data import DataOracle
    from dpopt.privacy.oracle import BudgetSpent, ReplayOracle, TraceOracle, UnplannedRelease
    from dpopt.types import Batch, Oracle, Query, Record, Release

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Batch",
    "BudgetSpent",
    "DataOracle",
    "Draw",
    "Ledger",
    "NonPrivate",
    "Oracle",
    "Plan",
    "Query",
    "Record",
    "Release",
    "ReplayOracle",
    "TraceOracle",
    "Unit",
    "UnplannedRelease",
    "calibrate",
    "epsilon",
]

__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(["BudgetSpent", "ReplayOracle", "TraceOracle", "UnplannedRelease"], "dpopt.privacy.oracle")
    | dict.fromkeys(["Batch", "Oracle", "Query", "Record", "Release"], "dpopt.types")
    | {
        "DataOracle": "dpopt.privacy.data",
        "calibrate": "dpopt.privacy.calibration",
    },
)
