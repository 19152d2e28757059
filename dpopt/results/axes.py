"""Axes of figures: ticks at the values that were run, lines over them, scores without the empty part of an axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from dpopt.results.choosing import validated_best
from dpopt.results.drawing import GREY, by_epsilon, by_method, sweeps, workload_panels
from dpopt.results.scores import shown

# A cut hides a distance: it needs a quarter of the axis empty, three values above that, and more than below.
_EMPTY, _FEWEST = 1 / 4, 3


def run_axis(axis: Any, values: Iterable[float], label: str) -> None:
    """A logarithmic x axis with ticks at the `values` that were run, and at a few others beyond them."""
    ticks = sorted(filter(math.isfinite, set(values)))
    axis.set(xscale="log", xlabel=label)
    if not ticks:
        return
    around = [(ticks[0] / 1.1, 0), (ticks[-1] * 1.1, 0)]  # one value alone would be at the edge
    axis.update_datalim(around, updatey=False)
    axis.autoscale_view(scaley=False)
    beyond = (mantissa * 10.0**power for power in range(-3, 5) for mantissa in (1, 2, 5))
    ticks += [value for value in beyond if 1.6 * ticks[-1] < value <= axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{value:g}" for value in ticks])
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
            panel.plot(line[column], unit.factor * line["mean"], "o-", ms=4, color=colour, label=f"ε = {target:g}")
        panel.set(ylabel=f"test {unit.label}")
        run_axis(panel, rows[column], label)
    return figure, panels


def _gap(spans: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    # The widest part of an axis that none of the sorted intervals touches, where few of them lie far below the others.
    if len(spans) <= _FEWEST:
        return None
    reached = np.maximum.accumulate([b for _, b in spans])
    widths = np.array([a for a, _ in spans[1:]]) - reached[:-1]
    below = int(widths.argmax()) + 1
    above = len(spans) - below
    is_wide = widths[below - 1] > max(_EMPTY, below / len(spans)) * (reached[-1] - spans[0][0])
    return (float(reached[below - 1]), spans[below][0]) if is_wide and above >= max(_FEWEST, below + 1) else None


def cut(axes: Sequence[Any], low: Iterable[float], high: Iterable[float], along: str = "y") -> None:
    """Cut the empty part out of axes that share their scores, where it would squeeze all else, and say so.

    What is left keeps its scale: a point of score is as long below the cut as above it.

    Args:
        axes: with everything drawn.
        low, high: the ends of all intervals that are drawn.
        along: the axis with the scores, "x" or "y".
    """
    spans = sorted((a, b) for a, b in zip(low, high, strict=True) if math.isfinite(a) and math.isfinite(b))
    hole = _gap(spans)
    if hole is None:
        return
    bottom, top = spans[0][0], max(end for _, end in spans)
    kept = max(top - bottom - (hole[1] - hole[0]), (hole[1] - hole[0]) / 10)
    first, last, far = hole[0] + 0.06 * kept, hole[1] - 0.06 * kept, 100 * (top - bottom)
    scores = (first - far, first, last, last + far)
    places = (first - far, first, first + 0.08 * kept, first + 0.08 * kept + far)
    functions = (lambda score: np.interp(score, scores, places), lambda place: np.interp(place, places, scores))
    for axis in axes:
        getattr(axis, f"set_{along}scale")("function", functions=functions)
        getattr(axis, f"set_{along}lim")(bottom - 0.06 * kept, top + 0.06 * kept)
        _mark(axis, first, last, along)


def _mark(axis: Any, first: float, last: float, along: str) -> None:
    # Ticks stand beside the cut alone: inside it the scale has no meaning.
    start, end = getattr(axis, f"get_{along}lim")()
    kept = (end - last) + (first - start)
    ticks = _ticks(start, first, kept) + _ticks(last, end, kept)
    getattr(axis, f"set_{along}ticks")(ticks, [f"{tick:.4g}" for tick in ticks])
    is_y, cut_at = along == "y", (first, last)
    (axis.axhspan if is_y else axis.axvspan)(first, last, facecolor="white", edgecolor="none", zorder=2.4)
    place = axis.get_yaxis_transform() if is_y else axis.get_xaxis_transform()
    text = {"color": GREY, "size": 7, "ha": "center", "va": "center", "rotation": 0 if is_y else 90}
    middle, zorder = (first + last) / 2, {"transform": place, "zorder": 2.7}
    axis.text(*((0.5, middle) if is_y else (middle, 0.5)), "axis cut", **text, **zorder)
    for side, spine in enumerate(("left", "right") if is_y else ("bottom", "top")):
        if axis.spines[spine].get_visible():
            ends = ((side, side), cut_at) if is_y else (cut_at, (side, side))
            axis.plot(*ends, color="white", lw=2, clip_on=False, **zorder)
            slash = [(-1, -0.5), (1, 0.5)] if is_y else [(-0.5, -1), (0.5, 1)]
            axis.plot(*ends, color="black", linestyle="none", marker=slash, ms=7, clip_on=False, **zorder)


def _ticks(start: float, end: float, kept: float) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    count, middle = round(6 * (end - start) / kept), (start + end) / 2
    ticks = [float(tick) for tick in MaxNLocator(max(1, count)).tick_values(start, end) if start <= tick <= end]
    return ticks if count > 1 and ticks else [min(ticks or [middle], key=lambda tick: abs(tick - middle))]
