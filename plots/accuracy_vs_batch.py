"""Test score against batch size B, a line for each ε; at each B the bound C and learning rate that validate best.

After Figure 7 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import run_axis
from dpopt.results.drawing import GREY, Styles, by_epsilon, gridded, legend, lines_along
from dpopt.results.scores import shown

NEEDS = "sweep"
STEPS = 20
"""The fewest steps that the paper wants, for CIFAR-100 and ViT-Tiny."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, number of epochs and method; right of the dashed line runs have fewer than 20 steps.

    Points that a refinement has added, each with one C and learning rate, are small and not joined.
    """
    if not (found := lines_along(frame, "batch_size", 3.2, 2.6)):
        return None
    figure, panels = found
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for target, colour, tried in by_epsilon(rows):
            line = gridded(tried).sort_values("batch_size")
            further = tried.drop(line.index)
            panel.plot(further["batch_size"], unit.factor * further["mean"], "o", ms=2, color=colour)
            panel.plot(
                line["batch_size"], unit.factor * line["mean"], "o-", ms=4, color=colour, label=f"ε = {target:g}"
            )
        threshold = (rows["batch_size"] * rows["draws"]).median() / STEPS
        panel.axvspan(threshold, 2 * max(threshold, rows["batch_size"].max()), color=GREY, alpha=0.12, lw=0)
        panel.axvline(threshold, color=GREY, linestyle="--", lw=1, label=f"T = {STEPS} steps")
        panel.set(xlim=(rows["batch_size"].min() / 1.4, rows["batch_size"].max() * 1.4), ylabel=f"test {unit.label}")
        run_axis(panel, gridded(rows)["batch_size"], "batch size B")
    legend(figure)
    return figure
