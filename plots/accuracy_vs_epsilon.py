"""Test score against epsilon: one line per method with its spread over seeds, the non-private ceiling dashed.

Crosses repeat a searched method's score at the epsilon that its whole search has spent.
"""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.analysis.scores import shown

NEEDS = "comparison"
MARKERS = "osD^"
"""One for each ten lines: then colours begin again."""


def draw(frame: pd.DataFrame) -> Figure:
    """One panel a workload; epsilon on a log scale."""
    workloads = frame["workload"].unique()
    figure, axes = plt.subplots(1, len(workloads), figsize=(5.5 * len(workloads), 4), squeeze=False)
    for panel, workload in zip(axes[0], workloads, strict=True):
        rows = frame[frame["workload"] == workload]
        unit = shown(rows["score"].iloc[0])
        private, ceiling = rows[rows["epsilon_target"] < math.inf], rows[rows["epsilon_target"] == math.inf]
        lines = sorted(private.groupby("label"), key=lambda item: -item[1]["mean"].mean())
        for number, (label, line) in enumerate(lines):
            _line(panel, str(label), line, MARKERS[number // 10 % len(MARKERS)], unit.factor)
        if (private["runs"] > 1).any():
            panel.plot([], [], "x:", color="gray", label="at ε with tuning")
        for _, row in ceiling.iterrows():
            panel.axhline(unit.factor * row["mean"], linestyle="--", color="gray", label=f"{row['label']} (ε = ∞)")
        targets = sorted(private["epsilon_target"].unique())
        panel.set_xscale("log")
        panel.set_xticks(targets, [f"{target:g}" for target in targets])
        panel.minorticks_off()
        panel.set(title=workload, xlabel="ε spent by the reported run", ylabel=f"test {unit.label}")
        panel.grid(alpha=0.3)
    axes[0][-1].legend(bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure


def _line(panel: Axes, label: str, rows: pd.DataFrame, marker: str, factor: float) -> None:
    rows = rows[rows["mean"].notna()]
    best = rows.loc[rows.groupby("epsilon_target")["mean"].idxmax()].sort_values("epsilon_target")
    spread = factor * best["std"].fillna(0)
    drawn = panel.errorbar(best["epsilon_single"], factor * best["mean"], spread, marker=marker, capsize=3, label=label)
    if (best["runs"] > 1).any():
        colour = drawn.lines[0].get_color()
        panel.plot(best["epsilon_with_tuning"], factor * best["mean"], "x:", color=colour, alpha=0.5)
