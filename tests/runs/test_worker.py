"""Workers on one results folder: which cells they take, how attempts are counted, and when they look and end."""

import dataclasses
import os
import shutil
import signal
import sys

import pytest
from stored import in_child

from dpopt import bars
from dpopt.errors import Held
from dpopt.privacy.distributed import Left
from dpopt.runs import stopping, worker
from dpopt.runs.train import Interrupted
from dpopt.runs.worker import News, Queue, attempt, work
from dpopt.store import Store, leases
from dpopt.suites.plan import cheapest_first, manifest, plan


@pytest.fixture
def suite(write_suite):
    return write_suite(overrides=["device=cpu"])


@pytest.fixture
def cells(suite):
    return cheapest_first(plan(suite))


@pytest.fixture
def ends(monkeypatch):
    """Cells end as a script says, without being trained: run id -> errors of its attempts, then results."""
    script = {}

    def train(cell, store, lease, *, stop, **how):
        store.begin(cell.run_id, cell.content())
        lease.check()
        errors = script.get(cell.run_id, [])
        if errors:
            error = errors.pop(0)
            raise error() if callable(error) else error
        finish(store, cell)

    monkeypatch.setattr(worker, "train", train)
    return script


def finish(store, cell):
    content = {"schema": 1, "run_id": cell.run_id, "cell": cell.content(), "status": "done", "epsilon": 1.0}
    content |= {"epsilon_target": 2.0, "delta": 1e-5, "provenance": {}}
    store.finish(cell.run_id, content, '{"draws": []}')


def told(suite, store, cells, **keys):
    """The news of one worker."""
    news = list[News]()
    work(dataclasses.replace(suite, **keys), store, cells, news.append)
    return news


def kinds(news):
    return [(each.kind, each.run_id) for each in news if each.kind != "waiting"]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_takes_the_cheapest_first_and_ends_with_a_bye(suite, store, cells, ends):
    news = told(suite, store, cells)
    ids = [cell.run_id for cell in cells]
    assert kinds(news) == [pair for run_id in ids for pair in (("begin", run_id), ("done", run_id))] + [("bye", "")]
    assert [each.left for each in news if each.kind == "done"] == list(range(len(cells)))[::-1]
    assert kinds(told(suite, store, cells)) == [("bye", "")]


def test_what_others_have_is_left_alone_and_taken_when_it_is_free(suite, store, cells, ends, monkeypatch):
    first, *others = cells
    lease, pauses = store.lease(first.run_id).take(), []

    def sleep(seconds):
        pauses.append(seconds)
        lease.release()

    monkeypatch.setattr(worker.time, "sleep", sleep)
    monkeypatch.setattr(worker, "_POLL", 0.01)
    begun = [run_id for kind, run_id in kinds(told(suite, store, cells)) if kind == "begin"]
    assert begun == [*(cell.run_id for cell in others), first.run_id]
    assert pauses, "it waited"


def test_a_cell_that_ends_elsewhere_is_not_run_again(suite, store, cells, ends, monkeypatch):
    first, second, third, *_ = cells
    lease = store.lease(first.run_id).take()
    store.fail(second.run_id, "out of luck elsewhere")
    store.begin(third.run_id, third.content())
    store.folder(third.run_id, "run.json").write_text("{")

    def ended(seconds):
        store.fail(first.run_id, "elsewhere")
        lease.release()

    monkeypatch.setattr(worker.time, "sleep", ended)
    monkeypatch.setattr(worker, "_POLL", 0.01)
    begun = [run_id for kind, run_id in kinds(told(suite, store, cells)) if kind == "begin"]
    assert not {first.run_id, second.run_id, third.run_id} & {*begun}
    assert [store.state(cell.run_id) for cell in cells[:3]] == ["failed", "failed", "damaged"]


@pytest.mark.parametrize("deaths", [2, 3])
def test_a_death_is_counted_once_and_the_last_attempt_is_the_last(suite, store, cells, ends, deaths):
    """However many workers there are: the count lies in the folder, and is written before an attempt begins."""
    ends[cells[0].run_id] = [die] * deaths
    for _ in range(deaths):
        assert in_child(lambda: told(suite, store, cells[:1])) == -signal.SIGKILL
        ends[cells[0].run_id].pop()
    assert store.tries(cells[0].run_id).number == deaths
    news = kinds(told(suite, store, cells[:1]))
    if deaths == 2:
        assert news[1][0] == "done"
        assert not store.folder(cells[0].run_id, "tries.json").exists()
    else:
        assert news[1][0] == "failed"
        assert store.error(cells[0].run_id) == {"kind": "died", "reason": "its worker died", "traceback": ""}
        store.forget_failure(cells[0].run_id)
        assert kinds(told(suite, store, cells[:1]))[1][0] == "done", "a retry counts anew"


def test_an_error_is_not_tried_again_unless_that_is_asked_for(suite, store, cells, ends):
    one, other = cells[0].run_id, cells[1].run_id
    ends |= {one: [ValueError("once")], other: [ValueError("once"), ValueError("twice")]}
    told(suite, store, cells[:1])
    assert store.error(one)["reason"] == "ValueError: once"
    assert "Traceback" in store.error(one)["traceback"]
    news = kinds(told(suite, store, cells[1:2], retries=1, retry_on=("failed",)))
    assert [kind for kind, _ in news] == ["begin", "again", "begin", "failed", "bye"]
    assert store.error(other)["reason"] == "ValueError: twice"


def test_the_death_of_a_process_beside_it_is_no_error_of_the_cell(suite, store, cells, ends):
    """Whoever hears of it first: the process that waited for the dead one, or the supervisor."""
    run_id = cells[0].run_id
    ends[run_id] = [ValueError("once"), Left("it has ended"), Interrupted]
    often = dataclasses.replace(suite, retries=2, retry_on=("failed", "died"))
    tries = []
    for kind in ("again", "again", "interrupted"):
        with store.lease(run_id) as lease:
            assert attempt(cells[0], store, lease, often)[0] == kind
        tries.append(store.tries(run_id)[:2])
    assert tries == [(1, "failed"), (2, "died"), (2, "died")]
    ends[run_id] = [KeyboardInterrupt]
    with store.lease(run_id) as lease, pytest.raises(KeyboardInterrupt):
        attempt(cells[0], store, lease, often)
    assert store.tries(run_id)[:2] == (2, "died")


def test_an_attempt_that_is_taken_back_leaves_those_before_it(suite, store, cells):
    """Of a kind that the suite tries again: else the cell had failed."""
    run_id, often = cells[0].run_id, dataclasses.replace(suite, retries=2, retry_on=("timeout",))
    for number in (1, 2):
        store.note_tries(run_id, number)
    worker.uncount(store, run_id, often)
    assert store.tries(run_id)[:2] == (1, "timeout")
    worker.uncount(store, run_id, often)
    assert store.tries(run_id).number == 0


def test_a_cell_that_takes_too_long_fails_and_one_that_is_stopped_does_not(suite, store, cells, ends):
    run_id = cells[0].run_id
    ends[run_id] = [Interrupted]
    told(suite, store, cells[:1], timeout=-1.0)
    assert store.error(run_id) == {"kind": "timeout", "reason": "it took longer than -1 seconds", "traceback": ""}
    store.forget_failure(run_id)

    def asked():
        stopping.ask()
        return Interrupted()

    ends[run_id] = [asked]
    with stopping.signals():
        assert kinds(told(suite, store, cells[:1])) == [("begin", run_id), ("interrupted", run_id)]
    assert (store.tries(run_id).number, store.state(run_id)) == (0, "interrupted")


def test_a_full_disk_is_no_cells_fault_and_ends_the_worker(suite, store, cells, ends):
    ends[cells[0].run_id] = [OSError(28, "No space left on device")]
    assert kinds(told(suite, store, cells)) == [("begin", cells[0].run_id), ("blocked", cells[0].run_id)]
    assert (store.tries(cells[0].run_id).number, store.state(cells[0].run_id)) == (0, "interrupted")


def test_a_cell_whose_folder_cannot_be_used_fails_and_the_others_are_run(suite, store, cells, ends, monkeypatch):
    """Its lease is a folder, so the failure is noted; or there can be no folder at all, so that it is told."""
    leased, folderless = (cell.run_id for cell in cells[:2])
    monkeypatch.setattr(leases, "_PATIENCE", 0.02)
    monkeypatch.setattr(leases, "_BEAT", 0.01)
    monkeypatch.setattr(worker, "_POLL", 0.05)
    store.folder(leased, "lease", "inside").mkdir(parents=True)
    store.folder(folderless).parent.mkdir(parents=True, exist_ok=True)
    store.folder(folderless).touch()
    news = kinds(told(suite, store, cells))
    assert {run_id for kind, run_id in news if kind == "failed"} == {leased, folderless}
    assert {run_id for kind, run_id in news if kind == "done"} == {cell.run_id for cell in cells[2:]}
    assert (store.state(leased), store.state(folderless), news[-1][0]) == ("failed", "pending", "bye")
    shutil.rmtree(store.root / "runs")
    (store.root / "runs").touch()
    assert kinds(told(suite, store, cells))[-1] == ("blocked", cells[0].run_id)


def test_who_was_overtaken_notes_nothing(suite, store, cells, ends):
    ends[cells[0].run_id] = [Held("another process has taken over")]
    with store.lease(cells[0].run_id) as lease:
        assert attempt(cells[0], store, lease, suite)[0] == "held"
    assert store.state(cells[0].run_id) == "interrupted"


class Far(Store):
    """A store whose looks cost nothing, and where eight workers take turns."""

    settled: set[str] = set()

    def is_settled(self, run_id):
        return run_id in Far.settled

    def lease(self, run_id):
        return FarLease(run_id)


class FarLease:
    taken: set[str] = set()

    def __init__(self, run_id):
        self.run_id = run_id

    def take(self):
        if self.run_id in FarLease.taken:
            raise Held("it is run")
        FarLease.taken.add(self.run_id)


class NamedCell:
    def __init__(self, run_id):
        self.run_id = run_id


def test_ten_thousand_cells_and_eight_workers_cost_a_look_for_each_cell_and_few_more(store, monkeypatch):
    """Each worker sees each cell once, and again only while another one has it, once in a while."""
    now = [0.0]
    monkeypatch.setattr(worker.time, "monotonic", lambda: now[0])
    cells = [NamedCell(f"{number:016x}") for number in range(10_000)]
    Far.settled, FarLease.taken = set(), set()
    queues, running = [Queue(Far(store.root), cells) for _ in range(8)], [None] * 8
    while any(queue.left for queue in queues):
        for at, queue in enumerate(queues):  # a cell takes a second
            if running[at]:
                Far.settled.add(running[at].run_id)
                FarLease.taken.discard(running[at].run_id)
            taken = queue.take()
            running[at] = taken[0] if taken else None
        now[0] += 1.0
    assert len(Far.settled) == 10_000
    assert all(10_000 <= queue.looks <= 2.2 * 10_000 for queue in queues), [queue.looks for queue in queues]


def test_further_cells_are_planned_by_whoever_finds_nothing(write_suite, store):
    suite = write_suite(overrides=["optimizers=[dp_sgd]", "seeds=0", "device=cpu", "widen=2"])
    planned = plan(suite)
    store.extend_suite(suite.name, manifest(suite, planned))
    news, noted = [], []

    def tell(message):
        news.append(message)
        noted.append({entry["run_id"] for entry in store.manifest(suite.name)["cells"]})

    worker.work(suite, store, cheapest_first(planned), tell)
    done = [run_id for kind, run_id in kinds(news) if kind == "done"]
    again = plan(suite, store)
    assert len(done) == len(again) > len(planned), "points beyond the grid were run too"
    assert all(message.run_id in of for message, of in zip(news, noted, strict=True) if message.kind == "begin")
    assert news[-1].kind == "bye"


def test_a_worker_that_has_nothing_left_plans_at_once(write_suite, store, ends, monkeypatch):
    """However long a plan takes, after which others wait for a while."""
    suite = write_suite(overrides=["optimizers=[dp_sgd]", "device=cpu", "widen=1"])
    first, *_ = planned = plan(suite)
    assert len(planned) >= 4
    monkeypatch.setattr(worker, "_IDLE", 1e9)
    monkeypatch.setattr(worker, "plan", lambda suite, results: planned[: len(results.run_ids()) + 1])
    news = told(suite, store, [first.cell])
    assert [each.kind for each in news] == ["begin", "done"] * len(planned) + ["bye"]


def test_a_stage_waits_for_what_another_worker_runs(write_suite, store, ends, monkeypatch):
    """The last cell of a grid is run elsewhere: what follows from it is planned when it is done."""
    suite = write_suite(overrides=["optimizers=[dp_sgd]", "seeds=0", "device=cpu", "widen=1"])
    first, *_ = cells = cheapest_first(plan(suite))
    lease, plans = store.lease(first.run_id).take(), []

    def planned(suite, results):
        plans.append(results.state(first.run_id))
        return [entry for entry in plan(suite) if entry.cell.run_id == first.run_id]

    def sleep(seconds):
        if not store.is_settled(first.run_id):
            finish(store, first)
            lease.release()

    monkeypatch.setattr(worker, "plan", planned)
    monkeypatch.setattr(worker.time, "sleep", sleep)
    monkeypatch.setattr(worker, "_POLL", 0.0)
    assert told(suite, store, cells)[-1].kind == "bye"
    assert plans[-1] == "done"


def test_a_note_before_the_first_draw_is_told_with_its_cell(suite, store, cells, monkeypatch):
    def train(cell, store, lease, **how):
        bars.listener.get()("computing features 12,000 of 60,000")
        store.begin(cell.run_id, cell.content())
        finish(store, cell)

    monkeypatch.setattr(worker, "train", train)
    begin, note, done, *_ = told(suite, store, cells[:1])
    assert [news.kind for news in (begin, note, done)] == ["begin", "note", "done"]
    assert note == News("note", cells[0].run_id, "synthetic_logreg: computing features 12,000 of 60,000", left=1)
    monkeypatch.setattr(worker, "attempt", lambda *arguments: sys.exit())
    with pytest.raises(SystemExit):
        told(suite, store, cells)
    assert bars.listener.get() is None
