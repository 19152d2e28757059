"""Share of blocks in which a method is within each distance of the best at equal cost.

Dolan and Moré ("Benchmarking optimization software with performance profiles", Mathematical Programming 2002) compare
running times by their ratio. Scores have no common zero, so here it is the difference, in the score's unit.
"""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results import ranking, statistics
from dpopt.results.drawing import Style, Styles, by_label, legend
from dpopt.results.scores import shown

NEEDS = "ranking"
APART = 0.08
"""The least part of the axis between two of its ticks."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """One panel a score, distances on a square-root scale; a line that stays below 1 has no rank in some blocks.

    From as many workloads on as ranks are tested with: of fewer, steps are single tasks.
    """
    frame = frame[frame["rank"].notna()]
    if frame["workload"].nunique() < statistics.ENOUGH:
        return None
    scores = frame["score"].unique()
    size = (5.2 * len(scores) + 1.2, 3.8)
    figure, axes = plt.subplots(1, len(scores), figsize=size, squeeze=False, layout="constrained")
    for axis, score in zip(axes[0], scores, strict=True):
        rows, unit = frame[frame["score"] == score], shown(score)
        farthest = -1.1 * unit.factor * rows["difference"].min() or 1.0  # where all methods tie
        blocks = rows.groupby(ranking.BLOCK).ngroups
        for _, style, of_label in by_label(rows, styles):
            _line(axis, of_label, blocks, unit.factor, farthest, style)
        axis.set_title(f"{blocks} block{'s' * (blocks > 1)}, equal {ranking.BUDGETS[frame['by'].iloc[0]]}", fontsize=10)
        axis.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        axis.set(xlabel=f"distance from the best: {unit.label}", xlim=(0, farthest), ylim=(-0.03, 1.03))
        ticks = _ticks(farthest)
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("share of blocks")
    legend(figure, styles)
    return figure


def _line(axis: Axes, rows: pd.DataFrame, blocks: int, factor: float, farthest: float, style: Style) -> None:
    """Markers where a block comes in; one that the method is not in never does."""
    gaps = (-factor * rows["difference"]).where(rows["failures"] < rows["seeds"], np.inf).to_numpy()
    distances = np.unique(np.append(gaps[np.isfinite(gaps)], 0.0))
    shares = (gaps <= distances[:, None]).sum(axis=1) / blocks
    ends, last = np.append(distances, farthest), np.append(shares, shares[-1])
    options = {"where": "post", "markersize": 4, "clip_on": False, "label": rows["label"].iloc[0]}
    axis.step(ends, last, markevery=range(len(distances)), **options, **style.line)


def _ticks(farthest: float) -> list[float]:
    """Round distances from 0 on, which on the square-root scale do not run into each other."""
    ticks = [0.0]
    for value in (mantissa * 10.0**power for power in range(-6, 4) for mantissa in (1, 2, 5)):
        if value <= farthest and (value / farthest) ** 0.5 - (ticks[-1] / farthest) ** 0.5 >= APART:
            ticks.append(value)
    return ticks
