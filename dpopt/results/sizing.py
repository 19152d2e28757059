"""Figures of a given width: fewer panels side by side, smaller texts, titles in lines, the legend below."""

from __future__ import annotations

import math
import textwrap
from typing import Any

from dpopt.errors import ConfigError

_PANEL = 1.35
"""Inches that a panel needs at least, beside the labels of its y axis."""
_SHRUNK, _LEAST = 0.8, 6.0
"""The factor of all text sizes, and the smallest size in points."""
_LETTERS = 14.0
"""Letters of a title of 8 points that fit into an inch."""


def fitted(figure: Any, width: float) -> Any:
    """`figure`, drawn by any file of `plots/`, made `width` inches wide; gives it back.

    Raises:
        ConfigError: a width that is no page's.
    """
    from matplotlib.text import Text

    if not 2 <= width <= 40:
        raise ConfigError("width", width, "expected 2 to 40 inches")
    before, height = figure.get_size_inches()
    panels = [axis for axis in figure.axes if axis.get_subplotspec()]
    if not panels:  # placed by hand: all of it keeps its proportions
        for text in figure.findobj(Text):
            text.set_fontsize(text.get_fontsize() * width / before)
        figure.set_size_inches(width, height * width / before)
        return figure
    for text in figure.findobj(Text):
        text.set_fontsize(max(_LEAST, _SHRUNK * text.get_fontsize()))
    if figure.get_layout_engine() is None:
        figure.set_layout_engine("constrained")
    rows, columns = _arranged(figure, panels, width)
    # Heights shrink as texts do, and no more: rows of a panel that has a method each need their lines.
    figure.set_size_inches(width, height * rows * min(1.0, max(width / before, 0.85 * _SHRUNK)))
    for axis in panels:
        title = axis.get_title().replace(" = ", "\N{NO-BREAK SPACE}=\N{NO-BREAK SPACE}")
        letters = max(10, int(_LETTERS * (width / columns - 0.25)))
        lines = [piece for line in title.split("\n") for piece in textwrap.wrap(line, letters)]
        axis.set_title("\n".join(lines), fontsize=axis.title.get_fontsize())
    _legend_below(figure, width)
    return figure


def _arranged(figure: Any, panels: list[Any], width: float) -> tuple[float, int]:
    """Put panels that do not share their y axis below each other where the width asks for it; gives how many times as
    many rows there are, and the columns.
    """
    grid = panels[0].get_subplotspec().get_gridspec()
    rows, columns = grid.get_geometry()
    shown = [axis for axis in panels if axis.axison]
    is_shared = any(len(axis.get_shared_y_axes().get_siblings(axis)) > 1 for axis in panels)
    if is_shared or any(axis.get_subplotspec().get_gridspec() is not grid for axis in panels):
        return 1.0, columns
    figure.draw_without_rendering()
    labels = (label.get_window_extent().width for axis in shown for label in axis.get_yticklabels())
    beside = max(1, min(columns, int(width / (_PANEL + max(labels, default=0) / figure.dpi))))
    lines = math.ceil(len(shown) / beside)
    beside = math.ceil(len(shown) / lines)
    if beside >= columns:
        return 1.0, columns
    again = figure.add_gridspec(lines, beside)
    for at, axis in enumerate(shown):
        axis.set_subplotspec(again[at // beside, at % beside])
    for axis in set(panels) - set(shown):
        axis.remove()
    return lines / rows, beside


def _legend_below(figure: Any, width: float) -> None:
    for legend in list(figure.legends):
        names = [text.get_text() for text in legend.get_texts()]
        # Those of a legend lack markers; of an axis they are the artists themselves.
        drawn_as = dict(zip(names, legend.legend_handles, strict=True))
        for axis in reversed(figure.axes):
            drawn_as |= dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        handles, size = [drawn_as[name] for name in names], legend.get_texts()[0].get_fontsize()
        legend.remove()
        place = {"loc": "outside lower center", "frameon": False, "fontsize": size}
        for columns in range(len(names), 0, -1):
            drawn = figure.legend(handles, names, **place, ncols=columns, columnspacing=1.2, handletextpad=0.5)
            taken = drawn.get_window_extent()
            if taken.width <= figure.dpi * width or columns == 1:
                break
            drawn.remove()
        figure.set_size_inches(width, figure.get_size_inches()[1] + taken.height / figure.dpi)
