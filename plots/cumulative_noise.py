"""Cumulative noise σ√T against batch size B at a fixed number of epochs, beside the noise of one step, σ/B.

After Figure 6 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import run_axis
from dpopt.results.drawing import GREY, Styles, by_epsilon, by_method, legend, named_epsilon, subplots, sweeps

NEEDS = "sweep"
PLATEAU = 1.05
"""Within 5 % of the least counts as the plateau."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """Relative to the largest B; filled dots lie on the plateau. σ/B keeps falling: it asks for the full batch."""
    frame = sweeps(frame)
    column = by_method(frame, ["examples", "epochs"])
    frame = frame.drop_duplicates([*column, "epsilon_target", "batch_size"])
    settings = list(frame.groupby(column))
    figure, axes, _ = subplots(2, len(settings), 3.2, 2.4, sharex=True)
    for ((examples, epochs, *method), rows), (cumulative, single) in zip(settings, axes.T, strict=True):
        for target, colour, line in by_epsilon(rows):
            line = line.sort_values("batch_size")
            sizes, noise = line["batch_size"], line["noise_gradient"] * line["draws"] ** 0.5
            cumulative.plot(sizes, noise / noise.iloc[-1], "-", color=colour, label=named_epsilon(target))
            flat = noise <= PLATEAU * noise.min()
            cumulative.plot(sizes[flat], (noise / noise.iloc[-1])[flat], "o", color=colour)
            cumulative.plot(sizes[~flat], (noise / noise.iloc[-1])[~flat], "o", mfc="white", color=colour)
            step = line["noise_gradient"] / sizes
            single.plot(sizes, step / step.iloc[-1], "o-", ms=4, color=colour)
        cumulative.set_title("\n".join([f"N = {examples:,.0f}", f"{epochs:g} epochs", *method]))
        single.set(yscale="log")
        run_axis(single, rows["batch_size"], "batch size B")
    axes[0, 0].plot([], [], "o", color=GREY, label="within 5 % of the least")
    axes[0, 0].plot([], [], "o", mfc="white", color=GREY, label="more than 5 % above")
    axes[0, 0].set_ylabel("σ√T, relative")
    axes[1, 0].set_ylabel("σ/B, relative")
    legend(figure)
    return figure
