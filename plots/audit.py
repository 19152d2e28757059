"""Lower bounds on epsilon beside the claimed one, for each optimizer and for mechanisms broken on purpose."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

NEEDS = "audit"
BOUNDS = {
    "worst_case": ("o", "C0", "worst-case canary, many runs"),
    "one_run": ("D", "C1", "one run"),
    "one_run_fdp": ("s", "C2", "one run, f-DP"),
}


def draw(frame: pd.DataFrame) -> Figure:
    """One panel for each target epsilon of the optimizers, one for the controls; a bar ends at the claimed epsilon."""
    frame = frame[frame["failure"] == ""]
    panels = [(f"ε = {target:g}", rows) for target, rows in _optimizers(frame).groupby("epsilon_target")]
    if (frame["kind"] == "control").any():
        panels.append(("broken on purpose", frame[frame["kind"] == "control"]))
    height = 1.2 + 0.24 * max(len(rows) for _, rows in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), height), squeeze=False)
    for axis, (title, rows) in zip(axes[0], panels, strict=True):
        _panel(axis, rows)
        axis.set_title(title)
    handles = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    figure.tight_layout(w_pad=2)
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0), frameon=False)
    return figure


def _optimizers(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["kind"] == "optimizer"]


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    at = range(len(rows))
    axis.barh(at, rows["epsilon"], color="0.9", height=0.8, label="claimed ε")
    for column, (marker, colour, label) in BOUNDS.items():
        if column in rows and rows[column].notna().any():
            axis.plot(rows[column], at, marker, color=colour, markersize=4, linestyle="", label=label)
    axis.set_yticks(at, rows["name"])
    axis.invert_yaxis()
    axis.set_xlim(left=-0.02 * axis.get_xlim()[1])
    axis.set_xlabel("ε")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
