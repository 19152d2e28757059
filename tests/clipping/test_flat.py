"""What all engines do alike, whatever they do in between; and the clip rules."""

import math
from dataclasses import replace

import pytest
import torch
from loop import ONE, RULES, TWO, check, squared
from torch import nn
from zoo import MODELS, Of

from dpopt.clipping import Abadi, Automatic, Normalized, clip_rule, clip_spec, engine
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.flat import clip_factors
from dpopt.clipping.rules import AtBound, PerSample
from dpopt.clipping.verification import verify
from dpopt.clipping.vmap import LoopEngine, VmapEngine
from dpopt.errors import ConfigError

ENGINES = pytest.mark.parametrize("kind", [BookkeepingEngine, VmapEngine], ids=lambda kind: kind.name)
FEATURES = 3


def made(kind):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1))
    return kind(Of(lambda m, x: m.body(x.reshape(len(x), -1)), body=body), squared)  # no model can do that with none


class Exchanging(VmapEngine):
    """Its losses and norms are right, and the sum where all weights are equal."""

    def per_example(self, *arguments):
        each = super().per_example(*arguments)
        return replace(each, weighted_sum=lambda weights: each.weighted_sum([part.flip(0) for part in weights]))


def test_an_engine_that_exchanges_gradients_is_refused():
    with pytest.raises(ConfigError, match=r"the gradients of body\.0\.weight of a batch are not those"):
        verify(made(Exchanging), torch.randn(9, FEATURES), torch.randn(9))


@pytest.mark.parametrize("kind", [VmapEngine, LoopEngine])
@pytest.mark.parametrize("name", ["mlp", "cnn", "linear_twice", "frozen_front"])
def test_the_slower_engines_equal_a_loop(name, kind):
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    own, x, y = kind(model, squared), inputs(5), torch.randn(5)
    for clip, weights in zip(RULES, (ONE, TWO, TWO, ONE), strict=True):
        check(model, own, x, y, weights=weights, clip=clip)
    shifted = own.theta + 0.1
    losses = own.losses([own.theta, shifted], x, y, torch.ones(5, dtype=torch.bool))
    for theta, values in zip((own.theta, shifted), losses, strict=True):
        torch.testing.assert_close(own.outputs(theta, x), (own.load(theta), model(x).detach())[1])
        torch.testing.assert_close(values, squared(model(x), y).detach())


def test_an_unknown_engine_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'vmap'"):
        engine(nn.Linear(1, 1), squared, "vmp")


@ENGINES
@pytest.mark.parametrize("points", [1, 2])
def test_no_examples_have_no_losses_and_a_sum_of_zero(kind, points):
    own, x, y = made(kind), torch.zeros(0, FEATURES), torch.zeros(0)
    pairs = [(0.5, own.theta)] * points
    total, losses, norms = own.clipped(pairs, x, y, torch.zeros(0, dtype=torch.bool), Abadi(1.0))
    assert torch.equal(total, torch.zeros(own.dimension))
    assert (losses.shape, norms.shape) == ((points, 0), (0,))
    assert own.losses([own.theta] * points, x, y, torch.zeros(0, dtype=torch.bool)).shape == (points, 0)


@ENGINES
def test_nothing_of_a_graph_comes_in_or_goes_out(kind):
    own = made(kind)
    theta, scale = own.theta.requires_grad_(), torch.ones(own.dimension, requires_grad=True)
    x, y = torch.randn(5, FEATURES, requires_grad=True), torch.randn(5, requires_grad=True)
    mask = torch.ones(5, dtype=torch.bool)
    found = [
        *own.clipped([(0.5, theta), (0.5, theta)], x, y, mask, Abadi(1.0), scale),
        own.losses([theta], x, y, mask),
        own.outputs(theta, x),
        own.theta,
    ]
    assert not any(value.requires_grad for value in found)
    assert all(value.grad is None for value in (theta, scale, x, y))


class Careless:
    """A rule of one's own that makes short gradients long, and gives no number for one."""

    sensitivity = 0.5

    def factor(self, norm):
        return torch.where(norm == 3, torch.nan, torch.ones_like(norm) * 10)


@pytest.mark.parametrize("rule", [Abadi(0.5), Careless()], ids=lambda rule: type(rule).__name__)
def test_factors_bound_every_example_and_are_zero_where_there_is_no_number(rule):
    norms = torch.tensor([0.1, 1.0, 3.0, 1e30, torch.inf, torch.nan, 1.0])
    mask = torch.arange(7) < 6
    factors = clip_factors(rule, norms, mask)
    assert factors[4:].tolist() == [0.0] * 3
    assert float((factors * norms)[:4].max()) == pytest.approx(0.5)
    if isinstance(rule, Careless):
        torch.testing.assert_close(factors[:4], torch.tensor([5.0, 0.5, 0.0, 5e-31]))
    else:
        torch.testing.assert_close(factors[:4], torch.tensor([1.0, 0.5, 1 / 6, 5e-31]))


@ENGINES
def test_outputs_have_no_gradients_even_where_they_are_the_inputs(kind):
    own = kind(Of(lambda m, x: x, weight=nn.Parameter(torch.ones(1))), squared)
    x = torch.randn(5, FEATURES, requires_grad=True)
    assert not own.outputs(own.theta, x).requires_grad


@ENGINES
def test_a_call_takes_almost_every_draw_as_far_as_memory_allows(kind):
    """Three standard deviations above the mean of Poisson's distribution."""
    own = made(kind)
    assert [own.physical_batch(expected) for expected in (0.01, 1, 100, 10_000)] == [1, 4, 130, 10_300]
    own.example_bytes = 2**20  # and vmap holds 64 MiB of gradients
    most = {"bookkeeping": 2**30 // 2**20, "vmap": 2**26 // (4 * own.dimension)}
    assert own.physical_batch(1e9) == most[kind.name]
    own.example_bytes = own.dimension = 2**31  # one always has to fit
    assert own.physical_batch(100) == 1


def test_the_first_batch_and_those_twice_as_large_are_examined():
    own = made(BookkeepingEngine)
    examined = []
    for examples in (1, 2, 3, 4, 7, 8, 8, 15, 16):
        x, y = torch.randn(examples, FEATURES), torch.randn(examples)
        if own.is_to_be_examined(examples):
            examined.append(examples)
        own.clipped([(1.0, own.theta)], x, y, torch.ones(examples, dtype=torch.bool), Abadi(1.0))
    assert examined == [2, 4, 8, 16]


# The clip rules.


NORMS = torch.tensor([0.0, 1e-6, 0.3, 1.0, 5.0, 1e12])


@pytest.mark.parametrize("rule", [Abadi(0.5), Automatic(2.0, 0.1), PerSample(2.0), Normalized(0.5)], ids=str)
def test_no_clipped_norm_exceeds_the_sensitivity(rule):
    clipped = NORMS * rule.factor(NORMS)
    assert clipped.isfinite().all()
    assert clipped.max() <= rule.sensitivity * (1 + 1e-6)
    assert clipped[-1] == pytest.approx(rule.sensitivity, rel=1e-5)


def test_formulas():
    torch.testing.assert_close(Abadi(2.0).factor(torch.tensor([1.0, 4.0])), torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(Automatic(2.0, 0.5).factor(torch.tensor([1.5])), torch.tensor([1.0]))
    torch.testing.assert_close(PerSample(2.0, 0.5).factor(torch.tensor([0.0, 1.0])), torch.tensor([2.0, 1.5]))
    assert float(PerSample().factor(torch.tensor(0.9))) == pytest.approx(1)  # 0.9 + 0.1 / (0.9 + 0.1)
    torch.testing.assert_close(Normalized(2.0).factor(torch.tensor([1.0, 4.0])), torch.tensor([0.5, 0.25]))
    assert Automatic().sensitivity == Normalized(7.0).sensitivity == 1  # mistake 20: the noise is sigma, not sigma C
    torch.testing.assert_close(Abadi(math.inf).factor(NORMS), torch.ones(6))


def test_defaults_are_the_papers():
    """AUTO-S has gamma = 0.01; all bounds are one."""
    assert clip_spec(Abadi()) == {"rule": "abadi", "bound": 1.0}
    assert clip_spec(Automatic()) == {"rule": "automatic", "bound": 1.0, "stabilizer": 0.01}
    assert clip_spec(Normalized()) == {"rule": "normalized", "bound": 1.0}


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_a_bound_may_be_a_tensor(bound):
    rule, same = AtBound(torch.tensor(bound)), Normalized(bound)
    torch.testing.assert_close(rule.factor(NORMS), same.factor(NORMS))
    assert rule.sensitivity == same.sensitivity


@pytest.mark.parametrize(
    "rule", [Abadi(0.25), Abadi(math.inf), Automatic(1.0, 0.02), PerSample(2.0), Normalized(3.0)], ids=str
)
def test_spec_round_trip(rule):
    assert clip_rule(clip_spec(rule)) == rule


def test_short_forms():
    assert clip_rule(0.5) == Abadi(0.5)
    assert clip_rule("inf") == Abadi(math.inf)
    assert clip_rule("automatic") == Automatic()
    assert clip_rule(Normalized(2.0)) == Normalized(2.0)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("automatc", "did you mean 'automatic'"),
        (-1.0, "clip.bound"),
        (True, "expected a bound"),
        ({"bound": 1.0}, "expected a bound, or a rule"),
        ({"rule": "abadi", "bond": 1.0}, "did you mean 'bound'"),
        ({"rule": "normalized", "bound": "inf"}, "clip.bound"),
    ],
)
def test_bad_rules(value, message):
    with pytest.raises(ConfigError, match=message):
        clip_rule(value)
