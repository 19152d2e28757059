"""Who is best over many tasks at equal total epsilon, from one suite with many workloads or from several suites."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpopt.analysis import against, figures, frames, ranking, statistics, tables
from dpopt.analysis.budgets import BLOCK, reached
from dpopt.analysis.drawing import styles_of
from dpopt.analysis.naming import readable_names, workload_names
from dpopt.analysis.results import Results, best_setting
from dpopt.analysis.scores import shown
from dpopt.analysis.writing import Table
from dpopt.errors import ConfigError
from dpopt.store.runs import Store

SELF, CHARGED, FREE = "self-tuned", "searched, charged", "not charged"
"""The tracks; methods of the last are for reference and have no rank."""
NOTE = (
    "Rank: the average over workloads of a method's ranks at equal total ε, all runs of its search included, with a 95 "
    "% bootstrap interval over workloads and seeds, which is too narrow with few workloads. First: the share of these "
    "samples in which its average rank is the best. Per draw, per gradient: the average rank with as many draws or "
    f"gradient evaluations as the cheapest method of a block takes, the runs of a search together; a {ranking.STOPPED} "
    "CPU hours: of all its runs here. Ranked are methods that are in all blocks (a workload and a target ε). In "
    "italics, for reference: searches that spend more than the target, and values set by hand, which are not charged."
)
CAPTION = "Average ranks and their critical difference."
SCORES_NOTE = (
    "Test scores: mean ± standard deviation over seeds. Bold: methods that may be the best of the task, at 95 % "
    "confidence, on this test split (paired t tests over seeds, corrected for their number); italics: for reference."
)


@dataclass(frozen=True)
class Leaderboard:
    """What suites say of methods. A method is a label; of several suites that have it on a workload, the first counts.

    Args:
        known: the suites, of one results folder.
        baseline: a ranked method that all others are compared with, see `against`; none where it is empty.
        by: of `budgets.BUDGETS`: what they have in common in that comparison.

    Raises:
        ConfigError: they lie in several folders, or no private row is finished.
    """

    known: Sequence[Results]
    baseline: str = ""
    by: str = "epsilon"

    def __post_init__(self) -> None:
        folders = {str(results.store.root) for results in self.known}
        if len(folders) > 1:
            raise ConfigError("results", sorted(folders), "expected suites of one folder")
        if self.cells.empty or self.scores.empty:
            raise ConfigError("suite", [results.suite for results in self.known], "no finished private rows")

    @property
    def store(self) -> Store:
        """Which holds the suites."""
        return self.known[0].store

    @cached_property
    def cells(self) -> pd.DataFrame:
        """The private cells of all suites, their workloads named alike."""
        known = [replace(results, store=self.store) for results in self.known]  # which reads each of them once
        specs = [[entry["cell"]["workload"] for entry in self.store.manifest(each.suite)["cells"]] for each in known]
        names, parts, seen = readable_names([spec for own in specs for spec in own]), [], set[tuple[str, str]]()
        for each, own in zip(known, specs, strict=True):
            called = {name: names[key] for key, name in workload_names(own).items()}
            cells = each.cells.assign(workload=each.cells["workload"].map(called))
            places = list(zip(cells["workload"], cells["label"], strict=True))
            parts.append(cells[[place not in seen for place in places]])
            seen |= set(places)
        cells = pd.concat(parts, ignore_index=True)
        return cells[cells["epsilon_target"] < math.inf]

    @cached_property
    def scores(self) -> pd.DataFrame:
        """One row a method, workload and target epsilon: `tables.comparison`, of several settings the chosen one."""
        return tables.comparison(self.store, best_setting(frames.select(self.cells)))

    @cached_property
    def tracks(self) -> dict[str, str]:
        """What is charged of each method."""
        own = self.scores.groupby("label", sort=False)
        is_free, is_self = own["is_reference"].any(), own["tuning"].agg(lambda tuning: (tuning == "self").all())
        return {label: FREE if is_free[label] else SELF if is_self[label] else CHARGED for label in is_free.index}

    @cached_property
    def ranked(self) -> pd.DataFrame:
        """The cells of the methods that have a rank."""
        return self.cells[self.cells["label"].map(self.tracks).isin([SELF, CHARGED])]

    @cached_property
    def entries(self) -> pd.DataFrame:
        """What each seed reaches in each block: `budgets.reached`."""
        return reached(self.store, self.ranked)

    @cached_property
    def blocks(self) -> pd.DataFrame:
        """One row a ranked method and block: `ranking.ranking`."""
        return ranking.of_entries(self.entries, "epsilon")

    @cached_property
    def ranks(self) -> pd.DataFrame:
        """One row a method, the best first and those without a rank last.

        Returns:
            `label`, `track`, `rank` with `low` and `high`, `first` (see `NOTE`), `draws` and `gradients` (the average
            ranks by these), `cpu_hours`, `blocks` that it is in, `is_best`: whether its rank may be the best.
        """
        cost = self.cells.drop_duplicates(["label", "run_id"]).assign(
            cpu=lambda cells: cells.get("seconds_cpu", pd.Series(math.nan, cells.index))
        )
        frame = pd.DataFrame({"track": self.tracks}).rename_axis("label")
        frame["cpu_hours"] = cost.groupby("label")["cpu"].sum(min_count=1) / 3600
        frame["blocks"] = self.scores.groupby("label").size()
        frame = frame.join(self._averages()).join(self._by("draws")).join(self._by("gradients"))
        return frame.sort_values("rank", kind="stable").reset_index()

    def _averages(self) -> pd.DataFrame:
        columns = ["rank", "low", "high", "first", "is_best"]
        if self.blocks.empty:
            return pd.DataFrame(columns=columns)
        rows, test = ranking.everywhere(self.blocks), ranking.rank_test(self.blocks)
        averages = ranking.average_ranks(self.blocks).set_index("label")["rank"]
        samples = statistics.rank_samples(_scores_by_workload(self.entries, rows, list(averages.index)))
        low, high = np.quantile(samples, [(1 - statistics.CONFIDENCE) / 2, (1 + statistics.CONFIDENCE) / 2], axis=0)
        is_first = samples == samples.min(axis=1, keepdims=True)
        first = (is_first / is_first.sum(axis=1, keepdims=True)).mean(axis=0)
        is_best = (averages - averages.min() < test.critical) if test else False
        return pd.DataFrame({"rank": averages}).assign(low=low, high=high, first=first, is_best=is_best)

    def _by(self, budget: str) -> pd.Series:
        """Average ranks at equal cost of another kind."""
        frame = ranking.ranking(self.store, self.ranked, budget)
        known = pd.Series(dtype=float) if frame.empty else ranking.average_ranks(frame).set_index("label")["rank"]
        return known.rename(budget)

    def tables(self) -> list[Table]:
        """The ranks, distances from the baseline, and the scores of all methods for each target epsilon.

        Raises:
            ConfigError: the baseline is no ranked method, or no other one can be compared with it.
        """
        targets = sorted(self.scores["epsilon_target"].unique())
        scores = [self._scores(target, target == targets[-1]) for target in targets]
        return [self._ranks(), *self._against(), *scores]

    def _against(self) -> list[Table]:
        if not self.baseline:
            return []
        entries = self.entries if self.by == "epsilon" else reached(self.store, self.ranked, self.by)
        return [against.as_table(against.against(entries, self.baseline), self.baseline, self.by)]

    def _ranks(self) -> Table:
        table = self.ranks
        rows = table.to_dict("records")
        frame = pd.DataFrame(
            {
                "method": table["label"],
                "track": table["track"],
                "rank": [_number(row["rank"]) for row in rows],
                "95 % interval": [_interval(row) for row in rows],
                "first": ["" if math.isnan(row["first"]) else f"{100 * row['first']:.0f} %" for row in rows],
                "per draw": table["draws"].map(_number),
                "per gradient": table["gradients"].map(_number),
                "blocks": table["blocks"].astype(str),
                "CPU hours": table["cpu_hours"].map("{:.2g}".format).replace("nan", ""),
            }
        )
        verdict = "Nothing is ranked." if self.blocks.empty else ranking.verdict(self.blocks)
        bold = {(at, name) for at, row in enumerate(rows) if row["is_best"] is True for name in ("method", "rank")}
        italic = {(at, "method") for at, row in enumerate(rows) if row["track"] == FREE}
        note = f"{NOTE} {verdict}{' Bold: ranks that do not differ from the best.' if bold else ''}"
        return Table(frame, "Average ranks at equal total ε", note, bold=bold, italic=italic, numbers=table)

    def _scores(self, target: float, is_last: bool) -> Table:
        rows, order = self.scores[self.scores["epsilon_target"] == target], list(self.ranks["label"])
        blocks = self.blocks
        if not blocks.empty:
            blocks = blocks[(blocks["epsilon"] == target) & blocks["is_best"]]
        best = set() if blocks.empty else set(zip(blocks["label"], blocks["workload"], strict=True))
        labels = [label for label in order if label in set(rows["label"])]
        frame = pd.DataFrame({"method": labels})
        bold, italic = set[tuple[int, str]](), set[tuple[int, str]]()
        for workload, own in rows.groupby("workload", sort=False):
            of = {row["label"]: row for row in own.to_dict("records")}
            unit = shown(own["score"].iloc[0])
            name = f"{workload}, {unit.label}"
            frame[name] = [unit.text(of[label]["mean"], of[label]["std"]) if label in of else "" for label in labels]
            bold |= {(at, name) for at, label in enumerate(labels) if (label, workload) in best}
            italic |= {(at, name) for at, label in enumerate(labels) if label in of and of[label]["is_reference"]}
        italic |= {(at, "method") for at, label in enumerate(labels) if self.tracks[label] == FREE}
        title = f"Scores at total ε = {target:g}"
        return Table(frame, title, SCORES_NOTE if is_last else "", bold=bold, italic=italic, numbers=rows)

    def _cost(self) -> str:
        runs = self.cells.drop_duplicates("run_id")
        hours = runs.get("seconds_cpu", pd.Series(dtype=float)).sum() / 3600
        return f"{len(runs):,} runs" + (f", {hours:.2g} CPU hours of training." if hours else ".")

    def _draw(self, plots: Path) -> Any:
        if self.blocks.empty:
            return None
        (plot,) = figures.plots(plots, "average_ranks")
        return plot.figure(self.blocks, styles_of(self.blocks["label"]))

    def files(self, plots: Path) -> dict[str, str | bytes]:
        """A page as Markdown and HTML, the figure, and the numbers as CSV (p too), by the names of their files."""
        from markupsafe import Markup

        from dpopt.analysis.report import svg
        from dpopt.analysis.report.sheet import Drawing, sheet

        made, drawn = self.tables(), self._draw(plots)
        parts = [f"## {table.title}\n\n{table.markdown}" for table in made]
        if drawn is not None:
            parts.insert(1, f"![{CAPTION}](leaderboard.svg)")
        said = f"Suites: {', '.join(results.suite for results in self.known)}. {self._cost()}"
        pictures, further = list[Drawing](), dict[str, str | bytes]()
        if drawn is not None:
            markup = Markup(svg.render(drawn, "figure-1", CAPTION))
            pictures.append(Drawing("average_ranks", CAPTION, "", markup, ""))
            further["leaderboard.svg"] = figures.render(self._draw(plots), ["svg"])["svg"]
        if self.baseline:
            further["leaderboard_against.csv"] = made[1].csv
        return further | {
            "leaderboard.md": "\n\n".join(["# Leaderboard", said, *parts]) + "\n",
            "leaderboard.html": sheet("Leaderboard", made, pictures, said),
            "leaderboard.csv": made[0].csv,
            "leaderboard_scores.csv": Table(self.scores).csv,
        }


def _scores_by_workload(entries: pd.DataFrame, rows: pd.DataFrame, labels: list[str]) -> list[list[np.ndarray]]:
    """For each workload the scores [seeds, methods] of each block of `rows`, as they are ranked."""
    found: dict[str, list[np.ndarray]] = {}
    kept = entries.merge(rows[BLOCK].drop_duplicates(), on=BLOCK)
    for (workload, *_), block in kept.groupby(BLOCK):
        found.setdefault(workload, []).append(ranking.imputed(block)[labels].to_numpy())
    return list(found.values())


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _interval(row: dict[str, Any]) -> str:
    return "" if math.isnan(row["low"]) else f"[{row['low']:.2f}, {row['high']:.2f}]"
