"""Images that are mirrored and shifted at random in each draw, several views of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpopt.clipping.views import Multiplicity
from dpopt.errors import ConfigError
from dpopt.fields import Natural
from dpopt.workloads.vision import ImageClassification


@dataclass(frozen=True)
class AugmentedImages(ImageClassification):
    """Training images are mirrored with probability 1/2 and cropped at random out of themselves with a wider edge.

    An image's gradient is the mean over its views, and is clipped once (De et al. 2022, arXiv 2204.13650). Validation
    and test images are as they are.

    Args:
        multiplicity: views of an image in a draw; time and memory of training are about as many times more.
        padding: pixels by which each edge is made wider, with the image's own reflection.
    """

    multiplicity: Multiplicity = 16  # type: ignore[override]
    padding: Natural = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.uses_features:
            raise ConfigError("workload.subset", self.subset, "its features are computed once: nothing is augmented")

    def check(self) -> None:
        super().check()
        if self.padding >= self.preparation.size:
            raise ConfigError("workload.padding", self.padding, f"expected less than {self.preparation.size}, the side")

    def augment(self, x: Tensor) -> Tensor:
        images, _, height, width = x.shape
        is_mirrored = torch.rand(images, 1, 1, 1, device=x.device) < 0.5
        wider = F.pad(torch.where(is_mirrored, x.flip(-1), x), (self.padding,) * 4, mode="reflect")
        down, right = torch.randint(2 * self.padding + 1, (2, images, 1), device=x.device)
        rows = (down + torch.arange(height, device=x.device))[:, None, :, None]
        columns = (right + torch.arange(width, device=x.device))[:, None, None, :]
        return wider.gather(2, rows.expand(-1, x.shape[1], -1, wider.shape[3])).gather(3, columns.expand(x.shape))
