"""Draws the figures in `plots/`: each file there says which frame it needs and has `draw(frame) -> Figure`."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError

FRAMES = ("comparison", "selected", "curves", "speed", "audit")
"""What a figure may need; all but "speed" and "audit" are a suite's."""


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        name: file name without `.py`.
        needs: "comparison" (one row a table row), "selected" (one row a replicate), "curves" (one row a curve entry),
            "speed" (one row a contender of `dpopt bench`) or "audit" (one row an audit of `dpopt audit`).
        draw: frame -> matplotlib Figure.
    """

    name: str
    needs: str
    draw: Callable[[pd.DataFrame], Any]


def plots(folder: Path) -> list[Plot]:
    """The figures that `folder` holds, in the order of their names.

    Raises:
        ConfigError: no such folder, or a file without `NEEDS` and `draw`.
    """
    if not folder.is_dir():
        raise ConfigError("plots", str(folder), "expected a folder of figure files")
    return [_load(file) for file in sorted(folder.glob("*.py")) if not file.name.startswith("_")]


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


def colours(labels: Iterable[str]) -> dict[str, Any]:
    """A colour for each of at most 20 labels."""
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(labels))
    return dict(zip(names, plt.colormaps["tab20" if len(names) > 10 else "tab10"].colors, strict=False))


def legend(figure: Any) -> None:
    """One legend, at the right of the first row of panels, of all that is labelled anywhere."""
    labelled = [pair for axis in figure.axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in reversed(labelled)}
    names = list(dict.fromkeys(label for _, label in labelled))
    last = figure.axes[0].get_subplotspec().get_gridspec().ncols - 1
    place = {"bbox_to_anchor": (1.02, 1), "loc": "upper left", "frameon": False}
    figure.axes[last].legend([handles[name] for name in names], names, **place)


def render(figure: Any) -> dict[str, bytes]:
    """A figure as the contents of files, by their kind: SVG and PNG; it is closed."""
    import matplotlib.pyplot as plt

    contents = {}
    for kind in ("svg", "png"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, bbox_inches="tight", dpi=150)
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
