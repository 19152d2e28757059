"""A worker: it takes the cheapest cell that has no result and no lease, runs it, and takes the next.

Any number of workers, on any number of machines, may do so on one results folder; nothing else schedules. A worker ends
when no cell is new and none is leased.
"""

from __future__ import annotations

import errno
import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from dpopt import bars
from dpopt.cells import Cell
from dpopt.errors import ConfigError, Held
from dpopt.privacy.distributed import Left
from dpopt.runs import stopping
from dpopt.runs.train import Interrupted, train
from dpopt.store.leases import Lease
from dpopt.store.runs import Failure, Store
from dpopt.suites.plan import cheapest_first, has_stages, manifest, plan
from dpopt.suites.schema import Keys

_POLL = 1.0
"""The least seconds between two looks at the cells that other workers have."""
_IDLE = 50
"""A worker looks at those cells, and plans, for at most one part in so many of its time."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class News(NamedTuple):
    """A message of a worker to its supervisor.

    Its kind: "ready", once it has started; "begin" of a cell; a "note" on what it is busy with, before the first draw;
    the cell's end: "done", "held" (another process has taken it over), "failed", "again" (a failure after which it is
    tried again), "interrupted", "blocked" (results cannot be written, whatever the cell); "waiting" for other workers;
    "bye": nothing is left.
    """

    kind: str
    run_id: str = ""  # the cell
    reason: str = ""  # of a failure; the text of a note
    left: int = 0  # cells that have no result yet, as far as this worker has looked


Tell = Callable[[News], None]


class Queue:
    """The cells that had no result and no failure when this worker looked last, cheapest first.

    Each cell is looked at once, and again only while another worker has it: 10,000 cells cost 10,000 looks, not more.
    `looks` counts looks at the store, `settled` the cells that were seen to have ended.
    """

    def __init__(self, store: Store, cells: Iterable[Cell]) -> None:
        self._store, self._fresh, self._noted = store, deque[Cell](), set[str]()
        self._held: dict[str, tuple[Cell, Lease]] = {}
        self._next_look, self.looks, self.settled = 0.0, 0, 0
        self.add(cells)

    def add(self, cells: Iterable[Cell]) -> bool:
        """Add the cells that are new; True if there are any."""
        new = {cell.run_id: cell for cell in cells if cell.run_id not in self._noted}
        self._noted |= new.keys()
        self._fresh.extend(new.values())
        return bool(new)

    def take(self) -> tuple[Cell, Lease] | None:
        """The next cell, under its lease; None if there is none now: all have ended, or other workers have them."""
        begin = time.monotonic()
        if begin >= self._next_look:  # first, as they are cheaper than any that is fresh
            for cell, lease in list(self._held.values()):
                if self._is_taken(cell, lease):
                    return cell, lease
            now = time.monotonic()
            self._next_look = now + max(_POLL, _IDLE * (now - begin))
        while self._fresh:
            cell = self._fresh.popleft()
            lease = self._store.lease(cell.run_id)
            if self._is_taken(cell, lease):
                return cell, lease
        return None

    def put_back(self, cell: Cell, lease: Lease) -> None:
        """A cell that was taken and has no result is to be looked at again."""
        self._held[cell.run_id] = cell, lease

    @property
    def left(self) -> int:
        """Cells that have not ended, as far as was looked."""
        return len(self._fresh) + len(self._held)

    @property
    def wait(self) -> float:
        """Seconds until the cells of other workers are to be looked at again."""
        return max(0.0, self._next_look - time.monotonic())

    def _is_taken(self, cell: Cell, lease: Lease) -> bool:
        """True if the lease is this worker's now, and the cell is to be run."""
        self.looks += 1
        self._held[cell.run_id] = cell, lease
        if not self._store.is_settled(cell.run_id):
            try:
                lease.take()
            except Held:
                return False
            except OSError:  # whoever runs the cell meets it again, and notes it
                pass
            if not self._store.is_settled(cell.run_id):  # it may have ended between the two looks
                del self._held[cell.run_id]
                return True
            lease.release()
        del self._held[cell.run_id]
        self.settled += 1
        return False


def work(
    suite: Keys,
    store: Store,
    cells: Iterable[Cell],
    tell: Tell,
    *,
    stop: Callable[[], bool] = stopping.is_asked,
    share: Callable[[Cell], object] | None = None,
    is_replaced: bool = False,
) -> None:
    """Run `cells`, cheapest first, until none is new and none is leased, or until this process is asked to stop.

    Where nothing can be taken, the suite is planned again: further cells may follow from results. It ends too, without
    a "bye", where results cannot be written.

    Args:
        suite, store, cells: how cells are run, where results go, and the suite's cells.
        tell: called with what happens.
        stop: asked between cells; a cell that runs asks `stopping`.
        share: told each cell before it runs, where other processes train it together with this one. They are out of
            step after anything but a result, so this process ends then.
        is_replaced: another process takes this one's place when it ends, so it ends after a cell that fails.
    """
    queue, planned_at, is_staged, pause = Queue(store, cells), -1, has_stages(suite), 0.0
    while not stop():
        if taken := queue.take():
            cell, lease = taken
            tell(News("begin", cell.run_id, left=queue.left + 1))
            name, note = cell.workload["name"], News("note", cell.run_id, left=queue.left + 1)
            token = bars.listener.set(lambda text, name=name, note=note: tell(note._replace(reason=f"{name}: {text}")))
            try:
                kind, reason = attempt(cell, store, lease, suite, share)
            finally:  # a second Ctrl-C ends it anywhere
                bars.listener.reset(token)
            if kind in ("held", "again", "interrupted"):
                queue.put_back(cell, lease)
            else:
                queue.settled += 1
            tell(News(kind, cell.run_id, reason, queue.left))
            # Where nothing can be noted of a cell, the next process would take it again.
            has_failed = kind == "again" or (kind == "failed" and store.is_settled(cell.run_id))
            if kind == "blocked" or (is_replaced and has_failed) or (share and kind != "done"):
                return
        elif is_staged and planned_at < queue.settled and (not queue.left or time.monotonic() > pause):
            # A pure function of the store: whoever plans at the same time plans the same cells.
            begin, planned_at = time.monotonic(), queue.settled
            try:
                planned = plan(suite, store)
                if queue.add(cheapest_first(planned)):
                    store.extend_suite(suite.name, manifest(suite, planned))
            except OSError as error:
                tell(News("blocked", reason=f"{type(error).__name__}: {error}"))
                return
            pause = time.monotonic() + _IDLE * (time.monotonic() - begin)
        elif not queue.left:
            tell(News("bye"))
            return
        else:
            tell(News("waiting", left=queue.left))
            time.sleep(min(0.2, queue.wait))


def attempt(
    cell: Cell, store: Store, lease: Lease, suite: Keys, share: Callable[[Cell], object] | None = None
) -> tuple[str, str]:
    """Run a cell under its lease and note how that ended; gives the kind, as of `News`, and the reason.

    An attempt is noted before it begins, as one whose worker died: whoever takes the cell after a death finds it
    counted, once, whatever else the dead process left. An end that is no failure takes the note back.
    """
    run_id = cell.run_id
    try:
        with lease:
            tries = store.tries(run_id)
            if tries.number and (tries.kind not in suite.retry_on or tries.number > suite.retries):
                store.fail(run_id, tries.reason, kind=tries.kind)
                return "failed", tries.reason
            store.note_tries(run_id, tries.number + 1)
            deadline = time.monotonic() + (math.inf if suite.timeout is None else suite.timeout)
            try:
                if share:
                    share(cell)
                train(cell, store, lease, **suite.how, stop=lambda: stopping.is_asked() or time.monotonic() > deadline)
            except Interrupted:
                if time.monotonic() > deadline:
                    return fail(store, run_id, suite, "timeout", too_long(suite))
                store.note_tries(run_id, *tries)
                return "interrupted", ""
            except KeyboardInterrupt:  # at once
                store.note_tries(run_id, *tries)
                raise
            except Held:
                raise
            except Left as error:  # the note stands: a process has died
                return "again", str(error)
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError) and error.errno in _FULL:
                    store.note_tries(run_id, *tries)
                    return "blocked", reason
                return fail(store, run_id, suite, "failed", reason, traceback.format_exc())
            return "done", ""
    except Held as error:
        return "held", str(error)
    except OSError as error:  # nothing can be written of this cell, such as in another user's folder
        kind, reason = "blocked" if error.errno in _FULL else "failed", f"{type(error).__name__}: {error}"
        try:
            if kind == "failed":
                store.fail(run_id, reason)
        except OSError:  # the reason is told at least; where nothing at all can be written, that is no cell's fault
            try:
                store.check_writable()
            except ConfigError:
                kind = "blocked"
        return kind, reason


def fail(store: Store, run_id: str, suite: Keys, kind: Failure, reason: str, trace: str = "") -> tuple[str, str]:
    """Note a failure of an attempt that is noted already: for the next attempt, or for good."""
    count = store.tries(run_id).number
    try:
        if kind in suite.retry_on and count <= suite.retries:
            store.note_tries(run_id, count, kind, reason)
            return "again", reason
        store.fail(run_id, reason, trace, kind)
    except OSError:  # the reason is told at least
        pass
    return "failed", reason


def uncount(store: Store, run_id: str, suite: Keys) -> None:
    """Take back the note of an attempt that ended by no fault of its cell."""
    # Of what kind earlier attempts were was noted before it began: one that the suite tries again.
    store.note_tries(run_id, max(0, store.tries(run_id).number - 1), *suite.retry_on[:1])


def too_long(suite: Keys) -> str:
    """The reason of a failure by `timeout`."""
    return f"it took longer than {suite.timeout:g} seconds"
