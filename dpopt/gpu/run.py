"""One slice of `dpopt gpu`, from the command's words to the table."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dpopt import configurations, fields
from dpopt.errors import ConfigError
from dpopt.gpu import report
from dpopt.gpu.session import Session, Slice, work
from dpopt.gpu.steps import Step, missing, select, table
from dpopt.gpu.work import Job
from dpopt.harness.remote import Remote
from dpopt.store.provenance import code, hardware, provenance

REPORTING = 20.0
"""Seconds of a slice that are kept for tables and figures."""
OPTIONAL = (
    *("opacus", "timm", "transformers", "peft", "sklearn", "datasets", "autodp", "pandas", "matplotlib"),
    *("prodigyopt", "dadaptation", "dog", "schedulefree"),
)
"""Packages without which less is done."""


@dataclass(frozen=True)
class GpuKeys:
    """What to do; `conf/base/gpu.yaml` says what each key means."""

    minutes: fields.Positive
    steps: tuple[fields.Name, ...] | None
    retry: bool
    results: Path
    plots: Path
    device: str

    @property
    def is_rehearsal(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Look:
    """A process that looks at a device; this one leaves the device's memory to the steps."""

    device: str

    def setting(self) -> dict[str, Any]:
        """Device, versions and code, and under `key` a digest of all that may change what is measured."""
        place = torch.device(self.device)
        torch.empty(0, device=place)
        found = provenance(place)
        made = {key: found[key] for key in ("device", "versions", "python")}
        made |= {"hardware": hardware(place), "torch": torch.__version__, "code": code()}
        key = hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:8]
        return made | {"commit": found["commit"], "dirty": found["dirty"], "key": key}


def settings(overrides: Sequence[str] = ()) -> GpuKeys:
    """The defaults with Hydra overrides such as `minutes=9`.

    Raises:
        ConfigError: a value that cannot be used, or no CUDA device where one is asked for.
    """
    given = configurations.command("gpu", overrides)
    steps = None if given["steps"] == "all" else fields.listed(given["steps"])
    folders = {key: Path(fields.convert(given[key], fields.Name, key, {})) for key in ("results", "plots")}
    chosen = fields.build(GpuKeys, given | folders | {"steps": steps}, "gpu")
    return dataclasses.replace(chosen, device=_device(chosen.device))


def _device(name: str) -> str:
    if name.partition(":")[0] not in ("auto", "cpu", "cuda"):
        raise ConfigError("device", name, "expected auto, cpu, cuda or cuda:NUMBER")
    if name != "cpu" and not torch.cuda.is_available():
        raise ConfigError("device", name, "there is no CUDA device; device=cpu rehearses the steps")
    return "cuda" if name == "auto" else name


def run(chosen: GpuKeys, started: float, out: Console, console: Console) -> int:
    """Work for one slice, write its table and figures, and print the table.

    Args:
        chosen: see `settings`.
        started: when the slice began, by `time.monotonic`.
        out: where the table goes.
        console: where progress goes.

    Returns:
        1 where a step or a check has failed, else 0.

    Raises:
        ConfigError: the device cannot be used, or another process works in the same folder.
    """
    session = _session(chosen)
    every = table(None if chosen.is_rehearsal else session.setting["hardware"]["memory"])
    wanted = select(every, chosen.steps)
    left_out = {step.name: reason for step in wanted if (reason := missing(step))}
    steps = [step for step in wanted if step.name not in left_out]
    _introduce(chosen, session, left_out, console)
    with session.alone():
        done = work(session, steps, started + 60 * chosen.minutes - REPORTING, retry=chosen.retry, console=console)
        report.write(session, every, {step.name: why for step in every if (why := missing(step))}, chosen.plots)
    out.print(report.summary(session, wanted, left_out), highlight=False, markup=False)
    console.print(_conclusion(session, steps, done), highlight=False, markup=False)
    return int(any(_is_bad(session.record(step)) for step in steps))


def _session(chosen: GpuKeys) -> Session:
    look = Remote(Look(chosen.device))
    setting, failure = look.ask("setting")
    look.close()
    if failure:
        raise ConfigError("device", chosen.device, failure)
    base = chosen.results / ("gpu" if chosen.is_rehearsal else "published/gpu")
    name = re.sub(r"[^a-z0-9]+", "-", setting["hardware"]["name"].lower()).strip("-")
    folder = base / f"{name}-{setting['key']}"
    store = folder / "store" if chosen.is_rehearsal else chosen.results
    job = Job("", {}, chosen.device, str(store.resolve()), chosen.retry)

    def command(step: Step, rows: Path) -> list[str]:
        told = dataclasses.asdict(dataclasses.replace(job, work=step.work, arguments=step.arguments))
        return [sys.executable, "-m", "dpopt.gpu.work", json.dumps(told), str(rows)]

    return Session(folder, setting, command)


def _introduce(chosen: GpuKeys, session: Session, left_out: dict[str, str], console: Console) -> None:
    """Say where the work is done, and without what."""
    kind = "rehearsal on the CPU, at the smallest shapes" if chosen.is_rehearsal else session.setting["device"]
    console.print(f"{kind}; results in {session.folder}/", highlight=False, markup=False)
    without = [package for package in OPTIONAL if find_spec(package) is None]
    if without or left_out:
        told = [f"without {', '.join(without)}"] if without else []
        told += [f"left out: {'; '.join(report.left_out_line(left_out))}"] if left_out else []
        console.print("; ".join(told), highlight=False, markup=False)


def _conclusion(session: Session, steps: Sequence[Step], done: Slice) -> str:
    """What there is left to do, in a line."""
    failed = [step.name for step in steps if session.status(step) == "failed"]
    left = [step.name for step in steps if session.status(step) not in ("done", "failed")]
    told = [f"{len(done.ran)} steps begun" if done.ran else "nothing to do" if not left else "no step fits"]
    told += [f"{len(steps) - len(failed) - len(left)} of {len(steps)} are done"]
    told += [f"{len(failed)} failed (retry=true begins them again)"] if failed else []
    told += [f"{len(left)} are left for the next slice"] if left else []
    return f"{'; '.join(told)}; {session.folder / 'table.md'}"


def _is_bad(record: dict[str, Any] | None) -> bool:
    """Whether a step, or a check of it, has failed."""
    if record is None:
        return False
    return record["status"] == "failed" or any(row.get("status") == "failed" for row in record["rows"])
