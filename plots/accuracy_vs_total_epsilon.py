"""Test score against all the ε that was spent, tuning included: one line per method with its spread over seeds."""

import math

import pandas as pd
from matplotlib.figure import Figure

from dpopt.analysis.figures import colours, legend_outside, workload_panels
from dpopt.analysis.scores import shown

NEEDS = "comparison"
MARKERS = "osD^vP"


def draw(frame: pd.DataFrame) -> Figure:
    """Dotted lines are of searches that spend more than their target, dashed ones of values that were set by hand."""
    frame = frame[frame["epsilon_target"] < math.inf]
    figure, panels = workload_panels(frame, 5, 3.6, by=["workload"])
    colour, names = colours(frame["label"]), list(dict.fromkeys(frame["label"]))
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for label, line in rows.groupby("label", sort=False):
            line = line.sort_values("epsilon_with_tuning")
            is_over = (line["epsilon_with_tuning"] > line["epsilon_target"] * (1 + 1e-6)).any()
            style = ":" if is_over else "--" if line["tuning"].iloc[0] == "fixed" else "-"
            panel.errorbar(
                line["epsilon_with_tuning"],
                unit.factor * line["mean"],
                unit.factor * line["std"].fillna(0),
                linestyle=style,
                marker=MARKERS[names.index(label) % len(MARKERS)],
                mfc="white" if is_over else None,
                capsize=2,
                color=colour[label],
                label=str(label),
            )
        panel.set_xscale("log")
        targets = sorted(rows["epsilon_target"].unique())
        panel.set_xticks(targets, [f"{target:g}" for target in targets])
        panel.minorticks_off()
        panel.set(xlabel="ε spent in all", ylabel=f"test {unit.label}")
    legend_outside(figure)
    return figure
