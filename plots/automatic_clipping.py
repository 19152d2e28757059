"""Normalised gradients (AUTO-S), which have no bound to tune, against a tuned clipping bound C.

After Figure 5 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import bars, run_axis, whole_ticks
from dpopt.results.choosing import validated_best
from dpopt.results.drawing import Styles, by_label, legend, sweeps, workload_panels
from dpopt.results.scores import shown

NEEDS = "sweep"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """Each method at the batch size, learning rate (and C) that validate best; nothing pays for this choice.

    Bars are one standard deviation to each side.
    """
    tuned = set(sweeps(frame)["label"])
    best = validated_best(frame, ["workload", "epochs", "epsilon_target", "label"])
    if best.empty:
        return None
    figure, panels = workload_panels(best, 3.2, 2.6)
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for label, style, line in by_label(rows, styles):
            line = line.sort_values("epsilon_target")
            name = f"{label}, C tuned" if label in tuned else label
            panel.errorbar(line["epsilon_target"], unit.factor * line["mean"], bars(line), label=name, **style.line)
        panel.set(ylabel=f"test {unit.label}")
        whole_ticks(panel.yaxis, 6)
        run_axis(panel, rows["epsilon_target"], "target ε\n(choice of B and C not paid for)")
    legend(figure, styles)
    return figure
