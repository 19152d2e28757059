"""Test score against the ε of the whole search: one line per method with its spread over seeds."""

import math

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.axes import bars, run_axis, whole_ticks
from dpopt.results.drawing import GREY, Styles, by_label, legend, workload_panels
from dpopt.results.pricing import ROUNDING
from dpopt.results.ranking import method
from dpopt.results.scores import shown

NEEDS = "comparison"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """One panel a workload; dashed: without privacy. Bars are one standard deviation to each side.

    Hollow markers are for reference: their search spends more than its target, and a faint line marks the ε of its
    reported run alone; or a value was set by hand, which is not charged, and they stand at the ε of the run.
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
            look = {"capsize": 2, "label": method({"label": label, "tuning": line["tuning"].iloc[0]}), **style.line}
            panel.errorbar(line["epsilon_with_tuning"], unit.factor * line["mean"], bars(line), **look)
            beside = line[line["is_reference"]]
            panel.plot(beside["epsilon_with_tuning"], unit.factor * beside["mean"], mfc="white", zorder=3, **style.dots)
            alone = line[is_over[line.index] & (line["tuning"] != "fixed")]
            tick = {"ls": "none", "marker": "|", "ms": 9, "alpha": 0.5, "color": style.colour}
            panel.plot(alone["epsilon_single"], unit.factor * alone["mean"], **tick)
        if rows["is_reference"].any():
            panel.plot([], [], "o", mfc="white", color=GREY, label="for reference")
        if is_over.any():
            panel.plot([], [], "|", ms=9, color=GREY, label="one run of a search that is not paid for")
        ceilings = frame[(frame["workload"] == workload) & (frame["epsilon_target"] == math.inf)]
        for row in ceilings.to_dict("records"):
            look = {"linestyle": (0, (4, 2)), "color": styles[row["label"]].colour}
            panel.axhline(unit.factor * row["mean"], label=f"{row['label']} (ε = ∞)", **look)
        panel.set(ylabel=f"test {unit.label}")
        by_hand = ", by hand: of the run" if (rows["tuning"] == "fixed").any() else ""
        run_axis(panel, rows["epsilon_target"], f"ε of the whole search{by_hand}")
        whole_ticks(panel.yaxis, 6)
    legend(figure, styles)
    return figure
