"""Draws the figures in `plots/`: each file there says which frame it needs and has `draw(frame) -> Figure`."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError


@dataclass(frozen=True)
class Plot:
    """One figure.

    Attributes:
        name: file name without `.py`.
        needs: "comparison" (one row a table row), "selected" (one row a replicate) or "curves" (one row a curve entry).
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
    if needs not in ("comparison", "selected", "curves") or not callable(draw):
        raise ConfigError("plots", str(file), 'expected NEEDS = "comparison", "selected" or "curves", and draw(frame)')
    return Plot(file.stem, needs, draw)


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.{kind}" for kind in ("svg", "png")]
    for path in paths:
        figure.savefig(path, bbox_inches="tight", dpi=150)
    return paths
