"""Test score of each method, one panel for each target epsilon; for suites with more methods than lines can show."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpopt.results.axes import cut
from dpopt.results.drawing import GREY, Styles, panels
from dpopt.results.scores import shown
from dpopt.results.tables import upper

NEEDS = "comparison"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """Dots with one standard deviation to each side; hollow ones were searched for.

    The ε of a whole search is named where it is not the target. Dashed: the best score without privacy.
    """
    factor = frame["score"].map(lambda score: shown(score).factor)
    frame = frame.assign(mean=factor * frame["mean"], std=factor * frame["std"].fillna(0))
    frame = frame.sort_values("mean", ascending=False)
    private, ceilings = frame[frame["epsilon_target"] < math.inf], frame[frame["epsilon_target"] == math.inf]
    dots = private if len(private) else frame
    height = 1.1 + 0.22 * dots.groupby(["workload", "epsilon_target"]).size().max()
    figure, axes = panels(dots, 4.6, height, sharex="row")
    best = {workload: rows["mean"].max() for workload, rows in ceilings.groupby("workload")} if len(private) else {}
    for (workload, target), axis in axes.items():
        rows = dots[(dots["workload"] == workload) & (dots["epsilon_target"] == target)]
        _panel(axis, rows, styles)
        if workload in best:
            axis.axvline(best[workload], color=GREY, linestyle="--", linewidth=1)
        axis.set(xlabel=f"test {shown(rows['score'].iloc[0]).label}")
    for workload, rows in dots.groupby("workload"):
        line = [axis for (name, _), axis in axes.items() if name == workload]
        drawn = pd.concat([rows, ceilings[ceilings["workload"] == workload].nlargest(1, "mean").assign(std=0.0)])
        cut(line, drawn["mean"] - drawn["std"], drawn["mean"] + drawn["std"], along="x")
    return figure


def _panel(axis: Axes, rows: pd.DataFrame, styles: Styles) -> None:
    axis.xaxis.set_major_locator(MaxNLocator(5))  # more labels than that run into each other
    for at, row in enumerate(rows.to_dict("records")):
        style, face = styles[row["label"]], {"mfc": "white"} if row["runs"] > 1 else {}
        axis.errorbar(row["mean"], at, xerr=row["std"], ms=5.5, label=row["label"], **face, **style.dots)
    axis.set_yticks(range(len(rows)), [row["label"] + _tuning(row) for row in rows.to_dict("records")])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _tuning(row: dict) -> str:
    """A remark on a number that took more than the target epsilon."""
    if row["tuning"] == "fixed":
        return " (set by hand)"
    spent = upper(row["epsilon_with_tuning"])
    return f" (ε {spent})" if spent != upper(row["epsilon_target"]) else ""
