"""Commands that plan and train cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpopt import fields
from dpopt.cli.console import ERR, OUT, complain, print_table, stored, suite_name
from dpopt.errors import ConfigError, Missing

if TYPE_CHECKING:
    from rich.console import Console

    from dpopt.harness.cost import Row, Timing
    from dpopt.harness.engines import Setup
    from dpopt.harness.flops import Rate, Work
    from dpopt.harness.rows import Planned
    from dpopt.harness.suite import Suite
    from dpopt.store import Store

SHOWN = 5
"""The most cells that are listed for one reason why they failed."""
PROBE = 5
"""Draws that time a row where `max_hours` has to know."""


def plan(overrides: Sequence[str]) -> None:
    """Show a suite's cells by state and what they cost, and write its manifest; needs neither data nor weights.

    probe=20 times 20 draws of each row. What was never timed is estimated by its FLOPs: on this machine, on a device
    that is known (flops=h100), or at a rate (flops=2e13, a second).
    """
    from dpopt.harness import cost, flops
    from dpopt.harness import plan as planning
    from dpopt.training import resolve_device

    own = [override for override in overrides if override.startswith(("probe=", "flops="))]
    given = {key: value for key, _, value in (override.partition("=") for override in own)}
    limit = fields.convert(given["probe"], fields.Count, "probe", {}) if "probe" in given else 0
    suite, store, planned = _plan([override for override in overrides if override not in own])
    rate = flops.rate(given.get("flops"), resolve_device(suite.device))
    if limit and rate.device:
        raise ConfigError("probe", limit, f"it times this machine, no {rate.device}: leave one of both keys out")
    rows = cost.rows(planned, store)
    timings = cost.timings(rows, store, suite, limit, ERR, rate)
    for workload, table in _costs(rows, timings).items():
        OUT.print(workload, style="bold")
        print_table(table)
    _tell_failures(rows, timings, OUT)
    cells = len({entry.cell.run_id for entry in planned})
    OUT.print(f"{cells} distinct cells of suite {suite.name}; results in {store.root}")
    for line in (_estimate(rows, timings, suite, rate), *_basis(timings, rate), *_absent(planning.missing(suite))):
        OUT.print(line)


def _costs(rows: list[Row], timings: dict[int, Timing]) -> dict[str, dict[str, list[str]]]:
    """What `dpopt plan` prints: workload -> column -> cells, without the columns that say nothing in any table."""
    from dpopt.analysis.naming import workload_names

    names = workload_names([row.cells[0].workload for row in rows])
    timed = [timings.get(number) for number in range(len(rows))]
    lines = [
        _line(row, timing if timing and not timing.failure else None) for row, timing in zip(rows, timed, strict=True)
    ]
    is_told = {name: any(line[name] for line in lines) for name in lines[0]}
    is_told["B"] = len({line["B"] for line in lines}) > 1
    tables: dict[str, dict[str, list[str]]] = {}
    for row, line in zip(rows, lines, strict=True):
        name = names[json.dumps(row.cells[0].workload, sort_keys=True)]
        table = tables.setdefault(name + (f": {_size(row.work)}" if row.work else ""), {})
        for name, text in line.items():
            if is_told[name]:
                table.setdefault(name, []).append(text)
    return tables


def _size(work: Work) -> str:
    return f"d = {work.dimension:,}, {work.gradient:.2g} FLOPs a gradient"


def _line(row: Row, timing: Timing | None) -> dict[str, str]:
    about = "~" if timing and timing.is_estimate else ""
    return {
        "optimizer": row.label,
        "tuning": row.tuning,
        "B": str(row.cells[0].batch_size),
        "cells": str(len(row.cells)),
        "done": str(row.done),
        "failed": str(row.failed),
        "to run": str(len(row.waiting)),
        "draws": "-".join(map(str, dict.fromkeys(row.draws))),
        "gradients": f"{row.gradients:.1e}" if row.waiting else "",
        "FLOPs": f"{row.operations:.1e}" if row.waiting and row.operations else "",
        "ms/draw": f"{about}{1e3 * timing.draw:.3g}" if timing else "",
        "MB": f"{timing.memory / 1e6:.0f}" if timing and timing.memory else "",
        "hours": f"{about}{row.seconds(timing) / 3600:.2g}" if timing and row.waiting else "",
    }


def _estimate(rows: list[Row], timings: dict[int, Timing], suite: Suite, rate: Rate | None = None) -> str:
    """How long what is to be run will take, in one line: on the device that `rate` names, or on this machine."""
    from dpopt.harness import cost

    waiting = [number for number, row in enumerate(rows) if row.waiting]
    known = [number for number in waiting if number in timings and not timings[number].failure]
    counted = sum(rows[number].operations or 0 for number in waiting) if rate else 0
    gradients = f"{sum(row.gradients for row in rows):.1e} gradient evaluations"
    gradients += f", {counted:.1e} FLOPs to run" if counted else " to run"
    if not known:
        return f"{gradients}; probe=20 estimates how long they take" if waiting else "nothing to run"
    workers = (suite.workers or 1) if rate and rate.device else cost.workers(suite)
    hours = cost.hours(rows, timings, workers)
    missing = f" without {len(waiting) - len(known)} rows that were not timed" if len(known) < len(waiting) else ""
    where = f"on {workers} {rate.device}" if rate and rate.device else f"with workers = {workers}"
    each = f" ({_clock(workers * hours)} if it were one)" if workers > 1 else ""
    return f"{gradients}, about {_clock(hours)} {where}{each}{missing}"


def _basis(timings: Mapping[int, Timing], rate: Rate) -> list[str]:
    """What the times rest on that nothing was timed for."""
    from dpopt.harness.cost import CALL

    if not any(timing.is_estimate for timing in timings.values()):
        return []
    return [f"~ by FLOPs ({rate.basis}) and {1e3 * CALL:g} ms a gradient; probe=20 times real draws"]


def _absent(missing: Sequence[Missing]) -> list[str]:
    """Which data and weights are not on this machine, and whether `dpopt run` begins without them."""
    loaded = [entry for entry in missing if entry.hub]
    refused = [entry for entry in missing if not entry.hub]
    lines = [f"loaded from the hub when first needed: {_listed(loaded)}"] if loaded else []
    return lines + ([f"missing: {_listed(refused)}", f"`dpopt run` refuses: {refused[0]}"] if refused else [])


def _listed(missing: Sequence[Missing]) -> str:
    kinds: dict[str, list[str]] = {}
    for entry in missing:
        kinds.setdefault(entry.kind, []).append(entry.name)
    return "; ".join(f"{kind} {', '.join(sorted(names))}" for kind, names in sorted(kinds.items()))


def _clock(hours: float) -> str:
    return f"{hours:.3g} hours" if hours >= 2 else f"{60 * hours:.2g} minutes"


def _tell_failures(rows: list[Row], timings: dict[int, Timing], console: Console) -> None:
    """Print which rows could not be timed, and why."""
    for number, timing in timings.items():
        if timing.failure:
            console.print(f"{rows[number].label} failed: {timing.failure}")


def _refuse_longer(suite: Suite, store: Store, planned: list[Planned]) -> None:
    """Raise `ConfigError` where a suite is estimated to take more than its `max_hours`."""
    from dpopt.harness import cost

    if suite.max_hours is None:
        return
    rows = cost.rows(planned, store)
    timings = cost.timings(rows, store, suite, PROBE, ERR)
    _tell_failures(rows, timings, ERR)
    if cost.hours(rows, timings, cost.workers(suite)) > suite.max_hours:
        raise ConfigError("max_hours", suite.max_hours, _estimate(rows, timings, suite))


def run(overrides: Sequence[str]) -> int:
    """Train what is not done of a suite; a run that was killed goes on where it was."""
    from dpopt.harness import cost, engines, stopping
    from dpopt.harness import plan as planning
    from dpopt.harness.execute import Outcome, Policy, execute
    from dpopt.training import resolve_device

    suite, store, planned = _plan(overrides, is_run=True)
    resolve_device(suite.device)
    _refuse_longer(suite, store, planned)
    store = _logged(store, suite.log)
    lot = suite.lot if suite.engine in engines.JOINING and not suite.isolate else 1
    policy, before = Policy(suite.timeout, suite.retries, suite.retry_on, lot), store.cancelled(suite.name)

    def make_engine() -> engines.Engine:
        return engines.create(suite.engine, store, _setup(suite))

    def is_stopped() -> bool:
        return stopping.is_asked() or store.cancelled(suite.name) != before

    outcome, cells = Outcome(), cost.cheapest_first(planned)
    while cells and not outcome.is_stopped:  # some cells follow from the outcome of others
        with stopping.signals():
            execute(cells, store, make_engine, ERR, outcome, policy, is_stopped)
        known = {entry.cell.run_id for entry in planned}
        planned = _plan(overrides)[2] if planning.has_stages(suite) else planned
        cells = cost.cheapest_first(entry for entry in planned if entry.cell.run_id not in known)
    ERR.print(
        f"{outcome.ran} cells run, {outcome.skipped} were done, {len(outcome.failed)} failed, "
        f"{len(outcome.damaged)} damaged",
    )
    if outcome.failed:
        _explain(store, suite.name, planned, outcome.failed)
    for run_id in outcome.damaged:
        ERR.print(f"damaged {store.folder(run_id)}: move it away to run the cell again")
    if outcome.is_stopped:
        raise KeyboardInterrupt
    return 1 if outcome.failed or outcome.damaged else 0


def _logged(store: Store, logs: tuple[str, ...]) -> Store:
    """`store`, which also logs where that is asked for."""
    if not logs:
        return store
    from dpopt.store.logs import LoggedStore

    return LoggedStore(store.root, logs)


def _explain(store: Store, suite: str, planned: list[Planned], failed: Mapping[str, str]) -> None:
    """Say why cells failed and where, once for each reason."""
    from dpopt.analysis.report.content import Failure, explained, place

    noted = {run_id for run_id in failed if store.state(run_id) == "failed"}
    cells = {entry.cell.run_id: entry for entry in planned if entry.cell.run_id in noted}
    places = {
        run_id: place(entry.label, entry.cell.workload["name"], entry.target, entry.cell.seed)
        for run_id, entry in cells.items()
    }
    others = [Failure(reason, "", [run_id]) for run_id, reason in failed.items() if run_id not in places]
    for reason, traceback, runs in [*explained(store, places), *others]:
        lines = [*traceback.splitlines(), *runs[:SHOWN]]
        lines += [f"and {len(runs) - SHOWN} more"] if len(runs) > SHOWN else []
        complain("failed", reason)
        ERR.print("\n".join(f"  {line}" for line in lines))
    ERR.print(f"to run them again: dpopt retry suite={suite}")


def _setup(suite: Suite) -> Setup:
    from dpopt.harness.engines import Setup

    memory = None if suite.memory is None else round(1e9 * suite.memory)
    return Setup(
        device=suite.device,
        physical_batch=suite.physical_batch,
        isolate=suite.isolate,
        workers=suite.workers,
        memory=memory,
        grace=suite.grace,
        options=suite.options,
    )


def cancel(overrides: Sequence[str]) -> None:
    """Ask the processes that run a suite, on any machine, to stop; running cells write a checkpoint first."""
    name, store, _, _ = stored(overrides)
    store.manifest(name)
    store.cancel(name)
    OUT.print(f"asked; `dpopt run suite={name}` goes on")


def retry(overrides: Sequence[str]) -> int:
    """Run a suite's failed cells again, with the rest of what is not done."""
    _, store, planned = _plan(overrides)
    for entry in planned:
        if store.state(entry.cell.run_id) == "failed":
            store.forget_failure(entry.cell.run_id)
    return run(overrides)


def _plan(overrides: Sequence[str], is_run: bool = False) -> tuple[Suite, Store, list[Planned]]:
    """Load and plan a suite, and note its cells in the store; one that is to be run needs its data and weights."""
    from dpopt.harness import plan as planning
    from dpopt.harness.suite import load_suite
    from dpopt.store import Store

    name, rest = suite_name(overrides)
    suite = load_suite(name, rest)
    store = Store(Path(suite.results))
    store.check_writable()
    if is_run:
        planning.require(suite)
    planned = planning.plan(suite, store)
    store.write_manifest(suite.name, planning.manifest(suite, planned))
    return suite, store, planned
