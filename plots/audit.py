"""Lower bounds on epsilon beside the claimed one, for each optimizer and for mechanisms broken on purpose."""

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpopt.results.drawing import GREY, Styles, labelled, styles_of

NEEDS = "audit"
BOUNDS = {  # column -> what it is
    "worst_case": "worst-case canary, many runs",
    "one_run": "one run",
    "one_run_fdp": "one run, f-DP",
}


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """One panel for each target epsilon of the optimizers, one for the controls; a bar ends at the claimed epsilon."""
    frame = frame[frame["failure"] == ""]
    panels = [(f"ε = {target:g}", rows) for target, rows in _optimizers(frame).groupby("epsilon_target")]
    if (frame["kind"] == "control").any():
        panels.append(("broken on purpose", frame[frame["kind"] == "control"]))
    if not panels:
        return None
    height = 1.2 + 0.24 * max(len(rows) for _, rows in panels)
    figure, axes = plt.subplots(1, len(panels), figsize=(4.2 * len(panels), height), squeeze=False)
    for axis, (title, rows) in zip(axes[0], panels, strict=True):
        _panel(axis, rows)
        axis.set_title(title)
    handles = labelled(figure)
    figure.tight_layout(w_pad=2)
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0), frameon=False)
    return figure


def _optimizers(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["kind"] == "optimizer"]


def _panel(axis: Axes, rows: pd.DataFrame) -> None:
    at = range(len(rows))
    axis.barh(at, rows["epsilon"], color=GREY, alpha=0.3, height=0.8, label="claimed ε")
    for column, style in styles_of(BOUNDS).items():
        if column in rows and rows[column].notna().any():
            axis.plot(rows[column], at, markersize=4, label=BOUNDS[column], **style.dots)
    axis.set_yticks(at, rows["name"])
    axis.invert_yaxis()
    axis.set_xlim(left=-0.02 * axis.get_xlim()[1])
    axis.set_xlabel("ε")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.tick_params(axis="y", length=0)
    axis.spines[["top", "right"]].set_visible(False)
