"""A model, its loss and its data, in the one form that the kernel works with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpopt.clipping import Loss
from dpopt.clipping.flat import as_written
from dpopt.clipping.layers import frozen_statistics
from dpopt.clipping.views import multiplied
from dpopt.privacy.distributed import digest
from dpopt.training.layout import Adapter, Layout, Transform, sample
from dpopt.training.loop import Metric
from dpopt.workloads.base import Split

_DIGESTED = 10_000
"""Records that are converted at once, to tell data sets apart."""


@dataclass(frozen=True)
class Subject:
    """A model that maps one tensor to one tensor, and records to train and to evaluate it on.

    Attributes:
        model: on `device`; its parameters are those of the model that was given.
        loss: (outputs, targets) -> one loss per example.
        train: the records.
        held_out: further records by name, to evaluate on.
        transform: inputs as they are stored -> as the model takes them.
        layout: how inputs of several names lie in one tensor.
        device: where the model computes.
        metric: what is measured beside the loss.
    """

    model: nn.Module
    loss: Loss
    train: Split
    held_out: dict[str, Split]
    transform: Transform
    layout: Layout
    device: torch.device
    metric: Metric | None = None

    @property
    def name(self) -> str:
        """The model's name in errors."""
        return type(self.model.model if isinstance(self.model, Adapter) else self.model).__name__

    @property
    def first(self) -> Split:
        """The first records as the model sees them; the same ones each time."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            # A random transform must not make two looks differ.
            torch.manual_seed(0)
            return sample(self.train, self.transform, self.device)

    @cached_property
    def records(self) -> list[str]:
        """All training records as digests, the same whatever type they are stored in."""
        parts = zip(*(part.split(_DIGESTED) for part in self.train), strict=True)
        return [digest(self.layout.converted(x), y.double()) for x, y in parts]

    def identity(self) -> dict[str, Any]:
        """Digests of what is trained and of all records, as plain data."""
        splits = {"train": self.train, **self.held_out}
        digests = {name: self.records if name == "train" else digest(*split) for name, split in splits.items()}
        trained = [(name.replace("_orig_mod.", ""), p) for name, p in self.model.named_parameters() if p.requires_grad]
        return {
            "parameters": [[name, list(p.shape), str(p.dtype)] for name, p in trained],
            **{name: [digests[name], [list(part.shape) for part in split]] for name, split in splits.items()},
        }

    def augmented(self, augment: Transform, multiplicity: int) -> Subject:
        """The subject whose gradients are means over random views of a record; not to evaluate."""
        dims = self.first.x.ndim
        changed = multiplied(
            self.model, self.loss, transform=self.transform, augment=augment, multiplicity=multiplicity, dims=dims
        )
        return replace(self, **changed._asdict())


def made_up(like: Tensor) -> Tensor:
    """Records of the type and shape of `like` that say nothing of it: bytes, numbers from 0 to 1, or zeros."""
    # Whole numbers may be indices into a table, where only 0 is sure to exist.
    if like.dtype != torch.uint8 and not like.is_floating_point():
        return torch.zeros_like(like)
    values = torch.arange(like.numel()).sin().abs().view(like.shape)
    return (values * (255 if like.dtype == torch.uint8 else 1)).to(like.dtype)


@contextmanager
def unchanged(model: nn.Module, device: torch.device, training: bool) -> Iterator[None]:
    """`model` in one mode and as it is written for a while; modes, buffers and generators are restored."""
    # They stay in evaluation mode, as a clipping engine leaves them.
    frozen = frozen_statistics(model)
    named = [(module, name, b) for module in model.modules() for name, b in module._buffers.items() if b is not None]
    buffers = [(module, name, buffer, buffer.clone()) for module, name, buffer in named]
    try:
        with kept_modes(model), torch.random.fork_rng([device] if device.type == "cuda" else []), as_written():
            model.train(training)
            for module in frozen:
                module.training = False
            yield
    # Statistics of batch norm and counters would move by a mere look.
    finally:
        for module, name, buffer, values in buffers:
            with torch.no_grad():
                module._buffers[name] = buffer.copy_(values)


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Each module of `model` is in the mode in which it was, afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
