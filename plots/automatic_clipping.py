"""Normalised gradients (AUTO-S), which have no bound to tune, against a tuned clipping bound C.

After Figure 5 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.analysis.figures import colours, legend_outside, sweeps, validated_best, workload_panels
from dpopt.analysis.scores import shown

NEEDS = "sweep"


def draw(frame: pd.DataFrame) -> Figure:
    """Each method at the batch size, learning rate (and C) that validate best."""
    tuned = set(sweeps(frame)["label"])
    best = validated_best(frame, ["workload", "epochs", "epsilon_target", "label"])
    figure, found = workload_panels(best, 3.2, 2.6)
    colour = colours(best["label"])
    for panel, rows in found:
        unit = shown(rows["score"].iloc[0])
        for label, line in rows.groupby("label", sort=False):
            line = line.sort_values("epsilon_target")
            name = f"{label}, C tuned" if label in tuned else str(label)
            spread = unit.factor * line["std"].fillna(0)
            panel.errorbar(
                line["epsilon_target"], unit.factor * line["mean"], spread, fmt="o-", color=colour[label], label=name
            )
        panel.set_xscale("log")
        targets = sorted(rows["epsilon_target"].unique())
        panel.set_xticks(targets, [f"{target:g}" for target in targets])
        panel.minorticks_off()
        panel.set(xlabel="ε", ylabel=f"test {unit.label}")
    legend_outside(figure)
    return figure
