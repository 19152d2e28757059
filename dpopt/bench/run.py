"""`dpopt bench`: which groups are measured, and the record that a run leaves."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpopt import configurations, fields, registry
from dpopt.bench.cases import CASES, Case
from dpopt.bench.contenders import ENGINES, Contender, engine_group, optimizer_group
from dpopt.bench.measure import measure, ratios
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Few, Positive, Several
from dpopt.store.provenance import provenance
from dpopt.training import resolve_device
from dpopt.workloads.models import SUBSETS

SCHEMA = 1
Precision = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class BenchKeys:
    """The keys of `dpopt bench`; `conf/base/bench.yaml` says what each key means."""

    cases: list[Case]
    subsets: list[str]
    engines: list[str]
    optimizers: list[str]
    probe_every: Several[Few]
    precision: Precision
    rounds: Few
    limit: Positive | None
    threads: Few | None
    device: torch.device
    results: Path
    plots: Path


@dataclass(frozen=True)
class Shapes:
    """The sizes of the cases."""

    tiny: bool
    batch_size: Few | None

    def of(self, case: Case) -> Case:
        """The case with these shapes."""
        case = case.rehearsal() if self.tiny else case
        return case if self.batch_size is None else dataclasses.replace(case, batch_size=self.batch_size)


@dataclass(frozen=True)
class Group:
    """Contenders that take turns on one case."""

    kind: Literal["engine", "optimizer"]
    case: Case
    subset: str
    contenders: list[Contender]


def settings(overrides: Sequence[str] = ()) -> BenchKeys:
    """The defaults with Hydra overrides such as `cases=[mlp]`.

    Raises:
        ConfigError: an unknown name, or a value that cannot be used.
    """
    values = configurations.command("bench", overrides)
    shapes = fields.build(Shapes, {key: values.pop(key) for key in ("tiny", "batch_size")}, "bench")
    names = {"cases": CASES, "subsets": SUBSETS, "engines": ENGINES, "optimizers": registry.optimizers()}
    chosen: dict[str, Any] = {key: _names(values, key, names) for key, names in names.items()}
    chosen["cases"] = [shapes.of(CASES[name]) for name in chosen["cases"]]
    chosen["device"] = resolve_device(fields.convert(values["device"], str, "device", {}))
    return fields.build(BenchKeys, values | chosen, "bench")


def bench(chosen: BenchKeys, console: Console | None = None) -> dict[str, Any]:
    """Measure everything that `chosen` names and return the record; `results/README.md` says what it holds.

    Args:
        chosen: see `settings`.
        console: where progress goes.

    Raises:
        ConfigError: there is nothing to measure.
    """
    groups, skipped = grouped(chosen)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    with _threads(chosen.threads) as threads, _progress(groups, chosen.rounds, console) as advance:
        rows = [row for group in groups for row in _rows(group, chosen, advance)]
    return {
        "schema": SCHEMA,
        "started": started,
        "seconds": time.perf_counter() - clock,
        "threads": threads,
        "cores": os.cpu_count(),
        "rows": rows,
        "skipped": skipped,
        "provenance": provenance(chosen.device),
    }


def grouped(chosen: BenchKeys) -> tuple[list[Group], list[str]]:
    """The groups to measure, and what is left out because a model has no such subset.

    Raises:
        ConfigError: nothing is left.
    """
    groups: list[Group] = []
    skipped: list[str] = []
    for case in chosen.cases:
        subsets = []
        for subset in chosen.subsets:
            try:
                case.counts(subset)
                subsets.append(subset)
            except ConfigError as error:
                skipped.append(f"{case.name}: {error}")
        for subset in subsets if chosen.engines else ():
            contenders = engine_group(tuple(chosen.engines), case, subset, chosen.device, chosen.precision)
            groups.append(Group("engine", case, subset, contenders))
        # An optimizer's own cost is that of its vectors, so one subset tells it.
        for subset in subsets[:1] if chosen.optimizers else ():
            where = (case, subset, chosen.device, chosen.precision)
            contenders = optimizer_group(tuple(chosen.optimizers), chosen.probe_every, *where)
            groups.append(Group("optimizer", case, subset, contenders))
    if not groups:
        raise ConfigError("bench", skipped or "no engines and no optimizers", "there is nothing to measure")
    return groups, skipped


def _rows(group: Group, chosen: BenchKeys, advance: Callable[[str], None]) -> list[dict[str, Any]]:
    where = f"{group.case.name} {group.subset}"
    results = measure(
        group.contenders, chosen.rounds, chosen.device, lambda name: advance(f"{where}: {name}"), chosen.limit
    )
    parameters, trained = group.case.counts(group.subset)
    common = {
        "kind": group.kind,
        "case": group.case.name,
        "subset": group.subset,
        "batch_size": group.case.batch_size,
        "precision": chosen.precision,
        "parameters": parameters,
        "trained": trained,
    }
    return [common | row for row in ratios(group.contenders, results)]


def _names(values: dict[str, Any], key: str, allowed: Iterable[str]) -> list[str]:
    allowed, value = list(allowed), values[key]
    if value in ("all", "none"):
        return allowed if value == "all" else []
    names = fields.listed(value)
    for name in names:
        if name not in allowed:
            raise unknown(key, name, [*allowed, "all"])
    return list(dict.fromkeys(names))  # the same name again would be two contenders of one name


@contextmanager
def _threads(count: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


@contextmanager
def _progress(groups: Sequence[Group], rounds: int, console: Console | None) -> Iterator[Callable[[str], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=console is None, transient=True) as progress:
        # Each contender is heard of when it is warm, in every round, and when its memory is measured.
        task = progress.add_task("", total=sum(len(group.contenders) for group in groups) * (2 + rounds))
        yield lambda done: progress.update(task, advance=1, description=done)
