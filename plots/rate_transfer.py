"""The loss at another ε of the learning rate that validates best at one, for each method that searches one.

After the theory of "Adaptive methods are preferable in high privacy settings" (arXiv 2603.03226): the best rate of
sign-like steps does not depend on ε, that of SGD does.
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.drawing import GREY, Styles, legend, shades, workload_panels
from dpopt.results.scores import shown

NEEDS = "transfers"
SEEDS = 5
"""The fewest seeds that are drawn: with fewer, an unlucky choice is a large part of the loss."""
SHARED = "open: one for all seeds"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """From the largest ε of a search to its smallest, and back; bars are 95 % intervals over seeds (5 or more).

    Full marks: each seed chooses its rate. Open ones: the mean over seeds chooses one rate for all of them.
    """
    import matplotlib.pyplot as plt

    frame = frame[frame["seeds"] >= SEEDS]
    if frame.empty:
        return None
    place = ["workload", "label"]
    ends = frame.groupby(place)["epsilon_target"].agg(smallest="min", largest="max")
    frame = frame.join(ends, on=place)
    ways = {
        (source, target): frame[(frame["epsilon_from"] == frame[source]) & (frame["epsilon_target"] == frame[target])]
        for source, target in (("largest", "smallest"), ("smallest", "largest"))
    }
    figure, panels = workload_panels(frame, 5.2, 1.2 + 0.3 * frame["label"].nunique(), by=["workload"])
    order = pd.concat(ways.values()).groupby("label")["loss"].mean().sort_values().index
    at = {label: height for height, label in enumerate(order)}
    for axis, rows in panels:
        unit, workload = shown(rows["score"].iloc[0]), rows["workload"].iloc[0]
        for shift, ((source, target), shade) in enumerate(zip(ways, shades(2), strict=True)):
            way = ways[source, target]
            name = f"rate of {_epsilon(way[source], source)}, at {_epsilon(way[target], target)}"
            way = way[way["workload"] == workload]
            heights = way["label"].map(at) + (0.3 * shift - 0.15)
            mean, colour = unit.factor * way["loss"], plt.colormaps["viridis"](shade)
            bars = [mean - unit.factor * way["low"], unit.factor * way["high"] - mean]
            axis.errorbar(mean, heights, xerr=bars, fmt="oD"[shift], ms=5, color=colour, elinewidth=1, label=name)
            shared = unit.factor * way["shared_loss"]
            axis.plot(shared, heights, "oD"[shift], ms=9, mfc="none", mec=colour, label=SHARED if shift == 0 else None)
        axis.axvline(0, color=GREY, lw=1)
        axis.set_yticks(range(len(order)), order)
        axis.set_ylim(len(order) - 0.5, -0.5)
        axis.set(xlabel=f"{unit.label.removesuffix(' (%)')} lost{' (points)' if unit.factor == 100 else ''}")
    legend(figure)
    return figure


def _epsilon(values: pd.Series, which: str) -> str:
    """The epsilon at an end of all searches, or which end it is where they differ."""
    return f"target ε = {values.iloc[0]:g}" if values.nunique() == 1 else f"the {which} ε"
