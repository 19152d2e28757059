"""Two processes that train one cell together, against the same cell in one process."""

import dataclasses
import os
import signal
import time

import pytest

from dpopt.errors import ConfigError
from dpopt.runs import train as cells
from dpopt.runs.engines import Event, Setup
from dpopt.runs.engines.span import SpanEngine
from dpopt.runs.execute import execute
from dpopt.runs.run_suite import run_suite
from dpopt.store import Store
from dpopt.suites.plan import plan

TWO = Setup("cpu", workers=2, grace=600.0)


def until(engine, is_enough, seconds=1800):
    """The last event, when `is_enough` says so of it."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        for event in engine.poll(0.2):
            if is_enough(event):
                return event
            assert event.kind == "progress", event
    pytest.fail("nothing happened")


def test_two_processes_leave_the_record_of_one(write_suite, store, tmp_path):
    planned = [entry.cell for entry in plan(write_suite(overrides=["optimizers=[hyfreedp,adadp]", "seeds=0"]))]
    outcome = execute(planned, store, lambda: SpanEngine(store, TWO))
    assert (outcome.ran, outcome.failed) == (2, {})
    alone = Store(tmp_path / "alone")
    for cell in planned:
        expected = cells.run(cell, alone, device="cpu")
        record = store.record(cell.run_id)
        assert record["processes"] == 2
        assert "processes" not in expected
        for key in ("epsilon", "noise", "draws", "status", "cell", "examples"):
            assert record[key] == expected[key]
        assert store.ledger(cell.run_id) == alone.ledger(cell.run_id)
        for mine, theirs in zip(store.curve(cell.run_id), alone.curve(cell.run_id), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-3, abs=2e-3)  # an accuracy may change by a record or two


def test_what_goes_wrong_in_one_process_ends_the_cell_and_no_other(write_suite, store):
    (long,) = [
        e.cell for e in plan(write_suite(overrides=["epochs=300", "optimizers=[adadp]", "seeds=0"], name="long"))
    ]
    (short,) = [e.cell for e in plan(write_suite(overrides=["optimizers=[hyfreedp]", "seeds=0"], name="short"))]
    outdated = dataclasses.replace(short, kernel=1)
    engine = SpanEngine(store, TWO)
    try:
        engine.submit(long)
        stopped_at = until(engine, lambda event: event.fraction > 0).fraction
        engine.cancel(long.run_id)
        assert until(engine, lambda event: event.kind != "progress") == Event(long.run_id, "interrupted")
        assert store.checkpoint(long.run_id).exists()

        engine.submit(long)
        assert until(engine, lambda event: event.fraction > 0).fraction >= stopped_at, "it started over"
        os.kill(engine.places[0].worker.members[1].process.pid, signal.SIGKILL)
        died = until(engine, lambda event: event.kind != "progress")
        assert (died.run_id, died.kind) == (long.run_id, "died")
        draws = [entry["draw"] for entry in store.curve(long.run_id)]
        assert draws == sorted(set(draws)), "two processes wrote"

        engine.submit(outdated)
        engine.submit(short)
        assert until(engine, lambda event: event.kind != "progress").kind == "failed"
        assert "revision" in store.error(outdated.run_id)["reason"]
        assert until(engine, lambda event: event.kind != "progress") == Event(short.run_id, "done")
    finally:
        engine.close()
    assert store.state(short.run_id) == "done"


def test_diagnostics_are_refused_before_anything_starts(write_suite, store):
    cell = plan(write_suite(overrides=["diagnostics=true"]))[0].cell
    with pytest.raises(ConfigError, match="its part of a draw"):
        SpanEngine(store, TWO).check(cell)


def test_records_that_share_random_numbers_are_refused_before_anything_starts(write_suite, store):
    suite = write_suite(overrides=["workloads=[gmm]", "optimizers=[adadp]", "seeds=0", "device=cpu", "workers=2"])
    with pytest.raises(ConfigError, match=r"engine: 'span' .*records of gmm share random numbers: say workers=1"):
        run_suite(suite, store.root, engine="span", progress=False)
    assert not store.suites()
    SpanEngine(store, dataclasses.replace(TWO, workers=1)).check(plan(suite)[0].cell)
