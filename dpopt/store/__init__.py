"""The only code that writes `results/`."""

from dpopt.files import Damaged
from dpopt.store.runs import Store

__all__ = ["Damaged", "Store"]
