import math
from contextlib import contextmanager

import pytest
import torch

import dpopt
from dpopt.privacy import Release


class Noise:
    """An oracle whose gradients are noise alone."""

    def __init__(self, dimension, std, draws=400):
        self.dimension, self.std, self.rate, self.expected_batch = dimension, std, 0.1, 1.0
        self.draws_total = self.draws_left = draws
        self.generator = torch.Generator().manual_seed(0)

    @contextmanager
    def draw(self):
        self.draws_left -= 1
        yield self

    def gradient(self, at, clip):
        return Release(self.std * torch.randn(self.dimension, generator=self.generator), self.std)


def eta(dimension, std, **fields):
    optimizer = dpopt.create("adadp_equilibrium", **fields)
    return float(optimizer.step(optimizer.init(torch.zeros(dimension)), Noise(dimension, std)).eta)


@pytest.mark.parametrize(("dimension", "std", "tau"), [(200, 0.1, 1.0), (5000, 0.02, 0.3)])
def test_equilibrium_is_theorem_10s(dimension, std, tau):
    assert eta(dimension, std, tau=tau) == pytest.approx(tau * math.sqrt(2) / (std * math.sqrt(dimension)))


def test_adadp_comes_to_rest_there():
    """Both on the same noise: ADADP's learning rate, averaged over its last half, is the constant."""
    dimension, std = 20_000, 0.05
    optimizer, oracle = dpopt.create("adadp", lr=0.1), Noise(dimension, std, draws=120)
    state, etas = optimizer.init(torch.zeros(dimension)), []
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        etas.append(float(state.eta))
    assert sum(etas[30:]) / len(etas[30:]) == pytest.approx(eta(dimension, std), rel=0.01)


def test_without_noise_the_learning_rate_is_the_largest():
    assert eta(100, 0.0) == 10.0
    assert eta(100, 0.0, lr=0.5) == 0.5
    assert eta(100, 1e-6, lr=0.5) == 0.5


def test_it_is_dp_sgd_at_the_constant():
    task = dpopt.testing.Task()
    ours = dpopt.create("adadp_equilibrium", tau=0.1)
    end = task.run(ours, task.oracle(task.plan(ours)))
    sgd = dpopt.create("dp_sgd", lr=float(end.eta))
    torch.testing.assert_close(end.theta, task.run(sgd, task.oracle(task.plan(sgd))).theta)
