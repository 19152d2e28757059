"""What holds on any device: norms and sums keep all digits, and blocks and copies are as the device wants them."""

import contextlib
import dataclasses
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpopt.clipping import Abadi, bookkeeping, engine, factors, vmap
from dpopt.clipping.flat import FullPrecision
from dpopt.workloads.models import two_conv

CPU = torch.device("cpu")
BOUND = 1e-3


def cross_entropy(output, target):
    return F.cross_entropy(output.float(), target, reduction="none")


class Tokens(nn.Module):
    """Linear layers on eight rows an example, some of which are kept as outer products."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 10)])

    def forward(self, x):
        first, second, last = self.layers
        return last(second(first(x).relu()).relu().mean(1))


MODELS = {"tokens": (Tokens, (8, 64)), "convolutions": (two_conv, (3, 32, 32))}


def task(name, examples=6):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make(), torch.randn(examples, *shape), torch.randint(10, (examples,))


def lengths(made, x, y, autocast):
    """The length of each example's clipped gradient, in units of the bound; all of them are clipped."""
    found = []
    for i in range(len(x)):
        mask = torch.zeros(len(x), dtype=torch.bool)
        mask[i] = True
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total = made.clipped_sum([(1.0, made.theta)], x, y, mask, Abadi(BOUND))
        found.append(float(total.double().norm()) / BOUND)
    return torch.tensor(found)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("engine_name", ["bookkeeping", "vmap"])
def test_no_example_exceeds_the_bound_under_autocast(name, engine_name):
    model, x, y = task(name)
    made = engine(model, cross_entropy, engine_name, sample=(x, y))
    assert lengths(made, x, y, autocast=True).max() < 1 + 1e-5


@pytest.mark.parametrize("engine_name", ["bookkeeping", "vmap"])
def test_without_full_precision_norm_and_sum_differ(engine_name, monkeypatch):
    for module in (bookkeeping, vmap):
        monkeypatch.setattr(module, "FullPrecision", lambda device: contextlib.nullcontext())
    model, x, y = task("tokens")
    made = engine(model, cross_entropy, engine_name, sample=(x, y))
    assert (lengths(made, x, y, autocast=False) - 1).abs().max() < 1e-5
    assert (lengths(made, x, y, autocast=True) - 1).abs().max() > 1e-3


def settings():
    """Of the processor, on which the tests run; a GPU has two of its own."""
    return [owner.fp32_precision for owner in (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)]


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="before torch 2.9")
def test_norms_and_sums_are_not_computed_with_tf32(monkeypatch):
    """Where a user asks for speed."""
    seen = []
    for name in ("squared_norm", "weighted_sum"):
        method = getattr(factors.Outer, name)

        def noted(self, *arguments, method=method, **keywords):
            seen.append(settings())
            return method(self, *arguments, **keywords)

        monkeypatch.setattr(factors.Outer, name, noted)
    torch.set_float32_matmul_precision("high")
    try:
        before = settings()
        model, x, y = task("tokens")
        made = engine(model, cross_entropy, "bookkeeping")
        seen.clear()
        made.clipped([(1.0, made.theta)], x, y, torch.ones(6, dtype=torch.bool), Abadi(BOUND))
        with pytest.raises(ValueError, match="inside"), FullPrecision(torch.device("cpu")):
            raise ValueError("inside")
        assert settings() == before
        assert set(before) - {"none", "ieee"}
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen
    assert {value for values in seen for value in values} <= {"none", "ieee"}


def test_a_bad_example_adds_nothing_where_the_device_is_not_waited_for(monkeypatch):
    model, x, y = task("tokens")
    x[2] = math.nan
    made = engine(model, cross_entropy, "bookkeeping", sample=(x[:2], y[:2]))
    arguments = ([(1.0, made.theta)], x, y, torch.ones(6, dtype=torch.bool), Abadi(BOUND))
    expected = made.clipped(*arguments)
    monkeypatch.setattr(bookkeeping, "must_be_sanitized", lambda norm: True)
    always = made.clipped(*arguments)
    assert torch.equal(always.total, expected.total)
    assert always.total.isfinite().all()
    good = [0, 1, 3, 4, 5]
    alone = made.clipped_sum([(1.0, made.theta)], x[good], y[good], torch.ones(5, dtype=torch.bool), Abadi(BOUND))
    torch.testing.assert_close(always.total, alone)


def test_copies_without_bad_examples_are_made_one_at_a_time(monkeypatch):
    alive, most = weakref.WeakSet(), []
    for kind in (factors.Outer, factors.Dense):
        original = kind.sanitized

        def counted(self, keep, original=original):
            copy = original(self, keep)
            alive.add(copy.left if isinstance(copy, factors.Outer) else copy.values)
            most.append(len(alive))
            return copy

        monkeypatch.setattr(kind, "sanitized", counted)
    monkeypatch.setattr(bookkeeping, "must_be_sanitized", lambda norm: True)
    model, x, y = task("tokens")
    made = engine(model, cross_entropy, "bookkeeping", sample=(x, y))
    monkeypatch.setattr(made, "is_to_be_examined", lambda examples: False)
    most.clear()
    made.clipped([(1.0, made.theta)], x, y, torch.ones(6, dtype=torch.bool), Abadi(BOUND))
    assert len(most) == 6
    assert max(most) <= 2  # the one before is still bound to its name


@pytest.mark.parametrize("name", ["bookkeeping", "vmap"])
def test_copies_of_the_points_are_gone_when_the_sum_is_made(name, monkeypatch):
    model, x, y = task("tokens")
    made = engine(model, cross_entropy, name, sample=(x, y))
    points = [(0.5, made.theta), (0.5, made.theta)]
    original, left = made.per_example, []

    def noted(points, *rest):
        copies = [weakref.ref(theta) for _, theta in points]
        each = original(points, *rest)

        def weighted_sum(weights):
            left.extend(copy() for copy in copies)
            return each.weighted_sum(weights)

        return dataclasses.replace(each, weighted_sum=weighted_sum)

    monkeypatch.setattr(made, "is_to_be_examined", lambda examples: False)
    monkeypatch.setattr(made, "per_example", noted)
    made.clipped(points, x, y, torch.ones(6, dtype=torch.bool), Abadi(BOUND))
    assert left == [None, None]


@pytest.mark.parametrize("name", MODELS)
def test_the_size_of_blocks_changes_rounding_alone(name, monkeypatch):
    model, x, y = task(name)
    made = engine(model, cross_entropy, "bookkeeping", sample=(x, y))
    points = [(1.0, made.theta), (-0.5, 0.9 * made.theta)]
    for scale in (None, torch.rand(made.dimension)):
        found = []
        for size in (1, 2**25):
            monkeypatch.setattr(factors, "BLOCK", size)
            found.append(made.clipped(points, x, y, torch.ones(6, dtype=torch.bool), Abadi(BOUND), scale))
        torch.testing.assert_close(found[0].norms, found[1].norms, rtol=1e-4, atol=0)
        torch.testing.assert_close(found[0].total, found[1].total, rtol=1e-3, atol=1e-7)


def test_vmap_takes_as_many_examples_as_the_device_has_memory_for(monkeypatch):
    free = {"cuda": 2**30}
    monkeypatch.setattr(vmap, "free_memory", lambda device: free[device.type])
    with FakeTensorMode():
        made = vmap.VmapEngine(nn.Linear(1000, 1000, device="cuda"), cross_entropy)
    assert made.physical_batch(10_000) == 2**30 // vmap._COPIES // (4 * 1_001_000)
    assert vmap.VmapEngine(nn.Linear(1000, 1000), cross_entropy).physical_batch(10_000) == 16
