"""Gradient norms before clipping, over training, a band for each ε: 5 to 95 % of the examples, and their median.

Not private: a diagnostic. After Figure 3 of "On optimal hyperparameters for differentially private deep transfer
learning" (arXiv 2510.20616).
"""

import pandas as pd
from matplotlib.figure import Figure

from dpopt.results.clip_batch import NO_CLIP, fixed_pair
from dpopt.results.drawing import GREY, Styles, by_epsilon, legend, named_epsilon, remarks, workload_panels

NEEDS = "diagnostics"
BELOW = 1000
"""The axis may reach this far below the least median or bound: bands end at rounding errors, far below both."""
PANEL = ["workload", "label"]


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A panel has one C, B and number of epochs, and each ε its best η; dots are the bound C*, by Theorem 5.2.

    Had each ε the C and B that validate best for it, the panel would show what B does to norms, and not what ε does.
    """
    frame = frame.assign(clip=frame["clip"].fillna(NO_CLIP))
    frame = pd.concat([_at_one_setting(rows) for _, rows in frame.groupby(PANEL)])
    if frame.empty:
        return None
    figure, panels = workload_panels(frame, 3.2, 2.6, by=PANEL)
    for panel, rows in panels:
        for target, colour, line in by_epsilon(rows):
            over = line.groupby("epoch")[["q5", "q50", "q95"]].mean()
            panel.plot(over.index, over["q50"], color=colour, label=named_epsilon(target))
            panel.fill_between(over.index, over["q5"], over["q95"], color=colour, alpha=0.15, lw=0)
            if "best_clip" in line:
                best = line.dropna(subset="best_clip").groupby("epoch")["best_clip"].mean()
                panel.plot(best.index, best, "o", ms=4, color=colour)
        panel.plot([], [], "o", ms=4, color=GREY, label="best bound C*")
        panel.set(xlabel="epochs", ylabel="gradient norm", yscale="log")
        clip, size, epochs = rows[["clip", "batch_size", "epochs"]].iloc[0]
        setting = f"{'no C' if clip == NO_CLIP else f'C = {clip:g}'}, B = {size:g}, {epochs:g} epochs"
        panel.set_title(f"{panel.get_title()}\n{setting}")
        least = rows[rows.columns.intersection(["q50", "best_clip"])].min().min()
        panel.set_ylim(bottom=max(panel.get_ylim()[0], least / BELOW))
    remarks(panels[0][0], "median", "5 to 95 % of the examples")
    legend(figure)
    return figure


def _at_one_setting(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the most epochs that all ε have, and of the C and B to begin with (`clip_batch.fixed_pair`)."""
    shared = set.intersection(*(set(of_target["epochs"]) for _, of_target in rows.groupby("epsilon_target")))
    rows = rows[rows["epochs"] == max(shared or rows["epochs"])]
    size, clip = fixed_pair(rows)
    return rows[(rows["batch_size"] == size) & (rows["clip"] == clip)]
