"""`dpopt audit`: lower bounds on epsilon for optimizers on a suite's workload, and for broken mechanisms."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from rich.console import Console

from dpopt import audit, bars, clipping, configurations, fields, registry
from dpopt.cells import Cell
from dpopt.configurations import first_key
from dpopt.errors import ConfigError, unknown
from dpopt.privacy.ledger import number_of_draws, sampling_rate
from dpopt.privacy.sampling import derive
from dpopt.runs.remote import side_by_side
from dpopt.runs.run_suite import places
from dpopt.store.provenance import provenance
from dpopt.suites import plan as planning
from dpopt.suites.suite import Suite, load_suite


@dataclass(frozen=True)
class AuditKeys:
    """The keys of an audit; `conf/base/audit.yaml` says what each key means."""

    suite: Suite
    trials: fields.Many
    game_draws: fields.Many | None
    canaries: fields.Many
    significance: fields.Probability
    controls: bool
    seed: fields.Seed


_Row = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""The columns of a row that need no computation, and a function that computes the rest in another process."""


def settings(overrides: Sequence[str] = ()) -> AuditKeys:
    """The defaults with Hydra overrides, of the audit's keys or of the suite's; ConfigError if one cannot be used."""
    keys, of_suites = configurations.keys("audit"), configurations.keys("suite")
    for key in map(first_key, overrides):
        if key not in keys + of_suites:
            raise unknown("override", key, keys + of_suites)
    values = configurations.command("audit", [override for override in overrides if first_key(override) in keys])
    names = values.pop("optimizers")
    names = registry.optimizers() if names == "all" else fields.several(names, fields.Name, "optimizers")
    rest = [override for override in overrides if first_key(override) not in keys]
    suite = load_suite(values["suite"], [*rest, f"optimizers=[{','.join(names)}]", "seeds=0"])
    return fields.build(AuditKeys, values | {"suite": suite}, "audit")


def run(chosen: AuditKeys, console: Console | None = None) -> dict[str, Any]:
    """Audit everything that `chosen` names and return the record; `results/README.md` says what it holds.

    A row that fails says why; the others are not lost. ConfigError if there is nothing to audit.
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    tasks = list(_tasks(chosen))
    # An empty record would look like an audit that was passed.
    if not tasks:
        raise ConfigError("audit", list(chosen.suite.epsilon), "no finite epsilon and no controls: nothing to audit")
    return {
        "schema": 1,
        "suite": chosen.suite.name,
        "started": started,
        "rows": _rows(tasks, len(places("cpu", chosen.suite.workers)), console),
        "seconds": time.perf_counter() - clock,
        "significance": chosen.significance,
        "game_draws": chosen.game_draws,
        "seed": chosen.seed,
        "provenance": provenance(torch.device("cpu")),
    }


def _tasks(chosen: AuditKeys) -> Iterator[_Row]:
    for number, control in enumerate(audit.controls() if chosen.controls else ()):  # one takes long: it goes first
        head = {"kind": "control", "name": control.name, "what": control.mistake}
        head |= {"epsilon_target": control.epsilon, "delta": control.delta}
        yield head, partial(_control, number, chosen.seed)
    for label, cell in _cells(chosen.suite):
        head = {"kind": "optimizer", "name": label, "epsilon_target": cell.epsilon, "delta": cell.delta}
        yield head, partial(_optimizer, label, cell, chosen)


def _cells(suite: Suite) -> Iterator[tuple[str, Cell]]:
    """The first cell of each row of the suite at each finite epsilon."""
    seen = set()
    planning.require(suite)
    for entry in planning.plan(suite):
        key = (entry.label, entry.cell.epsilon, str(entry.cell.workload), entry.cell.batch_size, entry.cell.epochs)
        # Seeds and grids of a row release alike, so that one cell stands for all of them.
        if entry.cell.epsilon < math.inf and key not in seen:
            seen.add(key)
            yield entry.label, entry.cell


def _rows(tasks: list[_Row], workers: int, console: Console | None) -> list[dict[str, Any]]:
    rows = [dict[str, Any]() for _ in tasks]
    bar = bars.bar(console, has_lines=True)
    # A row that fails, or runs out of memory in its process, does not end the others.
    with bar as show, closing(side_by_side([find for _, find in tasks], workers)) as answers:
        for done, (number, answer, failure) in enumerate(answers, 1):
            head = tasks[number][0]
            rows[number] = head | (answer or {"epsilon": None}) | {"failure": failure}
            show("audits", done, len(tasks), head["name"])
    return rows


def _optimizer(label: str, cell: Cell, chosen: AuditKeys) -> dict[str, Any]:
    torch.set_num_threads(1)
    workload = registry.from_spec("workload", cell.workload)
    train = workload.splits(cell.seed).train
    # The parameters of the suite's own runs, so that the audit is of what is trained.
    torch.manual_seed(derive("init", cell.workload, cell.seed) >> 65)
    # At once, as a canary's row is added to the records as the model takes them.
    x = workload.transform(train.x)
    engine = clipping.engine(workload.model(), workload.loss, sample=(x[:3], train.y[:3]))
    result = audit.audit(
        registry.from_spec("optimizer", cell.optimizer),
        epsilon=cell.epsilon,
        delta=cell.delta,
        rate=sampling_rate(cell.batch_size, len(x)),
        draws=number_of_draws(cell.epochs, cell.batch_size, len(x)),
        accountant=cell.accountant,
        trials=chosen.trials,
        game_draws=chosen.game_draws,
        canaries=min(chosen.canaries, engine.dimension),
        significance=chosen.significance,
        engine=engine,
        x=x,
        y=train.y,
        grid=cell.grid,
        seed=derive("audit", label, cell.epsilon, chosen.seed),  # rows are evidence of their own
    )
    return dataclasses.asdict(result) | {"trials": (result.trials, result.trials)}


def _control(number: int, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    started, control = time.perf_counter(), audit.controls()[number]
    bound = control.bound(control.scores(seed=seed))
    seconds = time.perf_counter() - started
    return {"epsilon": control.epsilon, "worst_case": bound, "trials": control.trials, "seconds": seconds}
