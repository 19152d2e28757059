"""What all engines do alike, whatever they do in between."""

import pytest
import torch
from loop import squared
from torch import nn

from dpopt.clipping import Abadi
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.flat import clip_factors
from dpopt.clipping.vmap import VmapEngine

ENGINES = pytest.mark.parametrize("kind", [BookkeepingEngine, VmapEngine], ids=lambda kind: kind.name)
FEATURES = 3


def made(kind):
    torch.manual_seed(0)
    return kind(nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, 1)), squared)


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


class Echo(nn.Module):
    """Gives back what it is given, so that a graph that comes in goes out."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x


@ENGINES
def test_outputs_have_no_gradients_even_where_they_are_the_inputs(kind):
    own = kind(Echo(), squared)
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


def test_the_first_batch_and_those_twice_as_large_are_examined():
    own = made(BookkeepingEngine)
    examined = []
    for examples in (1, 2, 3, 4, 7, 8, 8, 15, 16):
        x, y = torch.randn(examples, FEATURES), torch.randn(examples)
        if own.is_to_be_examined(examples):
            examined.append(examples)
        own.clipped([(1.0, own.theta)], x, y, torch.ones(examples, dtype=torch.bool), Abadi(1.0))
    assert examined == [2, 4, 8, 16]
