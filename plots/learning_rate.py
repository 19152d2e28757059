"""Learning rate over draws: what HyFreeDP and ADADP find from their starts, against the rates that others are given."""

import math
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.analysis.drawing import Styles, by_label, legend, panels

NEEDS = "curves"
LEAST = 1e-12
"""Lower rates are drawn here, where steps are without effect: one that shrinks for ever would hide all others."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """One line a seed; rates that were searched for or set by hand are thin.

    Without privacy only where a rate is found: constants have nothing to be compared with there.
    """
    is_shown = frame["eta"].notna() & ((frame["epsilon_target"] < math.inf) | (frame["tuning"] == "self"))
    shown = frame[is_shown]
    if shown.empty:
        return None
    figure, axes = panels(shown, 3.8, 3.6, sharey="row")
    name = f"learning rate (at least {LEAST:g})" if (shown["eta"] < LEAST).any() else "learning rate"
    for place, panel in axes.items():
        rows = shown[(shown["workload"] == place[0]) & (shown["epsilon_target"] == place[1])]
        for label, style, runs in by_label(rows, styles):
            for _, run in runs.groupby("run_id", sort=False):
                _line(panel, run, label=label, **style.line)
        panel.set_yscale("log")
        panel.set(xlabel="draws", ylabel=name if panel.get_subplotspec().is_first_col() else "")
    legend(figure, styles)
    return figure


def _line(panel: Axes, run: pd.DataFrame, **options: Any) -> None:
    """The rates that a run had, from the one on that it was given; not where all are a constant that it set itself."""
    width = 1.5 if run["tuning"].iloc[0] == "self" else 0.7
    draws, rates, start = list(run["draw"]), list(run["eta"]), float(run["lr"].iloc[0])
    if start in rates or run["eta"].nunique() > 1:
        draws, rates = [0, *draws], [start, *rates]
    marks = {"alpha": 0.8, "linewidth": width, "ms": 4, "markevery": max(1, len(draws) // 4)}
    panel.plot(draws, [max(rate, LEAST) for rate in rates], **marks, **options)
