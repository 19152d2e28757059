"""Tables for a terminal of some width, and with a column for each data set and epsilon, as papers print them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence

import pandas as pd

from dpopt.markup import PLAIN, TextFormat
from dpopt.results.choosing import Row
from dpopt.results.writing import Table

_CODE = re.compile(r"\x1b\[\d+m")
_GAP = "  "
_NONE = "–"


def _size(text: str) -> int:
    return len(_CODE.sub("", text))


def _parts(names: Sequence[str], widths: Mapping[str, int], width: int) -> list[list[str]]:
    """The columns in as many parts as a width needs, each of which begins with the first column."""
    first, *others = names
    parts, left = [[first]], width - widths[first]
    for name in others:
        if (left := left - widths[name] - len(_GAP)) < 0 and len(parts[-1]) > 1:
            parts.append([first])
            left = width - widths[first] - widths[name] - len(_GAP)
        parts[-1].append(name)
    return parts


def lines(table: Table, width: int, style: TextFormat = PLAIN) -> list[str]:
    """Title, headings and rows as lines; no row is wider than `width` signs, unless two columns are.

    Where the columns need more, `by` becomes headings and `optional` columns go, as many as it takes. What is still too
    wide is shown in parts, each with the first column.
    """
    styled = table.styled(style).set_axis(list(table.frame), axis=1)
    heads = {name: table.spans.get(name, (name, "")) for name in styled}
    words = {name: max(map(len, [*over.split(), own]), default=0) for name, (over, own) in heads.items()}
    widths = {name: max([words[name], *map(_size, styled[name])]) for name in styled}
    names = list(styled)

    def is_too_wide() -> bool:
        return sum(widths[name] + len(_GAP) for name in names) - len(_GAP) > width

    by = table.by if table.by in names and is_too_wide() else ""
    for name in filter(None, [by, *table.optional]):
        if name in names and is_too_wide():
            names.remove(name)
    text = [style.bold(line) for line in textwrap.wrap(style.escape(table.title), width)]
    for part in _parts(names, widths, width):
        text += ["", *_rows(table, styled, part, heads, widths, by, style)]
    return text


def _rows(
    table: Table,
    styled: pd.DataFrame,
    names: Sequence[str],
    heads: Mapping[str, tuple[str, str]],
    widths: Mapping[str, int],
    by: str,
    style: TextFormat,
) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        padded = (cell + " " * (widths[name] - _size(cell)) for name, cell in zip(names, cells, strict=True))
        return _GAP.join(padded).rstrip()

    wrapped = []
    for name in names:
        pieces = (textwrap.wrap(style.escape(head), widths[name]) for head in heads[name])
        wrapped.append([piece for part in pieces for piece in part])
    height = max(map(len, wrapped))
    filled = [[""] * (height - len(pieces)) + pieces for pieces in wrapped]
    text, before = [line(cells) for cells in zip(*filled, strict=True)], None
    for at, row in enumerate(styled[list(names)].itertuples(index=False, name=None)):
        if by and (heading := styled[by].iloc[at]) != before:
            text += ["", style.bold(heading)]
            before = heading
        elif at in table.rules and at:
            text += [""] if not table.rules[at] else []
        if heading := table.rules.get(at):
            text.append(style.italic(f"{heading}:"))
        text.append(line(row))
    return text


def wide(
    rows: pd.DataFrame, methods: Sequence[str], epsilon: str, text: Callable[[Row], str], italic: str = ""
) -> Table:
    """A row for each method and a column for each workload and epsilon, with what `text` says of a row of `rows`.

    Args:
        rows: `workload`, `label`, `is_highest` (bold), and the columns `epsilon` and `italic`, if there is one; no two
            of them have the same place.
        methods: the labels, in the order of the table.
    """
    of = {(row["label"], row["workload"], row[epsilon]): row for row in rows.to_dict("records")}
    frame, spans, marked = pd.DataFrame({"method": list(methods)}), {}, {"is_highest": set(), italic: set()}
    for workload, target in sorted({place[1:] for place in of}):
        own = f"ε = {target:g}".replace("inf", "∞")
        column = f"{workload}, {own}"
        cells = [of.get((label, workload, target)) for label in methods]
        frame[column], spans[column] = [text(row) if row else _NONE for row in cells], (workload, own)
        for key, places in marked.items():
            places |= {(at, column) for at, row in enumerate(cells) if row and row.get(key, False)}
    return Table(frame, spans=spans, bold=marked["is_highest"], italic=marked[italic])
