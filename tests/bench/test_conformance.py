"""The checks of a device, on the CPU as a device that conforms, and on ones that are broken in one way each."""

import math
import unittest
from contextlib import nullcontext

import pytest
import torch
from speed import conformance, twins

from dpopt import create
from dpopt.bench.cases import CASES
from dpopt.clipping import Abadi, bookkeeping, vmap
from dpopt.clipping import flat as shared
from dpopt.privacy import sampling
from dpopt.privacy.queries import Gradient
from dpopt.testing.task import Task

CPU = torch.device("cpu")


def statuses(rows):
    return {(row["name"], row["check"]): row["status"] for row in rows}


def engine_rows():
    return statuses(conformance.engines([CASES["mlp"].rehearsal()], CPU))


def test_the_cpu_conforms_to_itself():
    rows = list(conformance.optimizers(["hyfreedp"], CPU))
    assert {row["check"] for row in rows} == {rule.__name__ for rule in conformance.OPTIMIZER_RULES}
    assert {row["status"] for row in rows} == {"passed"}, rows
    rows = [*conformance.engines([CASES["mlp"].rehearsal()], CPU), *conformance.noise(CPU)]
    assert {row["name"] for row in rows} == {"bookkeeping, mlp", "vmap, mlp", "float32"}
    assert {row["status"] for row in rows} == {"passed"}, rows
    with pytest.raises(unittest.SkipTest, match="tokens"):
        conformance._leaves_out_bad_ones(conformance._Pair(CASES["gpt2"].rehearsal(), CPU), "bookkeeping")


def test_twins_put_every_query_to_both_and_see_other_draws():
    task, optimizer = Task(), create("hyfreedp")
    plan = task.plan(optimizer, epsilon=math.inf)
    one, other = task.oracle(plan), task.oracle(plan)
    both = twins.Twins(one, other, CPU)
    task.run(optimizer, both)
    assert one.ledger == other.ledger == plan.ledger
    assert both.compared > plan.draws
    with pytest.raises(AssertionError, match="apart from a release"):
        task.run(optimizer, twins.Twins(task.oracle(plan), task.oracle(plan, draw_seed=7), CPU))


def test_a_release_with_another_std_or_left_on_the_cpu_is_caught():
    task = Task()
    plan = task.plan(create("dp_sgd"))
    here, there = (twins.Twins(task.oracle(plan), task.oracle(plan), torch.device(name)) for name in ("cpu", "cuda"))
    release, query = twins.Release(torch.ones(3), 0.5), Gradient(torch.zeros(3), Abadi(1.0))
    assert here.compare(query, release, release) is release
    with pytest.raises(AssertionError, match="stds"):
        here.compare(query, release, twins.Release(torch.ones(3), 0.51))
    with pytest.raises(AssertionError, match="the release is on cpu"):
        there.compare(query, release, release)


def test_too_little_noise_is_caught(monkeypatch):
    original = sampling.add_gaussian
    monkeypatch.setattr(sampling, "add_gaussian", lambda total, std, *where: original(total, 0.9 * std, *where))
    row_statuses = statuses(conformance.optimizers(["dp_sgd"], CPU))
    assert row_statuses["dp_sgd", "adds_the_stated_gradient_noise"] == "failed"


def test_an_engine_that_lets_examples_exceed_their_bound_is_caught(monkeypatch):
    original = shared.clip_factors
    monkeypatch.setattr(shared, "clip_factors", lambda *arguments: 1.001 * original(*arguments))
    row_statuses = engine_rows()
    assert row_statuses["bookkeeping, mlp", "bounds every example"] == "failed"
    assert row_statuses["vmap, mlp", "bounds every example"] == "failed"
    assert row_statuses["bookkeeping, mlp", "bfloat16"] == "failed"


def test_an_engine_that_is_poisoned_by_a_bad_record_is_caught(monkeypatch):
    monkeypatch.setattr(bookkeeping, "must_be_sanitized", lambda norm: False)
    row_statuses = engine_rows()
    assert row_statuses["bookkeeping, mlp", "leaves bad records out"] == "failed"
    assert row_statuses["vmap, mlp", "leaves bad records out"] == "passed"


def test_an_engine_that_does_not_repeat_itself_is_caught(monkeypatch):
    original = shared.clip_factors

    def random(*arguments):
        factors = original(*arguments)
        return factors * (1 - 1e-6 * torch.rand_like(factors))

    monkeypatch.setattr(shared, "clip_factors", random)
    row_statuses = engine_rows()
    assert row_statuses["bookkeeping, mlp", "repeats bit for bit"] == "failed"
    assert row_statuses["bookkeeping, mlp", "as on the CPU"] == "passed"


def test_a_device_that_computes_something_else_is_caught(monkeypatch):
    original, calls = conformance._Pair.clipped, []

    def clipped(self, *arguments):
        calls.append(arguments)
        row_statuses = original(self, *arguments)
        return row_statuses._replace(total=1.01 * row_statuses.total) if len(calls) == 2 else row_statuses

    monkeypatch.setattr(conformance._Pair, "clipped", clipped)
    row_statuses = engine_rows()
    assert row_statuses["bookkeeping, mlp", "as on the CPU"] == "failed"
    assert row_statuses["vmap, mlp", "as on the CPU"] == "passed"


@pytest.mark.parametrize(
    ("noise", "check"),
    [
        (lambda total, std, seed, draw, release: total.add_(std * torch.randn(len(total))), "a function of its place"),
        (lambda total, std, *place: total.add_(std * drawn(len(total), 0)), "a function of its place"),
        (lambda total, std, *place: total.add_(0.98 * std * drawn(len(total), *place)), "has the stated size"),
        (lambda total, std, *place: total.add_(std * flat(len(total), *place)), "is normal"),
        (lambda total, std, *place: total.add_(std * looped(len(total), *place)), "blocks differ"),
    ],
)
def test_wrong_noise_is_caught(noise, check, monkeypatch):
    monkeypatch.setattr(sampling, "add_gaussian", noise)
    rows = {row["check"]: row["status"] for row in conformance.noise(CPU)}
    assert rows[check] == "failed"


def drawn(size, *place):
    return torch.randn(size, generator=torch.Generator().manual_seed(hash(place) % 2**62))


def flat(size, *place):
    return (torch.special.ndtr(drawn(size, *place)) - 0.5) * math.sqrt(12)


def looped(size, *place):
    return drawn(sampling.CPU_BLOCK, *place).repeat(size // sampling.CPU_BLOCK + 1)[:size]


def test_a_check_that_cannot_be_made_is_a_row():
    row = conformance._row("engine", "mlp", "divides", lambda: 1 / 0)
    assert (row["status"], row["detail"]) == ("failed", "ZeroDivisionError: division by zero")


def test_a_device_that_ignores_the_guard_is_caught(monkeypatch):
    """`FullPrecision` keeps the bound where autocast is on.

    Without it the factors of the mlp's third and fourth example are rounded up to bfloat16. (Book-keeping's own
    products either do not follow autocast or take norms at the upper end of their error, and so stay below the bound.)
    """
    key = "vmap, mlp", "bounds every example"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        guarded = engine_rows()
        monkeypatch.setattr(vmap, "FullPrecision", lambda device: nullcontext())
        ignored = engine_rows()
    assert (guarded[key], ignored[key]) == ("passed", "failed")
