"""Test score over draws: the mean over seeds of the reported runs, with the range between the seeds."""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.analysis.figures import colours, legend, panels
from dpopt.analysis.scores import shown

NEEDS = "curves"


def draw(frame: pd.DataFrame) -> Figure:
    """One line a method."""
    figure, axes = panels(frame, 3.8, 4, sharey="row")
    colour = colours(frame["label"])
    for (workload, target), panel in axes.items():
        rows = frame[(frame["workload"] == workload) & (frame["epsilon_target"] == target)]
        unit = shown(rows["score"].iloc[0])
        for label, runs in rows.groupby("label", sort=False):
            by_draw = unit.factor * runs.groupby("draw")[f"test_{rows['score'].iloc[0]}"].agg(["mean", "min", "max"])
            panel.plot(by_draw.index, by_draw["mean"], color=colour[label], label=label)
            panel.fill_between(by_draw.index, by_draw["min"], by_draw["max"], color=colour[label], alpha=0.15)
        panel.set(xlabel="draws", ylabel=f"test {unit.label}" if panel.get_subplotspec().is_first_col() else "")
    legend(figure)
    figure.tight_layout()
    return figure
