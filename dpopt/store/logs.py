"""Logs of runs for TensorBoard and W&B, beside what the store keeps. They are off by default, and nothing reads them.

TensorBoard's are in `results/tensorboard/WORKLOAD/OPTIMIZER/RUN_ID/`, W&B's in `results/wandb/`. Each entry of the
curve is logged when it is stored, at its draw; at the end follow the numbers of the record, or why the run failed.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from dpopt.errors import ConfigError
from dpopt.files import read
from dpopt.store.runs import Failure, Store

Entries = Sequence[Mapping[str, Any]]


class Log(Protocol):
    """The log of one run, from `__init__` to `close`."""

    def entry(self, entry: Mapping[str, Any]) -> None:
        """Log one entry of the curve."""
        ...

    def finish(self, record: Mapping[str, Any]) -> None:
        """Log what the run came to."""
        ...

    def close(self, failure: str = "") -> None:
        """End the log; `failure` says why the run failed."""
        ...


class TensorBoard:
    """A run's event file, written anew from the curve whenever the run goes on.

    Args:
        root: the results folder.
        run_id, cell: what is run.
        passed: entries of the curve that the run does not pass again.
        stored: entries that the curve had when the run was stopped.
    """

    def __init__(self, root: Path, run_id: str, cell: Mapping[str, Any], passed: Entries, stored: Entries) -> None:
        from torch.utils.tensorboard import SummaryWriter

        folder = root / "tensorboard" / cell["workload"]["name"] / cell["optimizer"]["name"] / run_id
        shutil.rmtree(folder, ignore_errors=True)
        self._cell, self._writer = cell, SummaryWriter(str(folder))
        for entry in passed:
            self.entry(entry)

    def entry(self, entry: Mapping[str, Any]) -> None:
        for name, value in measured(entry).items():
            self._writer.add_scalar(name, value, entry["draw"])
        self._writer.flush()

    def finish(self, record: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard.summary import hparams

        final = {f"final/{name}": value for name, value in outcome(record).items()}
        for name, value in final.items():
            self._writer.add_scalar(name, value, record["draws"])
        writer = self._writer.file_writer
        assert writer is not None, "it is there until the log is closed"
        for summary in hparams(hyperparameters(self._cell), final):  # `add_hparams` makes a run of its own for them
            writer.add_summary(summary)
        self._writer.add_text("status", record["status"])

    def close(self, failure: str = "") -> None:
        if failure:
            self._writer.add_text("failure", failure)
        self._writer.close()


class WandB:
    """A run of W&B with the cell's run id; see `TensorBoard` for the arguments.

    A log there cannot be written anew. A run that goes on is logged from where the curve ended when it was stopped, if
    the results folder has an earlier log of it. W&B's environment variables hold: WANDB_MODE=offline needs no network.
    """

    def __init__(self, root: Path, run_id: str, cell: Mapping[str, Any], passed: Entries, stored: Entries) -> None:
        import wandb

        is_new = not any(root.glob(f"wandb/*run-*-{run_id}"))
        self._logged = 0 if is_new or not stored else stored[-1]["draw"]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dpopt"),
            id=run_id,
            name=f"{cell['optimizer']['name']} {run_id}",
            group=cell["workload"]["name"],
            config=dict(cell),
            dir=root,
            resume=None if is_new else "allow",
            settings=wandb.Settings(console="off", silent=True),
        )
        for entry in passed:
            self.entry(entry)

    def entry(self, entry: Mapping[str, Any]) -> None:
        if entry["draw"] > self._logged:
            self._run.log(measured(entry), step=entry["draw"])

    def finish(self, record: Mapping[str, Any]) -> None:
        self._run.summary.update({**outcome(record), "status": record["status"]})

    def close(self, failure: str = "") -> None:
        if failure:
            self._run.summary.update({"failure": failure})
        self._run.finish(exit_code=1 if failure else 0)


LOGS: dict[str, Callable[[Path, str, Mapping[str, Any], Entries, Entries], Log]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
}
"""Name, which is also the package's, -> log."""


@dataclass(frozen=True)
class LoggedStore(Store):
    """A store that also logs what it is told of runs. An error of a log ends this log and not the run.

    Args:
        root: see `Store`.
        logs: names of `LOGS`, none for a plain store.

    Raises:
        ConfigError: a package is missing, or W&B does not know who logs.
    """

    logs: tuple[str, ...] = ()
    _open: dict[str, dict[str, Log]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.logs:
            package = find_spec(name)
            if package is None or package.origin is None:  # the current folder may hold a folder of that name
                raise ConfigError("log", name, f"the package is missing: pip install 'dpopt[{name}]'")
        if "wandb" in self.logs:
            _check_wandb()

    def restart_curve(self, run_id: str, entries: Iterable[Mapping[str, Any]]) -> None:
        passed, stored = list(entries), self.curve(run_id)
        super().restart_curve(run_id, passed)
        for stopped in list(self._open):  # a process runs one cell at a time, and one that is stopped does not say so
            self._close(stopped)
        cell = read(self.folder(run_id, "cell.json"))
        self._open[run_id] = {}
        for name in self.logs:
            with _warned(run_id, name):
                self._open[run_id][name] = LOGS[name](self.root, run_id, cell, passed, stored)

    def append_curve(self, run_id: str, entry: Mapping[str, Any]) -> None:
        super().append_curve(run_id, entry)
        self._tell(run_id, lambda log: log.entry(entry))

    def finish(self, run_id: str, record: Mapping[str, Any], ledger: str) -> None:
        super().finish(run_id, record, ledger)
        self._tell(run_id, lambda log: log.finish(record))
        self._close(run_id)

    def fail(self, run_id: str, reason: str, traceback: str = "", kind: Failure = "failed") -> None:
        super().fail(run_id, reason, traceback, kind)
        self._close(run_id, reason)

    def _tell(self, run_id: str, what: Callable[[Log], None]) -> None:
        logs = self._open.get(run_id, {})
        for name, log in list(logs.items()):
            with _warned(run_id, name, lambda name=name: logs.pop(name)):
                what(log)

    def _close(self, run_id: str, failure: str = "") -> None:
        self._tell(run_id, lambda log: log.close(failure))
        self._open.pop(run_id, None)


@contextmanager
def _warned(run_id: str, name: str, on_error: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Go on after an error of a log: it is not worth the run."""
    try:
        yield
    except Exception as error:
        on_error()
        print(f"run {run_id}: {name} logs no more of it: {type(error).__name__}: {error}")


def _check_wandb() -> None:
    import wandb

    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        raise ConfigError("log", "wandb", "there is no API key: `wandb login`, or set WANDB_MODE=offline")


def hyperparameters(cell: Mapping[str, Any]) -> dict[str, Any]:
    """What a cell is given, flat: "optimizer/lr"; lists as text."""
    return {name: value if isinstance(value, str | int | float) else str(value) for name, value in _leaves(cell)}


def measured(entry: Mapping[str, Any]) -> dict[str, float]:
    """The numbers in an entry of the curve but for the draw, which is the step that they are logged at."""
    return numbers({key: value for key, value in entry.items() if key != "draw"})


def outcome(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers that a run came to, epsilon among them."""
    return numbers({key: value for key, value in record.items() if key not in ("schema", "cell", "provenance")})


def numbers(content: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers in plain data, flat: "noise/gradient"."""
    return {name: value for name, value in _leaves(content) if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
