"""Average rank of each method at equal cost, its rank in each block, and which averages are not shown to differ."""

import textwrap

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results import ranking
from dpopt.results.drawing import GREY, Styles

NEEDS = "ranking"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A line a method, best first; bars at the right join averages closer than the critical difference (Nemenyi).

    Nothing is drawn of fewer workloads than ranks are tested with.
    """
    averages, rows = ranking.average_ranks(frame), ranking.everywhere(frame)
    if (test := ranking.rank_test(frame)) is None:
        return None
    figure, axis = plt.subplots(figsize=(6.5, 1.3 + 0.32 * len(averages)), layout="constrained")
    at = {label: place for place, label in enumerate(averages["label"])}
    axis.scatter(rows["rank"], rows["label"].map(at), marker="|", s=60, color=GREY)
    for place, (label, rank) in enumerate(zip(averages["label"], averages["rank"], strict=True)):
        axis.plot(rank, place, label=label, zorder=3, **styles[label].dots)
    axis.set_yticks(range(len(averages)), [_name(row) for row in averages.to_dict("records")])
    axis.set_ylim(len(averages) - 0.5, -0.5)
    axis.set_xlim(0.8, len(averages) + 0.2)
    axis.set_xticks(range(1, len(averages) + 1, 1 + len(averages) // 15))
    axis.set(xlabel=f"rank at equal {ranking.BUDGETS[frame['by'].iloc[0]]}")
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    _join(axis, _cliques(averages["rank"].to_numpy(), test[1]))
    below = textwrap.fill(f"Lines: ranks in single blocks. {ranking.verdict(frame)}", 95)
    figure.text(0.02, 0, below, va="top", size=8)
    return figure


def _name(row: dict) -> str:
    """With the replicates that its ranks were imputed for."""
    return row["label"] + (f" ({row['failures']} failed)" if row["failures"] else "")


def _cliques(averages: np.ndarray, critical: float) -> list[tuple[int, int]]:
    """First and last of each largest group of methods whose ascending average ranks are closer than `critical`."""
    groups: list[tuple[int, int]] = []
    for first, rank in enumerate(averages):
        last = int(np.searchsorted(averages, rank + critical)) - 1
        if last > first and (not groups or last > groups[-1][1]):
            groups.append((first, last))
    return groups


def _join(axis: Axes, cliques: list[tuple[int, int]]) -> None:
    for number, (first, last) in enumerate(cliques):
        place = axis.get_yaxis_transform()
        axis.plot([1.02 + 0.02 * number] * 2, [first, last], color="black", lw=3, transform=place, clip_on=False)
