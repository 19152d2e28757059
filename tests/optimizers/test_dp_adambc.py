import math

import pytest
import torch

import dpopt
from dpopt.privacy import Release


def directions(optimizer, steps=5, std=0.1):
    """The directions for `steps` random gradients."""
    generator = torch.Generator().manual_seed(0)
    state, found = optimizer.init(torch.zeros(50, dtype=torch.float64)), []
    for _ in range(steps):
        gradient = 0.3 * torch.randn(50, dtype=torch.float64, generator=generator)
        direction, state = optimizer.direction(state, Release(gradient, std))
        found.append(direction)
    return torch.stack(found)


def test_where_the_floor_holds_it_is_momentum_sgd():
    """First step: mhat is the gradient, so the direction is gradient / sqrt(gamma')."""
    optimizer = dpopt.create("dp_adambc", eps_v=0.25)
    gradient = torch.tensor([0.3, -0.4, 0.1])
    direction, _ = optimizer.direction(optimizer.init(torch.zeros(3)), Release(gradient, 0.2))
    torch.testing.assert_close(direction, gradient / 0.5)


def test_pure_noise_leaves_no_second_moment():
    """The mean of vhat - sigma_w^2 over many coordinates is zero: what is subtracted is what the noise added."""
    d, std, optimizer = 200_000, 0.5, dpopt.create("dp_adambc")
    state = optimizer.init(torch.zeros(d, dtype=torch.float64))
    torch.manual_seed(0)
    for _ in range(4):
        _, state = optimizer.direction(state, Release(std * torch.randn(d, dtype=torch.float64), std))
    vhat = state.v / (1 - 0.999**state.t)
    assert float(vhat.mean() - std**2) == pytest.approx(0, abs=5 * std**2 * math.sqrt(2 / (4 * d)))


@pytest.mark.parametrize("std", [torch.tensor(0.2, dtype=torch.float64), torch.full((50,), 0.2, dtype=torch.float64)])
def test_noise_may_be_a_tensor(std):
    torch.testing.assert_close(
        directions(dpopt.create("dp_adambc"), std=std), directions(dpopt.create("dp_adambc"), std=0.2)
    )
