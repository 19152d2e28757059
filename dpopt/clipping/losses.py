"""A loss that sees one record at a time, so that no record's loss depends on another record, whatever the loss does."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pkgutil import resolve_name
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from dpopt.errors import ConfigError

_LOG = logging.getLogger(__name__)
Loss = Callable[[Any, Tensor], Tensor]
"""(outputs [n, ...], targets [n, ...]) -> one loss per example [n]"""

SEPARABLE = (
    "dpopt.workloads.base:Workload.loss",
    "dpopt.workloads.generation:E2E.loss",
    "dpopt.workloads.gmm:GaussianMixture.loss",
)
"""The losses of the package's own workloads, which give the same bits for a batch as for its records."""


class RecordLoss:
    """`function` on each record alone: under `torch.func.vmap`, or one record after the other where that raises.

    A function of `SEPARABLE` is called on the batch as it is, which saves a tenth of a millisecond a call.

    Attributes:
        function: what the losses are computed by.
        is_trusted: the function is one of `SEPARABLE`, or the mean over views of a `RecordLoss`.
    """

    def __init__(self, function: Loss) -> None:
        self.function = function
        self.is_trusted = _is_separable(function) or type(function) is MeanLoss
        self._needs_loop: bool | None = False if self.is_trusted else None

    @property
    def needs_loop(self) -> bool | None:
        """True if `vmap` raises for the function; None before the first call."""
        return self.function.record_loss.needs_loop if type(self.function) is MeanLoss else self._needs_loop

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The losses [n] of outputs [n, ...], a tensor or a structure of tensors, and targets [n, ...].

        Raises:
            ConfigError: the loss of one record is not one number.
        """
        if self.is_trusted:
            return self.function(output, target)
        if not self._needs_loop:
            try:
                losses = self._by_vmap(output, target)
                self._needs_loop = False
                return losses
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # an `if` on a value, a mask of rows, an operation without a batching rule
                reason = " ".join(str(error).split())[:120]
        start, count = time.perf_counter(), len(target)
        losses = torch.cat([self.alone(rows(output, slice(i, i + 1), count), target[i : i + 1]) for i in range(count)])
        if not self._needs_loop:
            each = (time.perf_counter() - start) / count * 1e3
            text = "loss %s: one record after the other, %.2f ms for each in a pass, as torch.func.vmap raises: %s"
            _LOG.warning(text, named(self.function), each, reason)
            self._needs_loop = True
        return losses

    def alone(self, output: Any, target: Tensor) -> Tensor:
        """The loss [1] of one record's output and target, each with one row."""
        loss = self.function(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError("loss", named(self.function), f"expected one number for one record, not {shown}")
        return loss.reshape(1)

    def _by_vmap(self, output: Any, target: Tensor) -> Tensor:
        parts: list[Tensor] = []  # `vmap` takes no structures of classes that it has never seen
        mapped(parts.append, output)
        dims = [0 if _has_rows(part, len(target)) else None for part in parts]

        def one(parts: list[Tensor], target: Tensor) -> Tensor:
            singles = iter(p if dim is None else p.unsqueeze(0) for p, dim in zip(parts, dims, strict=True))
            return self.alone(mapped(lambda _: next(singles), output), target.unsqueeze(0)).squeeze(0)

        return vmap(one, in_dims=(dims, 0), randomness="different")(parts, target)


@dataclass(frozen=True)
class MeanLoss:
    """The mean over views of a record: outputs [n, K, ...] and targets [n, ...] -> [n].

    Args:
        loss: (outputs [m, ...], targets [m, ...]) -> [m].
    """

    loss: Loss
    record_loss: RecordLoss = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "record_loss", by_record(self.loss))

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.record_loss(*self.rows(output, target)).unflatten(0, (-1, output.shape[1])).mean(dim=1)

    def rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Each view as a record of its own: outputs and targets [n K, ...]."""
        return output.flatten(0, 1), target.repeat_interleave(output.shape[1], dim=0)


def by_record(loss: Loss) -> RecordLoss:
    """`loss` as one that sees a record at a time."""
    return loss if type(loss) is RecordLoss else RecordLoss(loss)


def _is_separable(loss: Loss) -> bool:
    function = loss.__func__ if type(loss) is MethodType else loss
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    return name in SEPARABLE and resolve_name(name) is function  # the name alone could be anybody's


def named(function: Callable[..., Any]) -> str:
    """A function's name, or its class's."""
    return getattr(function, "__name__", type(function).__name__)


def rows(output: Any, which: Any, count: int) -> Any:
    """Some rows of outputs of `count` records; a tensor without a row for each record is left as it is."""
    return mapped(lambda part: part[which] if _has_rows(part, count) else part, output)


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """`value`, a tensor or a structure of tensors, with `change` made to each tensor of it."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict) or hasattr(value, "__dict__"):
        new = copy.copy(value)
        for key, item in value.items() if isinstance(value, dict) else vars(value).items():
            (new.__setitem__ if isinstance(value, dict) else new.__setattr__)(key, mapped(change, item))
        return new
    return value


def _has_rows(part: Tensor, count: int) -> bool:
    return part.ndim > 0 and len(part) == count
