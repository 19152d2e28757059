"""ADADP's network for CIFAR-10 (Koskela and Honkela 2020, section 5.1): frozen convolutions below a trained network."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from dpopt.bars import watched
from dpopt.errors import Missing
from dpopt.workloads import cache, data, features
from dpopt.workloads.base import Outline, Split, Workload, mlp, outlined
from dpopt.workloads.vision import Preparation

FEATURES = 1600
OFFICIAL = "adadp_conv_cifar100"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
normalised = Preparation(size=32, channels=3, mean=MEAN, std=STD)
"""Pixels uint8 [n, 3, 32, 32] as the convolutions take them."""
RECIPE = {"rate": 0.02, "batch": 100, "epochs": 100, "padding": 4, "hidden": 500, "seed": 0}
"""Of our own pre-training. Rate, batch, crop and flip are the paper's; it names no number of epochs, the authors' code
takes 100. One hidden layer stands above the convolutions, as in that code, whose ReLU after the last layer is left out:
it lets no gradient through for a class whose output is negative."""


@dataclass(frozen=True)
class ADADPCNN(Workload):
    """CIFAR-10 through two frozen convolutions, then a 1600-500-500-10 ReLU network without biases, which is trained.

    The convolutions (3x3, 64 filters each, no padding; ReLU and a 3x3 max-pool of stride 2 after each) were trained on
    CIFAR-100, which the privacy guarantee does not cover. 1,055,000 parameters are trained. Private training has no
    augmentation, in which the authors' code differs (crop and flip): their features are not computed once.

    Args:
        convolutions: "official": those that the authors' code comes with, `adadp_conv_cifar100.safetensors` in
            `$DPOPT_DATA/checkpoints`; "pretrained": our own, trained by `RECIPE` when first needed and kept.
        pretraining: the data set of our own pre-training.
        validation: see `Workload`.
    """

    validation: int = 5000
    convolutions: Literal["official", "pretrained"] = "official"
    pretraining: Literal["cifar100", "cifar100_subset"] = "cifar100"

    data: ClassVar[str] = "cifar10"
    batch_size: ClassVar[int] = 200
    epochs: ClassVar[float] = 100.0
    clip: ClassVar[float] = 3.0
    classes: ClassVar[int] = 10

    @property
    def pool(self) -> int:  # type: ignore[override]
        return data.entry("cifar10").part("train").records

    def missing(self) -> list[Missing]:
        images = data.missing("cifar10")
        if self.convolutions == "pretrained":
            return images + data.missing(self.pretraining)
        try:
            _official_file()
        except Missing as error:
            return [*images, error]
        return images

    def outline(self) -> Outline:
        return outlined(self.model, (FEATURES,), data.entry("cifar10").part("test").records)

    def load(self) -> tuple[Split, Split]:
        from safetensors.torch import load_file

        is_official = self.convolutions == "official"
        weights = load_file(_official_file()) if is_official else pretrained(self.pretraining)
        return _features("train", weights), _features("test", weights)

    def model(self) -> nn.Module:
        return mlp(FEATURES, 500, 500, self.classes, bias=False)


def convolutions() -> nn.Sequential:
    """The two convolutions with random weights: [n, 3, 32, 32] -> [n, 1600]."""
    layers = {
        "conv1": nn.Conv2d(3, 64, 3),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(3, stride=2),
        "conv2": nn.Conv2d(64, 64, 3),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(3, stride=2),
        "flat": nn.Flatten(),
    }
    return nn.Sequential(OrderedDict(layers))


def pretrained(name: str) -> dict[str, Tensor]:
    """The weights of our own convolutions, trained on the data set `name`; trained now where they are not yet kept."""
    key = {"kind": "adadp_convolutions", "recipe": RECIPE, "data": data.fingerprint(name)}
    return {layer: torch.from_numpy(array) for layer, array in cache.arrays(key, partial(_pretrain, name)).items()}


def _official_file() -> Path:
    file = data.checkpoint(OFFICIAL)
    if file is None:
        allowed = f"set DPOPT_DATA to a folder that holds checkpoints/{OFFICIAL}.safetensors, or use 'pretrained'"
        raise Missing("workload.convolutions", "official", allowed, "weights", OFFICIAL)
    return file


def _features(split: str, weights: Mapping[str, Tensor]) -> Split:
    x, y = data.images("cifar10", split)
    key = {
        "architecture": "adadp_convolutions",
        "weights": features.checksum_of(weights),
        "data": data.fingerprint("cifar10"),
        "split": split,
        "normalisation": [MEAN, STD],
    }
    return Split(features.cached(key, partial(_frozen, weights), x, normalised, batch=500), y)


def _frozen(weights: Mapping[str, Tensor]) -> nn.Module:
    layers = convolutions()
    layers.load_state_dict(dict(weights))
    return layers


def _pretrain(name: str) -> dict[str, NDArray[np.float32]]:
    x, y = data.images(name, "train")
    # Another number of cores, or another device, rounds otherwise: who needs the same weights copies the cache.
    device = features.device()
    with features.threads(features.cores()), torch.random.fork_rng():
        torch.manual_seed(RECIPE["seed"])
        layers = convolutions()
        top = mlp(FEATURES, RECIPE["hidden"], data.entry(name).classes)
        model = nn.Sequential(layers, top).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=RECIPE["rate"])
        for _ in watched(range(RECIPE["epochs"]), RECIPE["epochs"], f"pre-training on {name}"):
            for rows in torch.randperm(len(x)).split(RECIPE["batch"]):
                loss = F.cross_entropy(model(normalised(_cropped_and_flipped(x[rows]).to(device))), y[rows].to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    return {name: parameter.detach().cpu().numpy() for name, parameter in layers.named_parameters()}


def _cropped_and_flipped(x: Tensor, padding: int = RECIPE["padding"]) -> Tensor:
    """Each image [n, c, h, w] moved by up to `padding` pixels over black ground, and mirrored with chance 1/2."""
    n, _, height, width = x.shape
    windows = F.pad(x, [padding] * 4).unfold(2, height, 1).unfold(3, width, 1)
    down, right = torch.randint(2 * padding + 1, (2, n))
    moved = windows[torch.arange(n), :, down, right]
    return torch.where((torch.rand(n) < 0.5).view(n, 1, 1, 1), moved.flip(-1), moved)
