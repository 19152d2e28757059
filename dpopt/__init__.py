"""dpopt: a benchmark suite for differentially private adaptive optimizers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpopt import optimizers
from dpopt._lazy import attach
from dpopt.registry import create

if TYPE_CHECKING:
    from dpopt import clipping, privacy, testing
    from dpopt.training import FitResult, fit

__version__ = "0.1.0"
__all__ = ["FitResult", "__version__", "clipping", "create", "fit", "optimizers", "privacy", "testing"]

__getattr__ = attach(
    __name__,
    dict.fromkeys(["FitResult", "fit"], "dpopt.training")
    | {name: f"dpopt.{name}" for name in ("clipping", "privacy", "testing")},
)
