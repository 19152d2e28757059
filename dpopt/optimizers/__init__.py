"""The optimizers, one method per file. Each sees an oracle only; see `base` for what they share.

`dpopt.optimizers()` is the tuple of registered names and `dpopt.optimizers.fiber` is a module: Python binds a submodule
to its package's attribute of that name, so one object has to be both.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from dpopt._lazy import attach

if TYPE_CHECKING:
    from dpopt.types import Optimizer

__all__ = ["Optimizer"]
__getattr__, __dir__ = attach(__name__, {"Optimizer": "dpopt.types"})


class _Callable(ModuleType):
    def __call__(self) -> tuple[str, ...]:
        """The names of all registered optimizers, plug-ins included."""
        from dpopt.registry import optimizers

        return optimizers()


sys.modules[__name__].__class__ = _Callable
