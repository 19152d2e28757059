"""Tables for a terminal of some width, and with a column for each data set and epsilon, as papers print them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence

import pandas as pd

from dpopt.markup import MARKED, PLAIN, TextFormat
from dpopt.results.choosing import Row
from dpopt.results.writing import Table

_GAP = "  "


def _size(text: str) -> int:
    return len(re.sub(r"\x1b\[\d+m", "", text))


def lines(table: Table, width: int, style: TextFormat = PLAIN) -> list[str]:
    """Title, headings and rows as lines; no row is wider than `width` signs, unless two columns are.

    Where the columns need more, `by` becomes headings and `optional` columns go, as many as it takes. What is still too
    wide is shown in parts, each with the first column.
    """
    styled = table.styled(style).set_axis(list(table.frame), axis=1)
    heads = {name: table.spans.get(name, (name, "")) for name in styled}
    longest = {name: max(map(len, [*over.split(), below])) for name, (over, below) in heads.items()}
    widths = {name: max([longest[name], *map(_size, styled[name])]) for name in styled}

    def is_too_wide(names: Sequence[str]) -> bool:
        return sum(widths[name] + len(_GAP) for name in names) - len(_GAP) > width

    names = list(styled)
    for name in (table.by, *table.optional):
        if name in names and is_too_wide(names):
            names.remove(name)
    parts = [names[:1]]
    for name in names[1:]:
        if len(parts[-1]) > 1 and is_too_wide([*parts[-1], name]):
            parts.append(names[:1])
        parts[-1].append(name)
    titles = PLAIN if style is MARKED else style  # asterisks mark cells alone
    text = [titles.bold(line) for line in textwrap.wrap(style.escape(table.title), width)]
    by = list(styled[table.by]) if table.by in widths and table.by not in names else []
    for part in parts:
        wrapped = [[textwrap.wrap(style.escape(head), widths[name]) for head in heads[name]] for name in part]
        pieces = [over + below for over, below in wrapped]
        height = max(map(len, pieces))
        rows = [*zip(*([""] * (height - len(words)) + words for words in pieces), strict=True)]
        rows += styled[part].itertuples(index=False, name=None)
        for at, cells in enumerate(rows, -height):
            heading = table.rules.get(at)
            if at >= 0 and by and (at == 0 or by[at] != by[at - 1]):
                text += ["", titles.bold(by[at])]
            elif at == -height or (at > 0 and heading == ""):
                text.append("")
            if heading:
                text.append(titles.italic(f"{heading}:"))
            padded = (cell + " " * (widths[name] - _size(cell)) for name, cell in zip(part, cells, strict=True))
            text.append(_GAP.join(padded).rstrip())
    return text


def wide(
    rows: pd.DataFrame,
    methods: Sequence[str],
    text: Callable[[Row], str],
    heading: Callable[[str], str] | None = None,
) -> Table:
    """A row for each method and a column for each workload and epsilon, with the `text` of a row of `rows`.

    Args:
        rows: `workload` (in the order of the table), `label`, `epsilon_target`, which tell any two apart, `is_highest`
            (bold) and `italic`.
        methods: the labels, in the order of the table.
        heading: of a column, below its workload; by default the epsilon.
    """
    of = {(row["label"], row["workload"], row["epsilon_target"]): row for row in rows.to_dict("records")}
    frame, spans, marked = pd.DataFrame({"method": list(methods)}), {}, {"is_highest": set(), "italic": set()}
    tasks = list(rows["workload"].unique())
    for workload, target in sorted({place[1:] for place in of}, key=lambda place: (tasks.index(place[0]), place[1])):
        below = heading(workload) if heading else f"ε = {target:g}".replace("inf", "∞")
        column = f"{workload}, {below}"
        cells = [of.get((label, workload, target)) for label in methods]
        frame[column], spans[column] = [text(row) if row else "–" for row in cells], (workload, below)
        for key, places in marked.items():
            places |= {(at, column) for at, row in enumerate(cells) if row and row[key]}
    return Table(frame, spans=spans, bold=marked["is_highest"], italic=marked["italic"])
