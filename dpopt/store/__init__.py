"""The only code that writes `results/`."""

from dpopt.store.runs import Damaged, Store

__all__ = ["Damaged", "Store"]
