"""What `execute` makes of what an engine reports; the engines here follow a script and run nothing."""

import pytest

from dpopt.runs import execute as executing
from dpopt.runs.engines import Event
from dpopt.runs.execute import Policy, execute
from dpopt.store import leases


class Scripted:
    """Reports for each cell, at each attempt, what its script says; "hangs" until it is cancelled.

    Args:
        store: where a cell that is "done" gets a record.
        script: run id -> kinds of events, one for each attempt; "done" where it says nothing.
    """

    def __init__(self, store, script):
        self.store, self.script = store, {run_id: list(kinds) for run_id, kinds in script.items()}
        self.attempts, self.waiting, self.hanging, self.is_closed = [], [], [], False

    def submit(self, cell):
        self.attempts.append(cell.run_id)
        self.waiting.append(cell.run_id)

    def poll(self, timeout):
        events = []
        for run_id in self.waiting:
            kinds = self.script.get(run_id)
            kind = kinds.pop(0) if kinds else "done"
            if kind == "hangs":
                self.hanging.append(run_id)
                events.append(Event(run_id, "progress", 0.0))
            else:
                if kind == "failed":
                    self.store.fail(run_id, "an error", "where")
                events.append(Event(run_id, kind, reason=f"it {kind}"))
        self.waiting = []
        return events

    def cancel(self, run_id):
        self.hanging.remove(run_id)
        self.waiting.append(run_id)
        self.script[run_id].insert(0, "interrupted")

    def close(self):
        self.is_closed = True


@pytest.fixture
def cells(write_suite):
    from dpopt.suites.plan import plan

    return [entry.cell for entry in plan(write_suite(overrides=["optimizers=[dp_sgd]"]))]


@pytest.fixture
def play(store, cells):
    """Run the cells on an engine that follows a script for the first one; gives the engine and the outcome."""

    def run(*kinds, **given):
        engine = Scripted(store, {cells[0].run_id: kinds})
        outcome = execute(cells, store, lambda: engine, **given)
        assert engine.is_closed
        assert sorted(set(engine.attempts)) == sorted(cell.run_id for cell in cells)
        return engine, outcome

    return run


def test_a_cell_whose_worker_dies_is_tried_again(play, store, cells):
    engine, outcome = play("died", "died")
    assert engine.attempts.count(cells[0].run_id) == 3
    assert (outcome.ran, outcome.failed) == (len(cells), {})
    assert store.state(cells[0].run_id) == "pending"


def test_not_for_ever(play, store, cells):
    engine, outcome = play("died", "died", "died")
    assert engine.attempts.count(cells[0].run_id) == 3
    assert outcome.failed == {cells[0].run_id: "it died"}
    assert outcome.ran == len(cells) - 1
    assert store.error(cells[0].run_id) == {"kind": "died", "reason": "it died", "traceback": ""}


def test_an_error_comes_again_and_is_not_tried_again(play, store, cells):
    engine, outcome = play("failed")
    assert engine.attempts.count(cells[0].run_id) == 1
    assert outcome.failed == {cells[0].run_id: "it failed"}
    assert store.error(cells[0].run_id) == {"kind": "failed", "reason": "an error", "traceback": "where"}


def test_an_error_is_tried_again_where_that_is_asked_for(play, store, cells):
    engine, outcome = play("failed", policy=Policy(retries=1, retry_on=("failed",)))
    assert engine.attempts.count(cells[0].run_id) == 2
    assert (outcome.ran, outcome.failed) == (len(cells), {})
    assert store.state(cells[0].run_id) == "pending", "the failure is forgotten"


def test_a_cell_that_takes_too_long_is_stopped(play, store, cells, monkeypatch):
    monkeypatch.setattr(executing, "POLL", 0.01)
    engine, outcome = play("hangs", policy=Policy(timeout=0.05))
    assert engine.hanging == []
    assert outcome.failed == {cells[0].run_id: "it took longer than 0.05 seconds"}
    assert store.error(cells[0].run_id)["kind"] == "timeout"
    store.forget_failure(cells[0].run_id)
    engine, outcome = play("hangs", policy=Policy(timeout=0.05, retry_on=("timeout",)))
    assert outcome.failed == {}


def test_a_cell_that_someone_else_stopped_goes_on(play, cells):
    engine, outcome = play("interrupted", "interrupted", "interrupted", "interrupted")
    assert engine.attempts.count(cells[0].run_id) == 5
    assert outcome.ran == len(cells)


def test_a_cell_of_another_process_is_waited_for(play, store, cells):
    """It is picked up when it is done, and run where the other process gives it back."""
    engine, outcome = play("held")
    assert engine.attempts.count(cells[0].run_id) == 2, "nobody has it any more"
    assert (outcome.ran, outcome.skipped) == (len(cells), 0)
    from dpopt.runs.train import run

    class Elsewhere(leases.Watch):
        looks = 0

        def try_free(self):
            Elsewhere.looks += 1
            if Elsewhere.looks == 3:
                run(cells[0], store, device="cpu")
            return False

    class Shared(type(store)):
        def watch(self, run_id):
            return Elsewhere(self.folder(run_id) / "lease.json")

    shared = Shared(store.root)
    engine = Scripted(shared, {cells[0].run_id: ["held"]})
    outcome = execute(cells, shared, lambda: engine)
    assert engine.attempts.count(cells[0].run_id) == 1
    assert (outcome.ran, outcome.skipped, outcome.failed) == (len(cells) - 1, 1, {})


def test_where_nothing_can_be_written_the_run_ends_with_one_message(store, cells):
    engine = Scripted(store, {cells[0].run_id: ["blocked"]})
    with pytest.raises(OSError, match="results cannot be written: it blocked"):
        execute(cells, store, lambda: engine)
    assert engine.is_closed
    assert store.state(cells[0].run_id) == "pending", "the cell is not to blame"


def test_a_run_that_is_asked_to_stop_leaves_the_rest(store, cells):
    engine, asked = Scripted(store, {cells[0].run_id: ["hangs"]}), iter([False, False, True])
    outcome = execute(cells, store, lambda: engine, stop=lambda: next(asked))
    assert engine.is_closed
    assert outcome.is_stopped
    assert (outcome.ran, outcome.failed) == (len(cells) - 1, {})


def test_a_worker_that_is_killed_while_it_starts_costs_no_attempt(play, store, cells):
    engine, outcome = play("unstarted", "unstarted", "unstarted", policy=Policy(retries=0))
    assert engine.attempts.count(cells[0].run_id) == 4
    assert (outcome.ran, outcome.failed) == (len(cells), {})


def test_where_no_worker_starts_the_run_ends_with_one_message(store, cells):
    engine = Scripted(store, {cells[0].run_id: ["unstarted"] * 9})
    with pytest.raises(OSError, match="a worker could not be started: it unstarted"):
        execute(cells, store, lambda: engine)
    assert engine.is_closed
    assert engine.attempts.count(cells[0].run_id) == executing.STARTS + 1, "others ended after the first"
    assert store.state(cells[0].run_id) == "pending", "the cell is not to blame"
