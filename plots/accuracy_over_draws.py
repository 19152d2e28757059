"""Test score of the reported runs over draws: the mean of the seeds that have one at a draw, and their range."""

import math

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import whole_ticks
from dpopt.results.drawing import MOST, Styles, by_label, legend, panels
from dpopt.results.scores import shown

NEEDS = "curves"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """One line a method; dashed: where runs without privacy end. More than twelve methods have no ranges."""
    private = frame[frame["epsilon_target"] < math.inf]
    ceilings = frame[frame["epsilon_target"] == math.inf] if len(private) else private
    frame = private if len(private) else frame
    figure, axes = panels(frame, 3.8, 3.6, sharey="row")
    is_crowded = frame["label"].nunique() > MOST
    for workload, of_workload in frame.groupby("workload"):
        score = of_workload["score"].iloc[0]
        unit = shown(score)
        without = ceilings[ceilings["workload"] == workload]
        ends = without.sort_values("draw").groupby(["label", "run_id"], sort=False)[f"test_{score}"].last()
        for epsilon, rows in of_workload.groupby("epsilon_target"):
            panel = axes[workload, epsilon]
            for label, style, runs in by_label(rows, styles):
                by_draw = unit.factor * runs.groupby("draw")[f"test_{score}"].agg(["mean", "min", "max"])
                marks = {"ms": 4, "markevery": max(1, len(by_draw) // 5), "lw": 1 if is_crowded else 1.5}
                panel.plot(by_draw.index, by_draw["mean"], label=label, **marks, **style.line)
                if not is_crowded:
                    look = {"color": style.colour, "alpha": 0.15, "lw": 0}
                    panel.fill_between(by_draw.index, by_draw["min"], by_draw["max"], **look)
            for label, end in (unit.factor * ends.groupby("label", sort=False).mean()).items():
                panel.axhline(end, label=f"{label} (ε = ∞)", linestyle=(0, (4, 2)), color=styles[label].colour)
            is_first = panel.get_subplotspec().is_first_col()
            panel.set(xlabel="draws", ylabel=f"test {unit.label}" if is_first else "")
            whole_ticks(panel.xaxis, 4)
            whole_ticks(panel.yaxis, 6)
    legend(figure, styles)
    return figure
