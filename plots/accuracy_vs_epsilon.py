"""Test score against epsilon: one line per method with its spread over seeds, the non-private ceiling dashed.

Hollow markers repeat a searched method's score at the epsilon that its whole search has spent.
"""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results.axes import cut, run_axis
from dpopt.results.drawing import GREY, Style, Styles, by_label, legend, workload_panels
from dpopt.results.scores import shown

NEEDS = "comparison"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """One panel a workload; epsilon on a log scale. An axis of scores is cut where it is empty."""
    figure, panels = workload_panels(frame, 5, 3.8, by=["workload"])
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        rows = rows.assign(mean=unit.factor * rows["mean"], std=unit.factor * rows["std"].fillna(0))
        private, ceiling = rows[rows["epsilon_target"] < math.inf], rows[rows["epsilon_target"] == math.inf]
        for label, style, line in by_label(private, styles):
            _line(panel, label, style, line)
        if (private["runs"] > 1).any():
            panel.plot([], [], "o", color=GREY, mfc="white", label="at ε with tuning")
        for row in ceiling.to_dict("records"):
            colour = styles[row["label"]].colour
            panel.axhline(row["mean"], linestyle=(0, (4, 2)), color=colour, label=f"{row['label']} (ε = ∞)")
        panel.set(ylabel=f"test {unit.label}")
        run_axis(panel, private["epsilon_target"], "ε spent by the reported run")
        cut([panel], rows["mean"] - rows["std"], rows["mean"] + rows["std"])
    legend(figure, styles)
    return figure


def _line(panel: Axes, label: str, style: Style, rows: pd.DataFrame) -> None:
    rows = rows[rows["mean"].notna()].sort_values("epsilon_target")
    panel.errorbar(rows["epsilon_single"], rows["mean"], rows["std"], capsize=3, label=label, **style.line)
    if (rows["runs"] > 1).any():
        panel.plot(rows["epsilon_with_tuning"], rows["mean"], alpha=0.6, mfc="white", lw=0.8, **style.line)
