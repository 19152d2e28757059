"""What is trained on what: a model, its loss and its data, in the one form that the kernel works with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from dpopt.clipping import Loss
from dpopt.clipping.views import multiplied
from dpopt.privacy.distributed import digest
from dpopt.training.inputs import Transform, sample
from dpopt.training.layout import Adapter, Layout
from dpopt.training.loop import Metric
from dpopt.workloads.base import Split

DIGESTED = 10_000
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
        """What errors call the model."""
        return type(self.model.model if isinstance(self.model, Adapter) else self.model).__name__

    @property
    def first(self) -> Split:
        """The first records as the model sees them; the same ones each time."""
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)
            return sample(self.train, self.transform, self.device)

    @cached_property
    def records(self) -> list[str]:
        """All training records as digests, the same whatever type they are stored in."""
        parts = zip(*(part.split(DIGESTED) for part in self.train), strict=True)
        return [digest(self.layout.converted(x), y.double()) for x, y in parts]

    def augmented(self, augment: Transform, multiplicity: int) -> Subject:
        """What an engine trains for gradients that are means over random views of a record; not to evaluate."""
        dims = self.first.x.ndim
        made = multiplied(
            self.model, self.loss, transform=self.transform, augment=augment, multiplicity=multiplicity, dims=dims
        )
        return replace(self, **made._asdict())
