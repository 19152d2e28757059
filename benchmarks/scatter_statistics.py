"""Ways to normalise images and their scattering coefficients, and their worth on CIFAR-10.

    python benchmarks/scatter_statistics.py results/published/scatter_statistics

takes an hour and a half on one core, 16 GB of memory, and CIFAR-10 in `DPOPT_DATA`, and writes
`scatter_statistics.csv`. The suite `scatternet_cifar10` takes images as they are and normalises the coefficients of
each image alone, in 27 groups of channels. Tramer and Boneh (2021) take CIFAR-10's images normalised by the constants
of ImageNet, and normalise each channel of coefficients by noised means and variances of the training data. Here the
model of the suite is trained with the same noise and settings above coefficients of both kinds of images, which are
normalised in up to four ways:

    alone       each image alone, as the suite does
    exact       by the mean and the variance of each channel
    floored     so, with 1e-5 added to the variance, as they do
    noised      so, by means and mean squares that are clipped and noised, as theirs are

No epsilon covers these statistics: exact ones are not private, and the bounds of the noised ones are medians of the
data. The numbers are for explaining a difference, and for nothing else.
"""

import sys
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

import dpopt
from dpopt import registry
from dpopt.workloads import data
from dpopt.workloads.scattering import Scattering

IMAGES = {"plain": ((0, 0, 0), (1, 1, 1)), "normalised": (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)}
SUITE = ("plain", "alone")  # what the suite itself has
FLOOR, NOISE, GROUPS = 1e-5, 8, 27
SEEDS = 3
CHUNK = 500
SETTINGS = ("epsilon", "delta", "epochs", "batch_size", "seed")


def coefficients(images, mean, std):
    """Scattering coefficients of images of bytes [n, 3, 32, 32], shape [n, 243, 8, 8]."""
    transform = Scattering(images.shape[-1])
    mean, std = (torch.tensor(values)[:, None, None] for values in (mean, std))
    with torch.no_grad():
        return torch.cat([transform((part.float() / 255 - mean) / std) for part in images.split(CHUNK)])


def mean_of(rows, noise, random):
    """The mean of rows [n, k], shape [k]. With noise, rows are clipped to the median norm and the sum is noised."""
    if not noise:
        return rows.mean(0)
    norms = rows.norm(dim=1, keepdim=True)
    bound = norms.median()
    drawn = torch.randn(rows.shape[1], generator=random)
    return (rows * (bound / norms).clamp(max=1)).mean(0) + drawn * noise * bound / len(rows)


def normalised(train, test, seed, floor, noise):
    """Both by the statistics of the channels of `train`; a channel without variance, for its noise, is 0."""
    random = torch.Generator().manual_seed(seed)
    center = mean_of(train.mean((2, 3)), noise, random)
    squares = torch.cat([part.square().mean((2, 3)) for part in train.split(CHUNK)])
    variance = (mean_of(squares, noise, random) - center**2).clamp(min=0)
    scale = torch.where(variance > 0, (variance + floor).rsqrt(), 0)
    center, scale = center[:, None, None], scale[:, None, None]
    return [features.sub(center).mul_(scale) for features in (train, test)]


def alone(train, test, seed):
    """Both with each image normalised in groups of channels."""
    return [nn.functional.group_norm(features, GROUPS) for features in (train, test)]


WAYS = {
    "alone": alone,
    "exact": lambda train, test, seed: normalised(train, test, seed, 0, 0),
    "floored": lambda train, test, seed: normalised(train, test, seed, FLOOR, 0),
    "noised": lambda train, test, seed: normalised(train, test, seed, FLOOR, NOISE),
}


def accuracy(cell, train, test):
    """The noise and the test accuracy of the suite's cell above other inputs; both are rows and labels."""
    torch.manual_seed(cell.seed)
    model = nn.Linear(train[0].shape[1], 10)
    loss = registry.from_spec("workload", cell.workload).loss
    optimizer = registry.from_spec("optimizer", cell.optimizer)
    result = dpopt.fit(model, loss, train, optimizer=optimizer, **{name: getattr(cell, name) for name in SETTINGS})
    with torch.no_grad():
        right = (model(test[0]).argmax(1) == test[1]).double().mean().item()
    return {"noise": result.record["noise"]["gradient"], "test_accuracy": right}


def main(folder):
    """A row for each kind of images, seed and way."""
    splits = {split: data.images("cifar10", split) for split in ("train", "test")}
    cells = dpopt.load_suite("scatternet_cifar10").cells()[:SEEDS]
    rows = []
    for kind, constants in IMAGES.items():
        raw = [coefficients(split.x, *constants) for split in splits.values()]
        for cell, way in product(cells, [way for way in WAYS if (kind, way) != SUITE]):
            train, test = (features.flatten(1) for features in WAYS[way](*raw, cell.seed))
            result = accuracy(cell, (train, splits["train"].y), (test, splits["test"].y))
            rows.append({"images": kind, "statistics": way, "seed": cell.seed, **result})
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "scatter_statistics.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
