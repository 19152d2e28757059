"""Who is best over many tasks at equal total epsilon, from one suite with many workloads or from several suites."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path

import numpy as np
import pandas as pd

from dpopt.errors import ConfigError
from dpopt.results import choosing, figures, layout, ranking, statistics, tables
from dpopt.results.choosing import Row
from dpopt.results.drawing import styles_of
from dpopt.results.frames import UNSAID
from dpopt.results.naming import titles
from dpopt.results.ranking import BLOCK, reached
from dpopt.results.report.sheet import inline, sheet
from dpopt.results.results import Results
from dpopt.results.scores import shown
from dpopt.results.writing import Column, Table, marks, named, texts, unless_nan
from dpopt.store.runs import Store

SELF, PUBLIC, CHARGED, FREE = "self-tuned", "public constant", "searched, charged", "not charged"
"""The tracks; methods of the last are for reference and have no rank."""
_CHOSEN_ON = "\N{DEGREE SIGN}"
"""Marks the score of a method on a task that one of its constants was chosen on."""
_NOTE = (
    "Rank: average over workloads at equal total ε, searches included. Unseen: over workloads on which no constant was "
    f"chosen. Per draw, per gradient: at equal cost. Italics: spends more than ε, or set by hand. {tables.PAGE}"
)
_CAPTION = "Average ranks and their critical difference."
_SCORES_NOTE = (
    f"Mean ± standard deviation over seeds. {tables.MARKS} {_CHOSEN_ON}: one of its constants was chosen on this "
    f"task. {tables.PAGE}"
)


@dataclass(frozen=True)
class Leaderboard:
    """Methods of suites of one folder. A method is a label; of suites with it on one workload the first counts."""

    suites: Sequence[Results]

    def __post_init__(self) -> None:
        folders = {str(results.store.root) for results in self.suites}
        if len(folders) > 1:
            raise ConfigError("results", sorted(folders), "expected suites of one folder")
        if self.cells.empty or self.scores.empty:
            raise ConfigError("suite", [results.suite for results in self.suites], "no finished private rows")

    @cached_property
    def names(self) -> dict[str, str]:
        """The name of each method in tables and figures; that of the first suite which has it."""
        return {label: name for results in reversed(self.suites) for label, name in results.names.items()}

    @property
    def store(self) -> Store:
        """The store of the suites."""
        return self.suites[0].store

    @cached_property
    def _every(self) -> pd.DataFrame:
        """The private cells of all suites, their workloads named alike."""
        suites = [replace(results, store=self.store) for results in self.suites]  # which reads each of them once
        specs = [[entry["cell"]["workload"] for entry in self.store.manifest(each.suite)["cells"]] for each in suites]
        parts = []
        for number, (results, names) in enumerate(zip(suites, titles(specs), strict=True)):
            parts.append(results.cells.assign(workload=results.cells["workload"].map(names), number=number))
        cells = pd.concat(parts, ignore_index=True)
        return cells[cells["epsilon_target"] < math.inf]

    @cached_property
    def cells(self) -> pd.DataFrame:
        """Of methods that several suites have on one workload, the cells of the first suite."""
        every = self._every
        return every[every["number"] == every.groupby(["workload", "label"])["number"].transform("min")]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """One row a method, workload and target epsilon: `tables.comparison`, of several settings the chosen one."""
        return tables.comparison(self.store, choosing.best_setting(choosing.select(self.cells)))

    @cached_property
    def tracks(self) -> dict[str, str]:
        """The track of each method."""
        tracks = dict[str, str]()
        for label, rows in self.scores.groupby("label", sort=False):
            (tuning, *others), tuned = rows["tuning"].unique(), {"self": SELF, "public": PUBLIC}
            track = CHARGED if others else tuned.get(tuning, CHARGED)
            tracks[str(label)] = FREE if rows["is_reference"].any() else track
        return tracks

    @cached_property
    def chosen_on(self) -> dict[str, dict[str, list[str]]]:
        """The constants of each method that were chosen on data, each with the tasks that it was chosen on."""
        constants: dict[str, dict[str, list[str]]] = {str(label): {} for label in self._every["label"].unique()}
        # One suite may say less than another, such as one that was run before a constant was chosen again.
        for label, text in self._every[["label", "chosen_on"]].drop_duplicates().itertuples(index=False):
            for constant, tasks in json.loads(text or "{}").items():
                before = constants[label].get(constant, [])
                constants[label][constant] = list(dict.fromkeys([*before, *tasks]))
        return constants

    def is_chosen_on(self, workload: str, label: str) -> bool:
        """True if a constant of a method was chosen on a task, with these or other fields, such as records held out."""
        tasks = [task for of_constant in self.chosen_on[label].values() for task in of_constant]
        return any(workload == task or workload.startswith(f"{task}, ") for task in tasks)

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The cells of the methods that have a rank."""
        return self.cells[self.cells["label"].map(self.tracks).isin([SELF, PUBLIC, CHARGED])]

    @cached_property
    def entries(self) -> pd.DataFrame:
        """The score of each seed in each block: `ranking.reached`."""
        return reached(self.store, self.ranked)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """One row a ranked method and block: `ranking.ranking`."""
        return ranking.ranking(self.entries)

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """One row a method, the best first and those without a rank last.

        `low` and `high` are a bootstrap interval over workloads and seeds; `unseen` is the average rank over workloads
        that no constant of a ranked method was chosen on; `draws` and `gradients` are average ranks by these.
        """
        runs = self.cells.drop_duplicates(["label", "run_id"])
        seconds = runs.get("seconds_cpu", pd.Series(math.nan, runs.index))
        frame = pd.DataFrame({"track": self.tracks}).rename_axis("label")
        frame["cpu_hours"] = seconds.groupby(runs["label"]).sum(min_count=1) / 3600
        frame["blocks"] = self.scores.groupby("label").size()
        # Both ranks are of the same methods: one that lacks a task has neither, and keeps no task from the second.
        rows = self.blocks if self.blocks.empty else ranking.everywhere(self.blocks)
        frame = frame.join(self._averages(rows))
        parts = {by: ranking.ranking(reached(self.store, self.ranked, by)) for by in ("draws", "gradients")}
        parts["unseen"] = rows if rows.empty else rows[rows["workload"].isin(self._unseen(rows["label"].unique()))]
        for by, blocks in parts.items():
            frame[by] = math.nan if blocks.empty else ranking.average_ranks(blocks).set_index("label")["rank"]
        return frame.sort_values("rank", kind="stable").reset_index()

    def _unseen(self, labels: Collection[str]) -> list[str]:
        """The workloads that no constant of the methods was chosen on; none where a suite does not say."""
        of_methods = self._every[self._every["label"].isin(labels)]
        workloads = [] if (of_methods["chosen_on"] == UNSAID).any() else self.cells["workload"].unique()
        return [name for name in workloads if not any(self.is_chosen_on(name, label) for label in labels)]

    def _averages(self, rows: pd.DataFrame) -> pd.DataFrame:
        if rows.empty:  # no method is in every block
            return pd.DataFrame(columns=["rank", "low", "high", "is_best"])
        averages, test = ranking.average_ranks(self.blocks).set_index("label")["rank"], ranking.rank_test(self.blocks)
        workloads: dict[str, list[np.ndarray]] = {}
        for (workload, *_), block in self.entries.merge(rows[BLOCK].drop_duplicates(), on=BLOCK).groupby(BLOCK):
            workloads.setdefault(workload, []).append(ranking.imputed(block)[list(averages.index)].to_numpy())
        samples = statistics.rank_samples(list(workloads.values()))
        low, high = np.quantile(samples, [(1 - statistics.CONFIDENCE) / 2, (1 + statistics.CONFIDENCE) / 2], axis=0)
        is_best = (averages - averages.min() < test[1]) if test else False
        return pd.DataFrame({"rank": averages}).assign(low=low, high=high, is_best=is_best)

    def tables(self, baseline: str = "", by: str = "epsilon") -> list[Table]:
        """The ranks, distances from the baseline if there is one, and scores of all methods for each target epsilon.

        Args:
            baseline: a ranked method that all others are compared with, by a budget of `ranking.BUDGETS`.
            by: that budget.
        """
        distances = []
        if baseline:
            entries = self.entries if by == "epsilon" else reached(self.store, self.ranked, by)
            distances = [ranking.against_table(ranking.against(entries, baseline), baseline, by, self.names)]
        targets = sorted(self.scores["epsilon_target"].unique())
        scores = [self._scores(target, _SCORES_NOTE if target == targets[-1] else "") for target in targets]
        shown = [self._ranks(), *distances, *scores, *self._constants()]
        return [replace(table, first=self.missing) for table in shown]

    @property
    def missing(self) -> str:
        """How many cells of each suite have no result; empty where all have one."""
        return " ".join(f"{results.suite}: {results.missing}" for results in self.suites if results.missing)

    @property
    def _methods(self) -> Column:
        return Column("method", "label", lambda label: self.names[label])

    def _ranks(self) -> Table:
        def interval(row: Row) -> str:
            return "" if math.isnan(row["low"]) else f"[{row['low']:.2f}, {row['high']:.2f}]"

        def rank(row: Row) -> str:
            is_tied = row["is_best"] is True and bool(row["rank"] > self.ranks["rank"].min())
            return "" if math.isnan(row["rank"]) else f"{row['rank']:.2f}" + f" {tables.DAGGER}" * is_tied

        columns = [
            self._methods,
            Column("track", "track"),
            Column("rank", text=rank),
            Column("95 % interval", text=interval),
            Column("unseen", "unseen", unless_nan("{:.2f}".format)),
            Column("per draw", "draws", unless_nan("{:.2f}".format)),
            Column("per gradient", "gradients", unless_nan("{:.2f}".format)),
            Column("blocks", "blocks"),
            Column("CPU hours", "cpu_hours", unless_nan("{:.2g}".format)),
        ]
        verdict = "Nothing is ranked." if self.blocks.empty else ranking.verdict(self.blocks)
        is_tested = any(is_best is True for is_best in self.ranks["is_best"])
        bold = marks(is_tested & (self.ranks["rank"] == self.ranks["rank"].min()), ("method", "rank"))
        italic = marks(self.ranks["track"] == FREE, ["method"])
        details = f"{verdict}{f' Bold: the best rank; {tables.DAGGER}: not shown to differ.' if bold else ''}"
        marked = {"bold": bold, "italic": italic, "optional": [column.name for column in columns[:3:-1]]}
        title = "Average ranks at equal total ε"
        frame = texts(self.ranks, columns)
        frame = frame if frame["unseen"].any() else frame.drop(columns="unseen")
        return Table(frame, title, _NOTE, details, **marked, numbers=self.ranks)

    def _scores(self, target: float, note: str) -> Table:
        rows = self.scores[self.scores["epsilon_target"] == target]
        blocks = self.blocks if self.blocks.empty else self.blocks[self.blocks["epsilon"] == target]
        # A mark belongs to a mean over the seeds that all have, so that a number of other seeds has none.
        means = {(row["label"], row["workload"]): row for row in blocks.to_dict("records")}

        def marked(row: Row) -> Row:
            block = means.get((row["label"], row["workload"]), {"mean": math.nan})
            is_same = math.isclose(block["mean"], row["mean"])
            flags = {mark: is_same and block[mark] for mark in ("is_best", "is_highest")}
            text = shown(row["score"]).text(row["mean"], row["std"])
            text += _CHOSEN_ON * self.is_chosen_on(row["workload"], row["label"]) + tables.dagger(flags)
            return row | flags | {"label": self.names[row["label"]], "text": text, "italic": row["is_reference"]}

        methods = self.ranks[self.ranks["label"].isin(rows["label"])]
        units = {row["workload"]: shown(row["score"]).label for row in rows.to_dict("records")}
        shown_rows = pd.DataFrame([*map(marked, rows.to_dict("records"))])
        table = layout.wide(shown_rows, [*methods["label"].map(self.names)], itemgetter("text"), units.__getitem__)
        italic = table.italic | marks(methods["track"] == FREE, ["method"])
        return replace(table, title=f"Scores at total ε = {target:g}", note=note, italic=italic, numbers=rows)

    def _constants(self) -> list[Table]:
        """The constants of methods that were chosen on data; none where there are none."""
        rows = [(label, *pair) for label in self.ranks["label"] for pair in self.chosen_on[label].items()]
        frame = pd.DataFrame(rows, columns=["label", "constant", "tasks"])
        columns = [self._methods, Column("constant", "constant")]
        columns.append(Column("chosen on", "tasks", lambda tasks: "; ".join(tasks) or "none of our tasks"))
        note = "Constants that a method has beside those of its paper, and the tasks whose scores they were chosen by."
        return [Table(texts(frame, columns), "Constants and what they were chosen on", note)] if rows else []

    @property
    def about(self) -> str:
        """The suites and their cost, in a sentence."""
        runs = self.cells.drop_duplicates("run_id")
        hours = runs.get("seconds_cpu", pd.Series(dtype=float)).sum() / 3600
        cost = f"{len(runs):,} runs" + (f", {hours:.2g} CPU hours of training." if hours else ".")
        return f"Suites: {', '.join(results.suite for results in self.suites)}. {cost}"

    def page(self, plots: Path, baseline: str = "", by: str = "epsilon") -> dict[str, str | bytes]:
        """A page as Markdown and HTML, its figure, and the numbers as CSV (p too), by the names of their files."""
        tables, pictures, files = self.tables(baseline, by), list[dict[str, str]](), dict[str, str | bytes]()
        parts = [f"## {table.title}\n\n{table.markdown}" for table in tables]
        (plot,), blocks = figures.plots(plots, "average_ranks"), self.blocks
        styles = {} if blocks.empty else styles_of(blocks["label"])
        blocks, styles = named(blocks, self.names), {self.names[label]: style for label, style in styles.items()}
        figure = None if blocks.empty else plot.figure(blocks, styles)
        if figure is not None:
            parts.insert(1, f"![{_CAPTION}](leaderboard.svg)")
            drawn = inline(figure, "figure-1", _CAPTION)
            pictures = [{"name": "average_ranks", "caption": _CAPTION, "legend": "", "svg": drawn, "problem": ""}]
            figure = plot.figure(blocks, styles)  # anew, as drawing moves its parts
            files["leaderboard.svg"] = figures.render(figure, ["svg"])["svg"]
        if baseline:
            files["leaderboard_against.csv"] = tables[1].csv
        return files | {
            "leaderboard.md": "\n\n".join(["# Leaderboard", self.about, *parts]) + "\n",
            "leaderboard.html": sheet("Leaderboard", tables, pictures, self.about),
            "leaderboard.csv": tables[0].csv,
            "leaderboard_scores.csv": Table(self.scores).csv,
        }
