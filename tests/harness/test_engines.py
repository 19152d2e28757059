import os
import signal
import time

import pytest
import torch

from dpopt.runs import train as cell_module
from dpopt.runs.engines import Setup
from dpopt.runs.engines.inline import InlineEngine
from dpopt.runs.engines.local import LocalEngine, places
from dpopt.runs.execute import Policy, execute
from dpopt.runs.train import Interrupted, run
from dpopt.store import Store
from dpopt.suites.plan import plan

METRICS = ("test_accuracy", "test_loss", "validation_accuracy", "validation_loss", "epsilon", "noise")


def metrics(store, cells):
    return {cell.run_id: [store.record(cell.run_id)[key] for key in METRICS] for cell in cells}


def test_local_and_inline_give_the_same_numbers(write_suite, store, tmp_path):
    cells = [entry.cell for entry in plan(write_suite())]
    outcome = execute(cells, store, lambda: LocalEngine(store, Setup("cpu", workers=2)))
    assert (outcome.ran, outcome.skipped, outcome.failed, outcome.damaged) == (len(cells), 0, {}, [])
    inline = Store(tmp_path / "inline")
    execute(cells, inline, lambda: InlineEngine(inline, Setup("cpu")))
    assert metrics(store, cells) == metrics(inline, cells)
    again = execute(cells, store, lambda: pytest.fail("an engine was started for nothing"))
    assert (again.ran, again.skipped) == (0, len(cells))


@pytest.mark.parametrize(
    "make",
    [lambda s: InlineEngine(s, Setup("cpu", 77)), lambda s: LocalEngine(s, Setup("cpu", 77, 1))],
    ids=["inline", "local"],
)
def test_engines_pass_the_physical_batch_on(write_suite, store, tmp_path, make):
    cell = next(entry.cell for entry in plan(write_suite()) if entry.label == "dp_sgd")
    execute([cell], store, lambda: make(store))
    expected = Store(tmp_path / "direct")
    run(cell, expected, device="cpu", physical_batch=77)
    assert store.curve(cell.run_id) == expected.curve(cell.run_id)
    default = Store(tmp_path / "default")
    run(cell, default, device="cpu")
    assert store.curve(cell.run_id) != default.curve(cell.run_id)


def test_a_worker_that_dies_costs_its_one_cell(write_suite, store):
    cells = [entry.cell for entry in plan(write_suite())]
    (long,) = [
        e.cell for e in plan(write_suite(overrides=["epochs=300", "optimizers=[adadp]", "seeds=0"], name="long"))
    ]
    engine = LocalEngine(store, Setup("cpu", workers=2))
    for cell in (long, *cells):
        engine.submit(cell)
    events, limit = engine.poll(0), time.monotonic() + 600
    assert engine.places[0].run_id == long.run_id
    victim = engine.places[0].worker.members[0]
    while len([e for e in events if e.kind != "progress"]) < len(cells) + 1 and time.monotonic() < limit:
        events += engine.poll(0.2)
        if victim.process.is_alive() and any(event.run_id == long.run_id and event.fraction > 0 for event in events):
            os.kill(victim.process.pid, signal.SIGKILL)
    engine.close()
    died = [event for event in events if event.kind == "died"]
    assert [event.run_id for event in died] == [long.run_id]
    assert "exit code -9" in died[0].reason
    assert store.state(long.run_id) == "interrupted", "its lease counts no more"
    assert {store.state(cell.run_id) for cell in cells} == {"done"}


class Unreadable:
    """Ends the process that is to hold it."""

    def __reduce__(self):
        return os._exit, (3,)


def test_workers_that_cannot_start_are_an_error_of_the_run(write_suite, store, monkeypatch):
    cell = plan(write_suite())[0].cell
    monkeypatch.setattr("dpopt.runs.engines.local.Runner", lambda *given: Unreadable())
    with pytest.raises(OSError, match=r"a worker could not be started: the process died \(exit code 3\)"):
        execute([cell], store, lambda: LocalEngine(store, Setup("cpu", workers=1)))
    assert store.state(cell.run_id) == "pending"


def test_failed_and_damaged_cells_are_left_alone(write_suite, store):
    failed, damaged, *rest = [entry.cell for entry in plan(write_suite())]
    store.fail(failed.run_id, "out of luck")
    store.begin(damaged.run_id, damaged.content())
    record = store.folder(damaged.run_id) / "run.json"
    record.write_text('{"half": ')
    outcome = execute([failed, damaged, *rest], store, lambda: InlineEngine(store, Setup("cpu")))
    assert outcome.failed == {failed.run_id: "out of luck"}
    assert outcome.damaged == [damaged.run_id]
    assert outcome.ran == len(rest)
    assert record.read_text() == '{"half": '


def test_inline_reports_failures(write_suite, store, monkeypatch):
    cells = [entry.cell for entry in plan(write_suite())][:2]
    monkeypatch.setattr("dpopt.runs.train.calibrate", lambda *a, **k: 1 / 0)
    outcome = execute(cells, store, lambda: InlineEngine(store, Setup("cpu")))
    assert outcome.ran == 0
    assert set(outcome.failed.values()) == {"ZeroDivisionError: division by zero"}


def test_a_cell_that_another_process_fails_meanwhile_is_not_trained_again(write_suite, store, monkeypatch):
    failed, other = [entry.cell for entry in plan(write_suite())][:2]
    monkeypatch.setattr("dpopt.runs.execute.POLL", 0.01)

    def make_engine():
        store.fail(failed.run_id, "out of luck elsewhere")
        return InlineEngine(store, Setup("cpu"))

    outcome = execute([failed, other], store, make_engine)
    assert (outcome.ran, outcome.failed) == (1, {failed.run_id: "out of luck elsewhere"})
    assert not store.folder(failed.run_id, "cell.json").exists()


def test_an_error_that_is_tried_again_does_not_stand_in_the_way(write_suite, store, monkeypatch):
    """The failure that the first attempt has noted is forgotten before the second one."""
    cell = plan(write_suite())[0].cell
    prepare, errors = cell_module.prepare, [ValueError("once")]

    def fails_once(*given, **named):
        if errors:
            raise errors.pop()
        return prepare(*given, **named)

    monkeypatch.setattr(cell_module, "prepare", fails_once)
    policy = Policy(retries=1, retry_on=("failed",))
    outcome = execute([cell], store, lambda: InlineEngine(store, Setup("cpu")), policy=policy)
    assert (outcome.ran, outcome.failed, store.state(cell.run_id)) == (1, {}, "done")


def test_a_cancelled_cell_leaves_a_checkpoint_and_its_worker_is_replaced(write_suite, store, at_marks):
    (long,) = [
        e.cell for e in plan(write_suite(overrides=["epochs=3000", "optimizers=[adadp]", "seeds=0"], name="long"))
    ]
    short = next(entry.cell for entry in plan(write_suite()))
    engine = LocalEngine(store, Setup("cpu", workers=1, grace=600.0))  # a machine may stand still for minutes
    engine.submit(long)
    engine.submit(short)
    events, limit = [], time.monotonic() + 600
    while time.monotonic() < limit and not any(event.run_id == short.run_id for event in events):
        events += engine.poll(0.2)
        if any(event.fraction > 0 for event in events):
            engine.cancel(long.run_id)
    engine.close()
    assert [event.kind for event in events if event.run_id == long.run_id][-1] == "interrupted"
    assert store.checkpoint(long.run_id).exists()
    assert store.state(long.run_id) == "interrupted"
    fractions = []
    with at_marks(fractions.append), pytest.raises(Interrupted):
        run(long, store, device="cpu", stop=lambda: bool(fractions))
    assert fractions[0] > 1 / 40, "it started over"


def test_workers_get_a_gpu_each_and_share_them_if_there_are_more(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("dpopt.runs.engines.local.resolve_device", lambda name: torch.device("cuda"))
    assert places("auto", None) == ["cuda:0", "cuda:1", "cuda:2"]
    assert places("cuda", 5) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    monkeypatch.setattr("dpopt.runs.engines.local.resolve_device", torch.device)
    assert places("cuda:1", None) == ["cuda:1"]
    assert places("cuda:1", 2) == ["cuda:1", "cuda:1"]
    assert places("cpu", None) == ["cpu"] * len(os.sched_getaffinity(0))
    assert places("cpu", 3) == ["cpu"] * 3
