import math

import pytest
import torch
from descent import descent, descent_bound
from torch import nn

from dpopt import clipping
from dpopt.errors import ConfigError
from dpopt.study.optimal_clip import mse, optimal_clip

L = 3.0


class Shift(nn.Module):
    """theta - x."""

    def __init__(self, dimension):
        super().__init__()
        self.theta = nn.Parameter(torch.zeros(dimension, dtype=torch.float64))

    def forward(self, x):
        return self.theta - x


@pytest.fixture
def quadratic():
    """The mean of (L/2) ||theta - a_i||^2: L-smooth, and for a step of 1/L the theorem holds with equality."""
    x = torch.randn(30, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    engine = clipping.engine(Shift(6), lambda out, _: L / 2 * out.square().sum(1), "vmap")
    return engine, x, torch.zeros(30), engine.theta


@pytest.fixture
def logistic():
    """Logistic regression from zero, and the constant of its smoothness: the largest eigenvalue of X'X/(4n)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(80, 5, dtype=torch.float64, generator=generator)
    y = (x[:, 0] + torch.randn(80, dtype=torch.float64, generator=generator) > 0).double()
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    loss = nn.BCEWithLogitsLoss(reduction="none")
    engine = clipping.engine(model, lambda out, target: loss(out[:, 0], target), "vmap")
    return (engine, x, y, engine.theta), float(torch.linalg.eigvalsh(x.T @ x)[-1]) / (4 * len(x))


@pytest.mark.parametrize(("clip", "noise"), [(0.5, 0.0), (2.0, 4.0), (20.0, 2.0), (math.inf, 0.0)])
def test_the_bound_is_what_a_quadratic_does(quadratic, clip, noise):
    found = descent(*quadratic, clip=clip, noise_multiplier=noise, lr=1 / L, draws=400)
    assert found.measured == pytest.approx(found.bound, abs=4 * found.std_error + 1e-12)
    assert found.std_error > 0 or not noise


def test_its_parts_are_those_of_the_means(quadratic):
    engine, x, y, theta = quadratic
    gradients = L * (theta - x)
    found = descent(engine, x, y, theta, clip=2.0, noise_multiplier=4.0, lr=0.1, draws=2)
    sums = mse(gradients, 2.0, 4.0)
    assert found.mse == pytest.approx((sums.bias / len(x) ** 2, sums.noise / len(x) ** 2))
    assert found.gradient == pytest.approx(float(gradients.mean(0).square().sum()))
    assert found.loss == pytest.approx(float(L / 2 * (theta - x).square().sum(1).mean()))
    assert found.bound == descent_bound(found.loss, found.gradient, found.mse.total, 0.1)


def test_the_measured_loss_is_that_of_the_step(quadratic):
    engine, x, y, theta = quadratic
    gradients = L * (theta - x)
    step = (gradients * (2 / gradients.norm(dim=1, keepdim=True)).clamp(max=1)).mean(0)
    after = theta - 0.2 * step
    found = descent(engine, x, y, theta, clip=2.0, noise_multiplier=0.0, lr=0.2)
    assert found.measured == pytest.approx(float(L / 2 * (after - x).square().sum(1).mean()))
    assert found.std_error == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("factor", [0.3, 1.0])
@pytest.mark.parametrize(("clip", "noise"), [(0.1, 1.0), (1.0, 10.0), (5.0, 20.0)])
def test_the_bound_holds_for_logistic_regression(logistic, clip, noise, factor):
    arguments, smoothness = logistic
    found = descent(*arguments, clip=clip, noise_multiplier=noise, lr=factor / smoothness, draws=200)
    assert found.measured <= found.bound + 4 * found.std_error


def test_without_its_error_term_the_bound_is_broken(logistic):
    arguments, smoothness = logistic
    found = descent(*arguments, clip=5.0, noise_multiplier=20.0, lr=1 / smoothness, draws=200)
    assert found.measured > descent_bound(found.loss, found.gradient, 0.0, 1 / smoothness) + 4 * found.std_error


def test_longer_steps_than_smoothness_allows_break_the_bound(quadratic, logistic):
    far = descent(*quadratic, clip=20.0, noise_multiplier=2.0, lr=4 / L, draws=200)
    assert far.measured > far.bound + 4 * far.std_error
    arguments, smoothness = logistic
    far = descent(*arguments, clip=5.0, noise_multiplier=1.0, lr=20 / smoothness, draws=200)
    assert far.measured > far.bound + 4 * far.std_error


def test_the_optimal_clip_has_the_least_bound(logistic):
    (engine, x, y, theta), smoothness = logistic
    gradients = (torch.sigmoid(x @ theta) - y)[:, None] * x
    best, _ = optimal_clip(gradients, 5.0)
    bounds = {
        clip: descent(engine, x, y, theta, clip=clip, noise_multiplier=5.0, lr=1 / smoothness, draws=2).bound
        for clip in (0.5 * best, 0.9 * best, best, 1.1 * best, 2 * best)
    }
    assert min(bounds, key=bounds.__getitem__) == best


def test_physical_batches_change_nothing(quadratic, monkeypatch):
    options = {"clip": 2.0, "noise_multiplier": 4.0, "lr": 0.1, "draws": 10}
    whole = descent(*quadratic, **options)
    monkeypatch.setattr(quadratic[0], "physical_batch", lambda expected: 7)
    parts = descent(*quadratic, **options)
    assert parts.measured == pytest.approx(whole.measured)
    assert parts.bound == pytest.approx(whole.bound)


def test_engines_agree():
    generator = torch.Generator().manual_seed(2)
    x, y = torch.randn(40, 4, generator=generator), torch.randint(0, 3, (40,), generator=generator)
    torch.manual_seed(3)
    model, loss = nn.Linear(4, 3), nn.CrossEntropyLoss(reduction="none")
    slow, fast = (
        descent(engine, x, y, engine.theta, clip=0.5, noise_multiplier=3.0, lr=0.5)
        for engine in (clipping.engine(model, loss, name) for name in ("vmap", "bookkeeping"))
    )
    assert fast.mse == pytest.approx(slow.mse, rel=1e-4)
    assert fast.bound == pytest.approx(slow.bound, rel=1e-5)
    assert fast.measured == pytest.approx(slow.measured, rel=1e-5)


def test_the_noise_is_the_seeds(quadratic):
    options = {"clip": 2.0, "noise_multiplier": 4.0, "lr": 0.1, "draws": 10}
    assert descent(*quadratic, **options) == descent(*quadratic, **options)
    assert descent(*quadratic, **options).measured != descent(*quadratic, **options, seed=1).measured


@pytest.mark.parametrize(
    ("name", "value"),
    [("clip", 0.0), ("clip", math.inf), ("noise_multiplier", -1.0), ("lr", 0.0), ("draws", 1), ("draws", 0)],
)
def test_bad_input(quadratic, name, value):
    options = {"clip": 1.0, "noise_multiplier": 1.0, "lr": 0.1, "draws": 10, name: value}
    with pytest.raises(ConfigError, match=name):
        descent(*quadratic, **options)


def test_no_examples(quadratic):
    engine, x, y, theta = quadratic
    with pytest.raises(ConfigError, match="at least one example"):
        descent(engine, x[:0], y[:0], theta, clip=1.0, noise_multiplier=1.0, lr=0.1)
