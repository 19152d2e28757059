"""ADADP, its combination with a decay, and the constant rate at which it comes to rest."""

import math
from contextlib import contextmanager

import pytest
import torch

import dpopt
from dpopt.privacy import Draw, Ledger, Plan, Release, ReplayOracle, TraceOracle


def replay(gradients, rate=0.1):
    """An oracle that hands out the given gradients [draws, d], one a draw."""
    draws, dimension = gradients.shape
    ledger = Ledger([Draw(rate, (1.0,))] * draws)
    plan = Plan({"gradient": 1.0}, ledger, 1.0, rate, draws, dimension, 1e-5, "pld")
    return ReplayOracle([[Release(gradient, 0.1)] for gradient in gradients], plan)


class Quadratic:
    """f(theta) = sum_i lambda_i (theta_i - c_i)^2 / 2, gradients with noise of standard deviation `std`."""

    def __init__(self, eigenvalues, centre, std, draws=2):
        self.eigenvalues, self.centre, self.std = eigenvalues, centre, std
        self.dimension, self.rate, self.draws_total, self.draws_left = len(centre), 0.1, draws, draws
        self.generator = torch.Generator().manual_seed(0)

    @contextmanager
    def draw(self):
        self.draws_left -= 1
        yield self

    def gradient(self, at, clip):
        noise = torch.randn(self.dimension, generator=self.generator, dtype=torch.float64)
        return Release(self.eigenvalues * (at - self.centre) + self.std * noise, self.std)


def noise_alone(dimension, std, draws=2):
    return Quadratic(0.0, torch.zeros(dimension, dtype=torch.float64), std, draws)


def draws_of_steps(name, draws, **fields):
    """How many draws each step of a whole run takes."""
    optimizer, oracle = dpopt.create(name, **fields), TraceOracle(3, 0.1, draws)
    state, taken = optimizer.init(oracle.theta), []
    while oracle.draws_left:
        before = oracle.draws_left
        state = optimizer.step(state, oracle)
        taken.append(before - oracle.draws_left)
    assert oracle.kinds == [("gradient",)] * draws
    return taken


@pytest.mark.parametrize(
    ("second", "tau", "expected"), [([0.0, 1.0], 1e9, 1.1), ([0.0, 1.0], 1e-9, 0.9), ([1.0, 0.0], 1.0, 1.1)]
)
def test_factor_is_clipped(second, tau, expected):
    """Also where equal gradients make no error."""
    optimizer = dpopt.create("adadp", tau=tau)
    state = optimizer.step(optimizer.init(torch.zeros(2)), replay(torch.tensor([[1.0, 0.0], second])))
    assert float(state.eta) == pytest.approx(0.1 * expected)


def test_automatic_tolerance():
    """tau = sqrt(d / 2T) with T the number of steps, half the draws."""
    optimizer, gradients = dpopt.create("adadp", tau=None, shrink=1e-6, grow=1e6, lr=1.0), torch.zeros(8, 50)
    gradients[1::2, 0] = 0.2
    state = optimizer.step(optimizer.init(torch.zeros(50)), replay(gradients))
    assert float(state.eta) == pytest.approx(math.sqrt(50 / 8) / 0.1, rel=1e-5)


@pytest.mark.parametrize(("curvature", "eta"), [(0.0, 0.2), (3.0, 0.2), (3.0, 0.01)])
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


# The equilibrium


def constant(dimension, std, **fields):
    optimizer = dpopt.create("adadp_equilibrium", **fields)
    start = optimizer.init(torch.zeros(dimension, dtype=torch.float64))
    return float(optimizer.step(start, noise_alone(dimension, std)).eta)


def test_adadp_comes_to_rest_there():
    """Both on the same noise: ADADP's learning rate, averaged over its last half, is the constant."""
    dimension, std = 20_000, 0.05
    optimizer, oracle = dpopt.create("adadp", lr=0.1), noise_alone(dimension, std, draws=120)
    state, etas = optimizer.init(torch.zeros(dimension, dtype=torch.float64)), []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        etas.append(float(state.eta))
    assert sum(etas[30:]) / len(etas[30:]) == pytest.approx(constant(dimension, std), rel=0.01)


def test_without_noise_the_learning_rate_is_the_largest():
    assert constant(100, 0.0) == 10.0
    assert constant(100, 0.0, lr=0.5) == constant(100, 1e-6, lr=0.5) == 0.5


# The hybrid


@pytest.mark.parametrize("per_epoch", [10, 49])
def test_decay_is_equation_5_1(per_epoch):
    """4 epochs: ADADP in two, then eta_50 / (1 + 0.1 k) in the k-th, k = 1 and 2. 49 (1/49) < 1 in floating point."""
    gradients = 0.1 * torch.randn(4 * per_epoch, 50, generator=torch.Generator().manual_seed(0))
    optimizer, oracle = dpopt.create("adadp_hybrid"), replay(gradients, 1 / per_epoch)
    state, etas = optimizer.init(torch.zeros(50)), []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        etas.append(float(state.eta))
    assert etas[per_epoch:] == pytest.approx(
        [etas[per_epoch - 1] / (1 + 0.1 * k) for k in (1, 2) for _ in range(per_epoch)]
    )


@pytest.mark.parametrize(
    ("draws", "fields", "adaptive", "plain"),
    [
        (40, {}, 10, 20),
        (41, {}, 10, 21),
        (40, {"adaptive_epochs": 0.7}, 3, 34),
        (40, {"adaptive_epochs": 0.05}, 0, 40),
        (41, {"adaptive_epochs": 9.0}, 20, 1),
    ],
    ids=str,
)
def test_an_odd_draw_goes_to_dp_sgd(draws, fields, adaptive, plain):
    """A step before the switch takes two draws, one after it takes one; an ADADP run of odd length ends in one."""
    assert draws_of_steps("adadp_hybrid", draws, **fields) == [2] * adaptive + [1] * plain
    assert draws_of_steps("adadp", 7) == [2, 2, 2, 1]
