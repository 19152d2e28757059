"""Train the cells of a suite that have no result: `dpopt run` and `dpopt.run_suite`."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import cycle, islice
from pathlib import Path
from typing import NoReturn

import torch
from rich.console import Console
from rich.text import Text

from dpopt import bars, fields, registry
from dpopt.cells import Cell
from dpopt.errors import ConfigError, unknown
from dpopt.markup import lines
from dpopt.runs import launchers, stopping
from dpopt.runs.supervisor import Supervisor
from dpopt.runs.worker import News, Tell, work
from dpopt.store import Store
from dpopt.store.runs import RESULTS
from dpopt.suites import plan as planning
from dpopt.suites.suite import Suite, check_engine, other_engines
from dpopt.training import resolve_device
from dpopt.workloads.features import cores

_START = {"inline": "preparing the first cell", "local": "starting {} workers", "span": "starting {} processes"}
"""Engine -> what is shown until the first cell is heard of."""


@dataclass
class SuiteOutcome:
    """The outcome of a suite's cells."""

    ran: int = 0  # cells that were run now and have a result
    skipped: int = 0  # cells that had a result already, or got one from another process
    failed: dict[str, str] = field(default_factory=dict)  # run id -> reason, of this and of earlier attempts
    damaged: list[str] = field(default_factory=list)  # cells whose record cannot be read; left alone
    is_stopped: bool = False  # True if some cells are left because the run was asked to stop


def run_suite(
    suite: Suite,
    results: str | Path | None = None,
    *,
    engine: str | None = None,
    progress: bool | Console = True,
    retry: bool = False,
) -> SuiteOutcome:
    """Train the cells of `suite` that have no result, and add all of them to what the suite has in `results`.

    A run that was killed goes on where it was. Cells that were planned before, with other overrides, stay the suite's.
    Failed and damaged cells are left alone. Cells that other processes run, on any machine, are waited for.

    Args:
        suite: of `load_suite`.
        results: folder; by default the suite's own key.
        engine: where cells run, such as "local" or "inline"; by default the suite's own key.
        progress: whether to show it on stderr, or the console that shows it.
        retry: run cells again that have failed.

    Returns:
        What became of the cells; where it `is_stopped`, the same call goes on.

    Raises:
        ConfigError: something in the suite cannot be used, or data or weights are missing. The suite's cells and what
            is noted of failures are then as before.
        OSError: results cannot be written, or no worker can be started.
    """
    store, engine = open_store(suite, results), engine or suite.engine
    check_engine(engine, "engine")
    store.check_writable()
    planning.require(suite)
    devices = places(suite.device, suite.workers)
    planned = planning.plan(suite, store)
    console = progress if isinstance(progress, Console) else Console(stderr=True, quiet=not progress)
    left = [cell for cell in planning.cheapest_first(planned) if _is_left(cell, store, retry)]
    with ExitStack() as opened:
        # Whatever can be refused is refused before anything is written.
        run = _engine(engine, suite, store, left, devices, opened) if left else None
        for cell in left if retry else ():
            if store.state(cell.run_id) == "failed":
                store.forget_failure(cell.run_id)
        store.extend_suite(suite.name, planning.manifest(suite, planned))

        outcome, before, first = SuiteOutcome(), store.cancelled(suite.name), list(left)

        def stop() -> bool:
            return stopping.is_asked() or store.cancelled(suite.name) != before

        opened.enter_context(stopping.signals())
        while run and left:
            with _board(console, left, outcome, _START.get(engine, "starting jobs").format(len(devices))) as tell:
                run(left, tell, stop)
            if planning.has_stages(suite):  # further cells follow from the results
                planned = planning.plan(suite, store)
                store.extend_suite(suite.name, planning.manifest(suite, planned))
            had = {cell.run_id for cell in left}
            left = [cell for cell in planning.cheapest_first(planned) if _is_left(cell, store)]
            left = [cell for cell in left if cell.run_id not in outcome.failed]  # in whose folder nothing can be noted
            if stop() or had == {cell.run_id for cell in left}:
                break
        outcome.is_stopped = bool(left) and stop()
    if engine not in ("inline", "local", "span"):  # jobs do not tell
        outcome.ran = sum(store.state(cell.run_id) in RESULTS for cell in first)
    for run_id in {entry.cell.run_id: entry for entry in planned}:
        state = store.state(run_id)
        if state in RESULTS:
            outcome.skipped += 1
            outcome.failed.pop(run_id, None)
        elif state == "failed":
            outcome.failed[run_id] = store.error(run_id)["reason"]
        elif state == "damaged":
            outcome.damaged.append(run_id)
    outcome.skipped = max(0, outcome.skipped - outcome.ran)
    return outcome


def open_store(suite: Suite, results: str | Path | None = None) -> Store:
    """The store of a suite, which also logs where the suite asks for it."""
    root = suite.results if results is None else fields.path(results, "results")
    if not suite.log:
        return Store(root)
    from dpopt.store.logs import LoggedStore

    return LoggedStore(root, suite.log)


def run_job() -> NoReturn:
    """Run what a launcher's `Job` writes to stdin, until nothing is left; exits with 1 if it was stopped before."""
    stopping.end_with(int(os.environ["DPOPT_PARENT"]))
    suite, results = pickle.load(sys.stdin.buffer)
    suite = replace(suite, engine="local", options={}, workers=1)
    raise SystemExit(run_suite(suite, results).is_stopped)  # its bar is lines of the job's log


def _is_left(cell: Cell, store: Store, retry: bool = False) -> bool:
    """True if a cell is to be run: it has not ended, or has failed and is to be tried again."""
    return not store.is_settled(cell.run_id) or (retry and store.state(cell.run_id) == "failed")


def _engine(
    name: str, suite: Suite, store: Store, cells: Sequence[Cell], devices: Sequence[str], opened: ExitStack
) -> Callable[[Sequence[Cell], Tell, Callable[[], bool]], None]:
    """The engine `name`, closed with `opened`; `ConfigError` where it cannot be had, or does not run one of `cells`."""
    if name in ("inline", "local", "span") and suite.options:
        raise unknown(f"options of engine {name}", next(iter(suite.options)), [], "it has none")
    if name == "inline":
        return lambda left, tell, stop: work(suite, store, left, tell, stop=stop)
    if name in ("local", "span"):
        if not hasattr(os, "fork"):
            raise ConfigError("engine", name, "this system cannot fork: use inline")
        slots = [tuple(devices)] if name == "span" else [(device,) for device in devices]
        for cell in cells if name == "span" else ():
            if cell.diagnostics:
                reason = "engine 'span' has none: each process sees only its part of a draw"
                raise ConfigError("diagnostics", True, reason)
            if len(devices) > 1 and registry.from_spec("workload", cell.workload).shares_randomness:
                allowed = f"{len(devices)} processes, and records of {cell.workload['name']} share random numbers"
                raise ConfigError("engine", "span", f"{allowed}: say workers=1")
        return lambda left, tell, stop: Supervisor(suite, store, left, slots, tell).run(stop)
    others = other_engines()
    make = others[name].load() if name in others else import_module(f"dpopt.runs.{name}").Launcher
    launcher = opened.enter_context(closing(make(suite)))
    job = launchers.Job(suite, str(store.root))
    return lambda left, tell, stop: launchers.launch(launcher, job, store, left, tell, stop)


def places(name: str, workers: int | None) -> list[str]:
    """The device of each worker: by default one worker for each GPU, or for each core; more share the GPUs in turn.

    Raises:
        ConfigError: there is no such device; see `training.resolve_device`.
    """
    # GPUs are counted without touching them: a process that has cannot be forked.
    gpus = torch.cuda.device_count() if name == "auto" or name.startswith("cuda") else 0
    if name.startswith("cuda:") and gpus and name[5:].isdigit():
        if int(name[5:]) >= gpus:
            raise ConfigError("device", name, f"not available: this machine has {gpus} GPUs")
        devices = [name]
    elif gpus and name in ("auto", "cuda"):
        devices = [f"cuda:{index}" for index in range(gpus)]
    else:
        is_cpu = resolve_device(name).type == "cpu"
        devices = [name] * (cores() if is_cpu and workers is None else 1)
    return list(islice(cycle(devices), workers or len(devices)))


@contextmanager
def _board(console: Console, cells: Sequence[Cell], outcome: SuiteOutcome, start: str) -> Iterator[Tell]:
    """A function that shows how far a suite is, when a worker tells; until then what it `start`s with."""
    named = {cell.run_id: f"{cell.optimizer['name']}, ε = {cell.epsilon:g}" for cell in cells}
    total, began, before = len(cells), time.monotonic(), outcome.ran
    # Without a thread of its own, as workers are forked from this process.
    plain = {"auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}

    def tell(news: News) -> None:
        nonlocal total
        if news.kind == "blocked":
            raise OSError(f"results cannot be written: {news.reason}; the same command goes on when they can")
        outcome.ran += news.kind == "done"
        if news.kind == "failed":
            outcome.failed[news.run_id] = news.reason
            console.print(Text.assemble(("failed ", "red"), lines(f"{news.run_id}: {news.reason}")))
        if news.kind == "ready":
            return
        total = max(total, news.left)  # further cells follow from results
        doing = news.reason if news.kind in ("note", "waiting") else named.get(news.run_id, "")
        ran, minutes = outcome.ran - before, (time.monotonic() - began) / 60
        rate = f"{ran / minutes:.0f} a minute" if ran else ""
        failed = f"{len(outcome.failed)} failed" if outcome.failed else ""
        show("cells", total - news.left, total, ", ".join(filter(None, (rate, failed, doing))))

    with bars.bar(console, not console.quiet, has_lines=True, **plain) as show:
        show(start)
        yield tell
