"""Test score of each method at each target epsilon; for suites with more methods than lines can show."""

import math

import numpy as np
import pandas as pd
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from dpopt.results.axes import bars, whole_ticks
from dpopt.results.drawing import COLOURS, GREY, Styles, legend, named_epsilon, workload_panels
from dpopt.results.scores import shown

NEEDS = "comparison"
KINDS = {"no search": COLOURS[0], "search paid for": COLOURS[2], "for reference": COLOURS[3]}


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel for each workload, its methods in one order, that of their average rank; the darker, the larger ε.

    Bars are one standard deviation to each side. For reference: a search that spends more than its target, or a value
    set by hand, which is not charged. Dashed: the best score without privacy.
    """
    frame = frame[frame["mean"].notna()]
    private, ceilings = frame[frame["epsilon_target"] < math.inf], frame[frame["epsilon_target"] == math.inf]
    dots = private if len(private) else frame
    dots = dots[dots.groupby("workload")["mean"].transform("size") > 1]  # one point is no figure
    if dots.empty:
        return None
    kinds = np.where(dots["is_reference"], "for reference", np.where(dots["runs"] > 1, "search paid for", "no search"))
    dots = dots.assign(kind=kinds, place=dots.groupby(["workload", "epsilon_target"])["mean"].rank(ascending=False))
    order, targets = (
        list(dots.groupby("label")["place"].mean().sort_values().index),
        sorted(dots["epsilon_target"].unique()),
    )
    height = len(order) * (0.14 + 0.08 * len(targets)) + 0.9
    names = 0.08 * max(map(len, order)) / min(4, dots["workload"].nunique())  # inches that they take of each panel
    figure, panels = workload_panels(dots, 3.0 + names, height, by=["workload"])
    for panel, rows in panels:
        unit = shown(rows["score"].iloc[0])
        best = unit.factor * ceilings.loc[ceilings["workload"] == rows["workload"].iloc[0], "mean"].max()
        rows = rows.assign(
            at=rows["label"].map(order.index) + 0.72 * rows["epsilon_target"].map(targets.index) / len(targets)
        )
        for (kind, target), of_kind in rows.groupby(["kind", "epsilon_target"]):
            look = {"fmt": "o", "ms": 4, "elinewidth": 1, "color": _shade(kind, targets.index(target), len(targets))}
            mean, name = unit.factor * of_kind["mean"], f"{kind}, {named_epsilon(target)}"
            panel.errorbar(mean, of_kind["at"], xerr=bars(of_kind), label=name, **look)
        if len(private) and math.isfinite(best):
            panel.axvline(best, color=GREY, linestyle="--", linewidth=1, label="best without privacy")
        is_first = panel.get_subplotspec().is_first_col()
        panel.set_yticks(
            [at + 0.36 * (1 - 1 / len(targets)) for at in range(len(order))], order if is_first else [""] * len(order)
        )
        panel.set(xlabel=f"test {unit.label}", ylim=(len(order) - 0.14, -0.36))
        for at in range(1, len(order)):
            panel.axhline(at - 0.25, color=GREY, lw=0.3, alpha=0.5)
        panel.grid(False, axis="y")
        panel.tick_params(axis="y", length=0)
        panel.spines[["top", "right"]].set_visible(False)
        whole_ticks(panel.xaxis, 6)
    legend(figure)
    return figure


def _shade(kind: str, place: int, count: int) -> tuple[float, ...]:
    """A kind's colour, mixed with white for the smaller epsilons."""
    share = 0.45 + 0.55 * (place + 1) / count
    return tuple(1 - share * (1 - part) for part in to_rgb(KINDS[kind]))
