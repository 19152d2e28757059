"""The learning rate that validates best against batch size B, a line for each ε, beside a rate that grows with √B.

After "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616), by which the
best rate of DP-Adam often grows so.
"""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from dpopt.results.axes import run_axis
from dpopt.results.drawing import GREY, Styles, by_epsilon, legend, named_epsilon, sweeps, workload_panels

NEEDS = "rates"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, number of epochs and method, whose lines grow as B to the powers in the corner.

    A point is the geometric mean over all bounds C and seeds: with normalised gradients C does not scale the step.
    """
    tried = sweeps(frame)
    if tried.empty:
        return None
    tried = tried.assign(log_rate=np.log(tried["lr"]), log_size=np.log(tried["batch_size"]))
    figure, panels = workload_panels(tried, 3.2, 2.6, by=["workload", "epochs", "label"])
    for panel, rows in panels:
        sizes = np.sort(rows["batch_size"].unique()).astype(float)
        for place, (target, colour, line) in enumerate(by_epsilon(rows)):
            means = np.exp(line.groupby("batch_size")["log_rate"].mean())
            panel.plot(means.index, means, "o-", ms=4, color=colour, label=named_epsilon(target))
            if len(means) > 1:
                power = np.polyfit(line["log_size"], line["log_rate"], 1)[0]
                corner = {"transform": panel.transAxes, "ha": "right", "fontsize": 8}
                panel.text(0.97, 0.05 + 0.09 * place, f"power {power:z.2f}", color=colour, **corner)
        root = np.exp(rows["log_rate"].mean()) * np.sqrt(sizes / np.exp(rows["log_size"].mean()))
        panel.plot(sizes, root, "--", lw=1, color=GREY, label="∝ √B")
        panel.set(yscale="log", ylabel="best learning rate η")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 3)))  # powers of ten alone may be one tick
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.minorticks_off()
        run_axis(panel, rows["batch_size"], "batch size B")
    legend(figure)
    return figure
