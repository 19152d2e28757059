"""The stored cells of a suite, and the frames, tables, figures and pages that follow from them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.results import choosing, clip_batch, frames, ranking, tables, transfer
from dpopt.results.drawing import Style, styles_of
from dpopt.results.frames import GROUP
from dpopt.results.naming import row_names, titles
from dpopt.store import Store

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
        key: tuple(value) if isinstance(value, list | tuple | set | range) else (value,)
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
    def folder(self) -> Path:
        """The folder of tables and pages: the suite's, or one inside of it for a part of the suite."""
        folder = self.store.suite_folder(self.suite)
        return folder / "part" if self.part else folder

    def table(self) -> pd.DataFrame:
        """One row a method and setting, with scores and epsilons: see `tables.comparison`."""
        return tables.comparison(self.store, self.every)

    def ranking(self, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
        """One row a method in a block of equal cost: see `ranking.reached` for arguments, `ranking.ranking`."""
        return ranking.ranking(ranking.reached(self.store, self.cells, by, budgets))

    def against(self, baseline: str, by: str = "epsilon", budgets: Sequence[float] = ()) -> pd.DataFrame:
        """One row a method and workload, with its distance from `baseline`: see `ranking.against`."""
        return ranking.against(ranking.reached(self.store, self.cells, by, budgets), baseline)

    def plot(self, name: str, folder: str | Path = "plots") -> Figure:
        """The figure `name` of `folder`; `ConfigError` for no such figure, or where the suite has nothing to show."""
        from dpopt.results import figures

        (chosen,) = figures.plots(fields.path(folder, "folder"), name)
        if chosen.needs not in figures.OF_SUITES:
            raise ConfigError("plot", name, f"it shows no suite; `{figures.OF_COMMANDS[chosen.needs]}` draws it")
        if (drawn := self.draw(chosen)) is None:
            raise ConfigError("plot", name, f"suite {self.suite} has nothing finished that it could show")
        return drawn

    def draw(self, plot: Plot) -> Figure | None:
        """A figure of suites, in the suite's styles and with names that are read; None where it has nothing to show."""
        frame = self.frame(plot.needs)
        if frame.empty:
            return None
        return plot.figure(frame.assign(workload=frame["workload"].map(self._titles)), self.styles)

    def report(self, folder: str | Path = "plots", overrides: Sequence[str] = ()) -> str:
        """One HTML page with tables and figures, which opens without a network.

        Args:
            folder: of the figures.
            overrides: of the command line, for the commands that the page names.
        """
        from dpopt.results.report.page import page, tables_of

        of_suite = shlex.join(overrides or [f"suite={self.suite}"])
        shown = tables_of(self.comparison, self.table(), self.store.manifest(self.suite), of_suite)
        ranks = [replace(table, command=f"dpopt rank {of_suite}") for table in ranking.as_tables(self.ranking())]
        if not self.effects.empty:
            shown.append(clip_batch.as_table(self.effects))
        plots = fields.path(folder, "folder")
        return page(self.store, self.suite, self.stored, [*shown, *ranks], self.draw, plots, of_suite)

    @cached_property
    def every(self) -> pd.DataFrame:
        """One row a replicate of every group: `choosing.select`."""
        return choosing.select(self.cells)

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
        return tables.comparison(self.store, every).merge(choosing.mean_scores(every), on=GROUP)

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
    def _titles(self) -> dict[str, str]:
        specs = [entry["cell"]["workload"] for entry in self.store.manifest(self.suite)["cells"]]
        return titles([specs])[0]

    def frame(self, needs: str) -> pd.DataFrame:
        """The frame that a figure `needs`."""
        return self.ranking() if needs == "ranking" else getattr(self, needs)
