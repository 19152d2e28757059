"""Classification of images: any data set of images, any model, trained from scratch or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt import fields
from dpopt._extras import absent
from dpopt.clipping.layers import refuse_unsafe
from dpopt.errors import ConfigError, Missing
from dpopt.fields import Arguments, Count
from dpopt.privacy.sampling import derive
from dpopt.workloads import cache as kept
from dpopt.workloads import data, features, models
from dpopt.workloads.base import EVALUATION_BATCH, Outline, Split, Workload, mlp, outlined
from dpopt.workloads.data.source import is_online, kept_file

_WEIGHTS = "model.safetensors"
"""The hub's file of a checkpoint."""


class Preparation(NamedTuple):
    """The preparation of stored pixels: input side, channels of the model, and by what each channel is normalised."""

    size: int
    channels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """Pixels uint8 [n, h, w] (grey) or [n, 3, h, w] -> float32 [n, channels, size, size]."""
        x = (x if x.ndim == 4 else x.unsqueeze(1)).float().div_(255)
        if x.shape[-1] != self.size:
            # Bicubic interpolation overshoots at edges.
            x = F.interpolate(x, (self.size, self.size), mode="bicubic", antialias=True).clamp_(0, 1)
        mean, std = _constants(self.mean, self.std, x.device)
        return x.expand(-1, self.channels, -1, -1).sub(mean).div_(std)


@dataclass(frozen=True)
class ImageClassification(Workload):
    """Images resized and normalised, a model by name, and the part of it that is trained.

    A checkpoint's classifier is replaced by one for the classes of the data, which starts at zero. Models with random
    weights get group normalisation in place of batch normalisation. Where only the head of a checkpoint is trained, or
    a linear layer above a fixed part (`FROZEN`), features are computed once (`features`), in evaluation mode.

    Args:
        data: name of a data set of images, see `data.entries`.
        architecture: a key of `ARCHITECTURES` or `FROZEN`, the name of a model of another package, see
            `models.make_outside`, or of timm's, such as "vit_tiny_patch16_224.augreg_in21k_ft_in1k".
        pretrained: start from timm's checkpoint: the file in `$DPOPT_DATA/checkpoints` whose name begins with the
            model's where that variable is set, else from the hub.
        subset: what is trained, see `models.trainable`.
        size: side that images are resized to (bicubically); by default that of the checkpoint, else that of the data.
        options: of `timm.create_model`, such as `depth`.
        validation: see `Workload`.
        records: use that many of the data's training records, always the same ones; by default all.
    """

    data: str = "cifar10"
    architecture: str = "wrn_16_4"
    pretrained: bool = False
    subset: Literal["full", "head", "bitfit", "film", "lora"] = "full"
    size: Count | None = None
    options: Arguments = Arguments()
    records: Count | None = fields.later(None)

    batch_size: ClassVar[int] = 1000
    epochs: ClassVar[float] = 5.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", data.pinned(self.data, "image"))
        if self._is_own and (self.pretrained or self.options):
            raise ConfigError("workload.architecture", self.architecture, "only timm's have checkpoints and options")
        super().__post_init__()
        if self.records and self.records > (most := data.entry(self.data).part("train").records):
            raise ConfigError("workload.records", self.records, f"expected at most {most}, all of {self.data}")

    @property
    def revision(self) -> int:  # type: ignore[override]
        return models.REVISIONS.get(self.subset, 1)

    @property
    def pool(self) -> int:  # type: ignore[override]
        return self.records or data.entry(self.data).part("train").records

    @property
    def evaluation_batch(self) -> int:  # type: ignore[override]
        # As many pixels as usual: a batch takes about the same memory whatever the size.
        side = 32 if self.uses_features else self.preparation.size
        return max(1, EVALUATION_BATCH * 32**2 // max(side, 32) ** 2)

    @property
    def marks(self) -> int:  # type: ignore[override]
        # Few where an evaluation costs as much as some draws: whole models of timm's, thousands of features.
        if self.architecture in FROZEN:
            return 10
        return 40 if self.uses_features or self._is_own else 10

    @property
    def classes(self) -> int:  # type: ignore[override]
        return data.entry(self.data).classes

    @property
    def uses_features(self) -> bool:
        """True if records are loaded as the features of a frozen backbone; not if that has dropout."""
        is_fixed = self.pretrained and self.subset == "head" and not any("drop" in name for name in self.options)
        return is_fixed or self.architecture in FROZEN

    def check(self) -> None:
        self.outline()

    def missing(self) -> list[Missing]:
        packages = absent("peft") if self.subset == "lora" else []
        return packages + data.missing(self.data) + (_absent_checkpoint(self.architecture) if self.pretrained else [])

    def outline(self) -> Outline:
        tested = data.entry(self.data).part("test").records
        if not self.uses_features:
            side, channels, *_ = self.preparation
            return outlined(lambda: self._network(None), (channels, side, side), tested)
        return outlined(lambda: self._head(self._width), (self._width,), tested)

    def load(self) -> tuple[Split, Split]:
        # Images that differ in size are decoded to the model's.
        size = None if data.entry(self.data).size else self.preparation.size
        train, test = (data.images(self.data, split, size) for split in ("train", "test"))
        if self.uses_features:
            train = Split(self._features(train.x, "train"), train.y)
            test = Split(self._features(test.x, "test"), test.y)
        if self.records:
            rows = np.random.default_rng(derive("records", self.data)).permutation(len(train.y))[: self.records]
            train = Split(*(part[torch.from_numpy(np.sort(rows))] for part in train))
        return train, test

    def read(self, new: Any) -> Tensor:
        pixels = data.incoming(self.data, new, data.entry(self.data).size or self.preparation.size)
        if not self.uses_features:
            return pixels
        return torch.from_numpy(features.computed(lambda: self._backbone(self._checkpoint()), pixels, self.preparation))

    def transform(self, x: Tensor) -> Tensor:
        return x if self.uses_features else self.preparation(x)

    def model(self) -> nn.Module:
        return self._head(self.load()[0].x.shape[1]) if self.uses_features else self._network(self._checkpoint())

    def unfilled(self) -> nn.Module:
        return self._head(self._width) if self.uses_features else self.model()

    @cached_property  # every draw asks for it
    def preparation(self) -> Preparation:
        """The preparation of stored pixels for the whole model."""
        entry = data.entry(self.data)
        if self._is_own:
            channels = 3 if self.architecture.startswith("wrn") else entry.channels
            mean, std = ((0.0,), (1.0,)) if self.architecture in _RAW else (entry.mean, entry.std)
            return Preparation(self._side(None), channels, mean, std)
        configuration = models.timm_configuration(self.architecture)
        if self.pretrained:
            return Preparation(self._side(configuration.input_size[-1]), 3, configuration.mean, configuration.std)
        return Preparation(self._side(None), 3, entry.mean, entry.std)

    @property
    def _is_own(self) -> bool:
        return any(self.architecture in names for names in (ARCHITECTURES, FROZEN, models.outside()))

    def _side(self, of_checkpoint: int | None) -> int:
        side = self.size or self.options.get("img_size") or of_checkpoint or data.entry(self.data).size
        if not side:
            raise ConfigError("workload.size", None, f"the images of {self.data} differ in size: give one")
        return int(side)

    def _network(self, checkpoint: Path | None) -> nn.Module:
        prepared = self.preparation
        if self._is_own:
            make = ARCHITECTURES.get(self.architecture, partial(models.make_outside, self.architecture))
            network = make(self.classes, prepared.channels, prepared.size)
        else:
            network = models.timm_model(self.architecture, self.classes, checkpoint, **self._options)
        network = models.zero_head(network) if self.pretrained else models.without_batch_norm(network)
        refuse_unsafe(network)
        return models.trainable(network, self.subset)

    @cached_property
    def _width(self) -> int:
        """The number of features."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            if self.architecture in FROZEN:
                side, channels, *_ = self.preparation
                return int(self._backbone()(torch.empty(1, channels, side, side)).shape[1])
            return int(self._backbone().head_hidden_size)  # timm states it: nothing has to run

    def _head(self, width: int) -> nn.Module:
        head = models.trainable(nn.Linear(width, self.classes), self.subset)
        return models.zero_head(head) if self.pretrained else head

    def _backbone(self, checkpoint: Path | None = None) -> Any:
        if self.architecture in FROZEN:
            return FROZEN[self.architecture](self.preparation.channels, self.preparation.size)
        return models.timm_model(self.architecture, 0, checkpoint, **self._options)

    @property
    def _options(self) -> dict[str, Any]:
        # Models of one input size are made for ours.
        configuration, side = models.timm_configuration(self.architecture), self.preparation.size
        is_other = configuration.fixed_input_size and side != configuration.input_size[-1]
        return ({"img_size": side} if is_other else {}) | dict(self.options)

    def _checkpoint(self) -> Path | None:
        return _checkpoint(self.architecture) if self.pretrained else None

    def _features(self, x: Tensor, split: str) -> Tensor:
        file = self._checkpoint()
        decides = {"options": self._options, "weights": kept.checksum(file)} if file else {"revision": self.revision}
        key = {
            "architecture": self.architecture,
            **decides,
            "data": data.fingerprint(self.data),
            "split": split,
            "preparation": self.preparation._asdict(),
        }
        return features.cached(key, lambda: self._backbone(file), x, self.preparation)


ARCHITECTURES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "two_conv": models.two_conv,
    "opacus_conv": models.opacus_conv,
    "tanh_conv": models.tanh_conv,
    "wrn_16_4": lambda classes, channels, size: models.wide_resnet(16, 4, classes),
    "adadp_mlp": lambda classes, channels, size: mlp(channels * size**2, 256, 256, 256, classes, bias=False),
}
"""Models of our own: name -> function of (classes, channels, input side)."""
FROZEN: dict[str, Callable[[int, int], nn.Module]] = {"scatter": models.scatter_features}
"""Frozen parts of our own, below a linear layer: name -> function of (channels, input side)."""
_RAW = ("tanh_conv", "scatter")
"""Of these, pixels go in as they are, in [0, 1], as in the authors' code for MNIST and Fashion-MNIST.

CIFAR-10's they normalise by the constants of ImageNet, which changes little (`benchmarks/scatter_statistics.py`).
"""


@cache
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    # Kept on the device, so that no batch waits for them.
    return torch.tensor(mean, device=device).view(-1, 1, 1), torch.tensor(std, device=device).view(-1, 1, 1)


def _checkpoint(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    if local := _local_checkpoint(name):
        return local
    source = models.timm_configuration(name).hf_hub_id
    try:
        return Path(hf_hub_download(source, _WEIGHTS))
    except Exception as error:  # the library raises many kinds, none of them for a user to read
        allowed = f"{source} cannot be loaded ({error}); {_how_to_get(name)}"
        raise ConfigError("workload.architecture", name, allowed) from error


def _absent_checkpoint(name: str) -> list[Missing]:
    # What `_checkpoint` would have to ask the hub for.
    source = models.timm_configuration(name).hf_hub_id
    try:
        if _local_checkpoint(name) or kept_file(source, _WEIGHTS):
            return []
    except Missing as error:
        return [error]
    return [Missing("workload.architecture", name, _how_to_get(name), "weights", name, source * is_online())]


def _how_to_get(name: str) -> str:
    return f"set DPOPT_DATA to a folder that holds checkpoints/{name}.safetensors, or go online once"


def _local_checkpoint(name: str) -> Path | None:
    configuration = models.timm_configuration(name)  # of a name without a tag that of timm's default one
    return data.checkpoint(f"{configuration.architecture}.{configuration.tag}.")
