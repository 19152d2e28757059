"""What a training step is timed on: models of the usual kinds, with random data of their shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt.clipping import Loss
from dpopt.workloads import models
from dpopt.workloads.base import mlp


@dataclass(frozen=True)
class Case:
    """A model with data to time a step on. Can be pickled, so its functions are those of modules.

    Attributes:
        name: what tables call it.
        model: makes it, from torch's global generator.
        data: n -> random inputs and targets of n examples, from the same generator; never zeros.
        batch_size: examples of a step.
        loss: one loss per example.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch_size: int
    loss: Loss

    def make(self, subset: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
        """The model with `subset` trained, inputs and targets of one batch: the same ones at every call.

        Raises:
            ConfigError: the model has no such subset.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = models.trainable(self.model(), subset)
            x, y = self.data(self.batch_size)
        return model.to(device), x.to(device), y.to(device)


def class_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each example, shape [n]."""
    return F.cross_entropy(output, target, reduction="none")


def token_loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean cross-entropy over the tokens of each example, shape [n], from logits [n, t, v] and token ids [n, t]."""
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(dim=1)


def images(n: int, shape: tuple[int, ...], classes: int = 10) -> tuple[Tensor, Tensor]:
    """Normal inputs [n, *shape] and uniform classes [n]."""
    return torch.randn(n, *shape), torch.randint(classes, (n,))


def tokens(n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Uniform token ids [n, length], and those that follow each."""
    ids = torch.randint(vocabulary, (n, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


_COLOUR = partial(images, shape=(3, 32, 32))
_TEXT = partial(tokens, length=64, vocabulary=4096)
_MLP = partial(mlp, 784, 256, 256, 10)
_VIT = partial(models.timm_model, "vit_tiny_patch16_224", img_size=32, patch_size=4)

CASES = {
    case.name: case
    for case in (
        Case("mlp", _MLP, partial(images, shape=(784,)), 256, class_loss),
        Case("cnn", models.two_conv, _COLOUR, 128, class_loss),
        Case("wrn", models.wide_resnet, _COLOUR, 16, class_loss),
        Case("vit", _VIT, _COLOUR, 32, class_loss),
        Case("gpt2", models.GPT2, _TEXT, 16, token_loss),
    )
}
"""By name: 784-256-256-10, two convolutions, WRN-16-4, ViT-Ti at 32 x 32 pixels with 4 x 4 patches, a small GPT-2."""
