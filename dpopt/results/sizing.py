"""Figures of a given width: fewer panels side by side, smaller texts, titles in lines, the legend below."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from dpopt.errors import ConfigError

_WIDTH: ContextVar[float | None] = ContextVar("width", default=None)
_PANEL = 1.7
"""Inches that a panel needs at least, with its labels."""
_SHRUNK, _LEAST = 0.8, 6.0
"""The factor of all text sizes, and the smallest size in points."""
_LETTERS = 15.0
"""Letters of a title that fit into an inch at 8 points."""


@contextmanager
def of_width(width: float | None) -> Iterator[None]:
    """Figures that are drawn inside are to be `width` inches wide, or as wide as they are drawn for None."""
    if width is not None and not 2 <= width <= 40:
        raise ConfigError("width", width, "expected 2 to 40 inches")
    token = _WIDTH.set(width)
    try:
        yield
    finally:
        _WIDTH.reset(token)


def beside(most: int) -> int:
    """The number of panels side by side, at most `most`, for which the width suffices."""
    width = _WIDTH.get()
    return most if width is None else max(1, min(most, int(width / _PANEL)))


def fitted(figure: Any, width: float) -> Any:
    """`figure`, drawn by any file of `plots/`, made `width` inches wide; gives it back."""
    from matplotlib.text import Text

    before, height = figure.get_size_inches()
    # Heights shrink as texts do, and no more: rows of a panel that has a method each need their lines.
    figure.set_size_inches(width, height * min(1.0, max(width / before, _SHRUNK * 0.85)))
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    for text in figure.findobj(Text):
        text.set_fontsize(max(_LEAST, _SHRUNK * text.get_fontsize()))
    for axis in figure.axes:
        panels = axis.get_subplotspec().get_gridspec().ncols if axis.get_subplotspec() else 1
        letters = max(10, int(_LETTERS * (width / panels - 0.25)))
        for at in ("left", "center", "right"):
            if title := axis.get_title(loc=at):
                lines = [piece for line in title.split("\n") for piece in textwrap.wrap(line, letters)]
                axis.set_title("\n".join(lines), loc=at, fontsize=axis.title.get_fontsize())
    _legend_below(figure, width)
    return figure


def _legend_below(figure: Any, width: float) -> None:
    for legend in list(figure.legends):
        names = [text.get_text() for text in legend.get_texts()]
        # Those of a legend lack markers; of an axis they are the artists themselves.
        drawn_as = dict(zip(names, legend.legend_handles, strict=True))
        for axis in reversed(figure.axes):
            drawn_as |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        handles = [drawn_as[name] for name in names]
        size = legend.get_texts()[0].get_fontsize() if names else _LEAST
        legend.remove()
        for columns in range(len(names), 0, -1):
            place = {"loc": "outside lower center", "frameon": False, "ncols": columns, "fontsize": size}
            drawn = figure.legend(handles, names, **place, columnspacing=1.2, handletextpad=0.5)
            taken = drawn.get_window_extent()
            if taken.width <= figure.dpi * width or columns == 1:
                break
            drawn.remove()
        if names:
            figure.set_size_inches(width, figure.get_size_inches()[1] + taken.height / figure.dpi)
