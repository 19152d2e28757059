"""Learning rate over draws: what HyFreeDP and ADADP find from their starts, against the rates that others are given."""

import math

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt import registry
from dpopt.results.drawing import Style, Styles, band, by_label, legend, panels, remarks

NEEDS = "curves"
LEAST = 1e-12
"""Lower rates are drawn here, where steps are without effect: one that shrinks for ever would hide all others."""
MANY = 8
"""Of more methods, each family (the first word of an optimizer's name) has panels of its own."""
SEEDS = 3
"""From as many on, a rate that is found has one line and a band."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """Rates that are found: the median over seeds in a band from least to largest; of few seeds, one line a seed.

    So are rates that were searched for or set by hand; they are thin. Without privacy only where a rate is found:
    constants have nothing to be compared with there.
    """
    is_shown = frame["eta"].notna() & ((frame["epsilon_target"] < math.inf) | (frame["tuning"] == "self"))
    shown = frame[is_shown]
    if shown.empty:
        return None
    if shown["label"].nunique() > MANY:
        names = {name: entry.display or name for name, entry in registry.entries("optimizer").items()}
        families = shown["optimizer"].str.split("_").str[0].replace(names | {"dp": "DP-SGD, DP-Adam"})
        shown = shown.assign(workload=shown["workload"] + "\n" + families)
    figure, axes = panels(shown, 3.8, 3.6, sharey="row")
    name = f"learning rate (at least {LEAST:g})" if shown["eta"].between(0, LEAST, "left").any() else "learning rate"
    name += "\n(gaps: negative)" if (shown["eta"] < 0).any() else ""
    for place, panel in axes.items():
        rows = shown[(shown["workload"] == place[0]) & (shown["epsilon_target"] == place[1])]
        for label, style, runs in by_label(rows, styles):
            _lines(panel, label, style, runs)
        panel.set_yscale("log")
        panel.set(xlabel="draws", ylabel=name if panel.get_subplotspec().is_first_col() else "")
    if any(panel.collections for panel in axes.values()):
        remarks(next(iter(axes.values())), "median over seeds", "least to largest")
    legend(figure, styles)
    return figure


def _lines(panel: Axes, label: str, style: Style, runs: pd.DataFrame) -> None:
    is_found = runs["tuning"].iloc[0] == "self"
    lines = [_rates(run) for _, run in runs.groupby("run_id", sort=False)]
    if is_found and len(lines) >= SEEDS:
        lines = [band(panel, lines, style.colour)]
    for line in lines:
        marks = {"ms": 4, "markevery": max(1, len(line) // 4), "lw": 1.5 if is_found else 0.7}
        panel.plot(line.index, line, alpha=0.8, label=label, **marks, **style.line)


def _rates(run: pd.DataFrame) -> pd.Series:
    """A run's rates by draw, from the one on that it was given, if any; not where all are a constant of its own."""
    rates, start = pd.Series(run["eta"].to_numpy(), index=run["draw"]), run["lr"].iloc[0]
    if pd.notna(start) and ((rates == start).any() or rates.nunique() > 1):
        rates = pd.concat([pd.Series({0: start}), rates])
    return rates.where(rates >= 0).clip(lower=LEAST)
