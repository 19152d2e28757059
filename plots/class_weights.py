"""The share w_y(C) of each class that clipping leaves at the end of training: classes from the easiest to the hardest.

Not private: a diagnostic. After Figure 4 of "On optimal hyperparameters for differentially private deep transfer
learning" (arXiv 2510.20616).
"""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results.axes import whole_ticks
from dpopt.results.drawing import Styles, legend, panels, shades

NEEDS = "classes"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """Of the first method; relative to the class that C = 1 leaves most of, so that flat means that all count alike.

    On a log scale, which shows weights a thousand times apart.
    """
    import matplotlib.pyplot as plt

    label = frame["label"].iloc[0]
    frame = frame[frame["label"] == label]
    figure, axes = panels(frame, 3.2, 2.6, sharey="row")
    bounds = [bound for bound in sorted(frame["bound"].unique()) if float(math.log10(bound)).is_integer()]
    colours = dict(zip(bounds, plt.colormaps["viridis"](shades(len(bounds))), strict=True))
    for (workload, target), axis in axes.items():
        rows = frame[(frame["workload"] == workload) & (frame["epsilon_target"] == target)]
        table = rows.pivot_table(index="label_of_class", columns="bound", values="weight")
        favoured = table[1.0].idxmax()
        table = table.sort_values(1.0, ascending=False)
        for bound in bounds:
            relative = table[bound] / table[bound].loc[favoured]
            axis.plot(range(1, len(table) + 1), relative, color=colours[bound], label=f"C = {bound:g}")
        axis.set_title(f"{axis.get_title()}\n{label}")
        axis.set(xlabel="class, easiest to hardest\n(by its weight at C = 1)")
        whole_ticks(axis.xaxis, 4)
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel("relative weight")
    for axis in axes.values():
        _log_axis(axis)
    legend(figure)
    return figure


def _log_axis(axis: Axes) -> None:
    """A logarithmic y axis of what is drawn, with plain numbers at its ticks: of narrow axes not at tens alone."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    marks = (1,) if high >= 100 * low else (1, 2, 5) if high >= 5 * low else range(1, 10)
    axis.yaxis.set_major_locator(LogLocator(subs=marks))
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter(NullFormatter())
