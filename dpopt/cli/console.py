"""Printing: texts as they are, tables, problems."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpopt import bars
from dpopt.markup import line, lines


class _Plain(Console):
    """Prints text as it is, without markup and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See `rich.console.Console`."""
        bars.has_spoken = True
        super().print(*(lines(each) if isinstance(each, str) else each for each in objects), **options)


OUT, ERR = _Plain(soft_wrap=True), _Plain(soft_wrap=True, stderr=True)


def complain(what: str, text: str) -> None:
    """Print an error on stderr, its kind in red."""
    ERR.print(Text.assemble((f"{what}: ", "red"), lines(text)))


def print_table(table: Any) -> None:
    """Print a mapping or a data frame, name -> texts, each row on a line."""
    columns, shown = dict(table.items()), Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        shown.add_column(Text(line(name)), no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*(Text(line(cell)) for cell in row))
    needed = OUT.measure(shown, options=OUT.options.update(max_width=1000)).maximum
    print_wide(shown, needed)  # a narrow terminal breaks lines better than cells


def print_lines(texts: Iterable[str]) -> None:
    """Print lines in style `TERMINAL`, however wide the terminal is."""
    for text in texts:
        _Plain(soft_wrap=True).print(Text.from_ansi(text))


def print_wide(shown: Table, width: int) -> None:
    """Print a table at least so wide, whatever the terminal is."""
    _Plain(width=max(OUT.width, width)).print(shown)


def report_problems(problems: list[str]) -> None:
    """Print each on stderr."""
    for problem in problems:
        ERR.print(problem)
