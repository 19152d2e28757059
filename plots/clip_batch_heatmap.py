"""Test score over clipping bound C and batch size B, each at its best learning rate; the best cell is marked.

After Figure 1 of "On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616).
"""

import math

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results.choosing import validated_best
from dpopt.results.clip_batch import NO_CLIP
from dpopt.results.drawing import COLOURS, DARK, LIGHT, Styles, by_method, sweeps
from dpopt.results.scores import shown

NEEDS = "sweep"
CAP = 20.0
"""Points of an accuracy: what is lost beyond has one colour."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """A row for each workload, number of epochs and method, a column for each ε; a method without C has one column.

    Colours are what is lost against the best cell of a panel, on one scale for all panels: to the largest loss of any,
    or to 20 points of an accuracy. The learning rate and the marked cell are those that validate best, and so need not
    have the largest number.
    """
    is_without = frame["clip"].isna() & (frame.groupby("label")["batch_size"].transform("nunique") > 1)
    frame = pd.concat([sweeps(frame), frame[is_without].assign(clip=NO_CLIP)])
    span = _span(frame)
    rows = list(frame.groupby(by_method(frame, ["workload", "epochs"])))
    targets = sorted(frame["epsilon_target"].unique())
    size = (2.6 * len(targets) + 1, 2.1 * len(rows) + 0.4)
    figure, axes = plt.subplots(len(rows), len(targets), figsize=size, squeeze=False, layout="constrained")
    for ((workload, epochs, *method), of_row), line in zip(rows, axes, strict=True):
        for target, axis in zip(targets, line, strict=True):
            _panel(axis, of_row[of_row["epsilon_target"] == target], span)
            name = "\n".join([workload, *method])
            axis.set_title(f"{name}\n{epochs:g} epochs, ε = {target:g}", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("clipping bound C")
    for axis in axes[:, 0]:
        axis.set_ylabel("batch size B")
    return figure


def _span(frame: pd.DataFrame) -> float:
    """The largest loss in a panel; of accuracies at most `CAP`."""
    unit = shown(frame["score"].iloc[0])
    means = frame.groupby(["workload", "epochs", "label", "epsilon_target"])["mean"]
    largest = unit.factor * (means.max() - means.min()).max()
    return min(CAP, largest) if unit.factor == 100 else largest


def _panel(axis: Axes, rows: pd.DataFrame, span: float) -> None:
    if rows.empty:
        axis.set_axis_off()
        return
    unit = shown(rows["score"].iloc[0])
    table = unit.factor * rows.pivot_table(index="batch_size", columns="clip", values="mean").sort_index()
    values = table.to_numpy()
    highest = np.nanmax(values)
    axis.imshow(values, origin="lower", aspect="auto", cmap="viridis", vmin=highest - span, vmax=highest)
    decimals, middle = _decimals(values), highest - span / 2
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = LIGHT if value < middle else DARK
            axis.text(x, y, f"{value:.{decimals}f}", ha="center", va="center", color=colour, size=7)
    for _, best in validated_best(rows, ["epsilon_target"]).iterrows():
        x, y = table.columns.get_loc(best["clip"]), table.index.get_loc(best["batch_size"])
        axis.add_patch(plt.Rectangle((x - 0.47, y - 0.47), 0.94, 0.94, fill=False, color=COLOURS[3], lw=2.5))
    axis.set_xticks(range(table.shape[1]), [f"{clip:g}" if clip else "no C" for clip in table.columns], size=7)
    axis.set_yticks(range(table.shape[0]), [f"{size:g}" for size in table.index], size=7)


def _decimals(values: np.ndarray) -> int:
    """As many as show a thirtieth of the range of `values`."""
    spread = np.nanmax(values) - np.nanmin(values)
    return min(4, max(0, math.ceil(-math.log10(spread / 30)))) if spread > 0 else 1
