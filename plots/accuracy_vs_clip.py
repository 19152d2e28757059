"""Test score against the clipping bound C, a line for each ε; at each C the B and learning rate that validate best.

After Figure 2 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import run_axis
from dpopt.results.choosing import validated_best
from dpopt.results.drawing import Styles, by_epsilon, gridded, legend, lines_along
from dpopt.results.scores import shown

NEEDS = "sweep"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, number of epochs and method; the open circle is the C that validates best.

    Points that a refinement has added, each with one B and learning rate, are small and not joined.
    """
    if not (found := lines_along(frame, "clip", 3.2, 2.6)):
        return None
    figure, panels = found
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for target, colour, tried in by_epsilon(rows):
            line = gridded(tried).sort_values("clip")
            panel.plot(line["clip"], unit.factor * line["mean"], "o-", ms=4, color=colour, label=f"ε = {target:g}")
            further = tried.drop(line.index)
            panel.plot(further["clip"], unit.factor * further["mean"], "o", ms=2, color=colour)
            top = validated_best(tried, ["epsilon_target"])
            panel.plot(top["clip"], unit.factor * top["mean"], "o", ms=11, mfc="none", color=colour)
        panel.set(ylabel=f"test {unit.label}")
        run_axis(panel, gridded(rows)["clip"], "clipping bound C")
    legend(figure)
    return figure
