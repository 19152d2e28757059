"""Test score against all the ε that was spent, tuning included: one line per method with its spread over seeds."""

import math

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import cut, run_axis
from dpopt.results.drawing import Styles, by_label, legend, workload_panels
from dpopt.results.pricing import ROUNDING
from dpopt.results.scores import shown

NEEDS = "comparison"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """Hollow markers are of methods whose search spends more than some target; a value set by hand is not charged."""
    frame = frame[frame["epsilon_target"] < math.inf]
    if frame.empty:
        return None
    figure, panels = workload_panels(frame, 5, 3.8, by=["workload"])
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        rows = rows.assign(mean=unit.factor * rows["mean"], std=unit.factor * rows["std"].fillna(0))
        for label, style, line in by_label(rows, styles):
            line = line.sort_values("epsilon_with_tuning")
            is_over = (line["epsilon_with_tuning"] > line["epsilon_target"] * ROUNDING).any()
            name = f"{label} (set by hand)" if line["tuning"].iloc[0] == "fixed" else label
            options = {"capsize": 2, "mfc": "white" if is_over else None, "label": name}
            panel.errorbar(line["epsilon_with_tuning"], line["mean"], line["std"], **options, **style.line)
        panel.set(ylabel=f"test {unit.label}")
        run_axis(panel, rows["epsilon_target"], "ε spent in all")
        cut([panel], rows["mean"] - rows["std"], rows["mean"] + rows["std"])
    legend(figure, styles)
    return figure
