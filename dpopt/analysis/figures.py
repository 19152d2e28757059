"""Draws the figures in `plots/`: each file there says which frame it needs and has `draw(frame) -> Figure`."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
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


def render(figure: Any) -> dict[str, bytes]:
    """A figure as the contents of files, by their kind: SVG and PNG."""
    contents = {}
    for kind in ("svg", "png"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, bbox_inches="tight", dpi=150)
        contents[kind] = buffer.getvalue()
    return contents


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as SVG and PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for kind, content in render(figure).items():
        paths.append(folder / f"{name}.{kind}")
        paths[-1].write_bytes(content)
    return paths
