"""The leaderboard as people read it: its tables, and its page with a figure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt.results import against, figures, ranking
from dpopt.results.budgets import reached
from dpopt.results.drawing import styles_of
from dpopt.results.leaderboard import FREE, Leaderboard
from dpopt.results.scores import shown
from dpopt.results.writing import Table

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
class Page:
    """What is shown of a leaderboard.

    Args:
        board: the leaderboard.
        baseline: a ranked method that all others are compared with, see `against`; none where it is empty.
        by: of `budgets.BUDGETS`: what they have in common in that comparison.
    """

    board: Leaderboard
    baseline: str = ""
    by: str = "epsilon"

    def tables(self) -> list[Table]:
        """The ranks, distances from the baseline, and the scores of all methods for each target epsilon.

        Raises:
            ConfigError: the baseline is no ranked method, or no other one can be compared with it.
        """
        targets = sorted(self.board.scores["epsilon_target"].unique())
        scores = [self._scores(target, target == targets[-1]) for target in targets]
        return [self._ranks(), *self._against(), *scores]

    def _against(self) -> list[Table]:
        if not self.baseline:
            return []
        entries = self.board.entries if self.by == "epsilon" else reached(self.board.store, self.board.ranked, self.by)
        return [against.as_table(against.against(entries, self.baseline), self.baseline, self.by)]

    def _ranks(self) -> Table:
        table = self.board.ranks
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
        verdict = "Nothing is ranked." if self.board.blocks.empty else ranking.verdict(self.board.blocks)
        bold = {(at, name) for at, row in enumerate(rows) if row["is_best"] is True for name in ("method", "rank")}
        italic = {(at, "method") for at, row in enumerate(rows) if row["track"] == FREE}
        note = f"{NOTE} {verdict}{' Bold: ranks that are not shown to differ from the best.' if bold else ''}"
        return Table(frame, "Average ranks at equal total ε", note, bold=bold, italic=italic, numbers=table)

    def _scores(self, target: float, is_last: bool) -> Table:
        rows, order = self.board.scores[self.board.scores["epsilon_target"] == target], list(self.board.ranks["label"])
        blocks = self.board.blocks
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
        italic |= {(at, "method") for at, label in enumerate(labels) if self.board.tracks[label] == FREE}
        title = f"Scores at total ε = {target:g}"
        return Table(frame, title, SCORES_NOTE if is_last else "", bold=bold, italic=italic, numbers=rows)

    def _cost(self) -> str:
        runs = self.board.cells.drop_duplicates("run_id")
        hours = runs.get("seconds_cpu", pd.Series(dtype=float)).sum() / 3600
        return f"{len(runs):,} runs" + (f", {hours:.2g} CPU hours of training." if hours else ".")

    def _draw(self, plots: Path) -> Any:
        if self.board.blocks.empty:
            return None
        (plot,) = figures.plots(plots, "average_ranks")
        return plot.figure(self.board.blocks, styles_of(self.board.blocks["label"]))

    def files(self, plots: Path) -> dict[str, str | bytes]:
        """A page as Markdown and HTML, the figure, and the numbers as CSV (p too), by the names of their files."""
        from markupsafe import Markup

        from dpopt.results.report import svg
        from dpopt.results.report.sheet import Drawing, sheet

        made, drawn = self.tables(), self._draw(plots)
        parts = [f"## {table.title}\n\n{table.markdown}" for table in made]
        if drawn is not None:
            parts.insert(1, f"![{CAPTION}](leaderboard.svg)")
        said = f"Suites: {', '.join(results.suite for results in self.board.known)}. {self._cost()}"
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
            "leaderboard_scores.csv": Table(self.board.scores).csv,
        }


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.2f}"


def _interval(row: dict[str, Any]) -> str:
    return "" if math.isnan(row["low"]) else f"[{row['low']:.2f}, {row['high']:.2f}]"
