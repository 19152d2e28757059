import math

import pytest
import torch

import dpopt
from dpopt.errors import ConfigError
from dpopt.privacy import Release


@pytest.mark.parametrize("kappa", [0.2, 0.5, 0.9])
def test_base_is_told_the_noise_of_the_filtered_gradient(kappa):
    """Against simulation after 1, 2, 5 and 40 steps, and against the stationary kappa / (2 - kappa)."""
    d, std, optimizer = 100_000, 0.3, dpopt.create("disk", kappa=kappa, base="dp_sgd")
    state = optimizer.init(torch.zeros(d))
    torch.manual_seed(0)
    for t in range(1, 41):
        direction, state = optimizer.direction(state, Release(std * torch.randn(d), std))
        if t in (1, 2, 5, 40):
            measured = float(direction.double().square().mean())
            assert measured == pytest.approx(float(state.variance), rel=5 * math.sqrt(2 / d))
    assert float(state.variance) == pytest.approx(std**2 * kappa / (2 - kappa), rel=1e-6)


@pytest.mark.parametrize(("kappa", "gamma", "points"), [(0.7, 0.5, 2), (1.0, 0.5, 1), (0.5, 1.0, 1)])
def test_a_point_without_weight_is_not_evaluated(kappa, gamma, points):
    optimizer = dpopt.create("disk", kappa=kappa, gamma=gamma)
    oracle = dpopt.privacy.TraceOracle(3, 0.1, 4)
    optimizer.step(optimizer.init(oracle.theta), oracle)
    assert sum(oracle.points) == points


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("fiber", r"DiSK\.base: .* plain gradient at theta_t"),
        ("scale_then_privatize", r"DiSK\.base: .* plain gradient at theta_t"),
    ],
)
def test_bases_that_cannot_be_filtered(base, message):
    with pytest.raises(ConfigError, match=message):
        dpopt.create("disk", base=base)
