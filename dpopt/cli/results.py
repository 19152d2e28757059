"""Commands that only read stored results; none imports torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dpopt import fields
from dpopt.cli.console import ERR, OUT, names, print_table, report_problems, stored, suite_name
from dpopt.errors import ConfigError, unknown
from dpopt.markup import MARKED, TERMINAL, duration

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpopt.results.figures import Plot
    from dpopt.results.results import Results
    from dpopt.results.writing import Table


def status(overrides: Sequence[str]) -> None:
    """Show how far a suite is, who runs what, and what failed and why."""
    from dpopt.results import progress

    results, _ = stored(overrides)
    cells = results.cells.drop_duplicates("run_id")
    held = {run_id: results.store.holder(run_id) for run_id in cells["run_id"][cells["state"] == "running"]}
    expected = progress.expected_seconds(cells)
    at_work = progress.running(cells, {run_id: holder for run_id, holder in held.items() if holder}, expected)
    counts, left = cells["state"].value_counts(), progress.seconds_left(cells, at_work, expected)
    time = "" if math.isnan(left) else f"; about {duration(left)} left, {len(at_work)} at a time"
    OUT.print(f"suite {results.suite}: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + time)
    if len(at_work):
        print_table(progress.readable(at_work))
    for problem in results.problems:
        OUT.print(problem)


def table(overrides: Sequence[str]) -> None:
    """Print a suite's comparison table and write it as Markdown, CSV, LaTeX and HTML.

    scores=[macro_accuracy,nll] shows further scores, compare=published the paper's numbers beside the suite's.
    """
    from dpopt.results import papers, tables
    from dpopt.results.report.sheet import sheet
    from dpopt.store.runs import RESULTS

    results, given = stored(overrides, "scores", "compare")
    comparison = results.table()
    scores, remarks = names(given["scores"], "scores"), list[str]()
    for score in scores:
        if score not in (known := tables.further_scores(comparison)):
            raise unknown("scores", score, known)
    if given["compare"] not in (None, "published"):
        raise unknown("compare", given["compare"], ["published"])
    if given["compare"] and not comparison.empty:
        comparison, remarks = papers.beside(comparison, results.store.manifest(results.suite), scores)
    shown = tables.as_table(comparison, results.suite, scores, remarks)
    _show(shown)
    if not comparison.empty:  # what is there may hold more
        _write(results, "table", shown.files() | {"html": sheet(shown.title, [shown])})
    missing = results.cells[~results.cells["state"].isin(RESULTS)]
    if len(missing):
        ERR.print(f"{len(missing)} cells have no result; rows that need them are left out")
    report_problems(results.problems)


def _show(*tables: Table) -> None:
    style = TERMINAL if OUT.is_terminal and not OUT.is_dumb_terminal else MARKED
    for shown in tables:
        print_table(shown.styled(style), is_styled=True)
        OUT.print(shown.note, style="dim", soft_wrap=False)


def _write(results: Results, name: str, files: Mapping[str, str]) -> None:
    """Write a table in several formats, and say where; what is published is not changed by looking at it.

    A reader who may not write has the table all the same: it was printed.
    """
    if not results.is_written:
        return
    try:
        for kind, content in files.items():
            results.store.write(results.folder / f"{name}.{kind}", content)
    except OSError as error:
        ERR.print(f"not written to {results.folder}: {error.strerror}")
        return
    OUT.print(f"written to {results.folder}/{name}.{{{','.join(files)}}}")


def rank(overrides: Sequence[str]) -> None:
    """Rank the rows of a suite with the same budget, tuning included, and say how sure that is.

    by=epsilon (what the whole search spends; the default), by=draws, by=gradients or by=seconds; budgets=[1,3] instead
    of the suite's epsilons, or of the largest amount that all rows can use. against=ROW shows how far every other row
    is from that one.
    """
    from dpopt.results import ranking
    from dpopt.results.report.sheet import sheet

    results, given = stored(overrides, "by", "budgets", "against")
    by, baseline = given["by"] or "epsilon", given["against"]
    budgets = [fields.convert(text, fields.Positive, "budgets", {}) for text in names(given["budgets"], "budgets")]
    if baseline:
        table = ranking.against_table(results.against(baseline, by, budgets), baseline, by)
        _show(table)
        name = f"against_{re.sub(r'[^A-Za-z0-9._-]', '_', baseline)}_{by}"
        _write(results, name, table.files() | {"html": sheet(table.title, [table])})
        report_problems(results.problems)
        return
    frame = results.ranking(by, budgets)
    _show(*ranking.as_tables(frame))
    if not frame.empty:
        _write(results, f"ranking_{by}", ranking.files(frame))
    report_problems(results.problems)


def leaderboard(overrides: Sequence[str]) -> None:
    """Rank methods over all workloads of suites at equal total epsilon, and say how sure that is.

    suite=[A,B] takes several suites, of which the first counts where two have a method on one workload. against=ROW
    shows how far every other method is from that one, at equal total epsilon or by=draws, by=gradients or by=seconds.
    to=FOLDER also writes a page there, as Markdown and HTML, with its figure and CSV.
    """
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.files import check_writable
    from dpopt.results.leaderboard import Leaderboard
    from dpopt.results.report.leaderboard import leaderboard as page

    suites, rest = suite_name(overrides)
    read = [stored([*rest, f"suite={name}"], "to", "against", "by") for name in names(suites, "suite")]
    known, given = zip(*read, strict=True)
    to = fields.path(given[0]["to"], "to") if given[0]["to"] else None
    if to:
        check_writable(to, "to")
    board = Leaderboard(known)
    compared = given[0]["against"] or "", given[0]["by"] or "epsilon"
    _show(*board.tables(*compared))
    if to:
        for name, content in page(board, fields.path(given[0]["plots"], "plots"), *compared).items():
            board.store.write(path := to / name, content)
            OUT.print(str(path))
    for results in known:
        report_problems(results.problems)


def plot(overrides: Sequence[str]) -> None:
    """Draw a suite's figures from stored results, into `plots/out/SUITE/`; figure=NAME draws one file of `plots/`."""
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.files import check_writable
    from dpopt.results import figures

    texts = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    folder = fields.path(texts.get("plots", "plots"), "plots")
    chosen = figures.plots(folder, texts.get("figure"))
    results, _ = stored(overrides, "figure")
    if results.every.empty:
        raise ConfigError("suite", results.suite, f"no finished rows in {results.store.root}")
    into = folder / "out" / results.suite / ("part" if results.part else "")
    check_writable(into, "plots", "plots=FOLDER draws the figures' files of another folder, into its out/")
    if "figure" in texts:
        _save(chosen[0], results.plot(chosen[0].name, folder), into)
    else:
        for figure in chosen:
            if figure.needs in figures.OF_SUITES and (drawn := results.draw(figure)):
                _save(figure, drawn, into)
    report_problems(results.problems)


def _save(plot: Plot, drawn: Figure, folder: Path) -> None:
    from dpopt.results import figures

    OUT.print(" ".join(map(str, figures.save(drawn, folder, plot.name))))


def report(overrides: Sequence[str]) -> None:
    """Write one HTML page of a suite, with its tables and figures, that opens without a network.

    to=FILE writes it there; by default it is in the suite's folder.
    """
    import matplotlib

    matplotlib.use("Agg")
    from dpopt.files import check_writable

    results, given = stored(overrides, "to")
    if not given["to"] and not results.is_written:
        raise ConfigError("to", None, "what is published is only read: say into which file the page is to be written")
    path = fields.path(given["to"] or results.folder / "report.html", "to")
    check_writable(path.parent, "to", "to=FILE says another place")
    shown = [override for override in overrides if not override.startswith("to=")]
    results.store.write(path, results.report(given["plots"], shown))
    OUT.print(str(path))
    report_problems(results.problems)
