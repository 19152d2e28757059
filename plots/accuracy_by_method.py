"""Test score of each method, one panel for each target epsilon; for suites with more methods than lines can show."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpopt.analysis.figures import panels
from dpopt.analysis.scores import shown
from dpopt.analysis.tables import upper

NEEDS = "comparison"


def draw(frame: pd.DataFrame) -> Figure:
    """Dots with one standard deviation to each side; open ones were searched for, with the ε of the whole search."""
    frame = frame.sort_values("mean", ascending=False)
    private, ceilings = frame[frame["epsilon_target"] < math.inf], frame[frame["epsilon_target"] == math.inf]
    dots = private if len(private) else frame
    figure, axes = panels(dots, 5, 1.2 + 0.22 * dots.groupby(["workload", "epsilon_target"]).size().max(), sharex="row")
    for (workload, target), axis in axes.items():
        rows = dots[(dots["workload"] == workload) & (dots["epsilon_target"] == target)]
        unit = shown(rows["score"].iloc[0])
        _panel(axis, rows, unit.factor)
        for ceiling in ceilings[ceilings["workload"] == workload]["mean"].nlargest(1):
            axis.axvline(unit.factor * ceiling, color="0.5", linestyle="--", linewidth=1)
        axis.set(xlabel=f"test {unit.label}")
    figure.tight_layout(w_pad=1.5)
    return figure


def _panel(axis: Axes, rows: pd.DataFrame, factor: float) -> None:
    at = range(len(rows))
    axis.hlines(at, *(factor * (rows["mean"] + k * rows["std"].fillna(0)) for k in (-1, 1)), color="C0")
    faces = ["white" if runs > 1 else "C0" for runs in rows["runs"]]
    axis.scatter(factor * rows["mean"], at, c=faces, edgecolors="C0", s=28, zorder=3)
    names = [row["label"] + _tuning(row) for row in rows.to_dict("records")]
    axis.set_yticks(at, names)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.xaxis.set_major_locator(MaxNLocator(5))  # more labels than that run into each other
    axis.grid(False, axis="y")
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _tuning(row: dict) -> str:
    """What there is to say of a number that was not reached by one run alone."""
    if row["tuning"] == "fixed":
        return " (set by hand)"
    return f" (ε {upper(row['epsilon_with_tuning'])})" if row["runs"] > 1 else ""
