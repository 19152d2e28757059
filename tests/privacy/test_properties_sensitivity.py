"""No record, added or taken away, moves what a query sums by more than the sensitivity that it is charged for."""

import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dpopt.clipping import Abadi, Automatic, Normalized, engine
from dpopt.privacy import DataOracle, Draw, Ledger, NonPrivate

FEATURES = 6
ROUNDING = 1e-5
"""Relative to the sensitivity, for each record that is summed in float32."""


def squared(output, target):
    return (output.flatten(1) - target[:, None]).square().mean(1)


def model(name):
    """A linear model, and models with a norm, a convolution, a sequence or a weight that is used twice."""
    hidden = nn.Linear(FEATURES, FEATURES)
    return {
        "linear": lambda: nn.Linear(FEATURES, 1, bias=False),
        "normed": lambda: nn.Sequential(hidden, nn.LayerNorm(FEATURES), nn.Tanh(), nn.Linear(FEATURES, 2)),
        "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, FEATURES)), nn.Conv1d(1, 2, 2), nn.ReLU()),
        "sequence": lambda: nn.Sequential(nn.Unflatten(1, (2, FEATURES // 2)), nn.Linear(FEATURES // 2, 3, bias=False)),
        "shared": lambda: nn.Sequential(hidden, nn.Tanh(), hidden, nn.Linear(FEATURES, 1)),
    }[name]()


@cache
def engine_of(name, kind):
    """The engine, decided on records that nobody could object to."""
    torch.manual_seed(0)
    sample = torch.randn(4, FEATURES), torch.randn(4)
    return engine(model(name), squared, kind, sample=sample)


class Query(NamedTuple):
    """What is asked of a draw.

    Attributes:
        points: weights, and what the model's parameters are multiplied by and noised with.
        scale: power of ten of the scale, whose entries are random.
        clip: how gradients are clipped.
        loss_bound, norm_bound: the bounds of losses and of counts.
    """

    points: list[tuple[float, float, float]]
    scale: int | None
    clip: object
    loss_bound: float
    norm_bound: float


def magnitudes(low, high):
    """Numbers 10^low to 10^high, as often small as large."""
    return st.floats(low, high).map(lambda power: 10**power)


SPECIAL = [0.0, 1e-38, 1e-23, 1e-20, 1e-6, 1e6, 1e10, 1e18, 1e30, 3e38, math.inf, math.nan]
NUMBERS = st.floats(-3, 3, width=32) | st.sampled_from(SPECIAL + [-value for value in SPECIAL])
RECORDS = st.tuples(st.lists(NUMBERS, min_size=FEATURES, max_size=FEATURES), NUMBERS)
RULES = st.one_of(
    magnitudes(-30, 10).map(Abadi),
    st.builds(Automatic, magnitudes(-10, 10), magnitudes(-30, 3)),
    magnitudes(-30, 10).map(Normalized),
)
QUERIES = st.builds(
    Query,
    st.lists(
        st.tuples(st.floats(-3, 3), st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.1, 1e10])),
        min_size=1,
        max_size=3,
    ),
    st.none() | st.integers(0, 9),
    RULES,
    magnitudes(-6, 6),
    magnitudes(-6, 6) | st.sampled_from([0.0, math.inf]),
)


def sums(made, records, query, size):
    """The noiseless sums behind a gradient, the losses at its points and a count: [d], [k] and [1]."""
    x = torch.tensor([features for features, _ in records], dtype=torch.float32)
    y = torch.tensor([target for _, target in records], dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    noises = torch.randn(len(query.points), made.dimension, generator=generator)
    points = [(w, a * made.theta + b * noise) for (w, a, b), noise in zip(query.points, noises, strict=True)]
    scale = None
    if query.scale is not None:
        generator.manual_seed(query.scale)
        scale = torch.rand(made.dimension, generator=generator) * 10**query.scale
    draw = Draw(1.0, (0.0,) * (2 + len(points)))
    noise = {"gradient": 0.0, "losses": 0.0, "counts": 0.0}
    plan = NonPrivate(noise, Ledger([draw]), math.inf, 1.0, 1, made.dimension, 1e-5, "pld")
    oracle = DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2, physical_batch=size)
    with oracle.draw() as batch:
        gradient = batch.gradient(points, query.clip, scale).value
        losses = batch.losses([theta for _, theta in points], query.loss_bound).value - query.loss_bound / 2
        below = batch.below(query.norm_bound).value - 0.5
    return [value.double() * len(records) for value in (gradient, losses, below)]


def check(made, records, place, query, size):
    """Compare the sums with and without the record at `place`."""
    without = records[:place] + records[place + 1 :]
    pairs = zip(sums(made, records, query, size), sums(made, without, query, size), strict=True)
    gradient, losses, below = (more - fewer for more, fewer in pairs)
    tolerance = 1 + ROUNDING * len(records)
    assert float(gradient.norm()) <= query.clip.sensitivity * tolerance
    assert float(losses.abs().max()) <= query.loss_bound / 2 * tolerance
    assert float(below.abs()) <= 0.5 * tolerance


kinds = pytest.mark.parametrize("kind", ["bookkeeping", "vmap"])
names = pytest.mark.parametrize("name", ["linear", "normed", "convolution", "sequence", "shared"])


@kinds
@names
@given(
    records=st.lists(RECORDS, min_size=2, max_size=6),
    place=st.integers(0, 5),
    query=QUERIES,
    size=st.sampled_from([1, 2, None]),
)
def test_one_record_moves_no_sum_by_more_than_its_sensitivity(name, kind, records, place, query, size):
    check(engine_of(name, kind), records, place % len(records), query, size)


TINY = [
    # Output gradients whose squares are zero in float32, beside inputs that make long gradients of them.
    ("sequence", 1e18, 2e-23, None, Abadi(1e-6)),
    ("linear", 1e18, 2e-23, 8, Abadi(1.0)),
    ("linear", 1e18, 2e-23, 8, Automatic()),
    # Gradients whose norm is zero in float32, and rules that would make them long.
    ("linear", 1.0, 2e-24, None, Abadi(1e-30)),
    ("linear", 1.0, 2e-24, None, Normalized(1e-30)),
    ("linear", 1.0, 2e-24, None, Automatic(1.0, 1e-30)),
    # Factors too small for float32, which are rounded up.
    ("linear", 1e18, 1.0, None, Abadi(6.6e-27)),
]


@kinds
@pytest.mark.parametrize(("name", "feature", "target", "scale", "clip"), TINY)
def test_numbers_too_small_for_their_type_hide_no_record(name, kind, feature, target, scale, clip):
    records = [([0.0] * FEATURES, 0.0), ([feature] * FEATURES, target)]
    check(engine_of(name, kind), records, 1, Query([(1.0, 0.0, 0.0)], scale, clip, 1.0, 1.0), None)


@kinds
@names
def test_the_sensitivity_is_reached(name, kind):
    """The bounds would hold of an oracle that releases nothing."""
    records = [([1.0, 2.0, -1.0] * 2, 1.0), ([1e3, -2e3, 3e3] * 2, 1e6)]
    query = Query([(1.0, 1.0, 0.1)], None, Abadi(0.5), 3.0, 1.0)
    with_it, without = (sums(engine_of(name, kind), part, query, None) for part in (records, records[:1]))
    moved = [float((a - b).norm()) for a, b in zip(with_it, without, strict=True)]
    assert moved == pytest.approx([0.5, 1.5, 0.5], rel=1e-5)
