import math
from contextlib import contextmanager

import pytest
import torch

import dpopt
from dpopt.clipping import Abadi
from dpopt.privacy import Draw, Ledger, Plan, Release, ReplayOracle, TraceOracle


def replay(values, draws=None):
    """An oracle that hands out the given gradients, one a draw."""
    dimension = len(values[0])
    ledger = Ledger([Draw(0.1, (1.0,))] * len(values))
    plan = Plan({"gradient": 1.0}, ledger, 1.0, 0.1, draws or len(values), dimension, 1e-5, "pld")
    return ReplayOracle([[Release(torch.tensor(value), 0.1)] for value in values], plan)


def test_two_draws_a_step_and_an_odd_one_is_not_lost():
    traced = TraceOracle(3, 0.1, 7)
    optimizer, steps = dpopt.create("adadp"), 0
    state = optimizer.init(traced.theta)
    while traced.draws_left:
        state, steps = optimizer.step(state, traced), steps + 1
    assert steps == 4
    assert traced.kinds == [("gradient",)] * 7


def test_noise_alone_drives_eta_to_the_equilibrium_of_theorem_10():
    """E err^2 = eta^2 d C^2 sigma^2 / 2 B^2, so err = tau at eta = tau B sqrt(2) / (C sigma sqrt(d))."""
    torch.manual_seed(0)
    d, std = 20_000, 0.05
    optimizer = dpopt.create("adadp", lr=0.5)
    oracle = replay([(std * torch.randn(d)).tolist() for _ in range(40)])
    state = optimizer.init(torch.zeros(d))
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
    assert float(state.eta) == pytest.approx(math.sqrt(2) / (std * math.sqrt(d)), rel=0.02)


@pytest.mark.parametrize(("tau", "expected"), [(1e9, 1.1), (1e-9, 0.9)])
def test_factor_is_clipped(tau, expected):
    optimizer = dpopt.create("adadp", tau=tau)
    state = optimizer.step(optimizer.init(torch.zeros(2)), replay([[1.0, 0.0], [0.0, 1.0]]))
    assert float(state.eta) == pytest.approx(0.1 * expected)


def test_equal_gradients_make_no_error_and_eta_grows():
    optimizer = dpopt.create("adadp")
    state = optimizer.step(optimizer.init(torch.zeros(2)), replay([[1.0, 0.0], [1.0, 0.0]]))
    assert float(state.eta) == pytest.approx(0.11)
    torch.testing.assert_close(state.theta, torch.tensor([-0.1, 0.0]))


def test_reject_stays_where_it_was():
    optimizer = dpopt.create("adadp", tau=1e-6, reject=True)
    state = optimizer.step(optimizer.init(torch.ones(2)), replay([[1.0, 0.0], [-1.0, 0.0]]))
    assert torch.equal(state.theta, torch.ones(2))


def test_automatic_tolerance():
    """tau = sqrt(d / 2T) with T the number of steps, half the draws."""
    d, optimizer = 50, dpopt.create("adadp", tau=None, shrink=1e-6, grow=1e6, lr=1.0)
    first, second = torch.zeros(d), torch.zeros(d)
    second[0] = 0.2
    state = optimizer.step(optimizer.init(torch.zeros(d)), replay([first.tolist(), second.tolist()] * 4))
    assert float(state.eta) == pytest.approx(math.sqrt(50 / 8) / 0.1, rel=1e-5)


def test_clip_is_the_given_rule():
    assert dpopt.create("adadp", clip=3.0).clip == Abadi(3.0)


class Quadratic:
    """f(theta) = sum_i lambda_i (theta_i - c_i)^2 / 2, gradients with noise of standard deviation `std`."""

    def __init__(self, eigenvalues, centre, std):
        self.eigenvalues, self.centre, self.std = eigenvalues, centre, std
        self.dimension, self.rate, self.draws_total, self.draws_left = len(centre), 0.1, 2, 2
        self.generator = torch.Generator().manual_seed(0)

    @contextmanager
    def draw(self):
        self.draws_left -= 1
        yield self

    def gradient(self, at, clip):
        noise = torch.randn(self.dimension, generator=self.generator, dtype=torch.float64)
        return Release(self.eigenvalues * (at - self.centre) + self.std * noise, self.std)


@pytest.mark.parametrize("curvature", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("eta", [0.01, 0.2])
def test_error_of_a_step_is_theorem_10s(curvature, eta):
    """E err^2 on a quadratic, in closed form; without curvature it is Theorem 10's lower bound.

    full - half = eta/2 (G_2 - G_1) and G_2 - G_1 = -eta/2 Lambda (g + n_1) + n_2 - n_1, while |full| < 1.
    """
    d, std = 20_000, 0.05
    eigenvalues = curvature * torch.linspace(0.5, 1.5, d, dtype=torch.float64)
    centre = torch.linspace(-0.3, 0.3, d, dtype=torch.float64)
    optimizer = dpopt.create("adadp", lr=eta, shrink=1e-9, grow=1e9)
    state = optimizer.step(optimizer.init(torch.zeros(d, dtype=torch.float64)), Quadratic(eigenvalues, centre, std))
    assert float(state.theta.abs().max()) < 1
    measured = (eta / float(state.eta)) ** 2  # eta_{l+1} = tau / err eta_l with tau = 1

    drift = (eta / 2) ** 2 * (eigenvalues.square() * centre).square().sum()
    noise = std**2 * ((1 + eta * eigenvalues / 2).square() + 1).sum()
    assert measured == pytest.approx(float((eta / 2) ** 2 * (drift + noise)), rel=5 * math.sqrt(2 / d))
    if curvature == 0:
        assert measured == pytest.approx(eta**2 * d * std**2 / 2, rel=5 * math.sqrt(2 / d))
