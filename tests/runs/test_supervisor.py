"""Workers in processes of their own: started, replaced, timed and stopped by their supervisor."""

import dataclasses
import os
import signal
import time

import pytest
import torch

from dpopt.runs import run_suite as running
from dpopt.runs import stopping, supervisor, worker
from dpopt.runs.run_suite import places, run_suite
from dpopt.runs.supervisor import Supervisor
from dpopt.store import Store
from dpopt.suites.plan import cheapest_first, plan

STABLE = ("test_accuracy", "test_loss", "validation_accuracy", "epsilon", "noise", "draws")


@pytest.fixture
def suite(write_suite):
    """Two cells."""
    return write_suite(overrides=["optimizers=[adadp]", "device=cpu", "grace=600"])


def supervised(suite, store, acts=None, stop=stopping.is_asked, **keys):
    """Run a suite's cells by one worker; `acts` is called with each news and with the supervisor."""
    news, suite = [], dataclasses.replace(suite, **keys)

    def tell(each):
        news.append(each)
        if acts:
            acts(each, boss)

    boss = Supervisor(suite, store, cheapest_first(plan(suite)), [("cpu",)], tell)
    boss.run(stop)
    return news


def test_workers_and_inline_give_the_same_numbers(write_suite, store, tmp_path):
    suite = write_suite(overrides=["optimizers=[hyfreedp]", "device=cpu", "workers=2", "physical_batch=77"])
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    outcome = run_suite(suite, one.root, progress=False)
    assert (outcome.ran, outcome.skipped, outcome.failed, outcome.damaged) == (2, 0, {}, [])
    run_suite(suite, other.root, engine="inline", progress=False)
    for entry in plan(suite):
        run_id = entry.cell.run_id
        assert [one.record(run_id)[key] for key in STABLE] == [other.record(run_id)[key] for key in STABLE]
        assert one.curve(run_id) == other.curve(run_id)
    again = run_suite(suite, one.root, progress=False)
    assert (again.ran, again.skipped) == (0, 2)


def test_a_worker_that_is_killed_is_replaced_and_its_cell_goes_on(suite, store):
    killed = []

    def kill(news, boss):
        if news.kind == "begin" and not killed:
            killed.append(news.run_id)
            os.kill(boss.slots[0].processes[0].pid, signal.SIGKILL)

    news = supervised(suite, store, kill, retries=1)
    begun = [each.run_id for each in news if each.kind == "begin"]
    assert [each.kind for each in news][-1] == "bye"
    assert [each.kind for each in news].count("ready") == 2
    assert begun.count(killed[0]) == 2 or store.state(killed[0]) == "done", "it may have ended before the kill"
    assert {store.state(entry.cell.run_id) for entry in plan(suite)} == {"done"}
    assert not list(store.root.rglob("tries.json"))


def test_a_cell_that_fails_takes_with_it_what_it_left_in_its_process(suite, store, monkeypatch):
    left, trained = [], worker.train

    def train(cell, *where, **how):
        assert not left, "another cell runs in the process of the one that failed"
        if cell.run_id == cells[0].run_id:
            left.append(bytes(10))
            raise MemoryError
        trained(cell, *where, **how)

    cells = cheapest_first(plan(suite))
    monkeypatch.setattr(worker, "train", train)
    supervised(suite, store)
    assert [store.state(cell.run_id) for cell in cells] == ["failed", "done"]


def test_a_worker_that_stands_still_is_timed_out(suite, store, monkeypatch):
    """Deaf to all but SIGKILL, within a cell; another worker goes on with the others."""
    monkeypatch.setattr(worker, "train", lambda *_, **how: os.kill(os.getpid(), signal.SIGSTOP))
    news = supervised(suite, store, timeout=0.1, grace=0.1)
    ready = [each.kind for each in news].count("ready")
    assert ready == 5, "for each cell one that is killed and one that notes it, and one that finds nothing left"
    expected = {"kind": "timeout", "reason": "it took longer than 0.1 seconds", "traceback": ""}
    assert [store.error(entry.cell.run_id) for entry in plan(suite)] == [expected] * 2


def test_a_stop_has_cells_write_checkpoints_and_costs_no_attempt(suite, store, at_marks):
    def wait(draws):
        while not stopping.is_asked():
            time.sleep(0.01)

    with at_marks(wait):
        news = supervised(
            suite, store, stop=lambda: any(file.stat().st_size for file in store.root.rglob("curve.jsonl"))
        )
    (run_id,) = store.run_ids()
    assert [each.kind for each in news if each.run_id] == ["begin", "interrupted"]
    assert store.folder(run_id, "checkpoint.pt").exists()
    assert (store.tries(run_id).number, store.state(run_id)) == (0, "interrupted")


def test_an_end_at_once_costs_no_attempt(suite, store, monkeypatch):
    def full(news, boss):
        while news.kind == "begin" and not store.tries(news.run_id).number:
            time.sleep(0.01)
        if news.kind == "begin":
            raise OSError("the disk is full")

    monkeypatch.setattr(worker, "train", lambda *_, **how: time.sleep(600))
    with pytest.raises(OSError, match="the disk is full"):
        supervised(suite, store, full)
    assert not list(store.root.rglob("tries.json"))


def test_workers_that_cannot_start_are_an_error_of_the_run(suite, store, monkeypatch):
    """Neither by a fork nor anew."""
    monkeypatch.setattr(supervisor, "_serve", die)
    monkeypatch.setattr(supervisor, "STARTS", 2)
    with pytest.raises(OSError, match=r"a worker could not be started: its process died \(exit code 3\)"):
        supervised(suite, store)
    assert store.run_ids() == []


def test_workers_that_end_before_any_cell_does_are_an_error_of_the_run(suite, store, monkeypatch):
    """They have started, and each takes a cell; no attempt is noted, so nothing else would ever end that."""
    monkeypatch.setattr(supervisor, "STARTS", 2)
    monkeypatch.setattr(worker, "attempt", die)
    with pytest.raises(OSError, match=r"workers end before any cell does: the last died \(exit code 3\)"):
        supervised(suite, store)


def test_a_cell_that_cannot_be_written_is_a_failure_of_the_outcome(suite, store):
    bad, other = (cell.run_id for cell in cheapest_first(plan(suite)))
    store.folder(bad).parent.mkdir(parents=True)
    store.folder(bad).touch()
    outcome = run_suite(dataclasses.replace(suite, workers=2), store.root, progress=False)
    assert (outcome.ran, outcome.failed.keys(), outcome.is_stopped) == (1, {bad}, False)
    assert store.state(other) == "done"


def test_without_forks_there_are_no_workers(suite, store, monkeypatch):
    monkeypatch.delattr(os, "fork")
    with pytest.raises(ValueError, match="engine: 'local' cannot be used; this system cannot fork: use inline"):
        run_suite(suite, store.root, progress=False)
    assert not list(store.root.rglob("*.json"))


def die(*_):
    os._exit(3)


def test_a_worker_ends_with_its_supervisor(suite, store, monkeypatch):
    monkeypatch.setattr(worker, "train", lambda *_, **how: time.sleep(1e6))
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:

        def tell(news, boss):
            if news.kind == "begin":
                os.write(writer, str(boss.slots[0].processes[0].pid).encode())
                os.kill(os.getpid(), signal.SIGKILL)

        supervised(suite, store, tell)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    left, until = int(os.read(reader, 20)), time.monotonic() + 300
    while os.path.exists(f"/proc/{left}") and time.monotonic() < until:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{left}")
    assert store.tries(store.run_ids()[0]).number == 0, "no cell's fault"


def test_workers_get_a_gpu_each_and_share_them_if_there_are_more(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr(running, "resolve_device", torch.device)
    assert places("auto", None) == ["cuda:0", "cuda:1", "cuda:2"]
    assert places("cuda", 5) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert places("cuda:1", None) == ["cuda:1"]
    assert places("cuda:1", 2) == ["cuda:1", "cuda:1"]
    with pytest.raises(ValueError, match=r"device: 'cuda:3' .*3 GPUs"):
        places("cuda:3", None)
    assert places("cpu", None) == ["cpu"] * len(os.sched_getaffinity(0))
    assert places("cpu", 3) == ["cpu"] * 3
    assert not torch.cuda.is_initialized()
