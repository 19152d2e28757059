"""The noise of one release as a tensor of its own."""

import torch

from dpopt.privacy import sampling


def gaussian(seed, draw, release, size, dtype=torch.float32, device="cpu"):
    """Standard normal noise [size] of release number `release` of draw number `draw`."""
    noise = torch.zeros(size, dtype=dtype, device=device)
    sampling.add_gaussian(noise, 1.0, seed, draw, release)
    return noise
