"""Test accuracy against epsilon: one line per method with its spread over seeds, the non-private ceiling dashed."""

import math

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

NEEDS = "comparison"


def draw(frame: pd.DataFrame) -> Figure:
    """One panel a workload; the x axis is the target epsilon, on a log scale."""
    workloads = frame["workload"].unique()
    figure, axes = plt.subplots(1, len(workloads), figsize=(5.5 * len(workloads), 4), squeeze=False)
    for panel, workload in zip(axes[0], workloads, strict=True):
        rows = frame[frame["workload"] == workload]
        private, ceiling = rows[rows["epsilon_target"] < math.inf], rows[rows["epsilon_target"] == math.inf]
        for label, line in sorted(private.groupby("label"), key=lambda item: -item[1]["accuracy"].mean()):
            line = line.groupby("epsilon_target", as_index=False)[["accuracy", "accuracy_std"]].max()
            spread = 100 * line["accuracy_std"].fillna(0)
            panel.errorbar(line["epsilon_target"], 100 * line["accuracy"], spread, marker="o", capsize=3, label=label)
        for _, row in ceiling.iterrows():
            panel.axhline(100 * row["accuracy"], linestyle="--", color="gray", label=f"{row['label']} (ε = ∞)")
        panel.set_xscale("log")
        panel.set_xticks(
            sorted(private["epsilon_target"].unique()), [f"{e:g}" for e in sorted(private["epsilon_target"].unique())]
        )
        panel.minorticks_off()
        panel.set(title=workload, xlabel="ε of the reported run", ylabel="test accuracy (%)")
        panel.grid(alpha=0.3)
    axes[0][-1].legend(bbox_to_anchor=(1.02, 1), loc="upper left", frameon=False)
    return figure
