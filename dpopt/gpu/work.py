"""What a step does, in the process that it has for itself:

    python -m dpopt.gpu.work JOB ROWS

JOB is a `Job` as JSON; rows are appended to the file ROWS as they are found, one JSON object a line. The process ends,
with all that it has started, when its standard input does: nothing outlives a session that was killed.
"""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from dpopt import registry
from dpopt.bench import cells_per_hour, conformance, largest
from dpopt.bench import run as bench
from dpopt.bench.cases import CASES
from dpopt.errors import ConfigError
from dpopt.gpu.tether import end_with_input
from dpopt.store import Store
from dpopt.store.runs import RESULTS

Rows = Iterator[dict[str, Any]]
ENGINES = ("bookkeeping", "poisson", "opacus_hooks", "opacus_ghost", "vmap")
OF_PAPERS = ("hyfreedp", "fiber", "adadp")
ROUNDS, LIMIT = 5, 60
"""Rounds of a timed step, and seconds that a contender may take for its first calls, or for a turn."""
MOST, SEARCH = 2**16, 50
"""Examples at which the search for the largest batch ends, and seconds that it may take for one contender."""
UNUSABLE = 2
"""Exit code of `dpopt run` where there is nothing that it could run."""


@dataclass(frozen=True)
class Job:
    """What a step's process is told.

    Attributes:
        work: key of `WORK`.
        arguments: of that function.
        device: as torch names it.
        store: where suites keep their cells.
        retry: whether cells that failed are run again.
        grace: seconds that cells have to write a checkpoint when the slice ends.
    """

    work: str
    arguments: dict[str, Any]
    device: str
    store: str
    retry: bool = False
    grace: float = 15.0

    @property
    def place(self) -> torch.device:
        return torch.device(self.device)


def conform_optimizers(job: Job, names: Sequence[str] | None = None) -> Rows:
    """The checks of the noise, and those of optimizers (by default all) that a device can break."""
    torch.set_num_threads(1)  # of small tensors
    yield from conformance.noise(job.place)
    for name in names or registry.optimizers():
        try:
            registry.create(name)
        except (ConfigError, ImportError) as error:
            row = {"kind": "optimizer", "name": name, "check": "all", "status": "skipped", "seconds": 0.0}
            yield row | {"detail": str(error)}
        else:
            yield from conformance.optimizers([name], job.place)


def conform_engines(job: Job, case: str, tiny: bool = False) -> Rows:
    """The checks of engines on one case."""
    torch.set_num_threads(1 if tiny else 4)
    yield from conformance.engines([CASES[case].rehearsal() if tiny else CASES[case]], job.place)


def cost(
    job: Job, case: str, subset: str, batch_size: int, tiny: bool = False, engines: Sequence[str] = ENGINES
) -> Rows:
    """Every engine against non-private training."""
    chosen = [f"subsets=[{subset}]", f"engines=[{','.join(_at_hand(engines))}]", "optimizers=none"]
    yield from _bench(job, case, batch_size, tiny, *chosen)


def draws(
    job: Job,
    case: str,
    batch_size: int,
    tiny: bool = False,
    optimizers: Sequence[str] = OF_PAPERS,
    probe_every: Sequence[int] = (1, 5, 10),
) -> Rows:
    """The papers' optimizers against their base."""
    chosen = ["engines=none", f"optimizers=[{','.join(optimizers)}]", f"probe_every={[*probe_every]}"]
    yield from _bench(job, case, batch_size, tiny, *chosen)


def bfloat16(
    job: Job, case: str, batch_size: int, tiny: bool = False, engines: Sequence[str] = ("bookkeeping", "poisson")
) -> Rows:
    """Book-keeping against non-private training, both under autocast."""
    chosen = ["optimizers=none", f"engines=[{','.join(engines)}]", "precision=bfloat16"]
    yield from _bench(job, case, batch_size, tiny, *chosen)


def batch(
    job: Job,
    case: str,
    batch_size: int,
    tiny: bool = False,
    engines: Sequence[str] = ("bookkeeping", "opacus_hooks", "opacus_ghost"),
    most: int = MOST,
) -> Rows:
    """The largest physical batch of every engine but `vmap`, which takes few examples at a time in any case."""
    chosen = CASES[case].rehearsal() if tiny else CASES[case]
    chosen = dataclasses.replace(chosen, batch_size=batch_size)
    yield from largest.largest(_at_hand(engines), chosen, "full", job.place, most, SEARCH)


def cells(job: Job, suite: str, overrides: Sequence[str], only: Sequence[str] | None = None) -> Rows:
    """Cells per hour of `dpopt run`, one by one and together, and of an Opacus loop."""
    yield from cells_per_hour.rows(suite, overrides, job.device, only=only)


def suite(job: Job, suite: str, overrides: Sequence[str]) -> Rows:
    """Train what is not done of a suite, until it is or the slice ends."""
    _ignore_interrupts()  # the suite's process gets them too, writes its checkpoints and ends
    where = [f"suite={suite}", f"results={job.store}"]
    command = "retry" if job.retry else "run"
    done = _dpopt(command, *where, f"device={job.device}", f"grace={job.grace:g}", *overrides)
    if done == UNUSABLE:
        sys.exit(done)
    if find_spec("pandas"):
        _dpopt("table", *where)
    yield _progress(Store(Path(job.store)), suite)
    if done:
        sys.exit(done)


def _progress(store: Store, name: str) -> dict[str, Any]:
    """How far a suite is, where its cells were trained, and its table."""
    run_ids = {entry["run_id"] for entry in store.manifest(name)["cells"]}
    states = Counter(store.state(run_id) for run_id in run_ids)
    finished = [store.record(run_id) for run_id in run_ids if store.state(run_id) in RESULTS]
    made = Counter(f"{record['provenance']['device']}, {record['provenance']['commit']}" for record in finished)
    why = Counter(store.error(run_id)["reason"] for run_id in run_ids if store.state(run_id) == "failed")
    table = store.suite_folder(name) / "table.md"
    text = table.read_text() if table.exists() else ""
    row = {"suite": name, "cells": len(run_ids), "states": dict(states), "why": dict(why)}
    return row | {"made": dict(made), "table": text}


def _dpopt(*words: str) -> int:
    return subprocess.run([sys.executable, "-m", "dpopt", *words], stdin=subprocess.DEVNULL).returncode


def _bench(job: Job, case: str, batch_size: int, tiny: bool, *overrides: str) -> Rows:
    given = [f"cases=[{case}]", f"batch_size={batch_size}", f"device={job.device}"]
    given += ["tiny=true", "rounds=2", "threads=1"] if tiny else [f"rounds={ROUNDS}", f"limit={LIMIT}"]
    yield from bench.bench(bench.settings([*given, *overrides]))["rows"]


def _at_hand(engines: Sequence[str]) -> list[str]:
    """Those of the engines that are installed."""
    return [name for name in engines if not name.startswith("opacus") or find_spec("opacus")]


WORK: dict[str, Callable[..., Rows]] = {
    function.__name__: function
    for function in (conform_optimizers, conform_engines, cost, draws, bfloat16, batch, cells, suite)
}


def _ignore_interrupts() -> None:
    signal.signal(signal.SIGINT, lambda number, frame: None)


def main(words: Sequence[str]) -> None:
    """Do what JOB says."""
    end_with_input()
    job = Job(**json.loads(words[0]))
    with Path(words[1]).open("a") as file:
        for row in WORK[job.work](job, **job.arguments):
            file.write(json.dumps(row) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
