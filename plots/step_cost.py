"""Time and peak memory of engines against non-private SGD, and of optimizers against DP-Adam."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results.drawing import COLOURS, GREY, Styles

NEEDS = "speed"
PANELS = [
    ("engine", "time_ratio", "time of a step / non-private"),
    ("engine", "memory_ratio", "peak memory / non-private"),
    ("optimizer", "time_ratio", "time of a draw / baseline's"),
]
GROUP = ["case", "subset", "precision", "threads"]
OF_ENGINES = {
    "non_private": GREY,
    "bookkeeping": COLOURS[0],
    "poisson": COLOURS[2],
    "vmap": COLOURS[6],
    "opacus_hooks": COLOURS[1],
    "opacus_ghost": COLOURS[3],
}


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """One panel a quantity; bars grouped by case and trained subset, a line at the baseline."""
    panels = [panel for panel in PANELS if (frame["kind"] == panel[0]).any()]
    lines = max(_lines(frame[frame["kind"] == kind]) for kind, _, _ in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.6 * len(panels), 0.9 + 0.24 * lines), squeeze=False)
    for axis, (kind, column, title) in zip(axes[0], panels, strict=True):
        _bars(axis, frame[frame["kind"] == kind], column)
        axis.set(xlabel=title)
    figure.tight_layout(w_pad=2)
    return figure


def _lines(rows: pd.DataFrame) -> int:
    """Bars, and for each group a heading and a gap."""
    return len(rows) + 2 * rows.groupby(GROUP).ngroups


def _bars(axis: Axes, rows: pd.DataFrame, column: str) -> None:
    at, ticks = 0.0, {}
    for (case, subset, precision, threads), group in rows.groupby(GROUP, sort=False):
        heading = f"{case}, {subset}, B = {group['batch_size'].iloc[0]}"
        heading += "" if precision == "float32" else f", {precision}"
        heading += f", {threads} threads" if rows["threads"].nunique() > 1 else ""
        axis.text(0.01, at, heading, transform=axis.get_yaxis_transform(), va="center", weight="bold", size=9, zorder=4)
        for row in group.to_dict("records"):
            at += 1
            ticks[at] = row["contender"]
            _bar(axis, at, row, column)
        axis.vlines(1, at - len(group) + 0.5, at + 0.5, color="black", linewidth=0.8)
        at += 2
    axis.set_yticks(list(ticks), list(ticks.values()))
    axis.set_ylim(at - 1, -1)
    _scale(axis, rows[column].max())
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _bar(axis: Axes, at: float, row: dict, column: str) -> None:
    """A bar with its value, and a line from quartile to quartile where there are some."""
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    beside = {"textcoords": "offset points", "va": "center", "size": 8, "bbox": background}
    if pd.isna(row[column]):
        axis.annotate("fails", (1, at), xytext=(4, 0), color=GREY, **beside)
        return
    axis.barh(at, row[column], color=OF_ENGINES.get(row["contender"], COLOURS[0]), height=0.8)
    end = row[column]
    if f"{column}_low" in row:
        axis.hlines(at, row[f"{column}_low"], row[f"{column}_high"], color="black", linewidth=0.8)
        end = max(end, row[f"{column}_high"])
    axis.annotate(f"{row[column]:.{2 if row[column] < 10 else 0}f}", (end, at), xytext=(4, 0), **beside)


def _scale(axis: Axes, longest: float) -> None:
    """Logarithmic where one bar would flatten the others; NaN where there are no bars."""
    if longest > 10:
        axis.set_xscale("log")
        axis.set_xlim(0.5, longest * 3)
        axis.xaxis.set_major_formatter("{x:g}")
    else:
        axis.set_xlim(0, max(1, longest) * 1.2)
