"""Test accuracy of the hardest fifth of the classes, the easiest fifth and all classes against the bound C.

"On optimal hyperparameters for differentially private deep transfer learning" (arXiv 2510.20616) says that a small C
costs hard classes most.
"""

import math

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results import hard_classes
from dpopt.results.axes import run_axis
from dpopt.results.drawing import COLOURS, GREY, Styles, by_method, legend, workload_panels

NEEDS = "class_scores"
LOOKS = dict(zip(hard_classes.GROUPS, ((COLOURS[3], "o"), (GREY, "s"), (COLOURS[0], "^")), strict=True))
FAR = 12.0
"""Points of accuracy: a mean that is further from 0 is a number at the edge, so that small changes can be seen."""


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """Relative to the smallest C, mean over ε and epochs, with 95 % intervals over seeds.

    B and η are those that validate best for each seed and C. Methods whose C is not varied rank the classes.
    """
    changes = hard_classes.changes(frame)
    if changes.empty:
        return None
    figure, panels = workload_panels(changes, 3.3, 2.8, by=by_method(changes, ["workload"]))
    for panel, rows in panels:
        rows = rows.assign(mean=100 * rows["mean"], half=100 * (rows["high"] - rows["mean"]).fillna(0))
        for shift, (group, (colour, marker)) in enumerate(LOOKS.items()):
            line = rows[rows["group"] == group]
            clips = line["clip"] * 1.08 ** (shift - 1)  # beside each other, so that no bar covers another
            look = {"color": colour, "marker": marker, "ms": 4, "lw": 1.2, "capsize": 2, "label": group}
            panel.errorbar(clips, line["mean"], line["half"], **look)
            for clip, mean in line.loc[line["mean"].abs() > FAR, ["clip", "mean"]].to_numpy():
                place = {"xy": (clip, math.copysign(FAR, mean)), "xytext": (0, 22 - 10 * shift)}
                text = f"{mean:+.0f}".replace("-", "−")
                panel.annotate(text, **place, textcoords="offset points", ha="center", size=8, color=colour)
        panel.axhline(0, color=GREY, lw=0.8)
        if left_out := rows["left_out"].max():
            panel.set_title(f"{panel.get_title()}\n({left_out} of seeds × ε × epochs left out)")
        panel.set_ylim(-FAR, FAR)
        panel.set_ylabel(f"change of test accuracy\nfrom C = {rows['reference'].iloc[0]:g} (points)")
        run_axis(panel, rows["clip"], "clipping bound C")
    legend(figure)
    return figure
