"""A loss that sees one record at a time, so that no record's loss depends on another record, whatever the loss does."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import vmap as functorch

from dpopt.clipping import mixing
from dpopt.clipping.evaluation import mapped, tensors_of
from dpopt.clipping.state import State
from dpopt.errors import ConfigError

_LOG = logging.getLogger(__name__)
_steps: Any = torch._C._functorch  # type: ignore[attr-defined]
Loss = Callable[[Any, Tensor], Tensor]
"""(outputs [n, ...], targets [n, ...]) -> one loss per example [n]"""

_SEPARABLE = (
    "dpopt.workloads.base:Workload.loss",
    "dpopt.workloads.generation:E2E.loss",
    "dpopt.workloads.gmm:GaussianMixture.loss",
)
"""The losses of the package's own workloads, which give the same bits for a batch as for its records."""
_TRIED, _SHOWN = 2**22, 64
"""The most numbers of outputs, and the most records of a batch, that a loss is tried on."""
_DIGITS = {torch.float64: 1e-9, torch.float32: 1e-5}
"""The most that two losses may be apart, as a share of the largest; 0.05 for types with fewer digits."""


class RecordLoss:
    """`function` on each record alone: under `torch.func.vmap`, or one record after the other where that raises.

    Attributes:
        has_views: outputs are [n, K, ...], and a record's loss is the mean over its K views, each by itself.
        is_trusted: the function is one of `_SEPARABLE`, and is called on the batch as it is.
        needs_loop: true if `vmap` raises for the function; None before the first call.
        has_rows: for each tensor of the outputs, true if it has a row for each record; None before `learn_rows`.
        is_random: true if `check_loss` saw it draw random numbers.
    """

    def __init__(self, function: Loss, has_views: bool = False) -> None:
        self.function, self.has_views = function, has_views
        self.is_trusted = _is_separable(function)
        self.needs_loop: bool | None = False if self.is_trusted else None
        self.has_rows: list[bool] | None = None
        self.is_random = self._is_fixed = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """The losses [n] of outputs [n, ...], a tensor or a structure of tensors, and targets [n, ...]."""
        if not self.has_views:
            return self.each(output, target)
        return self.each(*self.rows(output, target)).unflatten(0, (-1, output.shape[1])).mean(dim=1)

    def rows(self, output: Any, target: Tensor) -> tuple[Any, Tensor]:
        """Each view as a record of its own: outputs and targets [n K, ...]; without views they are as before."""
        if not self.has_views:
            return output, target
        return output.flatten(0, 1), target.repeat_interleave(output.shape[1], dim=0)

    def each(self, output: Any, target: Tensor) -> Tensor:
        """The loss of each row. ConfigError: the outputs have no row for each target, or a loss is not one number."""
        # Without `vmap`, as the package's losses give the same bits for a batch as for its records.
        if self.is_trusted:
            return self.function(output, target)
        count, reason, marks = len(target), "", self._row_marks(output, len(target))
        if not self.needs_loop:
            try:
                losses = self._by_vmap(output, target, marks)
                if losses.numel() == count:
                    self.needs_loop = False
                    return losses.view(count)
                reason = f"it gives {losses.numel()} numbers for {count} records"
            # It says nothing of the loss, and a loop would only hide it.
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # an `if` on a value, a mask of rows, an operation without a batching rule
                reason = " ".join(str(error).split())[:120]
        start = time.perf_counter()
        singles = (slice(at, at + 1) for at in range(count))
        losses = torch.cat([self.one(self.rows_of(output, single, count), target[single]) for single in singles])
        if not self.needs_loop:
            each = (time.perf_counter() - start) / count * 1e3
            text = "loss %s: one record after the other, %.2f ms for each in a pass, as torch.func.vmap raises: %s"
            _LOG.warning(text, named(self.function), each, reason)
            self.needs_loop = True
        return losses

    def learn_rows(self, model: Callable[[Tensor], Any], x: Tensor) -> None:
        """Learn which tensors of the outputs have a row for each record, from copies of one record x [1, ...].

        It is not asked anew for each batch: a codebook [16, d] has as many rows as a batch of 16 records.
        """
        two, three = (tensors_of(model(x.repeat(n, *[1] * (x.ndim - 1)))) for n in (2, 3))
        if len(two) == len(three):
            self.has_rows = [a.ndim > 0 and (len(a), len(b)) == (2, 3) for a, b in zip(two, three, strict=True)]

    def _row_marks(self, output: Any, count: int) -> list[bool]:
        """For each tensor of the outputs of `count` records: True if its rows are the records', False if it is whole.

        Raises ConfigError where a tensor that is to have a row for each record has another number of rows.
        """
        parts = tensors_of(output)
        are_rows = [part.ndim > 0 and len(part) == count for part in parts]
        marks = [True] if isinstance(output, Tensor) else are_rows if self.has_rows is None else self.has_rows
        if len(marks) != len(parts) or any(mark and not is_row for mark, is_row in zip(marks, are_rows, strict=True)):
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise ConfigError("model", f"outputs {shapes}", f"expected a row for each of {count} records")
        return marks

    def rows_of(self, output: Any, which: Any, count: int) -> Any:
        """Copies of some rows of outputs of `count` records, as a loss may work in place; other tensors are whole."""
        marks = iter(self._row_marks(output, count))
        return mapped(lambda part: (part[which] if next(marks) else part).clone(), output)

    def _by_vmap(self, output: Any, target: Tensor, marks: list[bool]) -> Tensor:
        if self.needs_loop is None:
            functorch.lazy_load_decompositions()  # type: ignore[attr-defined]
        count, left = len(target), iter([*marks, True])  # the last one is the target's
        # The steps of `vmap` by hand: its care for structures would double the time of a call.
        level = _steps._vmap_increment_nesting(count, "same" if self._is_fixed else "different")

        def shown(part: Tensor) -> Tensor:
            return _steps._add_batch_dim(part.unsqueeze(1), 0, level) if next(left) else part

        try:
            one = mapped(shown, output)
            return _steps._remove_batch_dim(self._value(one, shown(target)), level, count, 0)
        finally:
            _steps._vmap_decrement_nesting()

    def _value(self, output: Any, target: Tensor) -> Tensor:
        with _seeded(target.device) if self._is_fixed else nullcontext():
            return self.function(output, target)

    @contextmanager
    def fixed_numbers(self) -> Iterator[None]:
        """Within it, a loss that draws random numbers draws the same for each record and in each call."""
        self._is_fixed = self.is_random
        try:
            yield
        finally:
            self._is_fixed = False

    def alone(self, output: Any, target: Tensor) -> Tensor:
        """The loss [1] of one record's output and target, each with one row."""
        return self(output, target) if self.has_views else self.one(output, target)

    def one(self, output: Any, target: Tensor) -> Tensor:
        loss = self._value(output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shown = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError("loss", named(self.function), f"expected one number for one record, not {shown}")
        return loss.reshape(1)


def by_record(loss: Loss) -> RecordLoss:
    """`loss` as one that sees a record at a time."""
    return loss if isinstance(loss, RecordLoss) else RecordLoss(loss)


def _is_separable(loss: Loss) -> bool:
    function = loss.__func__ if isinstance(loss, MethodType) else loss
    # By name first, since looking a function up would import modules that nobody uses.
    name = f"{getattr(function, '__module__', '')}:{getattr(function, '__qualname__', '')}"
    return name in _SEPARABLE and resolve_name(name) is function  # the name alone could be anybody's


def named(function: Callable[..., Any]) -> str:
    """A function's name, or its class's."""
    return getattr(function, "__name__", type(function).__name__)


def check_loss(
    state: State, model: nn.Module, loss: RecordLoss, x: Tensor, y: Tensor, batch: float | None = None
) -> None:
    """Refuse a loss whose values for the records of a batch are not those for each of them alone (ConfigError).

    It is tried on outputs of `model`, that of `state`, for some records x, y, at best with targets of each kind, and
    refused too where it keeps state, fails for one record, or is not finite for some records alone.
    """
    is_finite = torch.stack([part.isfinite().reshape(len(x), -1).all(1) for part in (x, y)]).all(0)  # not bad records
    x, y = x[is_finite], y[is_finite]
    # A batch loss does no harm, as engines show it single records, but is not what its author wrote.
    if loss.is_trusted or not len(x):
        return
    with mixing.trial(state), torch.no_grad():
        for is_beside in (False, True):  # beside the parameters no initial zero hides a factor
            for p in model.eval().parameters():
                if is_beside and p.requires_grad:
                    p.copy_(mixing.beside([p]).view_as(p))
            try:
                with state:
                    room = _TRIED // max(1, sum(part.numel() for part in tensors_of(model(x[:1]))))
                    output, target = model(x[: max(2, room)]), y[: max(2, room)]
                    loss.learn_rows(model, x[:1])
            except Exception:  # an engine says what the model fails with
                return
            output, target = loss.rows(output, target)
            for size in (2, 2 * len(target) + 1, min(int(batch or 0), 512, room)):
                if size > 1:
                    _must_be_alike(loss, output, target, size, is_beside)


def _must_be_alike(loss: RecordLoss, output: Any, target: Tensor, size: int, is_beside: bool) -> None:
    # Some records come several times: where there is one of each class, a count of its records changes nothing.
    generator, name, count = torch.Generator().manual_seed(0), named(loss.function), len(target)
    more = torch.randint(count, (max(0, size - count),), generator=generator)
    which = torch.cat([torch.arange(min(count, size)), more])[torch.randperm(size, generator=generator)]
    which = which.to(target.device)
    output, target = loss.rows_of(output, which, count), target[which]
    few = min(size, _SHOWN)

    def values(output: Any, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        together = loss.function(mapped(Tensor.clone, output), target.clone())
        if tuple(together.shape) != (size,):
            raise ConfigError("loss", f"shape {tuple(together.shape)}", f"expected one loss per example, ({size},)")
        alone = loss.each(loss.rows_of(output, slice(few), size), target[:few].clone())
        parts = [(loss.rows_of(output, slice(i, i + 1), size), target[i : i + 1].clone()) for i in range(min(few, 16))]
        backwards = [loss.one(*part) for part in reversed(parts)][::-1]
        return together[:few], alone, torch.cat([*backwards, alone[len(parts) :]])

    try:
        exact = mapped(_doubled, output), _doubled(target)
        try:
            together, alone, backwards = values(*exact)
        except Exception:  # it may hold weights of the model's type
            exact = output, target
            together, alone, backwards = values(*exact)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError("loss", name, f"of one record alone it ends in {reason}") from error
    is_bad = ~alone.isfinite()
    shapes = [str(["n", *part.shape[1:]]).replace("'", "") for part in exact if isinstance(part, Tensor)]
    allowed = f"expected one that depends on the record's output and target alone, {', '.join(shapes)}"
    if not is_beside and is_bad.any() and not is_bad.all():
        at = int(is_bad.nonzero()[0])
        target_is = f" with target {target[at].tolist()}" if target.ndim == 1 else ""
        raise ConfigError("loss", name, f"the loss of a record{target_is} is {alone[at]:g}, that of others finite")
    loss.is_random = loss.is_random or _at_seed(loss, *exact)[1]
    if loss.is_random:  # it has other values each time, so records are kept and those beside them changed
        if _looks_beside(loss, *exact):
            raise ConfigError("loss", name, f"the loss of a record changes with the records beside it: {allowed}")
        return
    for others, text in ((together, f"in a batch of {size} records"), (backwards, "after other records")):
        digits = _DIGITS.get(alone.dtype, 0.05)
        if _apart(others, alone, digits) is not None and _is_rounded(loss, *exact):
            digits = max(digits, _DIGITS[torch.float32])
        if (bad := _apart(others, alone, digits)) is not None:
            seen = f"the loss of a record is {alone[bad]:.10g} alone and {others[bad]:.10g} {text}"
            raise ConfigError("loss", name, f"{seen}: {allowed}")


def _doubled(part: Tensor) -> Tensor:
    return part.double() if part.is_floating_point() else part


def _is_rounded(loss: RecordLoss, output: Any, target: Tensor) -> bool:
    """True if the loss computes with fewer digits than float64: it does not notice changes by some 1e-12."""

    def nearby(part: Tensor) -> Tensor:  # by another amount for each number, as a softmax does not notice a shift
        steps = torch.arange(part.numel(), device=part.device).view(part.shape).sin()
        return part + 1e-12 * steps * part.abs().clamp(min=1) if part.is_floating_point() else part

    # A loss that casts to float32 would be refused for its rounding otherwise.
    changed = loss.function(mapped(nearby, output), target.clone()) != loss.function(output, target.clone())
    return int(changed.sum()) < 2


@contextmanager
def _seeded(device: torch.device) -> Iterator[None]:
    with mixing.forked(device):
        torch.manual_seed(0)
        yield


def _at_seed(loss: RecordLoss, output: Any, target: Tensor) -> tuple[Tensor, bool]:
    """The losses at one state of the random generators, and True if they depend on it."""
    with _seeded(target.device):
        call = partial(loss.function, mapped(Tensor.clone, output), target.clone())
        return mixing.watch_generators(call, target.device)


def _looks_beside(loss: RecordLoss, output: Any, target: Tensor) -> bool:
    """True if losses of every other record change with the records between them, at equal random numbers."""
    size, (values, _) = len(target), _at_seed(loss, output, target)
    for kept in (0, 1):
        which = torch.arange(size, device=target.device)
        which[1 - kept :: 2] = kept
        others, _ = _at_seed(loss, loss.rows_of(output, which, size), target[which])
        if _apart(values[kept::2], others[kept::2], _DIGITS[torch.float32]) is not None:
            return True
    return False


def _apart(a: Tensor, b: Tensor, digits: float) -> int | None:
    largest = torch.cat([a, b]).abs().nan_to_num(0.0, 0.0).max()
    differ = ~((a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= digits * largest))
    return int(differ.nonzero()[0]) if differ.any() else None
