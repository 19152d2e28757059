"""Test score against the clipping bound C, a line for each ε; at each C the B and learning rate that validate best.

After Figure 2 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import lines_along
from dpopt.results.choosing import validated_best
from dpopt.results.drawing import Styles, by_epsilon, legend
from dpopt.results.scores import shown

NEEDS = "sweep"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, number of epochs and method; the open circle is the C that validates best."""
    if not (drawn := lines_along(frame, "clip", "clipping bound C")):
        return None
    figure, panels = drawn
    for panel, rows in panels:
        for _, colour, line in by_epsilon(rows):
            top = validated_best(line, ["epsilon_target"])
            scores = shown(line["score"].iloc[0]).factor * top["mean"]
            panel.plot(top["clip"], scores, "o", ms=11, mfc="none", color=colour)
    legend(figure)
    return figure
