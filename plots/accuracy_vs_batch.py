"""Test score against batch size B, a line for each ε; at each B the bound C and learning rate that validate best.

After Figure 7 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import lines_along
from dpopt.results.drawing import GREY, Styles, legend

NEEDS = "sweep"
STEPS = 20
"""The fewest steps that the paper wants, for CIFAR-100 and ViT-Tiny."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, number of epochs and method; right of the dashed line runs have less than 20 steps."""
    if not (drawn := lines_along(frame, "batch_size", "batch size B")):
        return None
    figure, panels = drawn
    for panel, rows in panels:
        least, most = rows["batch_size"].min() / 1.4, rows["batch_size"].max() * 1.4
        threshold = (rows["batch_size"] * rows["draws"]).median() / STEPS
        if threshold < most:
            panel.axvspan(threshold, most, color=GREY, alpha=0.12, lw=0)
            panel.axvline(threshold, color=GREY, linestyle="--", lw=1, label=f"T = {STEPS} steps")
        panel.set(xlim=(least, most))
    legend(figure)
    return figure
