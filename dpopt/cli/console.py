"""What the commands have in common: where they print, and how they read their overrides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dpopt import fields
from dpopt.cli.command import BASE
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Name
from dpopt.markup import line, lines

if TYPE_CHECKING:
    from dpopt.results.results import Results

OF_NAMES = ("optimizers", "workloads")
OF_NUMBERS: dict[str, Any] = {"epsilon": Bound, "seeds": fields.Natural}
"""What a reader may choose rows by."""


class Plain(Console):
    """Prints text as it is, without markup and control characters."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        """See `rich.console.Console`."""
        super().print(*(lines(each) if isinstance(each, str) else each for each in objects), **options)


OUT, ERR = Plain(soft_wrap=True), Plain(soft_wrap=True, stderr=True)


def complain(what: str, text: str) -> None:
    """Say on stderr what went wrong, in red, and how."""
    ERR.print(Text.assemble((f"{what}: ", "red"), lines(text)))


def suite_name(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The value of `suite=`, and the other overrides."""
    given = [override.partition("=")[2] for override in overrides if override.startswith("suite=")]
    if len(given) != 1:
        raise ConfigError("suite", given or None, "expected suite=NAME once; `dpopt list` shows the suites")
    return given[0], [override for override in overrides if not override.startswith("suite=")]


def stored(overrides: Sequence[str], *more: str) -> tuple[Results, dict[str, Any]]:
    """What is stored of a suite, and what was given, for commands that only read; imports no torch.

    Args:
        overrides: of the command line.
        more: keys that the command takes beside those that all take.
    """
    from dpopt.results.results import load_results

    name, rest = suite_name(overrides)
    known: dict[str, Any] = yaml.safe_load((BASE / "stored.yaml").read_text("utf-8")) | dict.fromkeys(more)
    known = given(rest, known)
    part: dict[str, Any] = {key: names(known[key], key) for key in OF_NAMES if known[key] is not None}
    for key, kind in OF_NUMBERS.items():
        if known[key] is not None:
            part[key] = [fields.convert(text, kind, key, {}) for text in names(known[key], key)]
    return load_results(known["results"], Path(name.removesuffix(".yaml")).name, **part), known


def given(overrides: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """What `overrides` say of the keys of `known`, which holds the defaults; each value as text.

    Raises:
        ConfigError: an unknown key, or a value that names nothing.
    """
    found = dict(known)
    for override in overrides:
        key, equals, value = override.partition("=")
        if key not in known or not equals:
            raise unknown("override", key if equals else override, known)
        found[key] = fields.convert(value, Name, key, {})
    return found


def names(text: str | None, where: str) -> list[str]:
    """The names in "a" or "[a, b]"; none where nothing was given.

    Raises:
        ConfigError: something was given that holds no name.
    """
    found = [name.strip() for name in (text or "").strip("[]").split(",") if name.strip()]
    if text is not None and not found:
        raise ConfigError(where, text, "expected names")
    return found


def print_table(table: Any, is_styled: bool = False) -> None:
    """Print columns of texts, a mapping or a data frame, each row on a line of its own.

    Args:
        table: name -> texts.
        is_styled: whether names and texts are in the style `TERMINAL`, and not plain.
    """
    columns, shown = dict(table.items()), Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        shown.add_column(_text(name, is_styled), no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*(_text(cell, is_styled) for cell in row))
    needed = OUT.measure(shown, options=OUT.options.update(max_width=1000)).maximum
    print_wide(shown, needed)  # a narrow terminal breaks lines better than cells


def _text(cell: str, is_styled: bool) -> Text:
    return Text.from_ansi(cell) if is_styled else Text(line(cell))


def print_wide(shown: Table, width: int) -> None:
    """Print a table at least so wide, whatever the terminal is."""
    Plain(width=max(OUT.width, width)).print(shown)


def report_problems(problems: list[str]) -> None:
    """Say what was found wrong, a line each."""
    for problem in problems:
        ERR.print(problem)
