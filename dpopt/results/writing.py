"""A table, and what each format makes of it: Markdown, CSV, LaTeX, HTML and the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dpopt import markup
from dpopt.markup import LATEX, MARKDOWN, TextFormat

Marks = Set[tuple[int, str]]
"""Cells of a table."""


def marks(rows: Iterable[bool], columns: Iterable[str]) -> Marks:
    """The cells of `columns` in the rows that are true."""
    return {(at, name) for at, is_marked in enumerate(rows) if is_marked for name in columns}


@dataclass(frozen=True)
class Table:
    """What a reader is shown.

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
    bold: Marks = frozenset()
    italic: Marks = frozenset()
    numbers: pd.DataFrame | None = None

    def styled(self, style: TextFormat) -> pd.DataFrame:
        """The texts as a format takes them, names included."""
        frame = self.frame.map(style.escape)
        for cells, mark in ((self.italic, style.italic), (self.bold, style.bold)):
            for row, name in cells:
                column = frame.columns.get_loc(name)
                frame.iloc[row, column] = mark(text) if (text := frame.iloc[row, column]) else ""
        return frame.rename(columns=style.escape)

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
        return frame.map(_cell).rename(columns=_cell).to_csv(index=False)

    @property
    def html(self) -> str:
        """A page of its own that needs no network."""
        from dpopt.results.report.sheet import sheet

        return sheet(self.title, [self])

    def files(self) -> dict[str, str]:
        """The contents of files, by their kind."""
        return {"md": f"{self.markdown}\n", "csv": self.csv, "tex": self.latex, "html": self.html}


def _cell(value: Any) -> Any:
    return markup.csv(value) if isinstance(value, str) else value
