"""Cells trained as one lot against the same cells one by one."""

import dataclasses
import os
import signal
import time

import pytest
import torch
from torch import nn

from dpopt import registry
from dpopt.clipping.lot import LotEngine
from dpopt.harness import cell as cells
from dpopt.harness import execute as executing
from dpopt.harness import lots
from dpopt.harness.engines import Event, Setup
from dpopt.harness.engines.attempt import attempt_lot
from dpopt.harness.engines.inline import InlineEngine
from dpopt.harness.engines.local import LocalEngine
from dpopt.harness.execute import Policy, execute
from dpopt.harness.plan import plan
from dpopt.privacy.lot import LotOracle
from dpopt.store import Store
from dpopt.testing.task import Task, advance
from dpopt.workloads.base import mlp
from dpopt.workloads.synthetic import SyntheticLogReg

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")
ALONE = {"torch_optim", "dadapt_adam", "dog", "prodigy", "schedulefree_adamw"}
"""Optimizers that decide on the host, and so are never stepped for several runs at once."""
TIMES = {"seconds_prepare", "seconds_train", "seconds_cpu", "seconds_draw", "peak_memory", "provenance", "lot"}
EXACT = ("run_id", "cell", "status", "epsilon", "delta", "noise", "rate", "draws", "examples", "dimension")
SUITE = """
defaults: [suite, _self_]
workloads: [{{name: {workload}}}]
optimizers: [{optimizer}]
epsilon: [2, inf]
accountant: rdp
batch_size: {batch_size}
epochs: {epochs}
seeds: [0, 1]
"""


@pytest.fixture
def planned(write_suite):
    """The cells of an optimizer on a small workload, with all that may differ within a lot."""

    def make(optimizer="dp_sgd", workload="synthetic_logreg, dim: 4", batch_size=800, epochs=2, overrides=()):
        text = SUITE.format(workload=workload, optimizer=optimizer, batch_size=batch_size, epochs=epochs)
        if "grid" not in str(overrides):
            overrides = [f"settings.{optimizer}.tuning=fixed", *overrides]
        return [entry.cell for entry in plan(write_suite(text, overrides))]

    return make


def searched(planned, *more, **changes):
    """Cells that differ in `lr`, in the bound, in epsilon and in the seed."""
    return planned(overrides=["settings.dp_sgd.grid.lr=[0.1,1.0]", "clip=[0.5,1.0]", *more], **changes)


@pytest.fixture
def alone(tmp_path):
    """Run cells one by one, in a store of their own."""

    def run(every):
        store = Store(tmp_path / "alone")
        for cell in every:
            cells.run(cell, store, device="cpu")
        return store

    return run


def assert_alike(store, other, every):
    """Both stores hold the same results of the cells, but for rounding."""
    for run_id in (cell.run_id for cell in every):
        mine, theirs = store.record(run_id), other.record(run_id)
        assert mine.keys() - TIMES == theirs.keys() - TIMES
        assert [mine[key] for key in EXACT] == [theirs[key] for key in EXACT]
        assert store.ledger(run_id) == other.ledger(run_id)
        curves = store.curve(run_id), other.curve(run_id)
        assert len(curves[0]) == len(curves[1])
        for entry, expected in zip(*curves, strict=True):
            assert entry == pytest.approx(expected, rel=1e-3, abs=2e-3, nan_ok=True)
        for key in ("test_loss", "test_accuracy", "validation_loss"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-3, abs=2e-3, nan_ok=True)


def test_the_digits_are_learned_alike(planned, store, alone):
    every = searched(planned, "epsilon=[2]", workload="digits_mlp", batch_size=128, epochs=1)
    (lot,) = lots.group(every, 16)
    lots.run(lot, store, device="cpu")
    assert_alike(store, alone(every), every)
    for record in (store.record(cell.run_id) for cell in every):
        assert record["lot"] == len(every) == 8
        assert store.state(record["run_id"]) == "done"
    assert {"lot"}.isdisjoint(alone([]).record(every[0].run_id))


@pytest.mark.parametrize("name", registry.optimizers())
def test_every_optimizer_ends_as_one_by_one_or_is_refused(planned, store, alone, name):
    every = planned(name, epochs=1.7)  # an odd number of draws
    assert len(every) == 4
    groups = lots.group(every, 4)
    if name in ALONE:
        assert [len(lot) for lot in groups] == [1] * 4
        with pytest.raises(lots.Refused, match="cannot be stepped"):
            lots.run(every, store, device="cpu")
        assert not any(store.curve(cell.run_id) for cell in every), "no draw was taken"
    else:
        (lot,) = groups
        lots.run(lot, store, device="cpu")
        assert_alike(store, alone(every), every)


@pytest.mark.parametrize("name", sorted(set(registry.optimizers()) - ALONE))
def test_the_noise_is_that_of_each_run_bit_for_bit(name):
    """Where all gradients are zero, a release is its noise."""
    optimizer, task = registry.create(name), Task(scale=0.0)
    plan = task.plan(optimizer)
    transcripts, noised = [[] for _ in range(3)], []
    oracles = [task.oracle(plan, transcripts[run], draw_seed=run, noise_seed=run) for run in range(3)]
    for oracle in oracles:
        task.run(optimizer, oracle)

    class Kept(LotOracle):
        def draw(self):
            noised.append([])
            return super().draw()

    answering = [task.oracle(plan, draw_seed=run, noise_seed=run) for run in range(3)]
    for oracle in answering:
        add = oracle._add_noise

        def kept(total, std, draw, release, add=add):
            add(total, std, draw, release)
            noised[-1].append(total.clone())

        oracle._add_noise = kept
    joined = lots.Joined([optimizer] * 3)
    start = joined.init(torch.stack([task.engine.theta] * 3))
    advance(joined, start, Kept(LotEngine(task.model, task.loss), answering))
    for number, totals in enumerate(noised):
        for run in range(3):
            gradient = transcripts[run][number][0].value
            assert torch.equal(totals[run] / answering[run].expected_batch, gradient)


def test_a_run_that_diverges_leaves_the_others_alone(planned, store, alone):
    every = planned(overrides=["settings.dp_sgd.grid.lr=[0.1,1e60,1.0]"])
    (lot,) = lots.group(every, 12)
    lots.run(lot, store, device="cpu")
    assert_alike(store, alone(every), every)
    states = [store.state(cell.run_id) for cell in every]
    assert states.count("diverged") == 4


def test_cells_go_from_a_lot_to_another_and_to_none(planned, store, alone):
    every = searched(planned)[:6]
    first, second = every[:4], every[4:]
    answers = iter([False] * 7 + [True])
    with pytest.raises(cells.Interrupted):
        lots.run(first, store, device="cpu", stop=lambda: next(answers))
    for cell in first:
        assert store.state(cell.run_id) == "interrupted"
        assert len(store.curve(cell.run_id)) == 8
        assert store.holder(cell.run_id) is None
        assert store.checkpoint(cell.run_id).stat().st_size < 10_000, "its own state alone"
    with pytest.raises(cells.Interrupted):
        cells.run(second[0], store, device="cpu", stop=lambda: True)
    fractions = []
    cells.run(first[0], store, device="cpu", report=fractions.append)
    assert fractions[0] == 9 / 20, "it went on where the lot was"
    told = []
    lots.run(every, store, device="cpu", report=lambda *given: told.append(given))
    assert (first[1].run_id, 9 / 20) in told
    assert (second[0].run_id, 2 / 20) in told
    assert_alike(store, alone(every), every)
    sizes = [store.record(cell.run_id).get("lot") for cell in every]
    assert sizes == [None, 3, 3, 3, None, None], "each number of draws is a lot of its own"


def test_cells_that_others_have_are_left_out(planned, store):
    every = searched(planned)[:4]
    cells.run(every[0], store, device="cpu")
    before = store.record(every[0].run_id)
    with store.lease(every[1].run_id):
        events = attempt_lot(every, store, Setup("cpu"))
    assert [event.kind for event in events] == ["done", "held", "done", "done"]
    assert store.record(every[0].run_id) == before
    assert store.state(every[1].run_id) == "pending"


def test_groups_hold_what_differs_in_little(planned):
    every = searched(planned)
    assert len(every) == 16
    assert [len(lot) for lot in lots.group(every, 5)] == [5, 5, 5, 1]
    assert [cell for lot in lots.group(every, 5) for cell in lot] == every
    assert [len(lot) for lot in lots.group(every, 1)] == [1] * 16
    others = [
        dataclasses.replace(every[0], batch_size=400),
        dataclasses.replace(every[0], epochs=3.0),
        dataclasses.replace(every[0], dry_run=2.0),
        dataclasses.replace(every[0], optimizer={**every[0].optimizer, "momentum": 0.9}),
        dataclasses.replace(every[0], workload={**every[0].workload, "dim": 5}),
        dataclasses.replace(every[0], diagnostics=True),
        dataclasses.replace(every[0], untrained=True),
    ]
    mixed = [every[0], *others, every[1]]
    assert [len(lot) for lot in lots.group(mixed, 4)] == [2] + [1] * 7
    assert lots.group(mixed, 4)[0] == [every[0], every[1]]


class Dropping(SyntheticLogReg):
    def model(self):
        return nn.Sequential(mlp(4, 3), nn.Dropout(0.5), nn.Linear(3, 2))


class Flipping(SyntheticLogReg):
    def augment(self, x):
        return torch.where(torch.rand(len(x), 1) < 0.5, -x, x)


class Frozen(SyntheticLogReg):
    """What is not trained depends on the seed."""

    def model(self):
        model = super().model()
        model.register_buffer("shift", torch.rand(3))
        return model


@pytest.mark.parametrize(("kind", "reason"), [(Dropping, "random"), (Flipping, "random"), (Frozen, "not trained")])
def test_what_cannot_be_joined_runs_one_by_one(planned, store, monkeypatch, kind, reason):
    every, made = planned(), registry.from_spec
    kind.__name__ = SyntheticLogReg.__name__  # the split depends on it
    monkeypatch.setattr(
        registry, "from_spec", lambda what, spec: kind(dim=4) if what == "workload" else made(what, spec)
    )
    with pytest.raises(lots.Refused, match=reason):
        lots.run(every, store, device="cpu")
    assert not any(store.curve(cell.run_id) for cell in every), "no draw was taken"
    events = attempt_lot(every, store, Setup("cpu"))
    assert {event.kind for event in events} == {"split"}
    outcome = execute(every, store, lambda: InlineEngine(store, Setup("cpu")), policy=Policy(lot=4))
    assert (outcome.ran, outcome.failed) == (4, {})
    assert not any("lot" in store.record(cell.run_id) for cell in every)


def test_cells_that_differ_in_more_are_refused(planned, store):
    one, other, *_ = planned()
    with pytest.raises(lots.Refused, match="differ in more"):
        lots.run([one, dataclasses.replace(other, batch_size=400)], store, device="cpu")


def test_a_lot_larger_than_a_physical_batch_is_refused(planned, store):
    every = planned()
    with pytest.raises(lots.Refused, match="physical batch"):
        lots.run(every, store, device="cpu", physical_batch=1000)


def test_a_bad_cell_is_found_and_named(planned, store):
    every = planned()
    bad = dataclasses.replace(every[1], selection={"rule": "nonsense"})
    mixed = [every[0], bad, *every[2:]]
    assert len(lots.group(mixed, 4)) == 1
    outcome = execute(mixed, store, lambda: InlineEngine(store, Setup("cpu")), policy=Policy(lot=4))
    assert outcome.ran == 3
    assert list(outcome.failed) == [bad.run_id]
    assert "nonsense" in outcome.failed[bad.run_id]
    assert "nonsense" in store.error(bad.run_id)["traceback"]


def test_a_lot_that_fails_in_the_middle_goes_on_one_by_one(planned, store, alone, monkeypatch):
    every, step, calls = planned(), lots.Joined.step, []

    def failing(self, state, oracle):
        calls.append(oracle.draws_left)
        if len(calls) == 9:
            raise RuntimeError("out of temper")
        return step(self, state, oracle)

    monkeypatch.setattr(lots.Joined, "step", failing)
    outcome = execute(every, store, lambda: InlineEngine(store, Setup("cpu")), policy=Policy(lot=4))
    assert (outcome.ran, outcome.failed) == (4, {})
    assert_alike(store, alone(every), every)


def test_local_workers_train_lots(planned, store, alone):
    every = searched(planned)
    outcome = execute(every, store, lambda: LocalEngine(store, Setup("cpu", workers=2)), policy=Policy(lot=8))
    assert (outcome.ran, outcome.failed) == (16, {})
    assert {store.record(cell.run_id)["lot"] for cell in every} == {8}
    assert_alike(store, alone(every[::5]), every[::5])


def long_lot(engine, planned):
    """Submit a lot that takes long, and wait until it has begun; gives its cells."""
    every = searched(planned, epochs=300)[:4]
    engine.submit(*every)
    events, limit = [], time.monotonic() + 120
    while not any(event.fraction > 0 for event in events) and time.monotonic() < limit:
        events += engine.poll(0.2)
    return every


def last_events(engine, count):
    events, limit = [], time.monotonic() + 120
    while len(events) < count and time.monotonic() < limit:
        events += [event for event in engine.poll(0.2) if event.kind != "progress"]
    return {event.run_id: event.kind for event in events}


def test_cancelling_a_cell_stops_its_lot(planned, store):
    engine = LocalEngine(store, Setup("cpu", workers=1))
    every = long_lot(engine, planned)
    queued = planned("adadp")
    engine.submit(*queued)
    engine.cancel(every[1].run_id)
    engine.cancel(queued[0].run_id)
    kinds = last_events(engine, 4 + 3)
    engine.close()
    assert [kinds[cell.run_id] for cell in every] == ["interrupted"] * 4
    assert [kinds.get(cell.run_id) for cell in queued] == [None, "done", "done", "done"]
    assert all(store.checkpoint(cell.run_id).exists() for cell in every)


def test_a_worker_that_dies_costs_its_lot(planned, store):
    engine = LocalEngine(store, Setup("cpu", workers=1))
    every = long_lot(engine, planned)
    os.kill(engine._workers[0].process.pid, signal.SIGKILL)
    kinds = last_events(engine, 4)
    engine.close()
    assert kinds == {cell.run_id: "died" for cell in every}


class Scripted:
    """Ends all cells of a lot as it is told, and those that come alone well; "hangs" until it is cancelled."""

    def __init__(self, ending):
        self.ending, self.submitted, self.events, self.hanging = ending, [], [], []

    def submit(self, *lot):
        self.submitted.append([cell.run_id for cell in lot])
        kind = self.ending if len(lot) > 1 else "done"
        if kind == "hangs":
            self.hanging = list(lot)
        self.events += [Event(cell.run_id, "progress" if kind == "hangs" else kind, 0.0) for cell in lot]

    def poll(self, timeout):
        events, self.events = self.events, []
        time.sleep(0.01)
        return events

    def cancel(self, run_id):
        self.events += [Event(cell.run_id, "interrupted") for cell in self.hanging]
        self.hanging = []

    def close(self):
        pass


@pytest.mark.parametrize("ending", ["split", "died", "interrupted", "hangs"])
def test_the_cells_of_a_lot_that_ends_badly_are_tried_alone(planned, store, monkeypatch, ending):
    monkeypatch.setattr(executing, "POLL", 0.01)
    every, engine = planned(), Scripted(ending)
    began = time.monotonic()
    outcome = execute(every, store, lambda: engine, policy=Policy(timeout=0.05, lot=4))
    ids = [cell.run_id for cell in every]
    assert engine.submitted == [ids, *([run_id] for run_id in ids)]
    assert (outcome.ran, outcome.failed) == (4, {})
    if ending == "hangs":
        assert time.monotonic() - began > 4 * 0.05, "a lot has the time of all of its cells"
