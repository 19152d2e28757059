"""What is trained on what: a model, its loss and its data, in the one form that the kernel works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from dpopt.clipping import Loss
from dpopt.training.inputs import Transform, sample
from dpopt.training.layout import Adapter, Layout
from dpopt.training.loop import Metric
from dpopt.workloads.base import Split


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
        """The first records as the model sees them."""
        return sample(self.train, self.transform, self.device)
