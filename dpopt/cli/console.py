"""Printing: texts as they are, tables, problems."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dpopt import bars
from dpopt.markup import MARKED, TERMINAL, lines

if TYPE_CHECKING:
    from dpopt.results.writing import Table


class Plain(Console):
    """Prints text as it is, without markup and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See `rich.console.Console`."""
        bars.has_spoken = True
        super().print(*(lines(each) if isinstance(each, str) else each for each in objects), **options)


OUT, ERR = Plain(soft_wrap=True), Plain(soft_wrap=True, stderr=True)


def complain(what: str, text: str) -> None:
    """Print an error on stderr, its kind in red."""
    ERR.print(Text.assemble((f"{what}: ", "red"), lines(text)))


def print_table(table: Table) -> None:
    """Print a table as the terminal's width allows; no row breaks."""
    from dpopt.results.layout import lines

    style = TERMINAL if OUT.is_terminal and not OUT.is_dumb_terminal else MARKED
    Plain(soft_wrap=True).print(Text.from_ansi("\n".join(lines(table, OUT.width, style))))


def report_problems(problems: list[str]) -> None:
    """Print each on stderr."""
    for problem in problems:
        ERR.print(problem)
