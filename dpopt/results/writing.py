"""A table as texts, and its Markdown, CSV, LaTeX and lines of a terminal; `report.sheet` has its HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from dpopt import markup
from dpopt.markup import HTML, LATEX, MARKDOWN, TextFormat

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
        note: what belongs below it.
        command: the command that makes the table again; empty if it is made only as a part of a page.
        bold, italic: cells that are, by the number of their row and the name of their column.
        numbers: what CSV has in place of `frame`, at full precision.
    """

    frame: pd.DataFrame
    title: str = ""
    note: str = ""
    command: str = ""
    bold: _Marks = frozenset()
    italic: _Marks = frozenset()
    numbers: pd.DataFrame | None = None

    def styled(self, style: TextFormat) -> pd.DataFrame:
        """The texts as a format takes them, names included."""
        frame = self.frame.map(style.escape)
        for cells, mark in ((self.italic, style.italic), (self.bold, style.bold)):
            for row, name in cells:
                column = frame.columns.get_loc(name)
                frame.iloc[row, column] = mark(text) if (text := frame.iloc[row, column]) else ""
        return frame.rename(columns=style.escape)

    def _repr_html_(self) -> str:
        body = self.styled(HTML).to_html(index=False, escape=False, border=0)
        return f"<b>{HTML.escape(self.title)}</b>{body}<small>{HTML.escape(self.note)}</small>"

    @property
    def markdown(self) -> str:
        """A table of GitHub's Markdown, with the note below."""
        body = self.styled(MARKDOWN).to_markdown(index=False, disable_numparse=True)
        return "\n\n".join([body, *filter(None, [MARKDOWN.escape(self.note)])])

    @property
    def latex(self) -> str:
        """A booktabs tabular with the note as its caption; needs \\usepackage{booktabs}."""
        style = self.styled(LATEX).style.hide(axis="index")
        return style.to_latex(hrules=True, caption=LATEX.escape(self.note), position="t")

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
