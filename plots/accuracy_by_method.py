"""Test score of each method, one panel for each target epsilon; for suites with more methods than lines can show."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.analysis.scores import shown
from dpopt.analysis.tables import upper

NEEDS = "comparison"


def draw(frame: pd.DataFrame) -> Figure:
    """Dots with one standard deviation to each side; open ones were searched for, with the ε of the whole search."""
    frame = frame.sort_values("mean", ascending=False)
    private = frame[frame["epsilon_target"] < math.inf]
    panels = list((private if len(private) else frame).groupby(["workload", "epsilon_target"]))
    height = 1.2 + 0.22 * max(len(rows) for _, rows in panels)
    is_shared = frame["score"].nunique() == 1
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), height), squeeze=False, sharex=is_shared)
    for axis, ((workload, target), rows) in zip(axes[0], panels, strict=True):
        unit = shown(rows["score"].iloc[0])
        _panel(axis, rows, unit.factor)
        ceiling = frame[(frame["workload"] == workload) & (frame["epsilon_target"] == math.inf)]["mean"].max()
        if not math.isnan(ceiling):
            axis.axvline(unit.factor * ceiling, color="0.5", linestyle="--", linewidth=1)
        axis.set(title=f"{workload}, ε = {target:g}", xlabel=f"test {unit.label}")
    figure.tight_layout(w_pad=1.5)
    return figure


def _panel(axis: Axes, rows: pd.DataFrame, factor: float) -> None:
    at = range(len(rows))
    axis.hlines(at, *(factor * (rows["mean"] + k * rows["std"].fillna(0)) for k in (-1, 1)), color="C0")
    faces = ["white" if runs > 1 else "C0" for runs in rows["runs"]]
    axis.scatter(factor * rows["mean"], at, c=faces, edgecolors="C0", s=28, zorder=3)
    names = [row["label"] + _tuning(row) for row in rows.to_dict("records")]
    axis.set_yticks(at, names)
    axis.invert_yaxis()
    axis.grid(axis="x", alpha=0.3)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _tuning(row: dict) -> str:
    """What there is to say of a number that was not reached by one run alone."""
    if row["tuning"] == "fixed":
        return " (set by hand)"
    return f" (ε {upper(row['epsilon_with_tuning'])})" if row["runs"] > 1 else ""
