"""Learning rate over draws: what HyFreeDP and ADADP find from their starts, against the rates that others are given."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NEEDS = "curves"


def draw(frame: pd.DataFrame) -> Figure:
    """One panel a target epsilon, one thin line a seed; rates that were searched for or set by hand are dashed.

    Without privacy only where a rate is found: constants have nothing to be compared with there.
    """
    is_shown = frame["eta"].notna() & ((frame["epsilon_target"] < math.inf) | (frame["tuning"] == "self"))
    shown = frame[is_shown]
    targets = sorted(shown["epsilon_target"].unique())
    figure, axes = plt.subplots(1, len(targets), figsize=(3.8 * len(targets) + 1, 4), sharey=True, squeeze=False)
    names = shown["label"].unique()
    colours = dict(zip(names, plt.colormaps["tab20" if len(names) > 10 else "tab10"].colors, strict=False))
    for panel, target in zip(axes[0], targets, strict=True):
        for (label, _, _), run in shown[shown["epsilon_target"] == target].groupby(
            ["label", "workload", "run_id"], sort=False
        ):
            _line(panel, run, label=label, color=colours[label])
        panel.set_yscale("log")
        panel.set(title=f"ε = {target:g}".replace("inf", "∞"), xlabel="draws")
        panel.grid(alpha=0.3)
    axes[0][0].set_ylabel("learning rate")
    handles = {
        label: handle for panel in axes[0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    axes[0][-1].legend(handles.values(), handles.keys(), bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure


def _line(panel: Axes, run: pd.DataFrame, **options: str) -> None:
    """The rates that a run had; one that changes begins with the one that it was given."""
    style = "-" if run["tuning"].iloc[0] == "self" else "--"
    draws, rates = list(run["draw"]), list(run["eta"])
    if run["eta"].nunique() > 1:
        draws, rates = [0, *draws], [float(run["lr"].iloc[0]), *rates]
    panel.plot(draws, rates, style, alpha=0.7, linewidth=1.2, **options)
