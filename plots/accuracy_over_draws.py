"""Test accuracy over draws: the mean over seeds of the reported runs, with the range between the seeds."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

NEEDS = "curves"


def draw(frame: pd.DataFrame) -> Figure:
    """One panel a target epsilon, one line a method."""
    targets = sorted(frame["epsilon_target"].unique())
    figure, axes = plt.subplots(1, len(targets), figsize=(3.8 * len(targets) + 1, 4), sharey=True, squeeze=False)
    names = frame["label"].unique()
    colours = dict(zip(names, plt.colormaps["tab20" if len(names) > 10 else "tab10"].colors, strict=False))
    for panel, target in zip(axes[0], targets, strict=True):
        rows = frame[frame["epsilon_target"] == target]
        for (label, _), runs in rows.groupby(["label", "workload"], sort=False):
            by_draw = 100 * runs.groupby("draw")["test_accuracy"].agg(["mean", "min", "max"])
            panel.plot(by_draw.index, by_draw["mean"], color=colours[label], label=label)
            panel.fill_between(by_draw.index, by_draw["min"], by_draw["max"], color=colours[label], alpha=0.15)
        panel.set(title=f"ε = {target:g}".replace("inf", "∞"), xlabel="draws")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("test accuracy (%)")
    handles = {
        label: handle for panel in axes[0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes[0][-1].legend(handles.values(), handles.keys(), bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure
