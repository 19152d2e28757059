"""Clipping bounds that optimizers adapt, over draws: R_l of losses (HyFreeDP's Figure 4), C of gradients."""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.drawing import Styles, band, by_label, legend, panels, remarks

NEEDS = "curves"


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """The median over seeds in a band from least to largest, for runs whose curves hold a bound."""
    if "bound" not in frame or frame["bound"].isna().all():
        return None
    shown = frame[frame["bound"].notna()]
    figure, axes = panels(shown, 3.8, 3.6, sharey="row")
    for (workload, target), panel in axes.items():
        rows = shown[(shown["workload"] == workload) & (shown["epsilon_target"] == target)]
        for label, style, runs in by_label(rows, styles):
            lines = [run.set_index("draw")["bound"] for _, run in runs.groupby("run_id", sort=False)]
            line = band(panel, lines, style.colour)
            panel.plot(line.index, line, ms=4, markevery=max(1, len(line) // 4), label=label, **style.line)
        panel.set_yscale("log")
        panel.set(xlabel="draws", ylabel="clipping bound" if panel.get_subplotspec().is_first_col() else "")
    remarks(next(iter(axes.values())), "median over seeds", "least to largest")
    legend(figure, styles)
    return figure
