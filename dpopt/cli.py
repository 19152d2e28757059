"""The `dpopt` command: each subcommand takes Hydra overrides such as `suite=quickstart seeds=[0,1]`."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table
from tabulate import tabulate

from dpopt import fields, registry
from dpopt.errors import ConfigError, unknown

if TYPE_CHECKING:
    from pandas import DataFrame

    from dpopt.analysis.figures import Plot
    from dpopt.harness.cost import Row, Timing
    from dpopt.harness.rows import Planned
    from dpopt.harness.suite import Suite
    from dpopt.store import Store

OUT = Console(soft_wrap=True)
ERR = Console(stderr=True, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 where cells failed, 2 for input that cannot be used."""
    parser = argparse.ArgumentParser(prog="dpopt", description="Benchmark differentially private adaptive optimizers.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (function, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=function.__doc__)
        command.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides")
    chosen = parser.parse_args(arguments)
    try:
        return COMMANDS[chosen.command][0](chosen.overrides) or 0
    except ConfigError as error:
        ERR.print(f"[red]error:[/red] {_escape(str(error))}", highlight=False)
        return 2
    except OSError as error:
        ERR.print(f"[red]error:[/red] {_escape(str(error))}", highlight=False)
        return 2
    except KeyboardInterrupt:
        ERR.print("interrupted; run the same command again to go on")
        return 130


def list_(overrides: Sequence[str]) -> None:
    """Print what is known by name, a table for each kind; what=models (or optimizers, ...) prints one table alone.

    format=markdown prints it as Markdown, by default that of the optimizers.
    """
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    for key, value in given.items():
        allowed = {"format": ["markdown"], "what": list(LISTED)}
        if value not in allowed.get(key, []):
            raise unknown("override", f"{key}={value}", [f"{k}={v}" for k, values in allowed.items() for v in values])
    if "format" in given:
        rows = LISTED[given.get("what", "optimizers")]()
        OUT.print(tabulate(rows, headers="keys", tablefmt="pipe"), highlight=False, markup=False)
        return
    for what in [given["what"]] if given else [name for name in LISTED if name != "models"]:  # counting takes seconds
        _print_rows(LISTED[what]())
    if not given:
        _print_notes()


def _print_notes() -> None:
    from dpopt.workloads.data import catalogue

    for name, entry in [*registry.entries("optimizer").items(), *catalogue.entries().items()]:
        if entry.note:
            OUT.print(f"{name}: {entry.note}", style="dim", highlight=False)


def _optimizers() -> list[dict[str, str]]:
    """One row for each registered optimizer; what it costs is counted by running it without data."""
    from dpopt.privacy.calibration import cost

    rows = []
    for name, entry in registry.entries("optimizer").items():
        draws, gradients, releases = cost(registry.create(name))
        grid = ", ".join(f"{key}: {len(values)} values" for key, values in entry.grid.items())
        rows.append(
            {
                "optimizer": name,
                "family": entry.family,
                "tuning": grid or "none",
                "draws/step": f"{draws:.3g}",
                "gradients/draw": f"{gradients:.3g}",
                "releases/draw": f"{releases:.3g}",
                "what it does": entry.summary,
                "reference": entry.reference,
            }
        )
    return rows


def _workloads() -> list[dict[str, str]]:
    entries = registry.entries("workload").items()
    return [{"workload": name, "what it is": entry.summary, "reference": entry.reference} for name, entry in entries]


def _data_sets() -> list[dict[str, str]]:
    from dpopt.workloads.data.catalogue import entries

    return [
        {
            "data set": name,
            "records": " + ".join(f"{part.records:,} {split}" for split, part in entry.splits.items()),
            "classes": str(entry.classes or "pairs"),
            "licence": entry.licence,
            "hub": entry.hub or "local folder only",
        }
        for name, entry in entries().items()
    ]


def _suites() -> list[dict[str, str]]:
    from dpopt.harness.suite import suite_files

    return [{"suite": name, "file": str(path)} for name, path in suite_files().items()]


def _models() -> list[dict[str, str]]:
    """How many parameters each trainable subset of well-known models holds."""
    from dpopt.workloads.models import parameter_counts

    def shown(value: int | str | None) -> str:
        return "none" if value is None else f"{value:,}" if isinstance(value, int) else value

    return [{key: shown(value) for key, value in row.items()} for row in parameter_counts()]


LISTED: dict[str, Callable[[], list[dict[str, str]]]] = {
    "optimizers": _optimizers,
    "workloads": _workloads,
    "data": _data_sets,
    "suites": _suites,
    "models": _models,
}
"""The tables of `dpopt list`."""


def _print_rows(rows: list[dict[str, str]]) -> None:
    table = Table(box=None, pad_edge=False)
    for name in rows[0]:
        table.add_column(name, no_wrap=name not in ("what it does", "reference"))
    for row in rows:
        table.add_row(*row.values())
    Console(width=max(OUT.width, 180)).print(table, "")  # a narrow terminal breaks lines better than columns


def plan(overrides: Sequence[str]) -> None:
    """Show a suite's cells by state and what they cost, and write its manifest; probe=20 times 20 draws of each row."""
    from dpopt.harness import cost

    own = [override for override in overrides if override.startswith("probe=")]
    limit = fields.convert(yaml.safe_load(own[-1].partition("=")[2]), fields.Count, "probe", {}) if own else 0
    suite, store, planned = _plan([override for override in overrides if override not in own])
    rows = cost.rows(planned, store)
    timings = cost.timings(rows, store, suite, limit, ERR)
    for workload, costs in _costs(rows, timings):
        OUT.print(workload, style="bold", highlight=False, markup=False)
        _print_table(costs)
    for number, timing in timings.items():
        if timing.failure:
            OUT.print(f"{rows[number].label} failed: {timing.failure}", highlight=False, markup=False)
    cells = len({entry.cell.run_id for entry in planned})
    OUT.print(f"{cells} distinct cells of suite {suite.name}; results in {store.root}", highlight=False)
    OUT.print(_estimate(rows, timings, cost.workers(suite)), highlight=False)


def _costs(rows: list[Row], timings: dict[int, Timing]) -> list[tuple[str, DataFrame]]:
    """What `dpopt plan` prints: a table for each workload, without the columns that say nothing in any."""
    from pandas import DataFrame

    from dpopt.analysis.frames import workload_names

    names = workload_names([row.cells[0].workload for row in rows])
    timed = [timings.get(number) for number in range(len(rows))]
    timed = [timing if timing and not timing.failure else None for timing in timed]
    pairs = list(zip(rows, timed, strict=True))
    columns = {
        "workload": [names[json.dumps(row.cells[0].workload, sort_keys=True)] for row in rows],
        "optimizer": [row.label for row in rows],
        "tuning": [row.tuning for row in rows],
        "B": [str(row.cells[0].batch_size) for row in rows],
        "cells": [str(len(row.cells)) for row in rows],
        "done": [str(row.done) for row in rows],
        "failed": [str(row.failed) for row in rows],
        "to run": [str(len(row.waiting)) for row in rows],
        "draws": ["-".join(map(str, dict.fromkeys(row.draws))) for row in rows],
        "gradients": [f"{row.gradients:.1e}" if row.waiting else "" for row in rows],
        "ms/draw": [f"{1e3 * timing.draw:.3g}" if timing else "" for timing in timed],
        "MB": [f"{timing.memory / 1e6:.0f}" if timing and timing.memory else "" for timing in timed],
        "hours": [f"{row.seconds(timing) / 3600:.2g}" if timing and row.waiting else "" for row, timing in pairs],
    }
    dropped = [name for name, cells in columns.items() if not any(cells) or (name == "B" and len(set(cells)) == 1)]
    tables = DataFrame(columns).drop(columns=dropped).groupby("workload", sort=False)
    return [(str(workload), table.drop(columns="workload")) for workload, table in tables]


def _estimate(rows: list[Row], timings: dict[int, Timing], workers: int) -> str:
    """How long what is to be run will take, in one line."""
    waiting = [number for number, row in enumerate(rows) if row.waiting]
    known = [number for number in waiting if number in timings and not timings[number].failure]
    hours = sum(rows[number].seconds(timings[number]) for number in known) / 3600 / workers
    gradients = f"{sum(row.gradients for row in rows):.1e} gradient evaluations to run"
    if not known:
        return f"{gradients}; probe=20 estimates how long they take" if waiting else "nothing to run"
    missing = f" without {len(waiting) - len(known)} rows that were not timed" if len(known) < len(waiting) else ""
    return f"{gradients}, about {hours:.2g} hours ({60 * hours:.2g} minutes) with workers = {workers}{missing}"


def run(overrides: Sequence[str]) -> int:
    """Train what is not done of a suite; a run that was killed goes on where it was."""
    from dpopt.harness import plan as planning
    from dpopt.harness.engines.inline import InlineEngine
    from dpopt.harness.engines.local import LocalEngine
    from dpopt.harness.execute import execute
    from dpopt.training import resolve_device

    suite, store, planned = _plan(overrides)
    resolve_device(suite.device)
    engines: dict[str, Callable[[], Any]] = {
        "inline": lambda: InlineEngine(store, suite.device, suite.physical_batch),
        "local": lambda: LocalEngine(store, suite.device, suite.workers, suite.physical_batch),
    }
    outcome, cells = None, [entry.cell for entry in planned]
    while cells:  # some cells follow from the outcome of others
        outcome = execute(cells, store, engines[suite.engine], ERR, outcome)
        known = {entry.cell.run_id for entry in planned}
        planned = _plan(overrides)[2] if planning.has_stages(suite) else planned
        cells = [entry.cell for entry in planned if entry.cell.run_id not in known]
    assert outcome is not None, "a suite has at least one cell"
    ERR.print(
        f"{outcome.ran} cells run, {outcome.skipped} were done, {len(outcome.failed)} failed, "
        f"{len(outcome.damaged)} damaged",
        highlight=False,
    )
    for run_id, reason in outcome.failed.items():
        ERR.print(f"failed  {run_id}  {_escape(reason)}  (dpopt retry suite={suite.name})", highlight=False)
    for run_id in outcome.damaged:
        ERR.print(f"damaged {store.folder(run_id)}: move it away to run the cell again", highlight=False)
    return 1 if outcome.failed or outcome.damaged else 0


def status(overrides: Sequence[str]) -> None:
    """Show how far a suite is, and what failed and why."""
    name, store, labels, _ = _stored(overrides)
    from dpopt.analysis.frames import load

    results = load(store, name, labels)
    counts = results.cells.drop_duplicates("run_id")["state"].value_counts()
    OUT.print(f"suite {name}: " + ", ".join(f"{n} {state}" for state, n in counts.items()), highlight=False)
    for problem in results.problems:
        OUT.print(problem, highlight=False, markup=False)


def retry(overrides: Sequence[str]) -> int:
    """Run a suite's failed cells again, with the rest of what is not done."""
    _, store, planned = _plan(overrides)
    for entry in planned:
        if store.state(entry.cell.run_id) == "failed":
            store.forget_failure(entry.cell.run_id)
    return run(overrides)


def collect(overrides: Sequence[str]) -> None:
    """Write a suite's cells and the curves of its selected runs as Parquet."""
    from dpopt.analysis import frames

    name, store, labels, _ = _stored(overrides)
    results = frames.load(store, name, labels)
    selected = frames.select(results.cells)
    folder = store.suite_folder(name)
    for kind, frame in (("cells", results.cells), ("curves", frames.curves(store, selected))):
        frame.to_parquet(folder / f"{kind}.parquet", index=False)
        OUT.print(f"{folder / kind}.parquet: {len(frame)} rows", highlight=False)
    _report(results.problems)


def table(overrides: Sequence[str]) -> None:
    """Print a suite's comparison table and write it as Markdown, CSV, LaTeX and HTML.

    scores=[macro_accuracy,nll] shows further scores, compare=published the paper's numbers beside the suite's,
    selection=geometric what private selection would make of the searches.
    """
    from dpopt.analysis import frames, published, tables

    name, store, labels, given = _stored(overrides, "scores", "compare", "selection")
    results = frames.load(store, name, labels)
    comparison = tables.comparison(store, frames.select(results.cells))
    scores, remarks = _names(given["scores"]), list[str]()
    for score in scores:
        if score not in (known := tables.further_scores(comparison)):
            raise unknown("scores", score, known)
    for key, value in (("compare", "published"), ("selection", "geometric")):
        if given[key] not in (None, value):
            raise unknown(key, given[key], [value])
    if given["compare"] and not comparison.empty:
        comparison, remarks = published.beside(comparison, store.manifest(name), scores)
    folder = store.suite_folder(name)
    for kind, content in tables.files(comparison, name, scores, remarks).items():
        store.write(folder / f"table.{kind}", content)
    _print_table(tables.readable(comparison, "[bold]{}[/bold]".format, scores))
    OUT.print(tables.footer(comparison, remarks), style="dim", highlight=False, markup=False)
    OUT.print(f"written to {folder}/table.{{md,csv,tex,html}}", highlight=False)
    if given["selection"]:
        _selection(store, folder, results.cells)
    missing = results.cells[~results.cells["state"].isin(["done", "diverged"])]
    if len(missing):
        ERR.print(f"{len(missing)} cells have no result; rows that need them are left out", highlight=False)
    _report(results.problems)


def _selection(store: Store, folder: Path, cells: DataFrame) -> None:
    from dpopt.analysis import selection

    outcome = selection.private_selection(store, cells)
    for kind, content in selection.files(outcome).items():
        store.write(folder / f"selection.{kind}", content)
    _print_table(selection.readable(outcome))
    OUT.print(selection.NOTE, style="dim", highlight=False)
    OUT.print(f"written to {folder}/selection.{{md,csv}}", highlight=False)


def rank(overrides: Sequence[str]) -> None:
    """Rank the rows of a suite with the same budget, tuning included, and say how sure that is.

    by=epsilon (what the whole search spends; the default), by=draws, by=gradients or by=seconds; budgets=[1,3] instead
    of the suite's epsilons, or of the largest amount that all rows can use.
    """
    from dpopt.analysis import frames, ranking

    name, store, labels, given = _stored(overrides, "by", "budgets")
    results, by = frames.load(store, name, labels), given["by"] or "epsilon"
    budgets = [fields.convert(text, fields.Positive, "budgets", {}) for text in _names(given["budgets"])]
    frame = ranking.ranking(store, results.cells, by, budgets)
    folder = store.suite_folder(name)
    for kind, content in ranking.files(frame).items():
        store.write(folder / f"ranking_{by}.{kind}", content)
    _print_table(ranking.readable(frame))
    if not frame.empty:
        _print_table(ranking.readable_averages(frame))
    OUT.print(ranking.note(frame), style="dim", highlight=False, markup=False)
    OUT.print(f"written to {folder}/ranking_{by}.{{md,csv}}", highlight=False)
    _report(results.problems)


def plot(overrides: Sequence[str]) -> None:
    """Draw a suite's figures from stored results, into `plots/out/SUITE/`; figure=NAME draws one file of `plots/`.

    Figures of no suite (`fig_hyfreedp_accounting`) are drawn by name, into `plots/out/`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.analysis import accounting, figures, frames, suites

    texts = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    folder = Path(texts.get("plots", "plots"))
    chosen = figures.plots(folder, texts.get("figure"))
    if len(chosen) == 1 and chosen[0].needs == "accounting":
        _draw(chosen[0], accounting.frame(), folder / "out")
        return
    name, store, labels, _ = _stored(overrides, "figure")
    results = frames.load(store, name, labels)
    known = suites.Frames(store, results)
    if known.selected.empty:
        raise ConfigError("suite", name, f"no finished rows in {store.root}: `dpopt run suite={name}`")
    for figure in chosen:
        if figure.needs in figures.OF_SUITES and not known.frame(figure.needs).empty:
            _draw(figure, known.frame(figure.needs), folder / "out" / name)
    _report(results.problems)


def _draw(plot: Plot, frame: DataFrame, folder: Path) -> None:
    from dpopt.analysis import figures

    OUT.print(" ".join(map(str, figures.save(plot.draw(frame), folder, plot.name))), highlight=False)


def report(overrides: Sequence[str]) -> None:
    """Write one HTML page of a suite, with its tables and figures, that opens without a network."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.analysis import frames, ranking
    from dpopt.analysis.report import Part, page
    from dpopt.analysis.suites import Frames

    name, store, labels, given = _stored(overrides)
    results = frames.load(store, name, labels)
    path = store.suite_folder(name) / "report.html"
    known = Frames(store, results)
    ranks, command = known.ranking, f"dpopt rank {shlex.join(overrides)}"
    part = Part("Ranks at equal total ε", ranking.readable(ranks), ranking.note(ranks), command)
    further = [] if ranks.empty else [part._replace(strong=list(ranks["is_best"]))]
    store.write(path, page(known, name, Path(given["plots"]), overrides=overrides, further=further))
    OUT.print(str(path), highlight=False)
    _report(results.problems)


def bench(overrides: Sequence[str]) -> None:
    """Time engines and optimizers side by side; prints the tables and stores them with the record and a bar chart."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.analysis import figures, speed
    from dpopt.bench import run as benchmark
    from dpopt.store import Store

    chosen = benchmark.settings(overrides)
    plots = [plot for plot in figures.plots(Path(chosen.plots)) if plot.needs == "speed"]
    record = benchmark.bench(chosen, ERR)
    store = Store(Path(chosen.results))
    _keep(store, store.add("bench", record), speed.markdown(record), plots, speed.frame(record))


def audit(overrides: Sequence[str]) -> int:
    """Bound the epsilon that optimizers really spend from below, and that of mechanisms broken on purpose."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.analysis import audits, figures
    from dpopt.harness import audit as auditing
    from dpopt.store import Store

    chosen = auditing.settings(overrides)
    plots = [plot for plot in figures.plots(Path(chosen.suite.plots)) if plot.needs == "audit"]
    record = auditing.run(chosen, ERR)
    store, rows = Store(Path(chosen.suite.results)), audits.frame(record)
    drawn = plots if any(rows["failure"] == "") else []
    _keep(store, store.add("audit", record), audits.markdown(record), drawn, rows)
    problems = audits.problems(rows)
    _report(problems)
    return 1 if problems else 0


def _keep(store: Store, folder: Path, text: str, plots: list[Plot], frame: DataFrame) -> None:
    """Print a record's tables and write them beside it, with its figures."""
    from dpopt.analysis import figures

    store.write(folder / "table.md", text)
    for plot in plots:
        for kind, content in figures.render(plot.draw(frame)).items():
            store.write(folder / f"{plot.name}.{kind}", content)
    OUT.print(text, highlight=False, markup=False)
    OUT.print(f"written to {folder}/", highlight=False)


def epsilon(overrides: Sequence[str]) -> None:
    """Print what a run spends: rate, noise and draws of the gradient, and HyFreeDP's probes if there are any."""
    from dpopt.harness.suite import BASE, compose_config
    from dpopt.privacy import Draw, Ledger
    from dpopt.privacy import epsilon as spent

    given = compose_config(BASE, "epsilon", overrides)
    rate = _field(given, "rate", float)
    noises = given["noise"] if isinstance(given["noise"], list) else [given["noise"]]
    gradient = tuple(fields.convert(noise, fields.Positive, "noise", {}) for noise in noises)
    draws, runs = _field(given, "draws", fields.Count), _field(given, "runs", fields.Count)
    probe = _field(given, "probe_noise", fields.Positive | None)
    rounds = math.ceil(draws / _field(given, "probe_every", fields.Count)) if probe is not None else 0
    ledger = Ledger()
    if rounds:
        ledger.append(Draw(rate, gradient + (probe,) * _field(given, "probes", fields.Count)), rounds * runs)
    if draws > rounds:
        ledger.append(Draw(rate, gradient), (draws - rounds) * runs)
    names = given["accountant"] if isinstance(given["accountant"], list) else [given["accountant"]]
    delta = _field(given, "delta", float)
    for name in names:
        OUT.print(f"epsilon = {_up(spent(ledger, delta, name))}  ({name}, delta = {delta:g})", highlight=False)


def calibrate(overrides: Sequence[str]) -> None:
    """Print the least noise with which an optimizer reaches a target epsilon."""
    from dpopt import create
    from dpopt.harness.suite import BASE, compose_config
    from dpopt.privacy import calibrate as solve
    from dpopt.training import number_of_draws, sampling_rate

    given = compose_config(BASE, "calibrate", overrides)
    optimizer = create(given["optimizer"], **given["fields"])
    examples, batch = (_field(given, key, fields.Count | None) for key in ("examples", "batch_size"))
    rate, draws = _field(given, "rate", float | None), _field(given, "draws", fields.Count | None)
    epochs, delta = _field(given, "epochs", fields.Positive | None), _field(given, "delta", float | None)
    if rate is None:
        rate = sampling_rate(_need(batch, "batch_size"), _need(examples, "examples"))
    if draws is None:
        draws = number_of_draws(_need(epochs, "draws or epochs"), rate, 1)
    plan = solve(
        optimizer,
        rate=rate,
        draws=draws,
        dimension=_field(given, "dimension", fields.Count),
        epsilon=_field(given, "epsilon", fields.Bound),
        delta=_need(examples, "delta or examples") ** -1.1 if delta is None else delta,
        accountant=given["accountant"],
    )
    for kind, noise in plan.noise.items():
        OUT.print(f"noise multiplier ({kind}) = {_up(noise)}", highlight=False)
    OUT.print(
        f"epsilon = {_up(plan.epsilon)}  ({plan.accountant}, delta = {plan.delta:g}, {plan.draws} draws)",
        highlight=False,
    )


def recommend(overrides: Sequence[str]) -> None:
    """Print a grid of clipping bound, batch size and learning rate to begin with, from public numbers alone."""
    from dpopt.harness.suite import BASE, compose_config
    from dpopt.study.recommend import main as recommended

    OUT.print(recommended(compose_config(BASE, "recommend", overrides)), highlight=False, markup=False)


COMMANDS: dict[str, tuple[Callable[[Sequence[str]], int | None], str]] = {
    "list": (list_, "optimizers, workloads, data sets and suites"),
    "plan": (plan, "a suite's cells by state, and what they cost"),
    "run": (run, "train what is not done of a suite"),
    "status": (status, "how far a suite is, and what failed"),
    "retry": (retry, "run failed cells again"),
    "collect": (collect, "a suite's records as Parquet"),
    "table": (table, "the comparison table"),
    "rank": (rank, "who is best with the same budget, and how sure that is"),
    "plot": (plot, "the figures, from stored results"),
    "report": (report, "tables and figures as one HTML page"),
    "bench": (bench, "what a private step costs"),
    "audit": (audit, "empirical lower bounds on epsilon"),
    "epsilon": (epsilon, "what a run spends"),
    "calibrate": (calibrate, "the noise for a target epsilon"),
    "recommend": (recommend, "a grid of C, B and eta to begin with"),
}


def _plan(overrides: Sequence[str]) -> tuple[Suite, Store, list[Planned]]:
    """Load and plan a suite, and note its cells in the store."""
    from dpopt.harness import plan as planning
    from dpopt.harness.suite import load_suite
    from dpopt.store import Store

    name, rest = _suite_name(overrides)
    suite = load_suite(name, rest)
    store = Store(Path(suite.results))
    planned = planning.plan(suite, store)
    store.write_manifest(suite.name, planning.manifest(suite, planned))
    return suite, store, planned


def _stored(overrides: Sequence[str], *more: str) -> tuple[str, Store, list[str] | None, dict[str, Any]]:
    """Suite name, store, selected rows and what was given, for commands that only read; imports no torch.

    Args:
        overrides: of the command line.
        more: keys that the command takes beside those that all take.
    """
    from dpopt.store import Store

    name, rest = _suite_name(overrides)
    known: dict[str, Any] = {"results": "results", "plots": "plots", "optimizers": None, **dict.fromkeys(more)}
    for override in rest:
        key, _, value = override.partition("=")
        if key not in known:
            raise unknown("override", key, known)
        known[key] = value
    store = Store(Path(known["results"]))
    name = Path(name.removesuffix(".yaml")).name
    labels = None if known["optimizers"] is None else _names(known["optimizers"])
    if labels is not None:
        present = {entry["label"] for entry in store.manifest(name)["cells"]}
        for label in labels:
            if label not in present:
                raise unknown("optimizers", label, present)
    return name, store, labels, known


def _names(text: str | None) -> list[str]:
    """The names in "a" or "[a, b]"."""
    return [name.strip() for name in (text or "").strip("[]").split(",") if name.strip()]


def _suite_name(overrides: Sequence[str]) -> tuple[str, list[str]]:
    names = [override.partition("=")[2] for override in overrides if override.startswith("suite=")]
    if len(names) != 1:
        raise ConfigError("suite", names or None, "expected suite=NAME once; `dpopt list` shows the suites")
    return names[0], [override for override in overrides if not override.startswith("suite=")]


def _field(given: dict[str, Any], key: str, hint: Any) -> Any:
    return fields.convert(given[key], hint, key, {})


def _up(value: float) -> str:
    """Five digits, rounded up: printed noise is enough, and a printed epsilon is not below the spent one."""
    return f"{math.ceil(value * 1e5 - 1e-9) / 1e5:.5f}" if math.isfinite(value) else "inf"


def _need(value: Any, name: str) -> Any:
    if value is None:
        raise ConfigError(name, None, "is missing")
    return value


def _print_table(frame: Any) -> None:
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in frame.columns:
        shown.add_column(column, no_wrap=True)
    for row in frame.itertuples(index=False):
        shown.add_row(*row)
    needed = OUT.measure(shown, options=OUT.options.update(max_width=1000)).maximum
    Console(width=max(OUT.width, needed)).print(shown)  # a narrow terminal breaks lines better than cells


def _report(problems: list[str]) -> None:
    for problem in problems:
        ERR.print(problem, highlight=False, markup=False)


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    sys.exit(main())
