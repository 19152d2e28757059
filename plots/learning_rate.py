"""Learning rate over draws: the schedules that HyFreeDP and ADADP find, against the constants of the grid searches."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

NEEDS = "curves"


def draw(frame: pd.DataFrame) -> Figure:
    """One panel a target epsilon, one thin line a seed; searched constants are dashed.

    Without privacy only where a rate is found: constants have nothing to be compared with there.
    """
    is_shown = frame["eta"].notna() & ((frame["epsilon_target"] < math.inf) | (frame["tuning"] == "self"))
    shown = frame[is_shown]
    targets = sorted(shown["epsilon_target"].unique())
    figure, axes = plt.subplots(1, len(targets), figsize=(3.8 * len(targets) + 1, 4), sharey=True, squeeze=False)
    names = shown["label"].unique()
    colours = dict(zip(names, plt.colormaps["tab20" if len(names) > 10 else "tab10"].colors, strict=False))
    for panel, target in zip(axes[0], targets, strict=True):
        rows = shown[shown["epsilon_target"] == target]
        for (label, _, _), run in rows.groupby(["label", "workload", "run_id"], sort=False):
            style = "--" if run["tuning"].iloc[0] == "grid" else "-"
            panel.plot(run["draw"], run["eta"], style, color=colours[label], alpha=0.7, linewidth=1.2, label=label)
        panel.set_yscale("log")
        panel.set(title=f"ε = {target:g}".replace("inf", "∞"), xlabel="draws")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("learning rate")
    handles = {
        label: handle for panel in axes[0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes[0][-1].legend(handles.values(), handles.keys(), bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure
