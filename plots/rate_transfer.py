"""What the learning rate that validates best at one ε loses at another, for each method that searches one.

After the theory of "Adaptive methods are preferable in high privacy settings" (arXiv 2603.03226): the best rate of
sign-like steps does not depend on ε, that of SGD does.
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.analysis.drawing import GREY, Styles, legend, shades, workload_panels
from dpopt.analysis.scores import shown

NEEDS = "transfers"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure:
    """The two longest ways, from the largest ε to the smallest and back; bars are 95 % intervals over seeds."""
    import matplotlib.pyplot as plt

    low, high = frame["epsilon_target"].min(), frame["epsilon_target"].max()
    ways = frame[(frame["epsilon_from"].isin([low, high])) & (frame["epsilon_target"].isin([low, high]))]
    figure, panels = workload_panels(ways, 4.2, 1.2 + 0.3 * ways["label"].nunique(), by=["workload"])
    order = ways.groupby("label")["loss"].mean().sort_values().index
    at = {label: place for place, label in enumerate(order)}
    for axis, rows in panels:
        unit = shown(rows["score"].iloc[0])
        for shift, (source, shade) in enumerate(zip((high, low), shades(2), strict=True)):
            way = rows[rows["epsilon_from"] == source]
            places = way["label"].map(at) + (0.3 * shift - 0.15)
            mean, colour = unit.factor * way["loss"], plt.colormaps["viridis"](shade)
            bars = [mean - unit.factor * way["low"], unit.factor * way["high"] - mean]
            name = f"rate of ε = {source:g}, at ε = {low if source == high else high:g}"
            axis.errorbar(mean, places, xerr=bars, fmt="oD"[shift], ms=5, color=colour, elinewidth=1, label=name)
        axis.axvline(0, color=GREY, lw=1)
        axis.set_yticks(range(len(order)), order)
        axis.set_ylim(len(order) - 0.5, -0.5)
        axis.set(xlabel=f"{unit.label.removesuffix(' (%)')} lost{' (points)' if unit.factor == 100 else ''}")
    legend(figure)
    return figure
