"""A table as texts, and its Markdown, CSV, LaTeX and lines of a terminal; `report.sheet` has its HTML."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import pandas as pd

from dpopt import markup
from dpopt.markup import HTML, LATEX, MARKDOWN, TextFormat

_NUMBER = re.compile(r"[-–+]?(\d.*|∞)?|no result|not charged")
"""What a cell of a column of numbers is: a number with what follows it, a dash, nothing, or why there is none."""
_Marks = Set[tuple[int, str]]
"""Cells of a table."""


def marks(rows: Iterable[bool], columns: Iterable[str]) -> _Marks:
    """The cells of `columns` in the rows that are true."""
    return {(at, name) for at, is_marked in enumerate(rows) if is_marked for name in columns}


class Column(NamedTuple):
    """A heading, and the text of a frame's column `key`, or without a key of a row as a mapping."""

    name: str
    key: str = ""
    text: Callable[[Any], str] = str


def named(frame: pd.DataFrame, names: Mapping[str, str] | None) -> pd.DataFrame:
    """A frame whose workloads and labels have the `names` that people read."""
    columns = [key for key in ("workload", "label") if key in frame]
    return frame.assign(**{key: frame[key].map(lambda name: (names or {}).get(name, name)) for key in columns})


def texts(frame: pd.DataFrame, columns: Sequence[Column]) -> pd.DataFrame:
    """The frame as people read it, a text for each row and column."""
    rows = frame.to_dict("records")
    shown = {name: [text(row[key] if key else row) for row in rows] for name, key, text in columns}
    return pd.DataFrame(shown, index=range(len(rows)))


def unless_nan(text: Callable[[float], str], missing: str = "") -> Callable[[float], str]:
    """The text of a number, and `missing` for NaN."""
    return lambda value: missing if pd.isna(value) else text(value)


@dataclass(frozen=True)
class Table:
    """A table as a reader sees it.

    Attributes:
        frame: plain texts, a column for each name.
        title: what the table shows.
        note: what belongs below it, in at most 40 words.
        details: what else is to be said of these rows; Markdown and HTML have it below the note.
        caption: of LaTeX, by default the title.
        first: a sentence that no reader may miss; empty where there is none.
        command: the command that makes the table again; empty if it is made only as a part of a page.
        bold, italic: cells that are, by the number of their row and the name of their column.
        numbers: what CSV has in place of `frame`, at full precision.
        optional: columns that a narrow terminal leaves out, the first of them first.
        by: a column whose values a narrow terminal has as headings.
        rules: numbers of rows that begin a part, and its heading, which may be empty.
        spans: column -> the heading of several neighbours, and its own below that.
    """

    frame: pd.DataFrame
    title: str = ""
    note: str = ""
    details: str = ""
    caption: str = ""
    command: str = ""
    first: str = ""
    bold: _Marks = frozenset()
    italic: _Marks = frozenset()
    numbers: pd.DataFrame | None = None
    optional: Sequence[str] = ()
    by: str = ""
    rules: Mapping[int, str] = field(default_factory=dict)
    spans: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def styled(self, style: TextFormat) -> pd.DataFrame:
        """The texts as a format takes them, names included."""
        columns = {name: list(map(style.escape, self.frame[name])) for name in self.frame}
        for cells, mark in ((self.italic, style.italic), (self.bold, style.bold)):
            for row, name in cells:
                columns[name][row] = mark(text) if (text := columns[name][row]) else ""
        return pd.DataFrame(columns, self.frame.index).rename(columns=style.escape)

    def headed(self, style: TextFormat) -> pd.DataFrame:
        """`styled`, with a row for the heading of each part."""
        frame, rows = self.styled(style), list[tuple[str, ...]]()
        for at, cells in enumerate(frame.itertuples(index=False, name=None)):
            if heading := self.rules.get(at):
                rows.append((style.italic(style.escape(f"{heading}:")), *[""] * (len(cells) - 1)))
            rows.append(cells)
        return pd.DataFrame(rows, columns=frame.columns)

    def _repr_html_(self) -> str:
        body = self.headed(HTML).to_html(index=False, escape=False, border=0)
        title, first, note = map(HTML.escape, (self.title, self.first, self.note))
        return f"<b>{title}</b>{f'<p>{first}</p>' if first else ''}{body}<small>{note}</small>"

    @property
    def markdown(self) -> str:
        """A table of GitHub's Markdown, with its first sentence above and the note below."""
        first = [MARKDOWN.escape(self.first)] if self.first else []
        body = self.headed(MARKDOWN).to_markdown(index=False, disable_numparse=True)
        return "\n\n".join([*first, body, *map(MARKDOWN.escape, filter(None, [self.note, self.details]))])

    @property
    def latex(self) -> str:
        """A table with a booktabs tabular and a short caption; needs \\usepackage{booktabs}."""
        caption = f"{self.first} {self.caption or self.title}".strip()
        frame, width, escape = self.styled(LATEX), self.frame.shape[1], LATEX.escape
        is_number = [self.frame[name].astype(str).str.fullmatch(_NUMBER).all() for name in self.frame]
        pairs, lines = [self.spans.get(name, ("", name)) for name in self.frame], list[str]()
        if self.spans:
            places = [list(same) for _, same in groupby(range(width), lambda at: pairs[at][0])]
            groups = [(escape(pairs[at[0]][0]), at[0] + 1, at[-1] + 1) for at in places]
            over = (rf"\multicolumn{{{b - a + 1}}}{{c}}{{{name}}}" if name else "" for name, a, b in groups)
            below = (rf"\cmidrule(lr){{{a}-{b}}}" for name, a, b in groups if name)
            lines = [rf"{' & '.join(over)} \\", " ".join(below)]
        lines += [rf"{' & '.join(escape(name) for _, name in pairs)} \\", r"\midrule"]
        for at, row in enumerate(frame.itertuples(index=False, name=None)):
            if at in self.rules and at:
                lines.append(r"\midrule")
            if heading := self.rules.get(at):
                lines.append(rf"\multicolumn{{{width}}}{{l}}{{\textit{{{escape(heading)}}}}} \\")
            # A mark that takes no width leaves the numbers of a column below each other.
            lines.append(rf"{' & '.join(row)} \\".replace(r" \dag{}", r"\rlap{$^\dagger$}"))
        columns = "".join("r" if number else "l" for number in is_number)
        label = re.sub(r"\W+", "-", self.title.partition(":")[0], flags=re.ASCII).strip("-").lower()
        top = [r"\begin{table}[t]", r"\centering", rf"\caption{{{escape(caption)}}}", rf"\label{{tab:{label}}}"]
        top += [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        return "\n".join([*top, *lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"]) + "\n"

    @property
    def csv(self) -> str:
        """The numbers at full precision, and texts that are no formulas."""
        frame = self.frame if self.numbers is None else self.numbers

        def cell(value: Any) -> Any:  # a spreadsheet runs a text that begins like a formula
            return markup.csv(value) if isinstance(value, str) else value

        return frame.map(cell).rename(columns=cell).to_csv(index=False)

    def files(self) -> dict[str, str]:
        """The contents of files, by their kind."""
        return {"md": f"{self.markdown}\n", "csv": self.csv, "tex": self.latex}
