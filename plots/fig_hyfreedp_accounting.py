"""Epsilon that HyFreeDP's two published noise rules claim, against what runs with their noise spend."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results.drawing import GREY, Styles, styles_of

NEEDS = "accounting"
RULES = ("independent", "additive")
BATCHES = {"same": "probes on the gradient's draw", "fresh": "probes on a fresh draw"}


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """A column a rule, a row a probe batch, a line for each K; above the diagonal, more is spent than claimed."""
    rules = [rule for rule in RULES if (frame["rule"] == rule).any()]
    batches = [batch for batch in BATCHES if (frame["batch"] == batch).any()]
    size = (3.6 * len(rules), 3.1 * len(batches))
    figure, axes = plt.subplots(len(batches), len(rules), figsize=size, sharex=True, sharey=True, squeeze=False)
    for batch, line in zip(batches, axes, strict=True):
        for rule, axis in zip(rules, line, strict=True):
            _panel(axis, frame[(frame["rule"] == rule) & (frame["batch"] == batch)])
            axis.set_title(f"{rule} rule,\n{BATCHES[batch]}", fontsize=10)
    for axis in axes[-1]:
        axis.set_xlabel("claimed ε")
    for axis in axes[:, 0]:
        axis.set_ylabel("true ε")
    _scale(axes[0][0], sorted(frame["epsilon_claimed"].unique()), frame["epsilon_true"].max())
    figure.tight_layout()
    axes[0][-1].legend(
        title="a round of probes\nevery K draws", bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False
    )
    return figure


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    claimed = sorted(rows["epsilon_claimed"])
    axis.plot(claimed, claimed, color=GREY, linewidth=0.8, label="true = claimed")
    lines = {f"K = {every}": line for every, line in rows.sort_values("epsilon_claimed").groupby("probe_every")}
    for label, style in styles_of(lines).items():
        line = lines[label]
        axis.plot(line["epsilon_claimed"], line["epsilon_true"], markersize=4, label=label, **style.line)
    ratio = rows["epsilon_true"] / rows["epsilon_claimed"]
    text = f"true / claimed: {ratio.min():.2f} to {ratio.max():.2f}"
    axis.text(0.05, 0.95, text, transform=axis.transAxes, va="top", size=9)
    axis.grid(alpha=0.3)


def _scale(axis: Axes, claimed: list[float], largest: float) -> None:
    """Logarithmic, with plain numbers; all panels share the axes."""
    axis.set(xscale="log", yscale="log")
    above = [mark for mark in (12, 20, 50, 100) if claimed[-1] < mark < 1.3 * largest]
    axis.set_xticks(claimed, [f"{mark:g}" for mark in claimed])
    axis.set_yticks([*claimed, *above], [f"{mark:g}" for mark in (*claimed, *above)])
    axis.minorticks_off()
