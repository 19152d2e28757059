"""Every optimizer against its float64 twin over 20 steps of a noisy quadratic, to 1e-6; and against torch.optim."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from twins import (
    adadp,
    adadp_equilibrium,
    adadp_hybrid,
    adambc,
    disk,
    doppler,
    fiber,
    hyfreedp,
    hyfreedp_search_then_decay,
    scheduled,
)

import dpopt
from dpopt.privacy import Release

D, STEPS, STD = 6, 20, 0.05
EIGENVALUES = np.linspace(0.2, 3.0, D)
CENTRE = np.linspace(-1.0, 2.0, D)
START = np.linspace(1.5, -0.5, D)


class Quadratic:
    """f(theta) = sum_i lambda_i (theta_i - c_i)^2 / 2 with reproducible noise; answers optimizers and twins alike."""

    def __init__(self, std=STD, draws=2 * STEPS):
        self.std = std
        self.noise = np.random.default_rng(0)
        self.dimension, self.rate, self.expected_batch = D, 0.1, 10.0
        self.draws_total = self.draws_left = draws

    @contextmanager
    def draw(self):
        self.draws_left -= 1
        yield self

    def _noised(self, exact, std, like):
        value = exact + std * self.noise.standard_normal(len(exact))
        return Release(torch.from_numpy(value), self.std) if isinstance(like, torch.Tensor) else value.tolist()

    def gradient(self, at, clip=None):
        points = [(1.0, at)] if isinstance(at, torch.Tensor) else at
        exact = sum(w * EIGENVALUES * (np.asarray(p, dtype=np.float64) - CENTRE) for w, p in points)
        return self._noised(exact, self.std, points[0][1])

    def losses(self, at, bound):
        exact = np.array([(EIGENVALUES * (np.asarray(p, dtype=np.float64) - CENTRE) ** 2).sum() / 2 for p in at])
        return self._noised(np.clip(exact, 0, float(bound)), 0.1 * self.std, at[0])


def run(optimizer, quadratic, steps=STEPS):
    state = optimizer.init(torch.from_numpy(START.copy()))
    states = [state := optimizer.step(state, quadratic) for _ in range(steps)]
    return states


def check(name, fields, twin, more=None, draws=2 * STEPS):
    states = run(dpopt.create(name, **fields, **(more or {})), Quadratic(draws=draws))
    expected = twin(Quadratic(draws=draws), START.tolist(), STEPS, **fields)
    theta, etas = expected if isinstance(expected, tuple) else (expected, None)
    np.testing.assert_allclose(states[-1].theta.numpy(), theta, rtol=1e-6, atol=1e-9)
    assert not np.allclose(theta, START, atol=1e-4)
    if etas:
        np.testing.assert_allclose([float(state.eta) for state in states], etas, rtol=1e-6)


@pytest.mark.parametrize("correction", ["asymptotic", "exact", "unfiltered", "off"])
@pytest.mark.parametrize("more", [{}, {"kappa": 1.0}, {"omega": 1.0}, {"omega": 0.1, "weight_decay": 0.1}], ids=str)
def test_fiber(correction, more):
    check("fiber", {"lr": 0.03, "correction": correction, **more}, fiber)


@pytest.mark.parametrize("factor", ["linear", "sqrt"])
@pytest.mark.parametrize("keep", ["full", "half"])
@pytest.mark.parametrize("more", [{}, {"reject": True, "tau": 0.3}, {"error_scale": 10**0.5, "tau": 0.05}], ids=str)
def test_adadp(factor, keep, more):
    check("adadp", {"factor": factor, "keep": keep, "lr": 0.5, **more}, adadp)


@pytest.mark.parametrize("more", [{}, {"bound": "literal"}, {"smoothing": 0.9}, {"probe_every": 1}], ids=str)
def test_hyfreedp(more):
    check("hyfreedp", {"lr": 0.02, **more}, hyfreedp)


@pytest.mark.parametrize("base", ["dp_adam", {"name": "dp_sgd", "momentum": 0.5}], ids=str)
@pytest.mark.parametrize("more", [{}, {"lr": 1e-6}, {"lr": 1.0}, {"rounds": 3}, {"probe_every": 20}], ids=str)
def test_hyfreedp_search_then_decay(base, more):
    check("hyfreedp_search_then_decay", {"base": base, **more}, hyfreedp_search_then_decay)


@pytest.mark.parametrize("rounds", [STEPS - 1, STEPS])
def test_hyfreedp_search_then_decay_in_most_draws_or_all(rounds):
    more = {"base": "dp_adam", "lr": 1e-6, "rounds": rounds, "probe_every": 1}
    check("hyfreedp_search_then_decay", more, hyfreedp_search_then_decay, draws=STEPS)


@pytest.mark.parametrize("fields", [{"lr": 0.02}, {"lr": 0.03, "betas": (0.5, 0.9), "eps_v": 1e-2}], ids=str)
def test_dp_adambc(fields):
    check("dp_adambc", fields, adambc)


BASES = ["dp_adam", "dp_adambc", {"name": "dp_sgd", "momentum": 0.5}]


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("more", [{}, {"kappa": 1.0}, {"kappa": 0.5, "gamma": 1.0}, {"kappa": 0.3}], ids=str)
def test_disk(base, more):
    check("disk", {"lr": 0.05, "base": base, **more}, disk)


@pytest.mark.parametrize("base", BASES, ids=str)
@pytest.mark.parametrize("more", [{}, {"a": (1.0, -0.9), "b": (0.1,)}, {"a": (1.0,), "b": (0.4, 0.3, 0.3)}], ids=str)
def test_doppler(base, more):
    check("doppler", {"lr": 0.05, "base": base, **more}, doppler)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("more", [{}, {"warmup": 0.3}, {"warmup": 0.1, "final": 0.2}], ids=str)
def test_scheduled(schedule, more):
    check("scheduled", {"lr": 0.1, "schedule": schedule, **more}, scheduled, {"base": "dp_adam"}, draws=STEPS)


@pytest.mark.parametrize("more", [{}, {"adaptive_epochs": 0.7}, {"adaptive_epochs": 0.6, "decay": 1.0}], ids=str)
def test_adadp_hybrid(more):
    check("adadp_hybrid", {"lr": 0.5, **more}, adadp_hybrid)


@pytest.mark.parametrize("fields", [{"tau": 0.05}, {"lr": 0.3}], ids=str)
def test_adadp_equilibrium(fields):
    check("adadp_equilibrium", fields, adadp_equilibrium)


TORCH = [
    ("dp_sgd", {"lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
    ("dp_sgd", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.02}, torch.optim.SGD, None),
    ("dp_adam", {"lr": 0.05}, torch.optim.Adam, None),
    ("dp_adam", {"lr": 0.05, "betas": (0.5, 0.9), "eps": 1e-3}, torch.optim.Adam, None),
    ("dp_adamw", {"lr": 0.05, "weight_decay": 0.1}, torch.optim.AdamW, None),
]


@pytest.mark.parametrize(("name", "fields", "kind", "arguments"), TORCH)
def test_noiseless_limit_is_torch(name, fields, kind, arguments):
    states = run(dpopt.create(name, **fields), Quadratic(std=0.0))
    parameter = torch.nn.Parameter(torch.from_numpy(START.copy()))
    reference = kind([parameter], **(arguments or fields))
    for _ in range(STEPS):
        parameter.grad = Quadratic(std=0.0).gradient(parameter.detach()).value
        reference.step()
    np.testing.assert_allclose(states[-1].theta.numpy(), parameter.detach().numpy(), rtol=1e-10)
