"""HyFreeDP's losses read with their noise in mind: what is derived in the docstring holds."""

import math

import numpy as np
import pytest
import torch

import dpopt
from dpopt.errors import ConfigError
from dpopt.privacy import Release
from dpopt.privacy.calibration import trace

ROUNDS = 20
"""Enough from 1e-8 (13.3 rounds of factor 4) to 1, with a few Newton steps."""


def rule(base="dp_sgd", **fields):
    return dpopt.create("hyfreedp_noise_aware", base=base, **fields)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def state_of(optimizer, eta, bound=1e9, is_usable=1.0):
    state = optimizer.init(torch.zeros(1, dtype=torch.float64))
    return state._replace(eta=number(eta), bound=number(bound), is_usable=number(is_usable))


def adapted(optimizer, losses, s=0.0, eta=0.1, bound=1e9, is_usable=1.0):
    """The next state after a round that released `losses`, whose noise has the standard deviation s."""
    released = Release(torch.tensor(losses, dtype=torch.float64), s)
    return optimizer._adapted(state_of(optimizer, eta, bound, is_usable), released)


def rounds(optimizer, eta, slope, curvature, s, seed=0, count=ROUNDS):
    """Eta after some rounds on a parabola: the loss after a step x along -G is 5 - slope x + curvature x^2 / 2."""
    noise = np.random.default_rng(seed)
    for _ in range(count):
        h = optimizer.reach * eta
        at = np.array([h, 0, -h])  # L_- lies in the descent direction
        losses = 5 - slope * at + curvature * at**2 / 2 + s * noise.standard_normal(3)
        eta = float(adapted(optimizer, losses.tolist(), s, eta).eta)
    return eta


def test_the_step_is_shared_out_under_momentum():
    assert [rule(base).phi for base in ("dp_sgd", "dp_adam", "fiber", "disk")] == pytest.approx([1.0, 0.1, 0.1, 0.1])


@pytest.mark.parametrize("base", ["dp_sgd", "dp_adam"])
def test_on_noise_alone_the_newton_step_has_no_drift(base):
    """The mean log of phi h |D_1 / (2 D_2)| / eta is zero; at the distance eta it is -log(2 sqrt 3) = -1.24."""
    minus, zero, plus = np.random.default_rng(0).standard_normal((3, 400_000))
    quotient = np.abs((plus - minus) / (2 * (plus - 2 * zero + minus)))
    optimizer = rule(base)
    drift = np.mean(np.log(optimizer.phi * optimizer.reach * quotient))
    assert abs(drift) < 0.01  # its standard error is pi / 2 / sqrt(400,000)
    assert np.mean(np.log(quotient)) == pytest.approx(-math.log(2 * math.sqrt(3)), abs=0.01)


@pytest.mark.parametrize("base", ["dp_sgd", "dp_adam"])
@pytest.mark.parametrize("start", [1e-8, 1e-2, 1.0])
def test_the_minimum_of_a_parabola_is_found_from_anywhere(base, start):
    optimizer = rule(base)
    assert rounds(optimizer, start, slope=0.1, curvature=2.0, s=0.0) == pytest.approx(optimizer.phi * 0.05, rel=1e-6)


@pytest.mark.parametrize("start", [1e-8, 1.0])
def test_it_is_found_through_noise(start):
    """In 30 rounds, as noise halves eta in some. Curvature at the minimum's reach is 30 standard deviations of D_2."""
    optimizer, slope, curvature = rule("dp_sgd"), 1.0, 20.0
    s = 12 * slope**2 / curvature / (30 * math.sqrt(6))
    found = np.array([rounds(optimizer, start, slope, curvature, s, seed, count=30) for seed in range(100)])
    ratio = found / (slope / curvature)
    assert np.median(ratio) == pytest.approx(1, abs=0.15)
    assert np.mean((ratio > 1 / 3) & (ratio < 3)) >= 0.97


@pytest.mark.parametrize(
    ("losses", "factor"),
    [
        pytest.param([5.0, 5.0, 5.0], 4, id="nothing to be seen"),
        pytest.param([5.0, 5.0, 4.8], 1, id="uphill"),
        pytest.param([9.0, 5.0, 9.0], 0.5, id="at the bottom"),
    ],
)
def test_what_a_round_says(losses, factor):
    assert float(adapted(rule(), losses, s=0.1).eta) == pytest.approx(0.1 * factor)


def test_saturated_losses_bring_eta_down_once_there_were_others():
    losses = [1.0, 0.95, 1.0]
    before = adapted(rule(), losses, bound=1.0, is_usable=0.0)
    assert float(before.eta) == 0.1
    assert float(before.is_usable) == 0
    assert float(adapted(rule(), losses, bound=1.0).eta) == pytest.approx(0.05)
    usable = adapted(rule(), [0.5, 0.5, 0.5], s=0.1, bound=1.0, is_usable=0.0)
    assert float(usable.is_usable) == 1
    assert float(usable.bound) == pytest.approx(1.5)


@pytest.mark.parametrize("eta", [5e-324, 1e300])
def test_eta_stays_a_positive_number(eta):
    for losses in ([1.0, 2.0, 4.0], [4.0, 2.0, 1.0], [1.0, 1.0, 1.0]):
        found = float(adapted(rule(), losses, s=1e-9, eta=eta).eta)
        assert 0 < found < math.inf


def test_draws_releases_and_noise_are_hyfreedps():
    own, paper = rule("dp_adamw"), dpopt.create("hyfreedp")
    assert trace(own, rate=0.1, draws=37) == trace(paper, rate=0.1, draws=37)
    assert own.noise_inflation == paper.noise_inflation


@pytest.mark.parametrize("fields", [{"probes": 5}, {"smoothing": 0.9}, {"guards": "none"}, {"growth": 0.5}])
def test_what_it_does_not_have(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        rule(**fields)
