"""Share of blocks in which a method is within each distance of the best at equal cost (`statistics.profile`)."""

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.analysis import ranking
from dpopt.analysis.budgets import BLOCK, BUDGETS
from dpopt.analysis.figures import colours
from dpopt.analysis.scores import shown
from dpopt.analysis.statistics import profile

NEEDS = "ranking"
MARKERS = "osD^v"


def draw(frame: pd.DataFrame) -> Figure:
    """One panel a score, distances on a square-root scale; a line that stays below 1 has no result in some blocks."""
    scores = frame["score"].unique()
    figure, axes = plt.subplots(1, len(scores), figsize=(5.5 * len(scores), 4), squeeze=False)
    colour = colours(frame["label"])
    for axis, score in zip(axes[0], scores, strict=True):
        rows, unit = frame[frame["score"] == score], shown(score)
        farthest = -1.1 * unit.factor * rows["difference"].min() or 1.0  # where all methods tie
        for number, (label, own) in enumerate(rows.groupby("label", sort=False)):
            _line(axis, own, unit.factor, farthest, color=colour[label], marker=MARKERS[number % len(MARKERS)])
        blocks = rows.groupby(BLOCK).ngroups
        axis.set_title(f"{blocks} block{'s' * (blocks > 1)}, equal {BUDGETS[frame['by'].iloc[0]]}", size="medium")
        axis.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        axis.set(xlabel=f"distance from the best: {unit.label}", xlim=(0, farthest), ylim=(-0.03, 1.03))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("share of blocks")
    axes[0][-1].legend(bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure


def _line(axis: Axes, rows: pd.DataFrame, factor: float, farthest: float, **style: str) -> None:
    """Markers where a block comes in."""
    failed = rows["difference"].isna() | (rows["failures"] == rows["seeds"])
    distances, shares = profile((-factor * rows["difference"]).mask(failed, np.inf).to_numpy())
    ends, last = np.append(distances, farthest), np.append(shares, shares[-1])
    options = {"where": "post", "markersize": 4, "clip_on": False, "label": ranking.named(rows.iloc[0].to_dict())}
    axis.step(ends, last, markevery=range(len(distances)), **options, **style)
