import math

import pytest
import torch

import dpopt
from dpopt.privacy import Release


def test_pure_noise_leaves_no_second_moment():
    """The mean of vhat - sigma_w^2 over many coordinates is zero: what is subtracted is what the noise added."""
    d, std, optimizer = 200_000, 0.5, dpopt.create("dp_adambc")
    state = optimizer.init(torch.zeros(d, dtype=torch.float64))
    torch.manual_seed(0)
    for _ in range(4):
        _, state = optimizer.direction(state, Release(std * torch.randn(d, dtype=torch.float64), std))
    vhat = state.v / (1 - 0.999**state.t)
    assert float(vhat.mean() - std**2) == pytest.approx(0, abs=5 * std**2 * math.sqrt(2 / (4 * d)))


def test_noise_may_be_a_tensor():
    optimizer, gradient = dpopt.create("dp_adambc"), torch.tensor([0.3, -0.4, 0.1])
    state = optimizer.init(torch.zeros(3))
    expected, _ = optimizer.direction(state, Release(gradient, 0.2))
    for std in (torch.tensor(0.2, dtype=torch.float64), torch.full((3,), 0.2)):
        torch.testing.assert_close(optimizer.direction(state, Release(gradient, std))[0], expected)
