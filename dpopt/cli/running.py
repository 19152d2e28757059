"""Commands that plan and train cells, or measure what a step costs and how private it is."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from dpopt.cli.console import ERR, OUT, complain, print_table, report_problems
from dpopt.cli.keys import OfSuite, read, suite_name
from dpopt.cli.listing import print_notes
from dpopt.errors import ConfigError
from dpopt.fields import Count, Name, key

if TYPE_CHECKING:
    from pandas import DataFrame

    from dpopt.store import Store
    from dpopt.suites.estimate import CostRow
    from dpopt.suites.searches import Planned

SHOWN = 5  # of cells that failed for one reason
_OPTIONAL = ("FLOPs", "gradients", "draws", "tuning", "MB", "ms/draw", "B")
"""Columns of `plan` that a narrow terminal leaves out, the first of them first."""


@dataclass(frozen=True, kw_only=True)
class SuiteKeys:
    """The key that names a suite; the others are keys of its file."""

    suite: Name = key("the suite: its name, or its file")


@dataclass(frozen=True, kw_only=True)
class PlanKeys(SuiteKeys):
    """Keys of `dpopt plan`."""

    timed_draws: Count | None = key("20: time 20 draws of each row; others are estimated by their FLOPs", None)


def plan(overrides: Sequence[str]) -> None:
    """Show a suite's cells by state, their cost, and where it leaves the protocol; writes nothing, needs no data."""
    from pandas import DataFrame

    from dpopt.results.writing import Table
    from dpopt.runs import probe
    from dpopt.runs.run_suite import open_store, places
    from dpopt.suites import estimate, protocol
    from dpopt.suites import plan as planning
    from dpopt.suites.suite import load_suite

    of_plan = [word for word in overrides if word.startswith(("suite=", "timed_draws="))]
    limit = read(PlanKeys, of_plan, "plan").timed_draws or 0
    suite = load_suite(*suite_name([word for word in overrides if not word.startswith("timed_draws=")]))
    store = open_store(suite)
    planned = planning.plan(suite, store)
    rows = estimate.rows(planned, store, suite.marks)
    start = time.process_time()  # a run imports and plans the same before its first cell
    at_once = 1 if suite.engine in ("inline", "span") else len(places(suite.device, suite.workers))
    # Workers share the machine: a draw is timed with as many beside it as will train.
    probe.find_times(rows, store, suite, at_once, limit, ERR)
    for workload, lines in _costs(rows).items():
        print_table(Table(DataFrame(lines, dtype=object), workload, optional=_OPTIONAL))
    for row in rows:
        if row.timing and row.timing.failure:
            OUT.print(f"{row.label} failed: {row.timing.failure}")
    for line in protocol.departures(planned):
        OUT.print(f"protocol: {line}", soft_wrap=False)
    print_notes(dict.fromkeys(entry.cell.optimizer["name"] for entry in planned))
    cells = len({entry.cell.run_id for entry in planned})
    OUT.print(f"{cells} distinct cells of suite {suite.name}; results in {store.root}")
    if further := planning.to_follow(planned, store):
        OUT.print(f"up to {further} further cells follow, where the best of a grid lies at its end")
    OUT.print(estimate.summary(rows, at_once, start), soft_wrap=False)
    if any(row.timing and row.timing.is_estimate for row in rows):
        share, call = f"{estimate.SHARE:.0%} of a product of matrices here", f"{1e3 * estimate.CALL:g} ms a gradient"
        OUT.print(f"~ by FLOPs ({share}), {call} and {estimate.PREPARE:g} s to prepare a cell", soft_wrap=False)
        later = "features and data that are made when first needed"
        OUT.print(f"not in it: {later}; timed_draws=20 times real draws", soft_wrap=False)
    missing = planning.missing(suite)
    for title, is_loaded in (("loaded from the hub when first needed", True), ("missing", False)):
        kinds: dict[str, list[str]] = {}
        for entry in missing:
            if bool(entry.hub) == is_loaded:
                kinds.setdefault(entry.kind, []).append(entry.name)
        if kinds:
            listed = "; ".join(f"{kind} {', '.join(sorted(names))}" for kind, names in sorted(kinds.items()))
            OUT.print(f"{title}: {listed}")
    if refused := next((entry for entry in missing if not entry.hub), None):
        OUT.print(f"`dpopt run` refuses: {refused}")  # it stops at the first


def _costs(rows: list[CostRow]) -> dict[str, list[dict[str, str]]]:
    from dpopt.results.naming import readable_names

    names = readable_names([row.cells[0].workload for row in rows])
    lines = [_line(row) for row in rows]
    # A column that says nothing in any table only makes the others narrow.
    is_shown = {name: any(line[name] for line in lines) for name in lines[0]}
    is_shown["B"] = len({line["B"] for line in lines}) > 1
    tables: dict[str, list[dict[str, str]]] = {}
    for row, line, name in zip(rows, lines, names, strict=True):
        size = f": d = {row.work.dimension:,}, {row.work.gradient:.2g} FLOPs a gradient" if row.work else ""
        tables.setdefault(name + size, []).append({name: text for name, text in line.items() if is_shown[name]})
    return tables


def _line(row: CostRow) -> dict[str, str]:
    timing = None if row.timing and row.timing.failure else row.timing
    about = "~" if timing and timing.is_estimate else ""
    return {
        "optimizer": row.label,
        "tuning": row.tuning,
        "B": str(row.cells[0].batch_size),
        "cells": str(len(row.cells)),
        "done": str(row.done),
        "failed": str(row.states.count("failed")),
        "damaged": str(row.states.count("damaged") or ""),
        "to run": str(len(row.waiting)),
        "draws": "-".join(map(str, dict.fromkeys(row.draws))),
        "gradients": f"{row.gradients:.1e}" if row.waiting else "",
        "FLOPs": f"{row.operations:.1e}" if row.waiting and row.operations else "",
        "ms/draw": f"{about}{1e3 * timing.draw:.3g}" if timing else "",
        "MB": f"{timing.memory / 1e6:.0f}" if timing and timing.memory else "",
        "hours": f"{about}{row.seconds / 3600:.2g}" if row.seconds is not None and row.waiting else "",
    }


def run(overrides: Sequence[str], is_again: bool = False) -> int:
    """Train what is not done of a suite, and add its cells to those that the suite has; a run that was killed goes on.

    Which rows one looks at is for the commands that read: `dpopt table suite=NAME optimizers=[fiber] epsilon=3`.
    """
    from dpopt.runs.run_suite import open_store, run_suite
    from dpopt.suites import plan as planning
    from dpopt.suites.suite import load_suite

    suite = load_suite(*suite_name(overrides))
    outcome = run_suite(suite, progress=ERR, retry=is_again)
    ERR.print(
        f"{outcome.ran} cells run, {outcome.skipped} were done, {len(outcome.failed)} failed, "
        f"{len(outcome.damaged)} damaged",
    )
    store = open_store(suite)
    if outcome.failed:
        _explain(store, planning.plan(suite), outcome.failed)
        ERR.print(f"to run them again: {shlex.join(['dpopt', 'retry', *overrides])}", soft_wrap=True)
    for run_id in outcome.damaged:
        ERR.print(f"damaged {store.folder(run_id)}: move it away to run the cell again")
    if outcome.is_stopped:
        raise KeyboardInterrupt
    if outcome.failed or outcome.damaged:
        return 1
    place = "" if suite.results == Path("results") else f" results={suite.results}"
    ERR.print(f"next: dpopt table suite={suite.name}{place}", style="dim")
    return 0


def retry(overrides: Sequence[str]) -> int:
    """Run a suite's failed cells again, with the rest of what is not done."""
    return run(overrides, is_again=True)


def _explain(store: Store, planned: list[Planned], failed: Mapping[str, str]) -> None:
    cells = {entry.cell.run_id: entry for entry in planned}
    reasons: dict[str, tuple[str, list[str]]] = {}
    # One bad value fails every cell of a grid: each reason is printed once.
    for run_id, reason in failed.items():
        place, end = run_id, ""
        if run_id in cells and store.state(run_id) == "failed":
            entry = cells[run_id]
            place = f"{run_id}: {entry.label} on {entry.cell.workload['name']}, target ε = {entry.target:g}"
            place = f"{place}, seed {entry.cell.seed}"
            end = "\n".join(store.error(run_id)["traceback"].strip().splitlines()[-6:])  # which name place and reason
        reasons.setdefault(reason, (end, []))[1].append(place)
    for reason, (end, runs) in reasons.items():
        lines = [*end.splitlines(), *runs[:SHOWN]]
        lines += [f"and {len(runs) - SHOWN} more"] if len(runs) > SHOWN else []
        complain("failed", reason)
        ERR.print("\n".join(f"  {line}" for line in lines))


class Cancel(OfSuite):
    """Ask the processes that run a suite, on any machine, to stop; running cells write a checkpoint first."""

    def __call__(self) -> None:
        results = self.stored()
        if results.part:
            raise ConfigError("cancel", dict(results.part), "expected the whole suite")
        results.store.check_writable()
        results.store.cancel(results.suite)
        OUT.print("asked; the same `dpopt run` goes on")


def bench(overrides: Sequence[str]) -> None:
    """Time engines and optimizers side by side; prints the tables and stores them with the record and a bar chart."""
    from dpopt.bench import run as benchmark
    from dpopt.results import speed

    chosen = benchmark.settings(overrides)
    _measured("bench", "speed", speed, chosen.results, chosen.plots, lambda: benchmark.bench(chosen, ERR))


def audit(overrides: Sequence[str]) -> int:
    """Bound the epsilon that optimizers really spend from below, and that of mechanisms broken on purpose."""
    from dpopt.audit import command as auditing
    from dpopt.results import audits

    chosen = auditing.settings(overrides)
    suite = chosen.suite
    rows = _measured("audit", "audit", audits, suite.results, suite.plots, lambda: auditing.run(chosen, ERR))
    problems = audits.problems(rows)
    report_problems(problems)
    return 1 if problems else 0


def _measured(
    kind: Literal["bench", "audit"],
    needs: str,
    shown: ModuleType,
    results: Path,
    plots: Path,
    measure: Callable[[], dict[str, Any]],
) -> DataFrame:
    """Measure, and keep the record with its table and the figures that need its frame."""
    from dpopt.results import figures
    from dpopt.store import Store

    chosen = [plot for plot in figures.plots(plots) if plot.needs == needs]
    store = Store(results)
    store.check_writable()  # before minutes of work whose record nobody could keep
    record = measure()
    folder, frame, text = store.add(kind, record), shown.frame(record), shown.markdown(record)
    store.write(folder / "table.md", text)
    for plot in chosen:
        drawn = plot.figure(frame)  # None where all that was measured has failed
        for end, content in figures.render(drawn).items() if drawn else ():
            store.write(folder / f"{plot.name}.{end}", content)
    OUT.print(text)
    OUT.print(f"written to {folder}/")
    return frame
