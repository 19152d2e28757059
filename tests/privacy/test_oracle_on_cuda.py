"""The data oracle on a GPU: it never waits, leaves no tensor behind, and releases what it releases on the CPU."""

import math

import pytest
import torch
from devices import ON_CUDA, to
from short import loss
from torch import nn

from dpopt.clipping import Abadi, Automatic, Normalized, engine
from dpopt.clipping.rules import AtBound
from dpopt.privacy import DataOracle, Draw, Ledger, Plan
from dpopt.testing.numerics import OneType

N, FEATURES, CLASSES = 120, 24, 6
ENGINES = pytest.mark.parametrize("name", ["bookkeeping", "vmap"])


def network(dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 40), nn.Tanh(), nn.Dropout(dropout), nn.Linear(40, CLASSES))


D = sum(p.numel() for p in network().parameters())  # more than there are losses in a draw, which are float64


def records():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, FEATURES, generator=generator), torch.randint(CLASSES, (N,), generator=generator)


def plan(rate=0.3, draws=1, gradients=1, losses=0, counts=0, noise=0.0):
    """A plan whose draws have that many releases of each kind, all with the noise multiplier `noise`."""
    kinds = {"gradient": gradients, "losses": losses, "counts": counts}
    noises = {kind: noise for kind, count in kinds.items() if count}
    draw = Draw(rate, (noise,) * sum(kinds.values()))
    return Plan(noises, Ledger([draw] * draws), 1.0, rate, draws, D, 1e-5, "pld")


def made(name, device, dropout=0.0):
    """An engine whose parameters are on `device`, and which has looked at its model and at a whole draw."""
    x, y = to(device, records())
    found = engine(network(dropout).to(device), loss, name, sample=(x[:4], y[:4]))
    found.clipped([(1.0, found.theta)], x, y, torch.ones_like(y).bool(), Abadi(1.0))
    return found


def oracle(made, plan, stored="cpu", **options):
    """An oracle that computes where `made` does, over records that are stored on the device `stored`."""
    x, y = to(stored, records())
    return DataOracle(made, x, y, plan, draw_seed=1, noise_seed=2, device=made.theta.device, **options)


def near(theta, *offsets):
    """Points beside `theta`."""
    return [theta + offset * torch.linspace(-1, 1, D, device=theta.device) for offset in offsets]


def weighted(theta):
    return [(1.7, *near(theta, 0.1)), (-0.7, theta)]


def released(cuda, name, plan, query, stored="cuda", **options):
    """What `query(batch, theta)` gives on a GPU, without waiting or a vector in float64, and on the CPU."""
    on_cpu = made(name, "cpu")
    with oracle(on_cpu, plan, **options).draw() as batch:
        expected = query(batch, on_cpu.theta)
    with cuda.there():
        on_gpu = made(name, "cuda")
        theta, asked = on_gpu.theta, oracle(on_gpu, plan, stored, **options)
        with cuda.never_waiting(), OneType(torch.float32, D), asked.draw() as batch:
            found = query(batch, theta)
        assert all(release.value.device.type == "cuda" for release in found)
        return [[to("cpu", (r.value, torch.as_tensor(r.std))) for r in each] for each in (found, expected)]


def assert_same(found, expected):
    for (value, std), (expected_value, expected_std) in zip(found, expected, strict=True):
        assert value.dtype == expected_value.dtype
        torch.testing.assert_close(value, expected_value, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(std.double(), expected_std.double(), rtol=1e-12, atol=0)
    assert found[0][0].any()


@ON_CUDA
@ENGINES
def test_gradients_are_those_of_the_cpu(cuda, name):
    """Each clip rule, a bound on the device, two points, a scale, and both."""

    def all_of_them(batch, theta):
        rules = [Abadi(0.3), Abadi(math.inf), Automatic(), Normalized(0.3), AtBound(theta.new_full((), 0.3))]
        scale = near(theta, 0.1)[0].abs()
        asked = [(theta, rule, None) for rule in rules] + [(weighted(theta), Abadi(0.3), None)]
        return [
            batch.gradient(*one) for one in [*asked, (theta, Abadi(0.3), scale), (weighted(theta), Abadi(0.3), scale)]
        ]

    assert_same(*released(cuda, name, plan(gradients=8), all_of_them))


@ON_CUDA
@pytest.mark.parametrize(
    ("name", "stored", "physical_batch"),
    [("bookkeeping", "cpu", None), ("bookkeeping", "cuda", 8), ("vmap", "cpu", 16), ("vmap", "cuda", None)],
)
def test_records_that_are_sent_over_or_cut_into_padded_batches_release_the_same(cuda, name, stored, physical_batch):
    def query(batch, theta):
        bound = theta.new_full((), 1.5, dtype=torch.float64)  # on the device, as a released number is
        gradient = batch.gradient(theta, Abadi(0.3))
        return [gradient, batch.losses([*near(theta, 0.1), theta, *near(theta, -0.1)], bound), batch.below(bound)]

    found, expected = released(
        cuda, name, plan(losses=3, counts=1), query, stored=stored, physical_batch=physical_batch, transform=torch.tanh
    )
    assert_same(found, expected)


@ON_CUDA
@ENGINES
def test_an_empty_draw_waits_for_nothing_and_is_noised(cuda, name):
    with cuda.there():
        made_there = made(name, "cuda")
        theta, asked = made_there.theta, oracle(made_there, plan(rate=1e-9, losses=1, counts=1, noise=1.0))
        with cuda.never_waiting(), OneType(torch.float32, D), asked.draw() as batch:
            releases = [batch.gradient(theta, Abadi(1.0)), batch.losses([theta], 1.0), batch.below(1.0)]
        for release in releases:
            scaled = to("cpu", release.value) / release.std
            assert scaled.isfinite().all()
            assert scaled.any()


@ON_CUDA
@pytest.mark.parametrize(("name", "value"), [("bookkeeping", math.nan), ("bookkeeping", 1e30), ("vmap", math.inf)])
def test_a_bad_record_contributes_nothing_and_is_not_looked_for(cuda, name, value):
    def spoilt(x):
        x = x.clone()
        x[3] = value
        return x

    def query(batch, theta):
        return [batch.gradient(theta, Abadi(0.3)), batch.losses(near(theta, 0.1), 1.5), batch.below(2.0)]

    found, expected = released(cuda, name, plan(rate=1.0, losses=1, counts=1), query, transform=spoilt)
    assert_same(found, expected)
    assert all(value.isfinite().all() for value, _ in found)
