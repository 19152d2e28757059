"""Which methods need their clipping bound C and batch size B tuned, and does that change with ε?

Left: points lost against the best cell of a method, on one scale for all panels; the best cell has its score in bold.
Blue frame: the cell that validates best, mean over seeds; dashed: the fixed pair. Middle: lost one step of the grid
away from the blue cell, mean of the neighbours. Right: gained over the fixed pair by tuning C, B or both, where C and B
of a seed are those that validate best on the other seeds. Bars are 95 % intervals over seeds, paired by seed; effects
within the grey band are too small to be shown by these seeds (the median half-width). Methods that need C and B least
stand first. The learning rate is the one that each search selects; choosing C and B is not in ε.
"""

import math
import textwrap
from collections import Counter
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from dpopt.results import clip_batch
from dpopt.results.clip_batch import GAINED, LOST, NO_CLIP, PARTS, Grid
from dpopt.results.drawing import COLOURS, DARK, GREY, LIGHT, Styles, by_epsilon, labelled, named_epsilon, page_width
from dpopt.results.scores import shown

NEEDS = "settings"
CAP = 20.0
"""Points of an accuracy; what is lost beyond has one colour, and a number at the edge in place of a dot."""
LINE, GAP = 0.17, 0.08
"""Inches: the height of a line, and what is between two panels."""


class Size(NamedTuple):
    """Inches: the widths of names, cells, panels of dots and what is beside these; and two sizes of texts."""

    label: float
    cell: float
    dots: float
    aside: float
    small: float
    large: float

    def wrapped(self, text: str, width: float) -> str:
        """A large text on lines of a width in inches."""
        return textwrap.fill(text, int(118 * width / self.large), break_on_hyphens=False)


WIDE, NARROW = Size(1.15, 0.28, 1.5, 0.38, 6.5, 8.5), Size(0.95, 0.19, 0.62, 0.32, 5.5, 7.0)
"""The second where a page is too narrow for the first."""
CHOSEN = {"fill": False, "ec": COLOURS[0], "lw": 2, "label": "validates best"}
FIXED = {"fill": False, "ec": DARK, "lw": 0.8, "ls": "--", "label": "the fixed pair"}


class Sheet:
    """A figure on which panels are placed in inches, from its top."""

    def __init__(self, size: Size, maps: float) -> None:
        self.figure, self.size, self.top, self.places = plt.figure(), size, 0.0, []
        self.width = size.label + maps + 2 * (size.aside + size.dots) + 0.15  # half of the last tick's number

    def panel(self, left: float, width: float, height: float) -> Axes:
        """A panel whose upper edge is at `top`."""
        axis = self.figure.add_axes((0, 0, 1, 1), label=str(len(self.places)))
        self.places.append((axis, left, self.top + height, width, height))
        return axis

    def done(self) -> Figure:
        """The figure, as high as what was placed."""
        self.figure.set_size_inches(self.width, self.top)
        for axis, left, bottom, width, height in self.places:
            axis.set_position((left / self.width, 1 - bottom / self.top, width / self.width, height / self.top))
        return self.figure


def draw(frame: pd.DataFrame, styles: Styles) -> Figure | None:
    """A block for each workload and number of epochs, whose title names what its seeds can show."""
    blocks = [*clip_batch.blocks(frame)]
    if not blocks:
        return None
    targets, cap = sorted(frame["epsilon_target"].unique()), _cap(blocks)
    columns = max(3, *(clips for block in blocks for clips in block.groupby("label")["clip"].nunique()))

    def sheet_of(size: Size) -> Sheet:
        return Sheet(size, len(targets) * (columns * size.cell + GAP))

    sheet = sheet_of(WIDE)
    if sheet.width > (page_width() or math.inf):
        plt.close(sheet.figure)
        sheet = sheet_of(NARROW)
    size, maps = sheet.size, len(targets) * (columns * sheet.size.cell + GAP)
    for block in blocks:
        _block(sheet, block, targets, columns * size.cell, cap)
    below = sheet.panel(size.label, maps - GAP, 0.12)
    beside = sheet.panel(size.label + maps + size.aside, 2 * size.dots + size.aside, 0.8)
    bar = sheet.figure.colorbar(
        ScalarMappable(Normalize(0, cap), "magma_r"), below, orientation="horizontal", extend="max"
    )
    bar.set_label("lost against the method's best cell,\nwhose score is bold", size=size.small + 0.5)
    below.tick_params(labelsize=size.small)
    beside.set_axis_off()
    handles, names = labelled(sheet.figure), map(named_epsilon, targets)
    entries = {name: handles[name] for name in (*names, *handles) if name in handles}
    look = {"ncols": 2 if size is WIDE else 1, "frameon": False, "fontsize": size.small + 0.5}
    look |= {"loc": "upper center", "borderaxespad": 0}
    beside.legend(entries.values(), entries, **look)
    sheet.top += 0.8
    return sheet.done()


def _cap(blocks: list[pd.DataFrame]) -> float:
    if all(shown(block["score"].iloc[0]).factor == 100 for block in blocks):
        return CAP
    tests = [grid.tests.mean(axis="columns") for block in blocks for grid in clip_batch.grids(block).values()]
    return max(test.max() - test.min() for test in tests) or 1.0


def _title(block: pd.DataFrame, sheet: Sheet) -> str:
    (workload, epochs), seeds = block[clip_batch.BLOCK].iloc[0], block["seed"].nunique()
    sentences = [f"{workload}, {epochs:g} epochs, {seeds} seed{'s' * (seeds > 1)}", *clip_batch.claims(block)]
    return "\n".join(sheet.size.wrapped(text, sheet.width) for text in sentences)


def _block(sheet: Sheet, block: pd.DataFrame, targets: list[float], wide: float, cap: float) -> None:
    of_methods, rows, unit = clip_batch.grids(block), clip_batch.effects(block), shown(block["score"].iloc[0]).points
    colours = {target: colour for target, colour, _ in by_epsilon(block)}
    at = sheet.size
    sizes, (size, clip) = sorted(block["batch_size"].unique()), clip_batch.fixed_pair(block)
    clips = {label: sorted(of["clip"].unique()) for label, of in block.groupby("label")}
    pair = ", ".join(f"{name}\u00a0=\u00a0{value:g}" for name, value in (("C", clip), ("B", size)) if value != NO_CLIP)
    bands = {effect: (of["high"] - of["mean"]).median() for effect, of in rows.groupby("effect")}
    title, order = _title(block, sheet), clip_batch.by_need(of_methods)
    heading = sheet.panel(0, sheet.width, LINE * (title.count("\n") + 1))
    heading.set_axis_off()
    heading.text(0.005, 1, title, size=at.large + 0.5, va="top")
    sheet.top += LINE * (title.count("\n") + 1) + 0.45
    right = at.label + len(targets) * (wide + GAP) + at.aside
    dots = (
        (right, LOST, PARTS[:2], f"{unit} lost one step away"),
        (right + at.dots + at.aside, GAINED, PARTS, f"{unit} gained by tuning, over {pair}"),
    )
    for label, after in zip(order, [*order[1:], None], strict=True):
        is_named = after is None or clips[after] != clips[label]  # C stands below the last of the rows that share it
        high = max(0.5, LINE * len(sizes))
        line = [sheet.panel(at.label + x * (wide + GAP), wide, high) for x in range(len(targets))]
        for target, axis in zip(targets, line, strict=True):
            _map(axis, of_methods.get((label, target)), sizes, clips[label], cap, is_named, at.small)
            axis.set_title(named_epsilon(target) if label == order[0] else "", size=at.large)
        line[0].set_yticks(range(len(sizes)), [f"{size:g}" for size in sizes], size=at.small)
        if label == order[0]:
            place = {"textcoords": "offset points", "ha": "right", "va": "bottom", "size": at.small}
            line[0].annotate("B", (0, 1), (-3, 1), xycoords="axes fraction", **place)
        name = textwrap.fill(label, 12) if " " in label or len(label) <= 12 else "\n".join(label.rsplit("_", 1))
        line[0].set_ylabel(name, size=at.large, rotation=0, ha="right", va="center", labelpad=3)
        for left, effect, parts, caption in dots:
            axis, band = sheet.panel(left, at.dots, high), bands.get(effect, np.nan)
            is_here = (rows["label"] == label) & (rows["effect"] == effect)
            _dots(axis, rows[is_here], parts, colours, cap, band, at.small)
            names = ["no C" if part == "C" and len(clips[label]) == 1 else part for part in parts]
            axis.set_yticks(range(len(parts)), names, size=at.small)
            axis.tick_params(axis="x", labelbottom=after is None)
            room = at.dots + 0.8 * at.aside
            axis.set_title(at.wrapped(caption, room) if label == order[0] else "", size=at.large)
            if after is None and np.isfinite(band):
                axis.set_xlabel(at.wrapped(f"grey, ±{band:.2g}: too small to show", room), size=at.small + 0.5)
        sheet.top += high + (0.3 if is_named else GAP)
    sheet.top += 0.25


def _map(
    axis: Axes, grid: Grid | None, sizes: list[float], clips: list[float], cap: float, is_named: bool, small: float
) -> None:
    axis.set_yticks([])
    axis.tick_params(length=0, pad=1.5)
    if grid is None:
        axis.set_axis_off()
        return
    values = grid.tests.mean(axis="columns").unstack("clip").reindex(index=sizes, columns=clips).to_numpy()
    lost, decimals = np.nanmax(values) - values, 0 if cap == CAP else 2
    axis.imshow(lost, origin="lower", aspect="auto", cmap="magma_r", vmin=0, vmax=cap)
    for (y, x), value in np.ndenumerate(lost):
        if np.isfinite(value):
            text = f"{values[y, x] if value == 0 else 0 - round(value, decimals):.{decimals}f}".replace("-", "−")
            look = {"weight": "bold" if value == 0 else "normal", "color": LIGHT if value > 0.55 * cap else DARK}
            axis.text(x, y, text, ha="center", va="center", size=small, **look)
    for setting, look, room in ((grid.chosen, CHOSEN, 0.45), (grid.fixed, FIXED, 0.36)):
        if setting:
            corner = clips.index(setting[1]) - room, sizes.index(setting[0]) - room
            axis.add_patch(plt.Rectangle(corner, 2 * room, 2 * room, **look))
    names = ["no C" if clip == NO_CLIP else f"{clip:g}" for clip in clips]
    axis.set_xticks(range(len(clips)), names if is_named else [""] * len(names), size=small)
    if is_named and clips != [NO_CLIP]:
        axis.set_xlabel("C", size=small, labelpad=0)


def _dots(
    axis: Axes,
    rows: pd.DataFrame,
    parts: tuple[str, ...],
    colours: dict[float, tuple],
    cap: float,
    band: float,
    small: float,
) -> None:
    low = -0.4 * cap
    if np.isfinite(band):
        axis.axvspan(-band, band, color="0.92", lw=0, zorder=0)
    axis.axvline(0, color=GREY, lw=0.8)
    beyond = Counter()
    for row in rows.iloc[::-1].to_dict("records"):
        mean, target, bar = row["mean"], row["epsilon_target"], row["high"] - row["mean"]
        part = parts.index(row["part"])
        at = part + 0.26 * (list(colours).index(target) - (len(colours) - 1) / 2)
        look = {"color": colours[target], "label": named_epsilon(target), "ms": 3, "elinewidth": 1}
        axis.errorbar(mean, at, xerr=bar, fmt="o", **look)
        if not low <= mean <= cap:
            # Side by side, as a line for each epsilon would be too low.
            away = 0.2 * cap * beyond[part, mean > cap]
            beyond[part, mean > cap] += 1
            edge = cap - away if mean > cap else low + 0.22 * cap + away
            box = {"fc": "white", "ec": "none", "pad": 0.4}
            text = {"size": small, "weight": "bold", "ha": "right", "va": "center", "bbox": box}
            axis.text(edge, part, f"{mean:.0f}".replace("-", "−"), color=colours[target], **text)
    axis.set_xlim(low, cap)
    axis.set_ylim(len(parts) - 0.4, -0.6)
    axis.tick_params(labelsize=small, length=2)
    axis.spines[["top", "right"]].set_visible(False)
