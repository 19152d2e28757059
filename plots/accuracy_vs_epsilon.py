"""Test score against the ε of the whole search: one line per method with its spread over seeds."""

import math

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import bars, focus, named_below, run_axis, whole_ticks
from dpopt.results.drawing import GREY, Styles, by_label, legend, workload_panels
from dpopt.results.pricing import ROUNDING
from dpopt.results.scores import shown

NEEDS = "comparison"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """One panel a workload; dashed: without privacy. Bars are one standard deviation to each side.

    Hollow markers are for reference: their search spends more than its target, and a faint line marks the ε of its
    reported run alone; or a value was set by hand, which is not charged.
    """
    private = frame[(frame["epsilon_target"] < math.inf) & frame["mean"].notna()]
    private = private[private.groupby("workload")["mean"].transform("size") > 1]  # one point is no figure
    if private.empty:
        return None
    figure, panels = workload_panels(private, 5, 3.8, by=["workload"])
    for panel, rows in panels:
        workload, unit = rows["workload"].iloc[0], shown(rows["score"].iloc[0])
        is_over = rows["epsilon_with_tuning"] > rows["epsilon_target"] * ROUNDING
        for label, style, line in by_label(rows, styles):
            line = line.sort_values("epsilon_with_tuning")
            name = f"{label} (set by hand)" if line["tuning"].iloc[0] == "fixed" else label
            look = {"capsize": 2, "mfc": "white" if line["is_reference"].any() else None, **style.line}
            panel.errorbar(line["epsilon_with_tuning"], unit.factor * line["mean"], bars(line), label=name, **look)
            alone = line[is_over[line.index] & (line["tuning"] != "fixed")]
            tick = {"ls": "none", "marker": "|", "ms": 9, "alpha": 0.5, "color": style.colour}
            panel.plot(alone["epsilon_single"], unit.factor * alone["mean"], **tick)
        if is_over.any():
            panel.plot([], [], "|", ms=9, color=GREY, label="one run of a search that is not paid for")
        ceilings = frame[(frame["workload"] == workload) & (frame["epsilon_target"] == math.inf)]
        for row in ceilings.to_dict("records"):
            look = {"linestyle": (0, (4, 2)), "color": styles[row["label"]].colour}
            panel.axhline(unit.factor * row["mean"], label=f"{row['label']} (ε = ∞)", **look)
        panel.set(ylabel=f"test {unit.label}")
        run_axis(panel, rows["epsilon_target"], "ε of the whole search")
        every = pd.concat([rows, ceilings])
        low, high = bars(every) * [[-1], [1]] + unit.factor * every["mean"].to_numpy()
        below = every.assign(mean=unit.factor * every["mean"])[focus([panel], low, high)]
        named_below(panel, dict(below.groupby("label")["mean"].agg(["min", "max"]).apply(tuple, axis=1)))
        whole_ticks(panel.yaxis, 6)
    legend(figure, styles)
    return figure
