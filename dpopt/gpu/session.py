"""A slice of work: steps in processes of their own, within a budget, with all that is known on disk.

A session's folder holds `setting.json` (device, versions, code) and `steps/NAME.json` for each step that was tried (its
status, seconds and rows, written in one step); `steps/NAME.log` is what a step that failed has printed. What is
measured on another device, or with other versions or other code, is another session with another folder, so that
results never mix unseen. Whoever wants to keep what was measured with other code copies its files into the new folder:
each says what it was measured with, and the table says which steps differ.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from dpopt.errors import ConfigError
from dpopt.gpu.steps import Step
from dpopt.store import Store
from dpopt.store.runs import Damaged, read

GRACE = 25.0
"""Seconds that a step which resumes has to keep what it has done."""
MARGIN = 1.5
"""A step is begun if this factor times what it took elsewhere is left."""
LINES = 12
"""The last lines of a failed step's output that its record keeps."""

Command = Callable[[Step, Path], list[str]]
"""A step, and the file that takes its rows, one JSON object a line -> the command that does it."""


@dataclass(frozen=True)
class Session:
    """What is known of the steps in one setting.

    Args:
        folder: of this session; made when something is written.
        setting: device, versions and code, as plain data.
        command: how a step is done.
    """

    folder: Path
    setting: dict[str, Any]
    command: Command

    def record(self, step: Step) -> dict[str, Any] | None:
        """What is known of a step; None for nothing, or for a file that cannot be read."""
        try:
            return read(self._path(step))
        except (FileNotFoundError, Damaged):
            return None

    def status(self, step: Step) -> str:
        """One of "done", "failed", "cut" (by the end of a slice) and "" for never tried."""
        return (self.record(step) or {}).get("status", "")

    def expected(self, step: Step) -> float:
        """Seconds that must be left for the step to be begun.

        With a margin, what it has taken elsewhere: in other sessions of this device, or where the table was made. Its
        limit where nobody knows, and where that was too little here before.
        """
        taken = [record["seconds"] for record in self._elsewhere(step) if record.get("status") == "done"]
        usual = max(taken, default=step.usual)
        if step.resumes or usual is None or self.status(step) == "cut":
            return step.limit
        return min(step.limit, MARGIN * usual)

    def run(self, step: Step, left: float) -> dict[str, Any]:
        """Do a step, for at most `left` seconds, and keep what became of it."""
        rows, log = self._path(step, ".rows"), self._path(step, ".log")
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.unlink(missing_ok=True)
        started = time.monotonic()
        status, reason = _attempt(step, self.command(step, rows), log, left)
        record = {
            "step": step.name,
            "status": status,
            "reason": reason,
            "seconds": time.monotonic() - started,
            "rows": list(_lines(rows)),
            "setting": self.setting,
        }
        Store(self.folder).write(self._path(step), record)
        rows.unlink(missing_ok=True)
        if status != "failed":
            log.unlink(missing_ok=True)
        return record

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only process that works in this folder.

        Raises:
            ConfigError: another one does.
        """
        Store(self.folder).write(self.folder / "setting.json", self.setting)
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ConfigError("results", str(self.folder), "another `dpopt gpu` works there") from None
        finally:
            os.close(handle)

    def _path(self, step: Step, suffix: str = ".json") -> Path:
        return self.folder / "steps" / f"{step.name}{suffix}"

    def _elsewhere(self, step: Step) -> Iterator[dict[str, Any]]:
        """The step's records in other sessions of the same device."""
        for path in self.folder.parent.glob(f"*/steps/{step.name}.json"):
            if path.parents[1] != self.folder:
                try:
                    record = read(path)
                except (FileNotFoundError, Damaged):
                    continue
                if record.get("setting", {}).get("device") == self.setting["device"]:
                    yield record


@dataclass
class Slice:
    """What a slice came to.

    Attributes:
        ran: steps that were begun, with what became of each.
        settled: steps with a result of an earlier slice.
        waiting: steps that have no place in what was left.
    """

    ran: dict[str, str]
    settled: list[str]
    waiting: list[str]


def work(
    session: Session, steps: Sequence[Step], until: float, *, retry: bool = False, console: Console | None = None
) -> Slice:
    """Do the steps that have no result yet, in their order, until the clock `time.monotonic` says `until`.

    Args:
        session: what is known.
        steps: what to do, the most valuable first.
        until: no step is begun that cannot be done by then.
        retry: begin those that failed as well.
        console: where progress goes.
    """
    console = console or Console(stderr=True, quiet=True)
    found = Slice({}, [], [])
    for number, step in enumerate(steps, 1):
        status = session.status(step)
        if status == "done" or (status == "failed" and not retry):
            found.settled.append(step.name)
        elif session.expected(step) > until - time.monotonic():
            found.waiting.append(step.name)
        else:
            title = f"{number}/{len(steps)} {step.name}"
            with console.status(title):
                record = session.run(step, until - time.monotonic())
            found.ran[step.name] = record["status"]
            console.print(f"{title}: {_told(record)}", highlight=False, markup=False)
    return found


def _told(record: dict[str, Any]) -> str:
    reason = f": {record['reason'].splitlines()[0]}" if record["reason"] else ""
    return f"{record['status']} after {record['seconds']:.0f} s{reason}"


def _attempt(step: Step, command: list[str], log: Path, left: float) -> tuple[str, str]:
    """Status and reason of a step that may take `left` seconds."""
    limit = left if step.resumes else min(step.limit, left)
    with log.open("wb") as output:
        # The step ends when its standard input does, so that it does not outlive a session that was killed.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = _wait(process, limit - GRACE if step.resumes else limit)
            if code is None and step.resumes:
                _signal(process, signal.SIGINT)
                _wait(process, GRACE)
        finally:
            _signal(process, signal.SIGKILL)
            process.wait()
    if code == 0:
        return "done", ""
    if code is None:
        is_late = limit >= step.limit and not step.resumes
        return ("failed", f"it takes more than {step.limit:g} seconds") if is_late else ("cut", "the slice ended")
    return "failed", _failure(code, log)


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None where it does not end in time."""
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and all that it has started, wherever they are in their work."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return


def _failure(code: int, log: Path) -> str:
    """What a process that failed said last."""
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    last = log.read_text(errors="replace").strip().splitlines()[-LINES:]
    return "\n".join([f"{how}: {last[-1]}", *last]) if last else how


def _lines(path: Path) -> Iterator[Any]:
    """The rows that a step has made; the last one may have been cut short."""
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            yield json.loads(line)
        except ValueError:
            return
