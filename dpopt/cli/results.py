"""Commands that only read stored results; none imports torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpopt import fields
from dpopt.cli.console import ERR, OUT, names, print_table, report_problems, stored
from dpopt.errors import ConfigError, unknown
from dpopt.markup import TERMINAL

if TYPE_CHECKING:
    from pandas import DataFrame

    from dpopt.analysis.figures import Plot
    from dpopt.store import Store


def status(overrides: Sequence[str]) -> None:
    """Show how far a suite is, who runs what, and what failed and why."""
    name, store, labels, _ = stored(overrides)
    from dpopt.analysis.frames import load

    results = load(store, name, labels)
    cells = results.cells.drop_duplicates("run_id")
    counts = cells["state"].value_counts()
    OUT.print(f"suite {name}: " + ", ".join(f"{n} {state}" for state, n in counts.items()))
    running = cells[cells["state"] == "running"]
    for run_id, label in zip(running["run_id"], running["label"], strict=True):
        if holder := store.holder(run_id):
            where = f"{holder}, which gave a sign of life {holder.age:.0f} s ago"
            OUT.print(f"{run_id} ({label}) {holder.fraction:.0%} done by {where}")
    for problem in results.problems:
        OUT.print(problem)


def table(overrides: Sequence[str]) -> None:
    """Print a suite's comparison table and write it as Markdown, CSV, LaTeX and HTML.

    scores=[macro_accuracy,nll] shows further scores, compare=published the paper's numbers beside the suite's,
    selection=geometric what private selection would make of the searches.
    """
    from dpopt.analysis import frames, published, tables

    name, store, labels, given = stored(overrides, "scores", "compare", "selection")
    results = frames.load(store, name, labels)
    comparison = tables.comparison(store, frames.select(results.cells))
    scores, remarks = names(given["scores"], "scores"), list[str]()
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
    print_table(tables.readable(comparison, TERMINAL, scores), is_styled=True)
    OUT.print(tables.footer(comparison, remarks), style="dim")
    OUT.print(f"written to {folder}/table.{{md,csv,tex,html}}")
    if given["selection"]:
        _selection(store, folder, results.cells)
    missing = results.cells[~results.cells["state"].isin(["done", "diverged"])]
    if len(missing):
        ERR.print(f"{len(missing)} cells have no result; rows that need them are left out")
    report_problems(results.problems)


def _selection(store: Store, folder: Path, cells: DataFrame) -> None:
    from dpopt.analysis import selection

    outcome = selection.private_selection(store, cells)
    for kind, content in selection.files(outcome).items():
        store.write(folder / f"selection.{kind}", content)
    print_table(selection.readable(outcome))
    OUT.print(selection.NOTE, style="dim")
    OUT.print(f"written to {folder}/selection.{{md,csv}}")


def rank(overrides: Sequence[str]) -> None:
    """Rank the rows of a suite with the same budget, tuning included, and say how sure that is.

    by=epsilon (what the whole search spends; the default), by=draws, by=gradients or by=seconds; budgets=[1,3] instead
    of the suite's epsilons, or of the largest amount that all rows can use.
    """
    from dpopt.analysis import frames, ranking

    name, store, labels, given = stored(overrides, "by", "budgets")
    results, by = frames.load(store, name, labels), given["by"] or "epsilon"
    budgets = [fields.convert(text, fields.Positive, "budgets", {}) for text in names(given["budgets"], "budgets")]
    frame = ranking.ranking(store, results.cells, by, budgets)
    folder = store.suite_folder(name)
    for kind, content in ranking.files(frame).items():
        store.write(folder / f"ranking_{by}.{kind}", content)
    print_table(ranking.readable(frame))
    if not frame.empty:
        print_table(ranking.readable_averages(frame))
    OUT.print(ranking.note(frame), style="dim")
    OUT.print(f"written to {folder}/ranking_{by}.{{md,csv}}")
    report_problems(results.problems)


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
    name, store, labels, _ = stored(overrides, "figure")
    results = frames.load(store, name, labels)
    known = suites.Frames(store, results)
    if known.selected.empty:
        raise ConfigError("suite", name, f"no finished rows in {store.root}: `dpopt run suite={name}`")
    for figure in chosen:
        if figure.needs in figures.OF_SUITES and not known.frame(figure.needs).empty:
            _draw(figure, known.frame(figure.needs), folder / "out" / name)
    report_problems(results.problems)


def _draw(plot: Plot, frame: DataFrame, folder: Path) -> None:
    from dpopt.analysis import figures

    OUT.print(" ".join(map(str, figures.save(plot.figure(frame), folder, plot.name))))


def report(overrides: Sequence[str]) -> None:
    """Write one HTML page of a suite, with its tables and figures, that opens without a network."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.analysis import frames, ranking
    from dpopt.analysis.report import Part, page
    from dpopt.analysis.suites import Frames

    name, store, labels, given = stored(overrides)
    results = frames.load(store, name, labels)
    path = store.suite_folder(name) / "report.html"
    known = Frames(store, results)
    ranks, command = known.ranking, f"dpopt rank {shlex.join(overrides)}"
    part = Part("Ranks at equal total ε", ranking.readable(ranks), ranking.note(ranks), command)
    further = [] if ranks.empty else [part._replace(strong=list(ranks["is_best"]))]
    store.write(path, page(known, name, Path(given["plots"]), overrides=overrides, further=further))
    OUT.print(str(path))
    report_problems(results.problems)
