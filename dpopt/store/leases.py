"""Leases: the right of one process among several, on one machine or on many, to run a cell.

While a process runs a cell, it holds the file `lease` in the run's folder; `filelock.SoftFileLease` keeps that true
without locks of the file system and without comparing the clocks of two machines. The file is created exclusively. Its
holder touches it every `_BEAT` seconds. It is taken over where its holder was a process of this machine that no longer
exists, or where it was not touched for `_PATIENCE` seconds of the observer's steady clock.

A lease lost by mistake costs nothing but time: the holder sees it before it writes anything that others would read
(`check`), and its cell goes on from the last checkpoint.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Self

from dpopt.errors import Held

if TYPE_CHECKING:
    from filelock import SoftFileLease

LEASE = "lease"
"""The name of a lease's file in the folder of a run."""
_BEAT = 5.0
"""Seconds between two signs of life."""
_PATIENCE = 60.0
"""Seconds without one after which a lease is taken over: longer than a network file system keeps attributes."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease."""

    host: str
    pid: int
    is_gone: bool  # it was a process of this machine and no longer exists; False where that cannot be seen
    age: float  # seconds since the last sign of life, by the clocks of this machine and of the file's; for display only
    fraction: float = 0.0  # part of the cell that is done

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


class Lease:
    """The right to run a cell, once it is taken: by `take`, or by a `with` block, which gives it back at its end.

    The same object is asked again where another process has it: how long that one has been silent is counted here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = _lock(path)
        # Owner, time of its last sign of life, and when this process first saw the two, by a clock that nobody sets.
        self._seen: tuple[object, float] = (None, 0.0)

    def take(self) -> Self:
        """Take the lease; raises `Held` where another process has it."""
        from filelock import Timeout

        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if self._is_kept():
                raise Timeout(str(self._path))
            self._lock.acquire(timeout=0)
        except Timeout:
            raise Held(f"it is run by {read(self._path) or 'another process'}") from None
        return self

    def check(self) -> None:
        """Ask before anything is written that others read; raises `Held` where another process has taken over."""
        owner = self._lock.owner
        if owner is None or owner.token != self._lock.token:
            raise Held("another process has taken over")

    def release(self) -> None:
        """Give the lease back; nothing happens if another process has taken it over."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self if self._lock.is_locked else self.take()

    def __exit__(self, *error: object) -> None:
        self.release()

    def _is_kept(self) -> bool:
        """True if the lease is one that `filelock` would misjudge, and was not silent for `_PATIENCE`."""
        # It tells machines apart by their names alone: the holder on another one that has this one's name it would
        # look for among the processes here. And a file that holds no text it would keep for ever.
        owner, here = self._lock.owner, _here()
        if owner is not None and (owner.hostname != here.hostname or _boot(owner) == _boot(here)):
            return False
        try:
            touched = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if (owner, touched) != self._seen[0]:
            self._seen = (owner, touched), time.monotonic()
        if time.monotonic() - self._seen[1] < _PATIENCE:
            return True
        if owner is None:  # nobody's, so that `filelock` would never take it over
            self._path.unlink(missing_ok=True)
        return False


def read(path: Path) -> Holder | None:
    """The holder of the lease `path`; None where nobody holds it, or where the file cannot be understood."""
    owner, here = _lock(path).owner, _here()
    if owner is None:
        return None
    is_gone, age = False, 0.0
    try:
        age = max(0.0, time.time() - path.stat().st_mtime)
        if owner.hostname == here.hostname and _boot(owner) == _boot(here):
            os.kill(owner.pid, 0)  # signal 0 only asks whether there is such a process
    except FileNotFoundError:
        return None
    except ProcessLookupError:
        is_gone = True
    except PermissionError:  # it exists, and is another user's
        pass
    return Holder(owner.hostname.partition("?")[0], owner.pid, is_gone, age)


def _lock(path: Path) -> SoftFileLease:
    from filelock import SoftFileLease  # a tenth of a second, which who only reads results need not wait for

    return SoftFileLease(path, lease_duration=_PATIENCE, heartbeat_interval=_BEAT, thread_local=False)


def _boot(owner: object) -> int:
    # The upper half of a process's start is that of the system: equal on one machine until it starts again.
    return (getattr(owner, "start", None) or 0) >> 64


@cache
def _here() -> Any:
    """The owner of a lease that this process takes."""
    # `filelock` has no function that tells how it names this machine.
    with TemporaryDirectory() as folder, (lock := _lock(Path(folder, LEASE))):
        return lock.owner
