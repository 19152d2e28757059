"""dpopt: a benchmark suite for differentially private adaptive optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpopt import optimizers
from dpopt._lazy import attach
from dpopt.registry import create

if TYPE_CHECKING:
    from dpopt import clipping, errors, privacy, sklearn, testing
    from dpopt.results.results import Results, load_results
    from dpopt.runs.run_suite import run_suite
    from dpopt.suites.suite import Suite, load_suite
    from dpopt.training import FitResult, fit
    from dpopt.training.privatize import privatize
    from dpopt.training.saved import load

__version__ = "0.2.0"
__all__ = [
    "FitResult",
    "Results",
    "Suite",
    "__version__",
    "clipping",
    "create",
    "errors",
    "fit",
    "load",
    "load_results",
    "load_suite",
    "optimizers",
    "privacy",
    "privatize",
    "run_suite",
    "sklearn",
    "testing",
]


# On first use: a list of names or a table must not wait for torch.
__getattr__, __dir__ = attach(
    __name__,
    dict.fromkeys(["FitResult", "fit"], "dpopt.training")
    | dict.fromkeys(["Results", "load_results"], "dpopt.results.results")
    | dict.fromkeys(["Suite", "load_suite"], "dpopt.suites.suite")
    | {"run_suite": "dpopt.runs.run_suite", "privatize": "dpopt.training.privatize", "load": "dpopt.training.saved"}
    | {name: f"dpopt.{name}" for name in ("clipping", "errors", "privacy", "sklearn", "testing")},
)
