"""Leases: which one of the processes that could run a cell may do so, on one machine or on several.

While a process runs a cell, `lease.json` in the run directory is its own. Three rules keep that true without locks of
the file system and without comparing the clocks of two machines:

- Taking: the file is created exclusively, which one process alone can do, also on a network file system.
- Keeping: the holder counts up in it every `BEAT` seconds, through the file that it has opened. It looks whether the
  name still leads to that file before it writes anything that others would read.
- Taking over: a holder is gone if it was a process of this machine that no longer exists, or if its file stayed the
  same for `PATIENCE` seconds of the observer's own, steady clock. The file is then renamed away, which succeeds once;
  what was renamed is what was observed, or it is put back. After that the first rule decides.

A lease lost by mistake costs nothing but time: the holder stops, and its cell goes on from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from dpopt.errors import Held

BEAT = 5.0
"""Seconds between two signs of life."""
PATIENCE = 60.0
"""Seconds without one after which a lease is taken over: longer than a network file system keeps attributes."""
WIDTH = 512
"""Bytes of a lease: always as many, so that one write replaces the last."""


@dataclass(frozen=True)
class Holder:
    """What a lease says of its holder.

    Attributes:
        host, pid: where it runs.
        machine, started: what tells its process from any other, see `_machine` and `_started`; empty where unknown.
        fraction: part of the cell that is done.
        age: seconds since the last sign of life, by the clocks of this machine and of the file's; for display only.
    """

    host: str
    pid: int
    machine: str
    started: str
    fraction: float
    age: float

    @property
    def is_gone(self) -> bool:
        """Whether it was a process of this machine and no longer exists; false where that cannot be known."""
        return bool(self.machine) and self.machine == _machine() and self.started != _started(self.pid)

    def __str__(self) -> str:
        return f"process {self.pid} of {self.host}"


class Lease:
    """The right of this process to run a cell, kept up by a thread from `__init__` to `__exit__`.

    Args:
        path: the lease's file; its folder is made.

    Raises:
        Held: another process has it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, _create(path)
        self._content = {"token": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}
        self._content |= {"machine": _machine(), "started": _started(os.getpid()), "beats": 0, "fraction": 0.0}
        self._released = threading.Event()
        try:
            self._beat()
        except OSError:  # a full disk, say: nobody is to wait for a lease that nobody has
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise
        self._thread = threading.Thread(target=self._keep, daemon=True)
        self._thread.start()

    def note(self, fraction: float) -> None:
        """Say what part of the cell is done; readers learn of it with the next sign of life."""
        self._content["fraction"] = round(fraction, 4)

    def check(self) -> None:
        """Ask before anything is written that others read.

        Raises:
            Held: another process has taken over.
        """
        if not self._is_ours():
            raise Held("another process has taken over")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._released.set()
        self._thread.join()
        if self._is_ours():
            self._path.unlink(missing_ok=True)
        os.close(self._file)

    def _is_ours(self) -> bool:
        """The first bytes alone: the rest may change while it is read."""
        found = _read(self._path)
        return found is not None and found.startswith(f'{{"token": "{self._content["token"]}"'.encode())

    def _keep(self) -> None:
        while not self._released.wait(BEAT):
            with contextlib.suppress(OSError):  # a lease that cannot be kept up is lost, as `check` will find
                self._beat()

    def _beat(self) -> None:
        self._content["beats"] += 1
        os.pwrite(self._file, json.dumps(self._content).encode().ljust(WIDTH), 0)
        os.fsync(self._file)


class Watch:
    """Finds out whether a lease that another process has is kept up.

    Args:
        path: the lease's file.
        patience: seconds that it may stay as it is.
    """

    def __init__(self, path: Path, patience: float = PATIENCE) -> None:
        self._path, self._patience = path, patience
        self._seen, self._since = b"", time.monotonic()

    def try_free(self) -> bool:
        """Remove the lease if its holder is gone; gives whether there is none now."""
        content = _read(self._path)
        if content is None:
            return True
        if content != self._seen:
            self._seen, self._since = content, time.monotonic()
        holder = read(self._path)
        if time.monotonic() - self._since < self._patience and not (holder and holder.is_gone):
            return False
        _remove(self._path, content)
        return True


def read(path: Path) -> Holder | None:
    """Who holds the lease `path`; None where nobody does, or where the file cannot be understood."""
    content = _read(path)
    try:
        known = json.loads(content or b"")
        age = max(0.0, time.time() - path.stat().st_mtime)
        own = (str(known["host"]), int(known["pid"]), str(known["machine"]), str(known["started"]))
        return Holder(*own, float(known["fraction"]), age)
    except (ValueError, TypeError, KeyError, OSError):
        return None


def _create(path: Path) -> int:
    """Create the file, if need be in the place of a holder that is gone."""
    while True:
        try:
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)
        except FileExistsError:
            content, holder = _read(path), read(path)
            if content is None:
                continue  # it has just been released
            if holder is None or not holder.is_gone:
                raise Held(f"it is run by {holder or 'another process'}") from None
            _remove(path, content)


def _remove(path: Path, observed: bytes) -> None:
    """Remove the lease if it is the observed one."""
    aside = path.with_name(f".lease-{secrets.token_hex(8)}")
    try:
        os.rename(path, aside)
    except FileNotFoundError:
        return  # another observer was faster
    if _read(aside) != observed:  # another observer was faster, and this is a new holder's
        with contextlib.suppress(OSError):
            os.link(aside, path)
    aside.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


@cache
def _machine() -> str:
    """What processes with the same numbering have in common: this start of the system and the container, if any."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process of this machine started, in the kernel's ticks; empty if there is no such process."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]
