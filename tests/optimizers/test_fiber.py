import math

import pytest
import torch

import dpopt
from dpopt.privacy import Release


def noise_gains(omega, steps, beta2=0.999):
    """Bias-corrected noise in vhat per unit variance of g, as `correction="exact"` finds it."""
    optimizer = dpopt.create("fiber", omega=omega, betas=(0.9, beta2))
    state, gains = optimizer.init(torch.zeros(1)), []
    for _ in range(steps):
        _, state = optimizer.direction(state, Release(torch.zeros(1), 1.0))
        gains.append(float(state.noise / (1 - beta2**state.t)))
    return state, gains


def test_the_papers_correction_is_only_asymptotic():
    """omega = 0.1: the true gain is 0.010 after one step and 0.469 after 100; the paper subtracts 0.5135 throughout."""
    _, gains = noise_gains(0.1, 100)
    assert gains[0] == pytest.approx(0.010, abs=5e-4)
    assert gains[-1] == pytest.approx(0.469, abs=5e-4)
    assert dpopt.create("fiber", omega=0.1).attenuation == pytest.approx(0.5135, abs=5e-5)


def test_two_points_and_their_weights():
    optimizer = dpopt.create("fiber", kappa=0.7, gamma=0.5)
    state = optimizer.init(torch.zeros(2))._replace(theta=torch.ones(2), previous=torch.zeros(2))
    (a, ahead), (rest, here) = optimizer.points(state)
    assert a == pytest.approx(0.3 / 0.35)
    assert a + rest == pytest.approx(1)
    torch.testing.assert_close(ahead, torch.full((2,), 1.5))
    torch.testing.assert_close(here, torch.ones(2))
    assert len(dpopt.create("fiber", kappa=1.0).points(state)) == 1


@pytest.mark.parametrize("omega", [0.05, 0.2, 0.4, 0.7, 1.0])
def test_gain_of_the_filter_against_simulation(omega):
    """Variance of g~ for white noise, 5 Monte-Carlo errors: the exact transient, and A(omega) once it has settled."""
    d, optimizer = 20_000, dpopt.create("fiber", omega=omega)
    error = 5 * math.sqrt(2 / d)
    state = optimizer.init(torch.zeros(d))
    generator = torch.Generator().manual_seed(0)
    for t in range(1, 301):
        _, state = optimizer.direction(state, Release(torch.randn(d, generator=generator), 1.0))
        if t in (1, 2, 3, 5, 10, 30, 300):
            measured = float(state.filtered.double().square().mean())
            assert measured == pytest.approx(float(state.covariance[0, 0]), rel=error)
    assert measured == pytest.approx(optimizer.attenuation, rel=error)
