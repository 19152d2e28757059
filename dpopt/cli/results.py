"""Commands that show, publish and verify stored results; none imports torch."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dpopt.cli.console import ERR, OUT, print_table, report_problems
from dpopt.cli.keys import OfSuite
from dpopt.errors import ConfigError
from dpopt.fields import Name, Positive, Several, key
from dpopt.files import check_writable
from dpopt.markup import duration

if TYPE_CHECKING:
    from dpopt.results import writing
    from dpopt.results.results import Results
    from dpopt.store import Store

_ENDS = {"markdown": "md", "latex": "tex", "csv": "csv", "html": "html"}
_By = Literal["epsilon", "draws", "gradients", "seconds"]
_SHOWN = 200  # one damaged ledger makes a finding for each of its runs


@dataclass(frozen=True, kw_only=True)
class Status(OfSuite):
    """Show how far a suite is, which processes run it, and what failed and why."""

    watch: bool = key("true: show it again and again, until all cells have ended", False)

    def __call__(self) -> None:
        while self._show() and self.watch:
            time.sleep(5.0)
            OUT.clear()

    def _show(self) -> bool:
        """Print it once; True if cells are left to run."""
        from dpopt.results import writing
        from dpopt.results.progress import progress
        from dpopt.store.runs import SETTLED

        results = self.stored()
        cells = results.cells.drop_duplicates("run_id")
        held = {run_id: results.store.holder(run_id) for run_id in cells["run_id"][cells["state"] == "running"]}
        # Finished runs of a workload tell how long the next one takes, so that a suite just begun shows no time.
        at_work, left = progress(
            writing.named(cells, results.names), {run_id: holder for run_id, holder in held.items() if holder}
        )
        counts = cells["state"].value_counts()
        clock = "" if math.isnan(left) else f"; about {duration(left)} left, {len(at_work)} at a time"
        OUT.print(f"suite {results.suite}: " + ", ".join(f"{n} {state}" for state, n in counts.items()) + clock)
        if len(at_work):
            print_table(writing.Table(at_work, optional=("sign of life", "run", "seed", "holder", "left")))
        for problem in results.problems:
            OUT.print(problem)
        return not bool(cells["state"].isin(SETTLED).all())


@dataclass(frozen=True, kw_only=True)
class Table(OfSuite):
    """Print a suite's comparison table and write it as Markdown, CSV, LaTeX and HTML."""

    layout: Literal["long", "wide"] = key("wide: a row for each method, a column for each data set and epsilon", "long")
    format: Literal["markdown", "latex", "csv", "html"] | None = key("print that alone, to be copied or piped", None)
    scores: Several[Name] | None = key("[macro_accuracy,nll]: show further scores", None)
    compare: Literal["published"] | None = key("the paper's numbers beside the suite's", None)

    def __call__(self) -> None:
        results = self.stored()
        shown = results.show(self.layout, scores=self.scores or (), compare=self.compare is not None)
        if self.format:
            print(_files(shown)[_ENDS[self.format]], end="")
            report_problems([shown.first] if shown.first else [])
        else:
            _show(shown)
            if self.compare:
                OUT.print(shown.details, style="dim", soft_wrap=False)
            if not results.every.empty:  # what is there may hold more
                _write(results, "wide" if self.layout == "wide" else "table", _files(shown))
        report_problems(results.problems)


def _show(*tables: writing.Table) -> None:
    for at, shown in enumerate(tables):
        if at:
            OUT.print()
        print_table(shown)
        for text in filter(None, (shown.first, shown.note)):
            OUT.print(text, style="dim", soft_wrap=False)


def _files(table: writing.Table) -> dict[str, str]:
    from dpopt.results.report.sheet import sheet

    return table.files() | {"html": sheet(table.title, [table])}


def _write(results: Results, name: str, files: Mapping[str, str]) -> None:
    if results.store.is_read_only:  # what is published is not changed by looking at it
        return
    try:
        for kind, content in files.items():
            results.store.write(results.folder / f"{name}.{kind}", content)
    except OSError as error:  # a reader who may not write has the table all the same: it was printed
        ERR.print(f"not written to {results.folder}: {error.strerror}")
        return
    OUT.print(f"written to {results.folder}/{name}.{{{','.join(files)}}}")


@dataclass(frozen=True, kw_only=True)
class Rank(OfSuite):
    """Rank the rows of a suite with the same budget, tuning included, and say how sure that is."""

    by: _By = key("the budget that all rows have", "epsilon")
    budgets: Several[Positive] | None = key("[1,3]: by default the suite's epsilons, or what all rows can use", None)
    against: Name | None = key("ROW: how far every other row is from that one", None)

    def __call__(self) -> None:
        from dpopt.results import ranking

        results, budgets = self.stored(), self.budgets or ()
        if self.against:
            distances = results.against(self.against, self.by, budgets)
            table = ranking.against_table(distances, self.against, self.by, results.names)
            _show(table := replace(table, first=results.missing))
            _write(results, f"against_{re.sub(r'[^A-Za-z0-9._-]', '_', self.against)}_{self.by}", _files(table))
        else:
            _show(*(ranks := results.ranks(self.by, budgets)))
            if len(ranks) > 1:
                _write(results, f"ranking_{self.by}", ranking.files(ranks))
        report_problems(results.problems)


@dataclass(frozen=True, kw_only=True)
class Leaderboard(OfSuite):
    """Rank methods over all workloads of suites at equal total epsilon, and say how sure that is."""

    suite: Several[Name] = key(  # type: ignore[assignment]
        "[A,B]: of suites that have a method on one workload, the first counts"
    )
    by: _By = key("the budget of against=", "epsilon")
    against: Name | None = key("ROW: how far every other method is from that one", None)
    to: Path | None = key("folder for a page as Markdown and HTML, with its figure and CSV", None)

    def __call__(self) -> None:
        from dpopt.results.leaderboard import Leaderboard

        suites = [self.stored(name) for name in self.suite]
        if self.to:
            check_writable(self.to, "to")
        board, compared = Leaderboard(suites), (self.against or "", self.by)
        _show(*board.tables(*compared))
        if self.to:
            for name, content in board.page(self.plots, *compared).items():
                board.store.write(path := self.to / name, content)
                OUT.print(str(path))
        for results in suites:
            report_problems(results.problems)


@dataclass(frozen=True, kw_only=True)
class Plot(OfSuite):
    """Draw a suite's figures from stored results, into `plots/out/SUITE/`."""

    figure: Name | None = key("one file of `plots/`; all of them by default", None)
    width: Positive | None = key("5.5: inches, as a page has them, with texts that can be read there", None)
    format: Several[Literal["svg", "png", "pdf"]] | None = key("pdf: the kinds of files; by default [svg,png]", None)

    def __call__(self) -> None:
        from dpopt.results import figures

        chosen = figures.plots(self.plots, self.figure)
        results = self.stored()
        if results.every.empty:
            raise ConfigError("suite", results.suite, f"no finished rows in {results.store.root}")
        into = self.plots / "out" / results.suite / ("part" if results.part else "")
        check_writable(into, "plots", "plots=FOLDER draws the figures' files of another folder, into its out/")
        for figure in chosen:
            if self.figure:
                drawn = results.plot(figure.name, self.plots, width=self.width)
            else:
                drawn = results.draw(figure, self.width) if figure.needs in figures.OF_SUITES else None
            if drawn:
                saved = figures.save(drawn, into, figure.name, self.format or figures.KINDS, self.width is None)
                OUT.print(" ".join(map(str, saved)))
        report_problems(results.problems)


@dataclass(frozen=True, kw_only=True)
class Report(OfSuite):
    """Write one HTML page of a suite, with its tables and figures, that opens without a network."""

    to: Path | None = key("file of the page; by default in the suite's folder, or SUITE.html here if published", None)

    def __call__(self) -> None:
        results = self.stored()
        beside = Path(f"{results.suite}.html") if results.store.is_read_only else results.folder / "report.html"
        path = self.to or beside
        if path.is_dir():
            raise ConfigError("to", str(path), "expected the file of the page, and it is a folder")
        check_writable(path.parent, "to", "to=FILE says another place")
        results.store.write(path, results.report(self.plots, self.overrides))
        OUT.print(str(path))
        report_problems(results.problems)


@dataclass(frozen=True, kw_only=True)
class Publish:
    """Write a suite's folder of results/published: its runs, tables, ranking and figures."""

    suite: Name | None = key("the suite; with check or remake all published suites by default", None)
    results: Path = key("folder that runs are read from", Path("results"))
    to: Path = key("folder of published suites", Path("results/published"))
    plots: Path = key("folder of the figures' files", Path("plots"))
    figures: Several[Name] | None = key("[NAME]: draw these figures", None)
    partial: bool = key("true: publish though cells have no result; each table says how many", False)
    check: bool = key("true: verify what is published, draw all figures that suites list, write nothing", False)
    remake: bool = key("true: write all tables and figures again from the published runs", False)

    def __call__(self) -> int:
        from dpopt.results import publishing
        from dpopt.results.results import load_results

        if (self.check or self.remake) and (self.figures or self.partial or self.check == self.remake):
            keys = [name for name in ("check", "remake", "figures", "partial") if getattr(self, name)]
            raise ConfigError("publish", keys, "expected check=true or remake=true alone")
        if self.check:
            return _verified(_results(self.to, "to"), self.suite, self.plots)
        if self.remake:
            for suite in [self.suite] if self.suite else _results(self.to, "to").suites():
                OUT.print(f"{suite}: {len(publishing.remake(self.to, suite, self.plots))} files")
            return 0
        if self.suite is None:
            raise ConfigError("suite", None, "expected suite=NAME once; `dpopt list suites` shows them")
        results = load_results(self.results, self.suite)
        for path in publishing.publish(results, self.to, self.plots, self.figures or (), partial=self.partial):
            OUT.print(str(path))
        return 0


@dataclass(frozen=True, kw_only=True)
class Verify:
    """Compute every stored epsilon again with two accountants, and check names, seals and published tables.

    Ends with 1 where a claim does not hold, or where there is nothing to verify. `dpopt publish check=true` also draws
    published figures.
    """

    suite: Name | None = key("one suite only, here and in `published`", None)
    results: Path = key("the results folder", Path("results"))

    def __call__(self) -> int:
        return _verified(_results(self.results, "results"), self.suite, None)


def _verified(store: Store, suite: str | None, plots: Path | None) -> int:
    from dpopt.results.verify import verify as check

    verified = check(store, suite, plots)
    for finding in verified.findings[:_SHOWN]:
        OUT.print(str(finding))
    if (more := len(verified.findings) - _SHOWN) > 0:
        OUT.print(f"... and {more} more")
    report_problems(verified.remarks)
    counts = ", ".join(f"{count} {kind}" for kind, count in verified.checked.items())
    OUT.print(f"{counts or 'nothing'} verified: {len(verified.findings)} mismatches")
    return 1 if verified.findings or not counts else 0  # nothing verified is no success: a path may be wrong


def _results(root: Path, where: str) -> Store:
    from dpopt.store import Store

    if not root.is_dir():  # a store would make it, and find nothing wrong in it
        raise ConfigError(where, str(root), "no such folder")
    return Store(root)
