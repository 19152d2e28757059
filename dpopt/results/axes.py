"""Axes of figures: ticks at the values that were run, lines over them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpopt.results import statistics
from dpopt.results.choosing import validated_best
from dpopt.results.drawing import by_epsilon, by_method, named_epsilon, sweeps, workload_panels
from dpopt.results.scores import shown

_LETTER = 0.0088
"""Inches that a digit takes, for each point of its size."""


def run_axis(axis: Any, values: Iterable[float], label: str) -> None:
    """A logarithmic x axis with ticks at the `values` that were run, and at a few others beyond them."""
    import matplotlib.pyplot as plt

    ticks = sorted(filter(math.isfinite, set(values)))
    axis.set(xscale="log", xlabel=label)
    if not ticks:
        return
    around = [(ticks[0] / 1.1, 0), (ticks[-1] * 1.1, 0)]  # one value alone would be at the edge
    axis.update_datalim(around, updatey=False)
    axis.autoscale_view(scaley=False)
    beyond = (mantissa * 10.0**power for power in range(-3, 5) for mantissa in (1, 2, 5))
    low, high = axis.get_xlim()
    ticks += [value for value in beyond if 1.6 * ticks[-1] < value <= high]
    # Numbers do not touch, in a panel that takes about 0.7 of its share of the figure.
    wide, digit = 0.7 * axis.figure.get_figwidth() / axis.get_gridspec().ncols, _LETTER * plt.rcParams["font.size"]
    names = {tick: f"{tick:g}" for tick in ticks}
    kept = ticks[:1]
    for tick in ticks[1:]:
        apart = wide * math.log(tick / kept[-1]) / math.log(high / low)
        if apart > digit * (1 + (len(names[tick]) + len(names[kept[-1]])) / 2):
            kept.append(tick)
    axis.set_xticks(kept, [names[tick] for tick in kept])
    axis.minorticks_off()


def lines_along(frame: pd.DataFrame, column: str, label: str) -> tuple[Any, list[tuple[Any, pd.DataFrame]]] | None:
    """A figure of `Results.sweep`'s test scores over C or B, a line for each epsilon, and its panels with their rows.

    At each value of `column` the row is shown that validates best. None where there is nothing to show.
    """
    frame = sweeps(frame)
    panel_of = by_method(frame, ["workload", "epochs"])
    best = validated_best(frame, [*panel_of, "epsilon_target", column])
    if best.empty:
        return None
    figure, panels = workload_panels(best, 3.2, 2.6, by=panel_of)
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for target, colour, line in by_epsilon(rows.sort_values(column)):
            look = {"ms": 4, "color": colour, "label": named_epsilon(target)}
            panel.plot(line[column], unit.factor * line["mean"], "o-", **look)
        panel.set(ylabel=f"test {unit.label}")
        whole_ticks(panel.yaxis, 6)
        run_axis(panel, rows[column], label)
    return figure, panels


def whole_ticks(axis: Any, count: int) -> None:
    """At most `count` + 1 ticks of an `Axis`, so that none touch; at whole numbers, unless there are less than two."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(count, steps=[1, 2, 5, 10], integer=np.ptp(axis.get_view_interval()) >= 2))


def bars(rows: pd.DataFrame) -> NDArray[np.float64]:
    """One standard deviation to each side, shape [2, rows], as shown; none reaches beyond what a score can be.

    Of fewer than `statistics.FEWEST` seeds it shows nothing, and is 0.
    """
    unit, spread = shown(rows["score"].iloc[0]), rows["std"].where(rows["seeds"] >= statistics.FEWEST).fillna(0)
    least, largest = unit.ends
    return unit.factor * np.array(
        [np.minimum(spread, rows["mean"] - least), np.minimum(spread, largest - rows["mean"])]
    )
