"""`dpopt bench`: which groups are measured, and the record that a run leaves."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import count, product
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from dpopt import bars, configurations, fields, registry
from dpopt.bench.cases import CASES, Case
from dpopt.bench.contenders import ENGINES, Contender, Task, engine_group, optimizer_group
from dpopt.bench.measure import measure, ratios
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Few, Positive, Several
from dpopt.store.provenance import provenance
from dpopt.training import resolve_device
from dpopt.workloads.features import threads
from dpopt.workloads.models import SUBSETS


@dataclass(frozen=True)
class BenchKeys:
    """The keys of `dpopt bench`; `conf/base/bench.yaml` says what each key means."""

    cases: list[Case]
    subsets: list[str]
    engines: list[str]
    optimizers: list[str]
    probe_every: Several[Few]
    batch_size: Few | None
    precision: Literal["float32", "bfloat16"]
    tiny: bool
    rounds: Few
    limit: Positive | None
    threads: Several[Few] | None
    device: torch.device
    results: Path
    plots: Path


def settings(overrides: Sequence[str] = ()) -> BenchKeys:
    """The defaults with Hydra overrides such as `cases=[mlp]`."""
    values = configurations.command("bench", overrides)
    names = {"cases": CASES, "subsets": SUBSETS, "engines": ENGINES, "optimizers": registry.optimizers()}
    chosen: dict[str, Any] = {key: _names(values, key, names) for key, names in names.items()}
    chosen["cases"] = [CASES[name] for name in chosen["cases"]]
    chosen["device"] = resolve_device(fields.convert(values["device"], str, "device", {}))
    keys = fields.build(BenchKeys, values | chosen, "bench")
    cases = [case.rehearsal() if keys.tiny else case for case in keys.cases]
    if keys.batch_size:
        cases = [dataclasses.replace(case, batch_size=keys.batch_size) for case in cases]
    return dataclasses.replace(keys, cases=cases)


def bench(chosen: BenchKeys, console: Console | None = None) -> dict[str, Any]:
    """Measure everything that `chosen` names and return the record; `results/README.md` says what it holds."""
    groups, skipped = find_groups(chosen)
    rows: list[dict[str, Any]] = []
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.perf_counter()
    # Each contender is heard of when it is warm, in every round, and when its memory is measured.
    used = chosen.threads or (torch.get_num_threads(),)
    total, ended = len(used) * sum(len(group) for *_, group in groups) * (2 + chosen.rounds), count(1)
    with bars.bar(console) as show:
        for (kind, case, subset, group), number in product(groups, used):

            def advance(name: str, where: str = f"{case.name} {subset}") -> None:
                show("measurements", next(ended), total, f"{where}: {name}")

            with threads(number):
                results = measure(group, chosen.rounds, chosen.device, advance, chosen.limit)
            common = {"kind": kind, "case": case.name, "subset": subset, "batch_size": case.batch_size}
            parameters, trained = case.counts(subset)
            common |= {"precision": chosen.precision, "threads": number, "parameters": parameters, "trained": trained}
            rows += [common | row for row in ratios(group, results)]
    return {
        "schema": 1,
        "started": started,
        "seconds": time.perf_counter() - clock,
        "threads": used,
        "cores": os.cpu_count(),
        "rows": rows,
        "skipped": skipped,
        "provenance": provenance(chosen.device),
    }


def find_groups(chosen: BenchKeys) -> tuple[list[tuple[str, Case, str, list[Contender]]], list[str]]:
    """Kind, case, subset and contenders that take turns, and what is left out because a model has no such subset."""
    groups: list[tuple[str, Case, str, list[Contender]]] = []
    skipped: list[str] = []
    for case in chosen.cases:
        subsets = []
        for subset in chosen.subsets:
            try:
                case.counts(subset)
                subsets.append(subset)
            except ConfigError as error:
                skipped.append(f"{case.name}: {error}")
        tasks = [Task(case, subset, chosen.device, chosen.precision) for subset in subsets]
        for task in tasks if chosen.engines else ():
            groups.append(("engine", case, task.subset, engine_group(chosen.engines, task)))
        # An optimizer's own cost is that of its vectors, so one subset tells it.
        for task in tasks[:1] if chosen.optimizers else ():
            contenders = optimizer_group(chosen.optimizers, chosen.probe_every, task)
            groups.append(("optimizer", case, task.subset, contenders))
    if not groups:
        raise ConfigError("bench", skipped or "no engines and no optimizers", "there is nothing to measure")
    return groups, skipped


def _names(values: dict[str, Any], key: str, allowed: Iterable[str]) -> list[str]:
    allowed, value = list(allowed), values[key]
    if value in ("all", "none"):
        return allowed if value == "all" else []
    names = fields.listed(value)
    for name in names:
        if name not in allowed:
            raise unknown(key, name, [*allowed, "all"])
    return list(dict.fromkeys(names))  # the same name again would be two contenders of one name
