"""A cell that is killed, stopped, or finds no room to write."""

import errno
import os
import random
import signal

import pytest
import torch
from short import sparing
from small_suites import train_cell
from stored import in_child, stable

from dpopt import files, registry
from dpopt.errors import ConfigError, Held
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy.data import DataOracle
from dpopt.runs import run_suite as running
from dpopt.runs import stopping
from dpopt.runs import train as cells
from dpopt.runs.run_suite import run_suite
from dpopt.runs.worker import work
from dpopt.store import Store
from dpopt.suites.plan import plan

DRAWS = 24
KILLS = 3


@pytest.fixture
def cell(write_suite):
    return next(entry.cell for entry in plan(write_suite(overrides=["optimizers=[hyfreedp]"])))


def cell_of(write_suite, name):
    text = f"""
defaults: [suite, _self_]
workloads: [{{name: synthetic_logreg, dim: 4}}]
optimizers: [{name}]
settings: {{{name}: {{tuning: fixed}}}}
epsilon: [2]
accountant: rdp
batch_size: 1000
epochs: {DRAWS / 8}
seeds: [0]
"""
    (entry,) = plan(write_suite(text))
    return entry.cell


def kill_at(patch, number):
    """From now on a process kills itself within draw `number`, after a release."""
    compute = DataOracle.answer

    def answer(self, charged):
        release = compute(self, charged)
        if charged.draw == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return release

    patch.setattr(DataOracle, "answer", answer)


class Forgetful(Store):
    """Keeps every other checkpoint, so that there are draws to be taken again."""

    def save_checkpoint(self, run_id, content):
        if len(self.curve(run_id)) % 2:
            super().save_checkpoint(run_id, content)


def ending(cell, store, monkeypatch):
    """Run a cell to its end: its record without times, its last state, its curve and its ledger."""
    kept, make = [], cells._record
    with monkeypatch.context() as patch:
        patch.setattr(cells, "_record", lambda ready, state: kept.append(state) or make(ready, state))
        record = train_cell(cell, store, device="cpu")
    leaves = torch.utils._pytree.tree_leaves(kept[0])
    return stable(record), leaves, store.curve(cell.run_id), store.ledger(cell.run_id)


def test_a_cell_that_asks_for_less_than_it_planned_has_no_record(write_suite, store, monkeypatch):
    """The stated epsilon is the plan's: a run that left another ledger must not be reported."""
    monkeypatch.setattr(DPSGD, "step", sparing(DPSGD.step))
    cell = cell_of(write_suite, "dp_sgd")
    with pytest.raises(RuntimeError, match="the plan holds"):
        train_cell(cell, store, device="cpu")
    assert store.state(cell.run_id) != "done"


STATES = ("adadp", "dp_adam", "fiber", "hyfreedp")
"""Optimizers with pairs of draws, moments, two points, and probes; conformance stops and resumes all of them."""


@pytest.mark.parametrize(
    "name", [name if name in STATES else pytest.param(name, marks=pytest.mark.slow) for name in registry.optimizers()]
)
def test_a_cell_killed_at_random_draws_ends_as_if_it_had_not_been(write_suite, store, tmp_path, monkeypatch, name):
    """By SIGKILL in the middle of a draw, each time in a process of its own."""
    cell = cell_of(write_suite, name)
    whole, state, curve, ledger = ending(cell, Store(tmp_path / "quiet"), monkeypatch)
    for number in sorted(random.Random(name).sample(range(DRAWS), KILLS)):

        def work(number=number):
            kill_at(monkeypatch, number)
            train_cell(cell, Forgetful(store.root), device="cpu", checkpoint_seconds=0)

        assert in_child(work) == -signal.SIGKILL, "it ended before it was killed"
        assert store.state(cell.run_id) == "interrupted"
    again, resumed, second, left = ending(cell, store, monkeypatch)
    assert again == whole
    assert all(torch.equal(one, other) for one, other in zip(resumed, state, strict=True))
    assert (second, left) == (curve, ledger)
    left = {file.name for file in store.folder(cell.run_id).iterdir()}
    assert left == {"run.json"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_a_run_and_the_second_one_at_once(write_suite, store, number):
    suite, news = write_suite(), []
    every = [entry.cell for entry in plan(suite)]

    class Signalled(Store):
        def append_curve(self, run_id, entry):
            super().append_curve(run_id, entry)
            if entry["draw"] == 6:
                os.kill(os.getpid(), number)

    with stopping.signals():
        work(suite, Signalled(store.root), every, news.append)
    assert [each.kind for each in news] == ["begin", "interrupted"]
    assert store.folder(every[0].run_id, "checkpoint.pt").exists()
    assert not stopping.is_asked()
    with stopping.signals():
        os.kill(os.getpid(), number)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), number)
    assert run_suite(suite, store.root, engine="inline", progress=False).ran == len(every)


def test_a_library_that_sets_signal_handlers_does_not_keep_them():
    with stopping.signals():
        with stopping.undisturbed():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stopping.is_asked()


def test_a_cell_is_run_by_one_process_at_a_time_and_once(cell, store):
    with store.lease(cell.run_id):
        with pytest.raises(Held, match=f"it is run by process {os.getpid()}"):
            train_cell(cell, store, device="cpu")
        assert store.state(cell.run_id) == "running"
    record = train_cell(cell, store, device="cpu")
    assert store.record(cell.run_id).items() >= record.items()
    assert 0 < record["seconds_draw"] * record["draws"] <= record["seconds_train"]
    assert 5e7 < record["peak_memory"] < 1e11


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("method", ["begin", "append_curve", "save_checkpoint", "finish"])
def test_a_full_disk_ends_the_run_and_harms_no_cell(write_suite, store, tmp_path, monkeypatch, method):
    suite = write_suite(overrides=["optimizers=[hyfreedp]", "device=cpu"])
    every = [entry.cell for entry in plan(suite)]
    monkeypatch.setattr(cells, "CHECKPOINT_SECONDS", 0)

    class Full(Store):
        calls = 0

    def limited(self, run_id, *given):
        Full.calls += 1
        if Full.calls < 3:
            return getattr(Store, method)(self, run_id, *given)
        with monkeypatch.context() as patch:
            patch.setattr(files.os, "fsync", full)
            if method == "append_curve":
                with (self.folder(run_id) / "curve.jsonl").open("a") as file:
                    file.write('{"draw": 3, "te')
                full()
            return getattr(Store, method)(self, run_id, *given)

    setattr(Full, method, limited)
    monkeypatch.setattr(running, "open_store", lambda *_: Full(store.root))
    if method in ("begin", "finish"):
        Full.calls = 1
    with pytest.raises(OSError, match=r"results cannot be written.*No space left"):
        run_suite(suite, store.root, engine="inline", progress=False)
    assert not [file.name for file in store.root.rglob(".writing-*")]
    assert "failed" not in {store.state(cell.run_id) for cell in every}
    monkeypatch.setattr(running, "open_store", lambda *_: store)
    outcome = run_suite(suite, store.root, engine="inline", progress=False)
    assert outcome.ran + outcome.skipped == len(every)
    quiet = Store(tmp_path / "quiet")
    for cell in every:
        assert stable(store.record(cell.run_id)) == stable(quiet.record(run_quiet(cell, quiet)))
        assert store.curve(cell.run_id) == quiet.curve(cell.run_id)


def run_quiet(cell, quiet):
    train_cell(cell, quiet, device="cpu")
    return cell.run_id


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(store, tmp_path, monkeypatch):
    store.check_writable()
    assert list((store.root / "runs").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"results: .*cannot be written: Not a directory"):
        Store(tmp_path / "file").check_writable()

    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(files.os, "open", refuse)
    with pytest.raises(ConfigError, match="Read-only file system"):
        store.check_writable()
