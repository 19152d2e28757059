"""The stored cells of a suite, and the frames, tables, figures and pages that follow from them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.markup import HTML
from dpopt.results import choosing, clip_batch, frames, papers, ranking, tables, transfer
from dpopt.results.drawing import Style, styles_of
from dpopt.results.frames import GROUP
from dpopt.results.naming import display_names, row_names, titles
from dpopt.results.writing import Table, named
from dpopt.store import Store
from dpopt.store.runs import RESULTS
from dpopt.suites.suite import load_suite, suite_files

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpopt.results.figures import Plot


def load_results(
    results: str | Path = "results",
    suite: str = "",
    *,
    optimizers: Sequence[str] | None = None,
    epsilon: Sequence[float] | float | None = None,
    seeds: Sequence[int] | int | None = None,
    workloads: Sequence[str] | None = None,
) -> Results:
    """The stored cells of a suite, finished or not; a published folder is read alike.

    Args:
        results: the folder, such as "results" or "results/published".
        suite: its name.
        optimizers, epsilon, seeds, workloads: only rows with these labels, target epsilons, seeds, and names of
            workloads (as tables print them, or as they are registered).

    Raises:
        ConfigError: there is no such suite, or it has no such row.
    """
    chosen = {"optimizers": optimizers, "epsilon": epsilon, "seeds": seeds, "workloads": workloads}
    store = Store(fields.path(results, "results"))
    part = {
        key: tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else (value,)
        for key, value in chosen.items()
        if value is not None
    }
    return Results(store, suite, part)


@dataclass(frozen=True)
class Results:
    """The stored cells of a suite, or a part of them by keys of `frames.OF_ENTRY`; what has nothing to show is empty.

    Raises:
        ConfigError: the suite was never run in this store, or has no such row.
    """

    store: Store
    suite: str
    part: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        frames.in_part(self.store.manifest(self.suite)["cells"], self.part)  # which say what there is not

    def __repr__(self) -> str:
        counts = self.cells.drop_duplicates("run_id")["state"].value_counts()
        return f"Results of suite {self.suite}: {', '.join(f'{count:,} {state}' for state, count in counts.items())}"

    def _repr_html_(self) -> str:
        return f"<p>{HTML.escape(repr(self))}</p>{self.show()._repr_html_()}"

    @cached_property
    def stored(self) -> frames.Stored:
        """One row a cell, and what is wrong with the records."""
        return frames.load(self.store, self.suite, self.part)

    @property
    def cells(self) -> pd.DataFrame:
        """One row a cell, finished or not: see `frames.Stored`."""
        return self.stored.cells

    @property
    def problems(self) -> list[str]:
        """Problems with the records, a line each."""
        return self.stored.problems

    @property
    def missing(self) -> str:
        """How many cells have no result, in a sentence; empty where all have one."""
        lacking = ~self.cells.drop_duplicates("run_id")["state"].isin(RESULTS)
        count = f"{lacking.sum():,} of {len(lacking):,} cells have no result"
        return f"{count}; seeds that need them are left out." if lacking.any() else ""

    @property
    def folder(self) -> Path:
        """The folder of tables and pages: the suite's, or one inside of it for a part of the suite."""
        folder = self.store.suite_folder(self.suite)
        return folder / "part" if self.part else folder

    def table(self) -> pd.DataFrame:
        """One row a method and setting, with scores and epsilons: see `tables.comparison`."""
        return self._rows.copy()

    def show(
        self,
        layout: str = "long",
        *,
        scores: Sequence[str] = (),
        compare: bool = False,
        names: Mapping[str, str] | None = None,
    ) -> Table:
        """The comparison table as people read it, also in a notebook; its `markdown`, `latex` and `csv` are texts.

        Args:
            layout: "long", a row for each method and setting, or "wide", a row for each method and a column for each
                workload and epsilon, of several settings of a method with the one that validates best.
            scores: further scores of the long table.
            compare: with the numbers of the paper that the suite's key `published` names.
            names: further or other names of labels and workloads.

        Raises:
            ConfigError: no such layout or score, or a suite that names no paper.
        """
        if layout not in (layouts := ("long", "wide")):
            raise unknown("layout", layout, layouts)
        called = self.called(names)
        if layout == "wide":
            if scores or compare:
                raise ConfigError("layout", layout, "it has one score of each row: leave out `scores` and `compare`")
            table = tables.as_wide(self.comparison, self.suite, list(self.styles), called, self.cells)
            return replace(table, first=self.missing)
        frame, remarks = self.table(), list[str]()
        for score in scores:
            if score not in (further := tables.further_scores(frame)):
                raise unknown("scores", score, further)
        if compare and not frame.empty:
            frame, remarks = papers.beside(frame, self.manifest, scores)
        return replace(tables.as_table(frame, self.suite, scores, remarks, called), first=self.missing)

    def ranks(self, by: str = "epsilon", budgets: Sequence[float] = ()) -> list[Table]:
        """`ranking` as people read it: every block, and the averages."""
        blocks, *averages = ranking.as_tables(self.ranking(by, budgets), self.names)
        return [replace(blocks, first=self.missing), *averages]

    def ranking(self, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
        """One row a method in a block of equal cost: see `ranking.reached` for arguments, `ranking.ranking`."""
        return ranking.ranking(ranking.reached(self.store, self.cells, by, budgets))

    def against(self, baseline: str, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
        """One row a method and workload, with its distance from the label `baseline`: see `ranking.against`."""
        return ranking.against(ranking.reached(self.store, self.cells, by, budgets), baseline)

    def plot(
        self,
        name: str,
        folder: str | Path = "plots",
        *,
        width: float | None = None,
        names: Mapping[str, str] | None = None,
    ) -> Figure:
        """A figure of the suite.

        Args:
            name, folder: its file in the folder of figures, without `.py`.
            width: in inches, such as the 5.5 of a page; by default as wide as its panels take.
            names: further or other names of labels and workloads.

        Raises:
            ConfigError: no such figure, a width that is no page's, or the suite has nothing to show.
        """
        import matplotlib.pyplot as plt

        from dpopt.results import figures

        (chosen,) = figures.plots(fields.path(folder, "folder"), name)
        if chosen.needs not in figures.OF_SUITES:
            raise ConfigError("plot", name, f"it shows no suite; `{figures.OF_COMMANDS[chosen.needs]}` draws it")
        if (drawn := self.draw(chosen, width, names)) is None:
            raise ConfigError("plot", name, f"suite {self.suite} has nothing finished that it could show")
        plt.close(drawn)  # a notebook would show it once more
        return drawn

    def draw(
        self, plot: Plot, width: float | None = None, names: Mapping[str, str] | None = None, workload: str = ""
    ) -> Figure | None:
        """A figure, in the suite's styles and with names that are read; None where it has nothing to show.

        With a `workload`, by the name that is read, it is of that one alone.
        """
        called = self.called(names)
        frame = named(self.frame(plot.needs), called)
        if workload and not frame.empty:
            frame = frame[frame["workload"] == workload]
        if frame.empty:
            return None
        styles = {called.get(label, label): style for label, style in self.styles.items()}
        figure = plot.figure(frame, styles, width)
        if figure is not None and self.missing:
            figure.suptitle(self.missing, fontsize=8)
        return figure

    def clip_batch(self) -> Table | None:
        """Which methods need C and B tuned: `effects` as people read it; None where a suite has one C and one B."""
        if self.effects.empty:
            return None
        return replace(clip_batch.as_table(named(self.effects, self.names)), first=self.missing)

    def report(self, folder: str | Path = "plots", overrides: Sequence[str] = ()) -> str:
        """One HTML page with tables and figures, which opens without a network.

        Args:
            folder: of the figures.
            overrides: of the command line, for the commands that the page names.
        """
        from dpopt.results.report.page import page

        return page(self, fields.path(folder, "folder"), shlex.join(overrides or [f"suite={self.suite}"]))

    @cached_property
    def every(self) -> pd.DataFrame:
        """One row a replicate of every group: `choosing.select`."""
        return choosing.select(self.cells)

    @cached_property
    def _rows(self) -> pd.DataFrame:
        return tables.comparison(self.store, self.every)

    @cached_property
    def selected(self) -> pd.DataFrame:
        """One row a replicate; of several batch sizes, epochs and clips of a method, those that validate best."""
        return choosing.best_setting(self.every)

    @cached_property
    def comparison(self) -> pd.DataFrame:
        """One row a method, workload and target epsilon: `tables.comparison` of `selected`."""
        return tables.comparison(self.store, self.selected)

    @cached_property
    def curves(self) -> pd.DataFrame:
        """One row a curve entry of the selected runs."""
        return frames.curves(self.store, self.selected)

    @cached_property
    def sweep(self) -> pd.DataFrame:
        """One row a group, of suites that vary a method's clip and batch size, with its mean `selected_by`."""
        every = self.every
        if every.empty or (every.groupby("label")[["clip", "batch_size"]].nunique().max() < 2).any():
            return pd.DataFrame()
        return self._rows.merge(choosing.mean_scores(every), on=GROUP)

    @cached_property
    def settings(self) -> pd.DataFrame:
        """One row a replicate of every group of `sweep`."""
        return pd.DataFrame() if self.sweep.empty else self.every

    @cached_property
    def effects(self) -> pd.DataFrame:
        """The cost of a C and B one step away from the best, and the gain by tuning them: `clip_batch.effects`."""
        return pd.DataFrame() if self.sweep.empty else clip_batch.effects(self.settings)

    @cached_property
    def rates(self) -> pd.DataFrame:
        """One row a replicate of `sweep` whose runs have several learning rates: the selected one is `lr`."""
        if self.sweep.empty:
            return pd.DataFrame()
        rates = self.cells.groupby([*GROUP, "seed"], dropna=False)["lr"].transform("nunique")
        # Without a score no rate is the best.
        scored = self.every[self.every["selected_by"] > -math.inf]
        return scored.merge(self.cells.loc[rates > 1, ["label", "run_id"]])

    @cached_property
    def diagnostics(self) -> pd.DataFrame:
        """One row a curve entry that holds diagnostics, of the runs of every group and not of the best one alone."""
        return frames.diagnostics(self.store, self.every)

    @cached_property
    def classes(self) -> pd.DataFrame:
        """One row a class and bound C, of the selected runs that were diagnosed."""
        return frames.classes(self.store, self.selected)

    @cached_property
    def class_scores(self) -> pd.DataFrame:
        """One row a class of the runs of `sweep`, with its test accuracy."""
        return frames.class_scores(self.store, self.settings)

    @cached_property
    def transfers(self) -> pd.DataFrame:
        """The loss at one epsilon of the point that validates best at another, for each search."""
        return transfer.transfers(self.cells)

    @cached_property
    def styles(self) -> dict[str, Style]:
        """The look of each label in figures."""
        # That of the whole suite, so that a figure of a part can be laid beside it.
        return styles_of(row_names(self.store.manifest(self.suite)["cells"]))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The suite as it is stored; until it is published, with the names and the paper of its file at hand."""
        stored = self.store.manifest(self.suite)
        with suppress(ConfigError):  # results are there whatever has become of the file
            if not self.store.is_read_only and self.suite in suite_files():
                return stored | load_suite(self.suite).presented
        return stored

    @cached_property
    def names(self) -> dict[str, str]:
        """The name in tables and figures of each workload and label of the frames."""
        entries = self.manifest["cells"]
        optimizers = (entry["cell"]["optimizer"]["name"] for entry in entries)
        rows = dict(zip(row_names(entries), optimizers, strict=True))
        workloads = titles([[entry["cell"]["workload"] for entry in entries]])[0]
        return workloads | display_names(rows, self.manifest.get("display", {}))

    def called(self, names: Mapping[str, str] | None = None) -> dict[str, str]:
        """`names`, with further or other ones; `ConfigError` where two rows or workloads have the same."""
        called = self.names | dict(names or {})
        every = [called[name] for name in self.names]
        if names and (shared := [name for name in names.values() if every.count(name) > 1]):
            raise ConfigError("names", shared[0], "two rows or workloads would have this name")
        return called

    def frame(self, needs: str) -> pd.DataFrame:
        """The frame that a figure `needs`."""
        return self.ranking() if needs == "ranking" else getattr(self, needs)
