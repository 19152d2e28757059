"""Augmentation multiplicity: the gradient of a record is the mean over some random views of it, and is clipped once.

De et al. 2022 (arXiv 2204.13650). The views are an axis of the inputs, [n, K, ...], which the model takes
as rows, and a record's loss is the mean of its K losses. To a clipping engine that is a model and a loss as any other
and a record is still one row, so the sensitivity is the clip rule's, as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Annotated, NamedTuple

import torch
from torch import Tensor, nn

from dpopt.clipping.losses import Loss, RecordLoss, named
from dpopt.clipping.mixing import Unsupported, forked, must_not_mix, replaced, same
from dpopt.clipping.names import Wrapper
from dpopt.errors import ConfigError
from dpopt.fields import Range

_Change = Callable[[Tensor], Tensor]
"""Inputs [n, ...] -> as many."""
Multiplicity = Annotated[int, Range(1, 1024, "[]")]
"""Number of views of a record; all are held at once."""
_TRIES = 4
"""Number of times that a random change is tried for mixing."""
_SHARED_RECORDS, _SHARED_COPIES, _SHARED_TRIES = 8, 4, 16
"""Records, copies of each, and tries; a flip of each of four is the same for all in all tries once in 2^48."""
_MIXES = "what it makes of a record depends on the others, so nothing bounds what one of them contributes"
_SHARES = (
    "it draws random numbers for a whole batch: who is in a draw decides which records are in one batch, so one record "
    "would change the numbers of others; draw them for each record"
)


class Views(Wrapper):
    """`model` on inputs with an axis of views, [n, K, ...] -> [n, K, ...]; on inputs of `dims` dimensions, without."""

    def __init__(self, model: nn.Module, dims: int) -> None:
        super().__init__(model)
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == self.dims:
            return self._orig_mod(x)
        return self._orig_mod(x.flatten(0, 1)).unflatten(0, x.shape[:2])


class Multiplied(NamedTuple):
    """The model and the loss of a clipping engine, and the transform of its inputs."""

    model: nn.Module
    loss: Loss
    transform: _Change


def multiplied(
    model: nn.Module, loss: Loss, *, transform: _Change, augment: _Change, multiplicity: int, dims: int
) -> Multiplied:
    """`model`, `loss` and `transform` for gradients that are means over K views of a record, [n, ...] -> [n, K, ...].

    A view is what `augment` makes of the transformed inputs, which have `dims` dimensions; K is `multiplicity`.
    """

    def views(x: Tensor) -> Tensor:
        inputs = transform(x)
        # A copy each time, as a change in place would add up over the views.
        return torch.stack([augment(inputs.clone()) for _ in range(multiplicity)], dim=1)

    return Multiplied(Views(model, dims), RecordLoss(loss, has_views=True), views)


def refuse_mixing(change: _Change, x: Tensor, name: str) -> None:
    """Raise `ConfigError`, which names `name`, if `change` of inputs x [n, ...] makes one record depend on another.

    It is tried on x with torch's generators in other states, which are as before afterwards.
    """
    # An augmentation that mixes, such as mixup, would leave the sensitivity unbounded.
    extremes = False
    with forked(x.device), suppress(Exception):  # a change can fail in any way
        change(replaced(x, {0: 0, len(x) - 1: 1, len(x) // 2: 2}, extremes=True))
        extremes = True
    for base, source, seed in _tried(x) if len(x) > 1 else ():

        def find(x: Tensor, seed: int = seed) -> tuple[Tensor]:
            torch.manual_seed(seed)
            return (change(x.clone()).reshape(len(x), -1).T,)

        try:
            with forked(x.device):
                must_not_mix(find, base, extremes, source)
        except Unsupported as error:
            reason = _MIXES
            if "twice" in error.reason:
                reason = "from one state of torch's generators it makes this once and that another time"
            raise ConfigError(name, named(change), reason) from error
        except Exception:  # a change may take only some whole numbers
            if base is source:
                raise


def refuse_sharing(change: _Change, x: Tensor, name: str) -> None:
    """Raise `ConfigError`, which names `name`, if `change` draws the same random numbers for all records of a batch.

    A change that hardly ever does anything, or that draws numbers for each record beside shared ones, is not noticed.
    """
    if shares_randomness(change, x):
        raise ConfigError(name, named(change), _SHARES)


def shares_randomness(change: _Change, x: Tensor) -> bool:
    """True if `change` is random and the same for equal records of a batch; see `refuse_sharing`."""
    if len(x) < 2:
        return False
    rows = torch.linspace(0, len(x) - 1, min(len(x), _SHARED_RECORDS)).long()
    equal, changed = x[rows.to(x.device)].repeat_interleave(_SHARED_COPIES, dim=0), []
    with forked(x.device):
        for seed in range(_SHARED_TRIES):
            torch.manual_seed(seed)
            changed.append(change(equal.clone()).split(_SHARED_COPIES))
    # The copies of a record are changed alike each time, and not each time in the same way.
    return any(
        all(same(copies, copies[:1].expand_as(copies)) for copies in each)
        and any(copies.shape != each[0].shape or not same(copies, each[0]) for copies in each)
        for each in zip(*changed, strict=True)
    )


def _tried(x: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    for seed in range(_TRIES):
        yield x, x, seed
    if x.is_floating_point():
        return
    ends = {int(x.min()), int(x.max())}
    # Whole numbers have no infinity: beside records of one value, another value shows in a mean or maximum.
    for value in ends | ({0, 255} if x.dtype == torch.uint8 else set()):
        for base in (x, *(torch.full_like(x, end) for end in ends)):
            yield base, torch.full_like(x, value), 0
