"""Gradient norms before clipping, over training, a band for each ε: 5 to 95 % of the examples, and their median.

Not private: a diagnostic. After Figure 3 of "On optimal hyperparameters for differentially private deep transfer
learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.drawing import GREY, Styles, by_epsilon, legend, remarks, workload_panels

NEEDS = "diagnostics"
BELOW = 1000
"""The axis may reach this far below the least median or bound: bands end at rounding errors, far below both."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """The runs that validate best; dots are the bound C* with the least error of the clipped, noised gradient."""
    figure, panels = workload_panels(frame, 3.2, 2.6, by=["workload", "label"])
    for panel, rows in panels:
        for target, colour, line in by_epsilon(rows):
            over = line.groupby("epoch")[["q5", "q50", "q95"]].mean()
            panel.plot(over.index, over["q50"], color=colour, label=f"ε = {target:g}")
            panel.fill_between(over.index, over["q5"], over["q95"], color=colour, alpha=0.15, lw=0)
            if "best_clip" in line:
                best = line.dropna(subset="best_clip")
                panel.plot(best["epoch"], best["best_clip"], "o", ms=4, color=colour)
        panel.plot([], [], "o", ms=4, color=GREY, label="best bound C*")
        panel.set(xlabel="epochs", ylabel="gradient norm", yscale="log")
        least = rows[rows.columns.intersection(["q50", "best_clip"])].min().min()
        panel.set_ylim(bottom=max(panel.get_ylim()[0], least / BELOW))
    remarks(panels[0][0], "median", "5 to 95 % of the examples")
    legend(figure)
    return figure
