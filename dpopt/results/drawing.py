"""Helpers of the files in `plots/`: a suite's styles, panels, one legend, and the rows of a sweep.

Pure black and white stand for ink and paper, which are others on a dark page (`report.sheet.inline`).
"""

from __future__ import annotations

import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from dpopt.errors import ConfigError

COLOURS = ("#0173B2", "#DE8F05", "#029E73", "#D55E00", "#CC78BC", "#CA9161", "#56B4E9")
"""Those of seaborn's palette for the colour-blind that can be told from white, from black and from grey."""
_MARKERS = "osD^vP*X"
_DASHES = ("-", "--", "-.", ":", (0, (6, 1.5, 1, 1.5, 1, 1.5)), (0, (1, 3)))
ROOM = 1.5
"""The inches beside its panels that a figure has for a legend; `legend` adds what else it takes."""
_ENTRY = 0.22  # inches that an entry of a legend is high
MOST = 12
"""Of more labels, lines are thin, and bands, which would cover each other, are left out."""
# A label that ends in a number, as in `RULE_1e-8`.
_NUMBERED = re.compile(r"(.+)_(\d[\d.]*(?:e[+-]?\d+)?)")
GREY = "0.5"
"""The colour of what belongs to no method: references, remarks."""
DARK, LIGHT = "#0A0A0A", "#FAFAFA"
_width: ContextVar[float | None] = ContextVar("width", default=None)
_BESIDE, _LETTERS = 1.9, 12.0
"""On a page: inches that a panel needs, its labels included, and letters of its texts that fit into an inch."""


@contextmanager
def on_page(width: float | None) -> Iterator[None]:
    """Inside, figures are so many inches wide: fewer panels side by side, small texts, the legend below.

    Raises:
        ConfigError: a width that is no page's.
    """
    import matplotlib as mpl

    if width is not None and not 2 <= width <= 40:
        raise ConfigError("width", width, "expected 2 to 40 inches")
    token, size = _width.set(width), 8.0 if width and width < 8 else 10.0
    try:
        with mpl.rc_context({"font.size": size, "axes.titlesize": 0.9 * size}):
            yield
    finally:
        _width.reset(token)


def page_width() -> float | None:
    """The width that `on_page` gives figures, in inches; None where they are as wide as their panels take."""
    return _width.get()


def subplots(lines: int, columns: int, width: float, height: float, **options: Any) -> tuple[Any, np.ndarray, float]:
    """A figure, its axes and how wide each is: panels of `width` x `height` inches, or as wide as the page."""
    import matplotlib.pyplot as plt

    page = _width.get()
    size = (page or width * columns + ROOM, height * lines * (0.8 if page else 1) + 0.3)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained", **options)
    for axis in axes.flat:
        axis.tick_params(labelsize=plt.rcParams["font.size"])  # ticks are made when the figure is saved
        axis.grid(alpha=0.3)
    return figure, axes, (page or width * columns) / columns


def _entitle(axis: Any, lines: Iterable[str], width: float) -> None:
    letters = max(10, int(13 * width) - 2)  # 13 fit into an inch
    axis.set_title("\n".join(textwrap.fill(line, letters, break_long_words=False) for line in lines))


class Style(NamedTuple):
    """The look of a label in all figures of its suite. A marker may be hollow, for a reason of the figure's own."""

    colour: str
    marker: str
    dash: Any

    @property
    def dots(self) -> dict[str, Any]:
        """Options of `Axes.plot` for points."""
        return {"color": self.colour, "marker": self.marker, "linestyle": "none"}

    @property
    def line(self) -> dict[str, Any]:
        """Options of `Axes.plot` for points that are joined."""
        return self.dots | {"linestyle": self.dash}


Styles = Mapping[str, Style]


def styles_of(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, in their order; no two of at most 56 have the same colour and marker.

    Where several methods have a label for each of several numbers (`RULE_START`), a method has one marker and dash, and
    a number one colour.
    """
    names = list(dict.fromkeys(labels))
    # A label without a number is the default of a method that others have with one.
    pairs = {name: match.groups() if (match := _NUMBERED.fullmatch(name)) else (name, "") for name in names}
    count = Counter(method for method, _ in pairs.values())
    families = {name: pair for name, pair in pairs.items() if count[pair[0]] > 1}
    methods, numbers = (list(dict.fromkeys(pair[k] for pair in families.values())) for k in (0, 1))
    rows = len(methods) + math.ceil((len(names) - len(families)) / len(COLOURS))
    styles: dict[str, Style] = {}
    if len(methods) >= 2 and len(numbers) <= len(COLOURS) and rows <= len(_DASHES):
        for name, (method, number) in families.items():
            row = methods.index(method)
            styles[name] = Style(COLOURS[numbers.index(number)], _MARKERS[row], _DASHES[row])
    taken = len({style.dash for style in styles.values()})
    markers = _MARKERS[taken:]
    for k, name in enumerate(name for name in names if name not in styles):
        row, column = divmod(k, len(COLOURS))
        dash = _DASHES[(taken + row) % len(_DASHES)]
        styles[name] = Style(COLOURS[column], markers[(column - row) % len(markers)], dash)
    return {name: styles[name] for name in names}


def by_label(frame: pd.DataFrame, styles: Styles) -> Iterator[tuple[str, Style, pd.DataFrame]]:
    """Each label of `frame` with its style and rows, in the suite's order."""
    order, groups = list(styles), dict(list(frame.groupby("label", sort=False)))
    for label in sorted(map(str, groups), key=order.index):
        yield label, styles[label], groups[label]


def by_epsilon(frame: pd.DataFrame) -> Iterator[tuple[float, Any, pd.DataFrame]]:
    """Each target epsilon with its rows and a colour, from dark (private) to light."""
    import matplotlib.pyplot as plt

    groups = list(frame.groupby("epsilon_target"))
    for (target, rows), at in zip(groups, shades(len(groups)), strict=True):
        yield target, plt.colormaps["viridis"](at), rows


def shades(count: int) -> np.ndarray:
    """Places of a colour map whose `count` colours can be seen on white and on black."""
    return np.linspace(0.3, 0.8, max(2, count))[:count]


def panels(
    frame: pd.DataFrame, width: float, height: float, **options: Any
) -> tuple[Any, dict[tuple[str, float], Any]]:
    """A figure with a row for each workload of `frame` and a column for each epsilon, and the axes that have rows.

    Args:
        width, height: of a panel, in inches.
        options: of `plt.subplots`.
    """
    workloads, targets = sorted(frame["workload"].unique()), sorted(frame["epsilon_target"].unique())
    figure, axes, each = subplots(len(workloads), len(targets), width, height, **options)
    drawn, there = {}, set(zip(frame["workload"], frame["epsilon_target"], strict=True))
    for workload, line in zip(workloads, axes, strict=True):
        for target, axis in zip(targets, line, strict=True):
            whole = named_epsilon(target).replace(" ", "\N{NO-BREAK SPACE}")
            _entitle(axis, f"{workload}, {whole}".split("\n"), each)
            if (workload, target) in there:
                drawn[workload, target] = axis
            else:
                axis.set_axis_off()
    return figure, drawn


def workload_panels(
    frame: pd.DataFrame, width: float, height: float, by: Sequence[str] = ("workload", "epochs")
) -> tuple[Any, list[tuple[Any, pd.DataFrame]]]:
    """A figure with a panel, `width` x `height` inches, for each group of `frame`, and each panel with its rows."""
    groups = list(frame.groupby(list(by)))
    page = _width.get()
    columns = min(int(page / _BESIDE) or 1 if page else 4, len(groups))
    figure, axes, each = subplots(-(-len(groups) // columns), columns, width, height)
    for axis in axes.flat[len(groups) :]:
        axis.set_axis_off()
    for axis, (keys, _) in zip(axes.flat, groups, strict=False):
        pairs = zip(by, keys, strict=True)
        lines = (f"{key:g} epochs" if of == "epochs" else str(key) for of, key in pairs)
        _entitle(axis, lines, each)
    return figure, [(axis, rows) for axis, (_, rows) in zip(axes.flat, groups, strict=False)]


def named_epsilon(target: float) -> str:
    """A target epsilon in a title or a legend: a search that is not paid for spends more."""
    return f"target ε = {target:g}" if target < math.inf else "ε = ∞"


def legend(figure: Any, styles: Styles | None = None) -> None:
    """One legend, at the right of a figure or below it on a page: all labels of all panels, as the suite has them."""
    handles, order = labelled(figure), list(styles or ())

    def place_of(name: str) -> int:  # the longest label counts, as "dp_adam" begins with "dp_ad" too; others are last
        return max((len(label), place) for place, label in enumerate([*order, ""]) if name.startswith(label))[1]

    names = sorted(handles, key=place_of)
    (width, height), is_on_page = figure.get_size_inches(), _width.get() is not None
    if is_on_page:
        columns, where = int(_LETTERS * width / (6 + max(map(len, names), default=0))) or 1, "outside lower center"
    else:
        columns, where = math.ceil(len(names) * _ENTRY / height), "outside right upper"
    drawn = figure.legend([handles[name] for name in names], names, loc=where, frameon=False, ncols=columns)
    taken = drawn.get_window_extent()
    # The figure grows by what does not fit into its `ROOM`, so that panels keep their size.
    if is_on_page:
        height += taken.height / figure.dpi
    else:
        width += max(0, math.ceil(10 * (taken.width / figure.dpi - ROOM)) / 10)
    figure.set_size_inches(width, height)


def band(axis: Any, lines: Sequence[pd.Series], colour: str) -> pd.Series:
    """Draw the range of `lines` over their index; gives their median, on the logarithmic scale of the panel."""
    by_place = pd.concat(lines).groupby(level=0)
    low, high = by_place.min(), by_place.max()
    axis.fill_between(low.index, low, high, color=colour, alpha=0.15, lw=0)
    return 10 ** pd.concat(lines).map(math.log10).groupby(level=0).median()


def remarks(axis: Any, line: str, band: str) -> None:
    """Two entries of a legend, in grey: what lines and bands show."""
    axis.plot([], [], color=GREY, label=line)
    axis.fill_between([], [], [], color=GREY, alpha=0.3, lw=0, label=band)


def labelled(figure: Any) -> dict[str, Any]:
    """The first artist of each label, in the order of the panels."""
    labelled = [pair for axis in figure.axes for pair in zip(*axis.get_legend_handles_labels(), strict=True)]
    first = {label: handle for handle, label in reversed(labelled)}
    return {label: first[label] for _, label in labelled}


def sweeps(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of methods whose clipping bound a suite varies."""
    return frame[frame.groupby("label")["clip"].transform("nunique") > 1]


def by_method(frame: pd.DataFrame, by: Sequence[str]) -> list[str]:
    """The columns `by`, and the label where `frame` has several: methods are neither mixed nor averaged."""
    return [*by, "label"] if frame["label"].nunique() > 1 else list(by)
