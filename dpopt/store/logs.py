"""Logs of runs for TensorBoard and W&B, beside the store. They are off by default, and nothing reads them.

TensorBoard's are in `results/tensorboard/WORKLOAD/OPTIMIZER/RUN_ID/`, W&B's in `results/wandb/`. Each entry of the
curve is logged when it is stored, at its draw; at the end follow the numbers of the record, or why the run failed.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dpopt import files
from dpopt.errors import ConfigError
from dpopt.store.runs import Failure, Store

_ENDED = "run {}: {} logs no more of it: {}: {}"
_Content = Mapping[str, Any]
_Write = Callable[[int, _Content, _Content], None]
"""Writes the numbers of one draw. At the end of a run, and then alone, there are texts: its status, or its failure."""


def _tensorboard(root: Path, run_id: str, cell: _Content, stored: int) -> _Write:
    """An event file for one run alone, written anew from the curve whenever the run goes on."""
    from torch.utils.tensorboard import SummaryWriter
    from torch.utils.tensorboard.summary import hparams

    folder = root / "tensorboard" / cell["workload"]["name"] / cell["optimizer"]["name"] / run_id
    # TensorBoard shows the events of all files in a folder, so draws that are made again would appear twice.
    shutil.rmtree(folder, ignore_errors=True)
    writer = SummaryWriter(str(folder))

    def write(draw: int, numbers: _Content, texts: _Content) -> None:
        scalars = {f"final/{name}": value for name, value in numbers.items()} if texts else dict(numbers)
        for name, value in scalars.items():
            writer.add_scalar(name, value, draw)
        for name, text in texts.items():
            writer.add_text(name, text)
        if "status" in texts and numbers and writer.file_writer is not None:
            plain = {name: each if isinstance(each, str | int | float) else str(each) for name, each in _leaves(cell)}
            for summary in hparams(plain, scalars):  # `add_hparams` makes a run of its own for them
                writer.file_writer.add_summary(summary)
        writer.close() if texts else writer.flush()

    return write


def _wandb(root: Path, run_id: str, cell: _Content, stored: int) -> _Write:
    """A run of W&B with the cell's run id. Its environment variables hold: WANDB_MODE=offline needs no network."""
    import wandb

    # A log there cannot be written anew: where the folder has one, it goes on after the last draw that was stored.
    is_new = not any(root.glob(f"wandb/*run-*-{run_id}"))
    name, group, project = cell["optimizer"]["name"], cell["workload"]["name"], os.environ.get("WANDB_PROJECT", "dpopt")
    # Not quiet, W&B would write over the lines that show how far a suite is.
    settings, resume = wandb.Settings(console="off", silent=True), None if is_new else "allow"
    rest: dict[str, Any] = {"name": f"{name} {run_id}", "group": group, "config": dict(cell), "dir": root}
    run = wandb.init(project=project, id=run_id, resume=resume, settings=settings, **rest)

    def write(draw: int, numbers: _Content, texts: _Content) -> None:
        if texts:
            run.summary.update({**numbers, **texts})
            run.finish(exit_code=1 if "failure" in texts else 0)
        elif is_new or draw > stored:
            run.log(dict(numbers), step=draw)

    return write


_LOGS: dict[str, Callable[[Path, str, _Content, int], _Write]] = {"tensorboard": _tensorboard, "wandb": _wandb}
"""Name, which is also the package's, -> the log of a run that begins or goes on."""


@dataclass(frozen=True)
class LoggedStore(Store):
    """A store that also logs what it is told of runs. An error of a log ends this log and not the run.

    Raises:
        ConfigError: the package of one of `logs`, names of `_LOGS`, is missing, or W&B does not know who logs.
    """

    logs: tuple[str, ...] = ()
    _open: dict[str, dict[str, _Write]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in self.logs:
            package = find_spec(name)
            if package is None or package.origin is None:  # the current folder may hold a folder of that name
                raise ConfigError("log", name, f"the package is missing: pip install 'dpopt[{name}]'")
        if "wandb" in self.logs:
            import wandb

            # A prompt would stop a suite that nobody watches.
            if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
                raise ConfigError("log", "wandb", "there is no API key: `wandb login`, or set WANDB_MODE=offline")

    def restart_curve(self, run_id: str, entries: Iterable[_Content]) -> None:
        passed, stored = list(entries), self.curve(run_id)
        super().restart_curve(run_id, passed)
        for stopped in list(self._open):  # a process runs one cell at a time, and one that is stopped does not say so
            self._write(stopped, 0, {}, {"status": "interrupted"})
        cell, last = files.read(self.folder(run_id, "cell.json")), stored[-1]["draw"] if stored else 0
        self._open[run_id] = {}
        for name in self.logs:
            try:
                self._open[run_id][name] = _LOGS[name](self.root, run_id, cell, last)
            except Exception as error:
                print(_ENDED.format(run_id, name, type(error).__name__, error))
        for entry in passed:
            self._write(run_id, entry["draw"], entry)

    def append_curve(self, run_id: str, entry: _Content) -> None:
        super().append_curve(run_id, entry)
        self._write(run_id, entry["draw"], entry)

    def finish(self, run_id: str, record: _Content, ledger: str) -> None:
        super().finish(run_id, record, ledger)
        shown = {key: value for key, value in record.items() if key not in ("schema", "cell", "provenance")}
        self._write(run_id, record["draws"], shown, {"status": record["status"]})

    def fail(self, run_id: str, reason: str, traceback: str = "", kind: Failure = "failed") -> None:
        super().fail(run_id, reason, traceback, kind)
        self._write(run_id, 0, {}, {"failure": reason})

    def _write(self, run_id: str, draw: int, content: _Content, texts: _Content = MappingProxyType({})) -> None:
        """Write the numbers of an entry or a record to all logs of a run that are open; with texts they end."""
        leaves, logs = [leaf for leaf in _leaves(content) if leaf[0] != "draw"], self._open.get(run_id, {})
        numbers = {name: value for name, value in leaves if type(value) in (int, float) and math.isfinite(value)}
        for name, write in list(logs.items()):
            try:
                write(draw, numbers, texts)
            except Exception as error:  # of foreign code, which may raise anything
                logs.pop(name)
                print(_ENDED.format(run_id, name, type(error).__name__, error))
        if texts:
            self._open.pop(run_id, None)


def _leaves(content: _Content, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in plain data with flat names, such as "noise/gradient"."""
    for key, value in content.items():
        yield from _leaves(value, f"{prefix}{key}/") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
