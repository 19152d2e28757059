"""What `Engine` does with attempts that follow a script, in this process and without a clock to wait for."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dpopt.runs.engines import Engine, Event, Setup

GRACE = 0.2


class Imagined(Engine):
    """Workers are numbers, from 0 on; an attempt ends when the test says so."""

    def __init__(self, store, room=2, stillborn=()):
        super().__init__(store, Setup(grace=GRACE), room)
        self.made, self.killed, self.stopped, self.stillborn = [], [], [], set(stillborn)
        self.attempts, self.by = {}, {}

    def worker(self, place):
        self.made.append(place)
        return f"worker {len(self.made)}"

    def start(self, worker, cell):
        if worker in self.stillborn:
            raise BrokenPipeError
        self.attempts[cell.run_id], self.by[cell.run_id] = Future(), worker
        return self.attempts[cell.run_id]

    def stop(self, worker, attempt):
        self.stopped.append(worker)

    def kill(self, worker):
        self.killed.append(worker)

    def end(self, run_id, kind="done"):
        self.attempts[run_id].set_result(Event(run_id, kind))


def take(engine, *names):
    for name in names:
        engine.submit(SimpleNamespace(run_id=name))


def test_cells_run_in_order_on_workers_that_stay(store):
    engine = Imagined(store)
    take(engine, "a", "b", "c")
    assert engine.poll(0) == []
    assert list(engine.attempts) == ["a", "b"]
    engine.end("b")
    assert engine.poll(0) == [Event("b", "done")]
    engine.poll(0)
    assert engine.by == {"a": "worker 1", "b": "worker 2", "c": "worker 2"}


@pytest.mark.parametrize(("kind", "stays"), [("held", True), ("failed", True), ("interrupted", False), ("died", False)])
def test_which_workers_go_on(store, kind, stays):
    engine = Imagined(store, room=1)
    take(engine, "a", "b")
    engine.poll(0)
    engine.end("a", kind)
    assert engine.poll(0) == [Event("a", kind)]
    engine.poll(0)
    assert engine.killed == ([] if stays else ["worker 1"])
    assert engine.by["b"] == ("worker 1" if stays else "worker 2")
    assert engine.made == ([0] if stays else [0, 0]), "the next worker has the same place"


def test_an_exception_is_the_death_of_the_worker(store):
    engine = Imagined(store)
    take(engine, "a")
    engine.poll(0)
    engine.attempts["a"].set_exception(RuntimeError("lost\n  the node"))
    assert engine.poll(0) == [Event("a", "died", reason="lost the node")]
    assert engine.killed == ["worker 1"]


def test_who_does_not_stop_is_killed_after_the_grace(store):
    engine = Imagined(store, room=1)
    take(engine, "a", "b")
    engine.poll(0)
    engine.cancel("a")
    engine.cancel("a")
    assert engine.stopped == ["worker 1"], "it is asked once"
    assert engine.poll(0) == []
    assert engine.killed == []
    assert engine.poll(2 * GRACE) == [Event("a", "died", reason="it did not stop within 0.2 seconds")]
    assert engine.killed == ["worker 1"]
    engine.poll(0)
    assert engine.by["b"] == "worker 2"


def test_who_was_asked_to_stop_gets_no_other_cell(store):
    """Even if the cell was done before it heard of it: the worker may hear of it in the next one."""
    engine = Imagined(store, room=1)
    take(engine, "a", "b")
    engine.poll(0)
    engine.cancel("a")
    engine.end("a")
    assert engine.poll(0) == [Event("a", "done")]
    engine.poll(0)
    assert (engine.killed, engine.by["b"]) == (["worker 1"], "worker 2")


def test_a_cell_that_waits_is_cancelled_without_a_word(store):
    engine = Imagined(store, room=1)
    take(engine, "a", "b", "c")
    engine.poll(0)
    engine.cancel("b")
    engine.end("a")
    engine.poll(0)
    engine.poll(0)
    assert list(engine.attempts) == ["a", "c"]
    assert engine.stopped == []


def test_a_worker_that_died_while_it_was_idle_costs_no_cell(store):
    engine = Imagined(store, room=1, stillborn=["worker 1"])
    take(engine, "a")
    engine.poll(0)
    engine.poll(0)
    assert engine.by == {"a": "worker 2"}
    assert engine.killed == ["worker 1"]


def test_closing_gives_all_the_same_grace_and_kills_every_worker(store):
    engine = Imagined(store, room=3)
    take(engine, "a", "b", "c", "d")
    engine.poll(0)
    engine.end("a")
    engine._queue.clear()
    engine.poll(0)
    engine.close()
    assert sorted(engine.stopped) == ["worker 2", "worker 3"], "one is idle"
    assert sorted(engine.killed) == ["worker 1", "worker 2", "worker 3"]
    assert "d" not in engine.attempts


def test_a_stop_that_is_interrupted_kills_all_the_same(store):
    class Impatient(Imagined):
        def wait(self, attempts, timeout):
            raise KeyboardInterrupt

    engine = Impatient(store)
    take(engine, "a", "b")
    engine._dispatch()
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert sorted(engine.killed) == ["worker 1", "worker 2"]


def test_how_far_a_cell_is_its_lease_says(store):
    engine = Imagined(store)
    take(engine, "a", "b")
    with store.lease("a") as lease:
        lease.note(0.25)
        lease._beat()
        assert engine.poll(0) == [Event("a", "progress", 0.25)]
    assert engine.poll(0) == []
