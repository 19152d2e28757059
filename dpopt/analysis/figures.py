"""Draws the figures in `plots/`: each file there says which frame it needs and has `draw(frame) -> Figure`."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from dpopt import markup
from dpopt._paths import at_hand
from dpopt.errors import ConfigError, unknown

OF_SUITES = ("comparison", "selected", "curves", "ranking", "sweep", "diagnostics", "classes")
"""What a figure of a suite may need: the frames of `suites.Frames`."""
DEFAULT = Path("plots")
"""Where figures are looked for beside those that come with dpopt."""
FRAMES = (*OF_SUITES, "speed", "audit", "accounting")
"""What a figure may need."""


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        name: file name without `.py`.
        needs: a frame of `suites.Frames`, "speed" (one row a contender of `dpopt bench`), "audit" (one row an audit of
            `dpopt audit`) or "accounting" (one row a published noise rule and setting; solved, not stored).
        draw: frame -> matplotlib Figure.
    """

    name: str
    needs: str
    draw: Callable[[pd.DataFrame], Any]

    def figure(self, frame: pd.DataFrame) -> Any:
        """What `draw` makes of `frame`, whose texts are no mathematics."""
        shown = frame.copy(deep=False)
        for name in frame.select_dtypes(exclude="number"):
            shown[name] = frame[name].map(lambda value: markup.figure(value) if isinstance(value, str) else value)
        return self.draw(shown)


def plots(folder: Path, name: str | None = None) -> list[Plot]:
    """The figures that `folder` holds, in the order of their names, or the one of that name.

    The default folder adds to the figures that come with dpopt, any other one stands alone.

    Raises:
        ConfigError: no such folder, no such figure, or a file without `NEEDS` and `draw`.
    """
    if folder != DEFAULT and not folder.is_dir():
        raise ConfigError("plots", str(folder), "expected a folder of figure files")
    files = at_hand("plots", "[!_]*.py") if folder == DEFAULT else {f.stem: f for f in sorted(folder.glob("[!_]*.py"))}
    if name is not None and name not in files:
        raise unknown("figure", name, files)
    return [_load(file) for stem, file in files.items() if name in (None, stem)]


def _load(file: Path) -> Plot:
    specification = importlib.util.spec_from_file_location(f"dpopt_plot_{file.stem}", file)
    if specification is None or specification.loader is None:
        raise ConfigError("plots", str(file), "cannot be imported")
    module: ModuleType = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    needs, draw = getattr(module, "NEEDS", None), getattr(module, "draw", None)
    if needs not in FRAMES or not callable(draw):
        raise ConfigError("plots", str(file), f"expected NEEDS, one of {', '.join(FRAMES)}, and draw(frame)")
    return Plot(file.stem, needs, draw)


def panels(
    frame: pd.DataFrame, width: float, height: float, **options: Any
) -> tuple[Any, dict[tuple[str, float], Any]]:
    """A figure with a row for each workload of `frame` and a column for each target epsilon.

    Args:
        frame: has `workload` and `epsilon_target`.
        width, height: of a panel, in inches.
        options: of `plt.subplots`.

    Returns:
        The figure, and the axes of each pair that has rows; the others are blank.
    """
    import matplotlib.pyplot as plt

    workloads, targets = sorted(frame["workload"].unique()), sorted(frame["epsilon_target"].unique())
    size = (width * len(targets) + 1, height * len(workloads))
    figure, axes = plt.subplots(len(workloads), len(targets), figsize=size, squeeze=False, **options)
    found, there = {}, set(zip(frame["workload"], frame["epsilon_target"], strict=True))
    for workload, line in zip(workloads, axes, strict=True):
        for target, axis in zip(targets, line, strict=True):
            name = f"ε = {target:g}".replace("inf", "∞")
            axis.set_title(name if len(workloads) == 1 else f"{workload}, {name}")
            axis.grid(alpha=0.3)
            if (workload, target) in there:
                found[workload, target] = axis
            else:
                axis.set_axis_off()
    return figure, found


def workload_panels(
    frame: pd.DataFrame, width: float, height: float, by: Sequence[str] = ("workload", "epochs")
) -> tuple[Any, list[tuple[Any, pd.DataFrame]]]:
    """A figure with a panel for each workload (and number of epochs), at most four in a row, on a constrained layout.

    Args:
        frame: has the columns `by`.
        width, height: of a panel, in inches.
        by: what a panel is for.

    Returns:
        The figure, and each panel with its rows.
    """
    import matplotlib.pyplot as plt

    groups = list(frame.groupby(list(by)))
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    size = (width * columns + 1.2, height * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis, (keys, _) in zip(axes.flat, groups, strict=False):
        axis.set_title("\n".join(map(_named, by, keys)), fontsize=8)
        axis.grid(alpha=0.3)
    return figure, [(axis, rows) for axis, (_, rows) in zip(axes.flat, groups, strict=False)]


def _named(column: str, value: Any) -> str:
    return f"{value:g} epochs" if column == "epochs" else str(value)


def sweeps(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of methods whose clipping bound a suite varies."""
    return frame[frame.groupby("label")["clip"].transform("nunique") > 1]


def gridded(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a suite's own grid: without those that a refinement has added between its values."""
    return frame if "is_refined" not in frame else frame[~frame["is_refined"]]


def validated_best(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """The row of each group that validates best; ties and missing scores go to the first."""
    return frame.loc[frame.assign(key=frame["validation"].fillna(-math.inf)).groupby(list(by))["key"].idxmax()]


def along(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """What a line over the last of `by` shows: at each value of the grid the row that validates best, and beside it
    every row that a refinement has added.
    """
    line = validated_best(gridded(frame), by)
    return pd.concat([line, frame.drop(gridded(frame).index)])


def by_epsilon(frame: pd.DataFrame) -> Iterator[tuple[float, Any, pd.DataFrame]]:
    """Each target epsilon with its rows and a colour, from dark (private) to light."""
    import matplotlib.pyplot as plt

    groups = list(frame.groupby("epsilon_target"))
    for number, (target, rows) in enumerate(groups):
        yield target, plt.colormaps["viridis"](0.85 * number / max(1, len(groups) - 1)), rows


def colours(labels: Iterable[str]) -> dict[str, Any]:
    """A colour for each of at most 20 labels."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(labels))
    return dict(zip(names, plt.colormaps["tab20" if len(names) > 10 else "tab10"].colors, strict=False))


def legend(figure: Any) -> None:
    """One legend, at the right of the first row of panels, of all that is labelled anywhere."""
    handles = _labelled(figure)
    last = figure.axes[0].get_subplotspec().get_gridspec().ncols - 1
    place = {"bbox_to_anchor": (1.02, 1), "loc": "upper left", "frameon": False}
    figure.axes[last].legend(handles.values(), handles, **place)


def legend_outside(figure: Any) -> None:
    """One legend at the right of a figure on a constrained layout, of all that is labelled anywhere."""
    handles = _labelled(figure)
    figure.legend(handles.values(), handles, loc="outside right upper", frameon=False)


def _labelled(figure: Any) -> dict[str, Any]:
    """The first artist of each label, in the order of the panels."""
    labelled = [pair for axis in figure.axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    first = {label: handle for handle, label in reversed(labelled)}
    return {label: first[label] for _, label in labelled}


def render(figure: Any, kinds: Sequence[str] = ("svg", "png")) -> dict[str, bytes]:
    """A figure as the contents of files, by their kind, the same bytes each time; it is closed."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    contents, nothing = {}, {"metadata": dict.fromkeys(("Creator", "Date"))}
    for kind in kinds:
        buffer = io.BytesIO()
        with mpl.rc_context({"svg.hashsalt": "dpopt"}):
            options: Any = nothing if kind == "svg" else {}
            figure.savefig(buffer, format=kind, bbox_inches="tight", dpi=150, **options)
        contents[kind] = buffer.getvalue()
    plt.close(figure)
    return contents


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, content in render(figure).items():
        paths.append(folder / f"{name}.{kind}")
        paths[-1].write_bytes(content)
    return paths
