"""Whether a step of an optimizer that is traced will be repeated as it was, so that it need not be traced again."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpopt.privacy.oracle import TraceOracle

_CONSTANT = {"dimension", "rate", "expected_batch", "draw"}
"""What an oracle says that is the same in every step; `draw` gives tensors that cannot be read."""


class Watched:
    """A trace oracle that notes whether anything is read of it that changes from step to step.

    Attributes:
        is_read: whether it was.
    """

    def __init__(self, oracle: TraceOracle) -> None:
        self._oracle = oracle
        self.is_read = False

    def __getattr__(self, name: str) -> Any:
        self.is_read |= name not in _CONSTANT
        return getattr(self._oracle, name)


def repeats(before: Any, after: Any) -> bool:
    """Whether control flow can tell two states apart by nothing: tensors that cannot be read differ in shape alone."""
    if type(before) is not type(after):
        return False
    if isinstance(before, Tensor):
        return (before.shape, before.dtype) == (after.shape, after.dtype)
    if isinstance(before, tuple | list):
        return len(before) == len(after) and all(map(repeats, before, after))
    if isinstance(before, dict):
        return list(before) == list(after) and all(repeats(before[key], after[key]) for key in before)
    return isinstance(before, bool | int | float | str | None) and before == after
