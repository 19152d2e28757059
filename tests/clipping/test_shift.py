"""A public shift before clipping: the sensitivity stays that of the rule, and the shift comes back once a draw."""

import math

import pytest
import torch
from loop import around, cross_entropy
from torch import nn

import dpopt
from dpopt.clipping import Abadi, ByGroup, Normalized, engine
from dpopt.clipping.flat import scaled
from dpopt.clipping.rules import clip_rule
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError
from dpopt.optimizers.adaclip import spread
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import DataOracle
from dpopt.testing import Task
from dpopt.types import Release

ENGINES = ["bookkeeping", "vmap", "loop"]


def problem(dtype=torch.float64):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    x, y = torch.randn(9, 5, dtype=dtype), torch.randint(0, 3, (9,))
    return model, x, y, torch.arange(9) != 4


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("weights", [(1.0,), (0.7, 0.5)], ids=str)
@pytest.mark.parametrize("has_scale", [True, False])
def test_every_engine_clips_the_shifted_gradient(name, weights, has_scale):
    model, x, y, mask = problem()
    made, each = engine(model, cross_entropy, name), VmapEngine(model, cross_entropy)
    points, shift = around(made.theta, weights), 0.1 * torch.randn_like(made.theta)
    scale = torch.rand_like(shift) * 3 if has_scale else torch.ones_like(shift)
    frame = torch.stack([scale, shift])
    found = made.clipped(points, x, y, mask, Abadi(0.3), frame)
    combined = sum(weight * each.gradients(theta, x, y) for weight, theta in points)
    gradients = (combined - shift) * scale
    assert torch.equal(scaled(combined, frame), gradients)
    norms = gradients.norm(dim=1)
    torch.testing.assert_close(found.norms, norms, rtol=1e-6, atol=0)
    expected = (mask * (0.3 / norms).clamp(max=1)) @ gradients
    torch.testing.assert_close(found.total, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(48, 3)), (2, 6, 6)),
        ((nn.Linear(2, 3), nn.Flatten(), nn.Linear(48, 3)), (16, 2)),
    ],
    ids=["convolution", "sequence"],
)
def test_a_shift_meets_gradients_that_a_layer_has_made_already(layers, shape):
    torch.manual_seed(0)
    model = nn.Sequential(*layers).double()
    x, y, mask = torch.randn(9, *shape, dtype=torch.float64), torch.randint(0, 3, (9,)), torch.arange(9) != 4
    found = []
    for name in ENGINES:
        made = engine(model, cross_entropy, name)
        frame = torch.stack([made.theta.abs() + 0.5, torch.full_like(made.theta, 0.1)])
        found.append(made.clipped([(1.0, made.theta)], x, y, mask, Abadi(0.3), frame))
    for other in found[1:]:
        torch.testing.assert_close(found[0].total, other.total, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ENGINES)
def test_an_infinite_scale_tells_not_if_a_draw_is_empty(name):
    model, x, y, _ = problem()
    made = engine(model, cross_entropy, name)
    scale = torch.ones_like(made.theta)
    scale[0], scale[1] = math.inf, math.nan
    for mask in (torch.ones(9, dtype=torch.bool), torch.zeros(9, dtype=torch.bool)):
        assert made.clipped([(1.0, made.theta)], x, y, mask, Abadi(1.0), scale).total.isfinite().all()


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("rule", [Normalized(1e-20), ByGroup(Normalized(1e-20))], ids=str)
def test_a_record_at_the_shift_contributes_no_more_than_the_sensitivity(name, rule):
    """What is left of two terms that all but cancel is their rounding, which differs between the norm and the sum."""
    for seed in range(8):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(50, 80), nn.Tanh(), nn.Linear(80, 10))
        x, y, alone = 3 * torch.randn(9, 50), torch.randint(0, 10, (9,)), torch.arange(9) == 2
        made, gradient = engine(model, cross_entropy, name), VmapEngine(model, cross_entropy)
        gradient = gradient.gradients(made.theta, x, y)[2]
        for nudge in (0.0, 1e-7, 3e-7, 1e-6, 1e-4):
            shift = gradient * (1 + nudge * torch.randn_like(gradient))
            frame = torch.stack([torch.rand_like(shift) + 0.5, shift])
            assert made.clipped([(1.0, made.theta)], x, y, alone, rule, frame).total.norm() <= 1 + 1e-5
            # So it is with two points and a scale.
            points = [(1.0, made.theta), (-1.0, made.theta * (1 + nudge * torch.randn_like(shift)))]
            assert made.clipped(points, x, y, alone, rule, frame[0]).total.norm() <= 1 + 1e-5


class AsManyAsDrawn(DataOracle):
    """Wrong: the shift comes back once for each drawn record, which tells how many there are."""

    def answer(self, charged):
        release, centre = super().answer(charged), charged.asked.centre
        drawn = sum(int(inputs()[2].sum()) for inputs in charged.records.inputs)
        share = drawn / self.expected_batch
        return Release(release.value + (share - 1) * centre, release.std)


@pytest.mark.parametrize(("kind", "is_safe"), [(DataOracle, True), (AsManyAsDrawn, False)])
def test_who_is_not_in_the_draw_contributes_nothing(kind, is_safe):
    task = Task(dtype=torch.float64)
    plan = task.plan(DPSGD(), epsilon=math.inf, rate=1.0)
    shift, scale = torch.full_like(task.engine.theta, 0.5), torch.full_like(task.engine.theta, 2.0)
    totals = []
    for rows in (60, 59, 0):
        oracle = kind(task.engine, task.x[:rows], task.y[:rows], plan, draw_seed=1, noise_seed=2, examples=60)
        with oracle.draw() as batch:
            totals.append(batch.gradient(task.engine.theta, Abadi(1.0), scale, shift).value * 60)
    moved = (totals[0] - totals[1]).norm()
    assert (moved <= 1 + 1e-9) == is_safe
    assert torch.allclose(totals[2], 60 * scale * shift) == is_safe


@pytest.mark.parametrize("epsilon", [3.0, math.inf])
def test_adaclip_and_dp_macadam_are_their_rules(epsilon):
    for name in ("adaclip", "dp_macadam"):
        task, transcript, optimizer = Task(dtype=torch.float64), [], dpopt.create(name, lr=0.05)
        oracle = task.oracle(task.plan(optimizer, epsilon=epsilon), transcript)
        theta = task.engine.theta
        final = task.run(optimizer, oracle).theta
        releases = [(release.value, release.std) for (release,) in transcript]
        reached = {"adaclip": adaclip, "dp_macadam": macadam}[name](optimizer, theta, releases)
        torch.testing.assert_close(final, reached, rtol=1e-9, atol=1e-12)


def adaclip(optimizer, theta, releases):
    (beta1, beta2), m, v = optimizer.betas, 0 * theta, torch.full_like(theta, 1 / len(theta))
    for value, std in releases:
        bound = spread(v)
        g = bound * value
        seen = ((g - m) ** 2 - (bound * std) ** 2).clamp(optimizer.least, optimizer.most)
        v, m = beta2 * v + (1 - beta2) * seen, beta1 * m + (1 - beta1) * g
        theta = theta - optimizer.lr * g
    return theta


def macadam(optimizer, theta, releases):
    beta1, beta2 = optimizer.betas
    m, v, s, b = 0 * theta, 0 * theta, 0 * theta, torch.ones_like(theta)
    for t, (value, std) in enumerate(releases, 1):
        g = b * value
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g**2
        mean = m / (1 - beta1**t)
        s = beta1 * s + (1 - beta1) * (g - mean) ** 2
        if t > 1:
            kappa = 2 * (beta1 - beta1**t) / (1 + beta1)
            root = (s / kappa - (b * std) ** 2).clamp(optimizer.least, optimizer.most).sqrt()
            b = (root * root.sum()).sqrt()
        theta = theta - optimizer.lr * mean / ((v / (1 - beta2**t)).sqrt() + optimizer.eps)
    return theta


def test_the_bounds_of_a_spread_add_the_least_noise():
    variance = torch.rand(20, dtype=torch.float64)
    bound = spread(variance)
    assert float((variance / bound**2).sum()) == pytest.approx(1)  # the mean square of a shifted and scaled gradient
    for _ in range(20):
        other = bound * torch.exp(0.1 * torch.randn(20, dtype=torch.float64))
        other = other * (variance / other**2).sum().sqrt()
        assert other.square().sum() >= bound.square().sum()
    for name in ("adaclip", "dp_macadam"):
        with pytest.raises(ConfigError, match=r"least: 1\.0 .* expected at most the 0\.1 of `most`"):
            dpopt.create(name, least=1, most=0.1)
    assert clip_rule(1) == dpopt.create("adaclip").clip
