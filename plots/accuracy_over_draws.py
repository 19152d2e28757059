"""Test score over draws: the mean over seeds of the reported runs, with the range between the seeds."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.analysis.scores import shown

NEEDS = "curves"


def draw(frame: pd.DataFrame) -> Figure:
    """One row of panels a score, one panel a target epsilon, one line a method."""
    scores, targets = list(frame["score"].unique()), sorted(frame["epsilon_target"].unique())
    size = (3.8 * len(targets) + 1, 4 * len(scores))
    figure, axes = plt.subplots(len(scores), len(targets), figsize=size, sharey="row", squeeze=False)
    names = frame["label"].unique()
    colours = dict(zip(names, plt.colormaps["tab20" if len(names) > 10 else "tab10"].colors, strict=False))
    for score, panels in zip(scores, axes, strict=True):
        for target, panel in zip(targets, panels, strict=True):
            _panel(panel, frame[(frame["score"] == score) & (frame["epsilon_target"] == target)], score, colours)
            panel.set(title=f"ε = {target:g}".replace("inf", "∞"), xlabel="draws")
        panels[0].set_ylabel(f"test {shown(score).label}")
    handles = {
        label: handle for panel in axes.flat for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes[0][-1].legend(handles.values(), handles.keys(), bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure


def _panel(panel: Axes, rows: pd.DataFrame, score: str, colours: dict) -> None:
    for (label, _), runs in rows.groupby(["label", "workload"], sort=False):
        by_draw = shown(score).factor * runs.groupby("draw")[f"test_{score}"].agg(["mean", "min", "max"])
        panel.plot(by_draw.index, by_draw["mean"], color=colours[label], label=label)
        panel.fill_between(by_draw.index, by_draw["min"], by_draw["max"], color=colours[label], alpha=0.15)
    panel.grid(alpha=0.3)
