"""The models on which a training step is timed: models of the usual kinds, with random data of their shape."""

from __future__ import annotations

import dataclasses
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

    `model` and `data` (n -> random inputs and targets of n examples, never zeros) draw from torch's global generator;
    `tiny` is both of the same kind at the smallest shapes, for a rehearsal, None where they are small anyway.
    """

    name: str
    model: Callable[[], nn.Module]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch_size: int
    loss: Loss
    tiny: tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]] | None = None

    def rehearsal(self) -> Case:
        """The same case at its smallest shapes and with 8 examples, under the same name."""
        model, data = self.tiny or (self.model, self.data)
        return dataclasses.replace(self, model=model, data=data, batch_size=8, tiny=None)

    def counts(self, subset: str) -> tuple[int, int]:
        """Numbers of parameters of the model, and of those that are trained; `ConfigError` without such a subset."""
        with torch.device("meta"):  # the large models would take seconds and gigabytes
            parameters = list(models.trainable(self.model(), subset).parameters())
        return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)

    def make(self, subset: str, device: torch.device) -> tuple[nn.Module, Tensor, Tensor]:
        """The model with `subset` trained, inputs and targets of one batch: the same ones at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # on the CPU, so that all devices and contenders get the same numbers
            model = models.trainable(self.model(), subset)
            x, y = self.data(self.batch_size)
        return model.to(device), x.to(device), y.to(device)


def _token_loss(output: Tensor, target: Tensor) -> Tensor:
    # The mean over the tokens of each example, from logits [n, t, v] and token ids [n, t].
    return F.cross_entropy(output.transpose(1, 2), target, reduction="none").mean(dim=1)


def _images(n: int, shape: tuple[int, ...], classes: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(n, *shape), torch.randint(classes, (n,))


def _tokens(n: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(vocabulary, (n, length + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()  # each is followed by the next


# Partials of functions of modules, as a case is sent to another process.
_CLASS_LOSS = partial(F.cross_entropy, reduction="none")
_COLOUR = partial(_images, shape=(3, 32, 32))
_PHOTO = partial(_images, shape=(3, 224, 224))
_TEXT = partial(_tokens, length=64, vocabulary=4096)
_VIT = partial(models.timm_model, "vit_tiny_patch16_224", img_size=32, patch_size=4)
_VITS = {size: partial(models.timm_model, f"vit_{size}_patch16_224") for size in ("tiny", "small", "base")}
_GPT2_SMALL = partial(models.gpt2, layers=12, width=768, heads=12, vocabulary=50_257, context=1024)

_TINY_COLOUR = partial(_images, shape=(3, 8, 8))
_TINY_MLP = (partial(mlp, 6, 5, 10), partial(_images, shape=(6,)))
_TINY_CNN = (partial(models.two_conv, size=8), _TINY_COLOUR)
_TINY_WRN = (partial(models.wide_resnet, depth=10, width=1), _TINY_COLOUR)
_SMALLEST = {"img_size": 32, "patch_size": 16, "depth": 1, "embed_dim": 48, "num_heads": 3}
_TINY_VIT = (partial(models.timm_model, "vit_tiny_patch16_224", **_SMALLEST), _COLOUR)
_TINY_GPT2 = (
    partial(models.gpt2, layers=1, width=32, heads=2, vocabulary=64, context=8),
    partial(_tokens, length=8, vocabulary=64),
)


CASES = {
    case.name: case
    for case in (
        Case("mlp", partial(mlp, 784, 256, 256, 10), partial(_images, shape=(784,)), 256, _CLASS_LOSS, _TINY_MLP),
        Case("cnn", models.two_conv, _COLOUR, 128, _CLASS_LOSS, _TINY_CNN),
        Case("wrn", models.wide_resnet, _COLOUR, 16, _CLASS_LOSS, _TINY_WRN),
        Case("vit", _VIT, _COLOUR, 32, _CLASS_LOSS, _TINY_VIT),
        Case("gpt2", models.gpt2, _TEXT, 16, _token_loss, _TINY_GPT2),
        *(Case(f"vit_{size}_224", vit, _PHOTO, 32, _CLASS_LOSS, _TINY_VIT) for size, vit in _VITS.items()),
        Case("gpt2_small", _GPT2_SMALL, partial(_tokens, length=128, vocabulary=50_257), 16, _token_loss, _TINY_GPT2),
    )
}
"""By name: 784-256-256-10; two convolutions; WRN-16-4; ViT-Ti at 32 x 32 pixels with 4 x 4 patches; a GPT-2 of four
layers; ViT-Ti, -S and -B at 224 x 224 with 16 x 16 patches; GPT-2 small with 128 tokens. All weights are random."""
