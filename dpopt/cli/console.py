"""What the commands have in common: where they print, and how they read their overrides."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from rich.console import Console
from rich.table import Table

from dpopt.cli.command import BASE
from dpopt.errors import ConfigError, unknown

if TYPE_CHECKING:
    from dpopt.store import Store

OUT = Console(soft_wrap=True)


ERR = Console(stderr=True, soft_wrap=True)


def suite_name(overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The value of `suite=`, and the other overrides."""
    given = [override.partition("=")[2] for override in overrides if override.startswith("suite=")]
    if len(given) != 1:
        raise ConfigError("suite", given or None, "expected suite=NAME once; `dpopt list` shows the suites")
    return given[0], [override for override in overrides if not override.startswith("suite=")]


def stored(overrides: Sequence[str], *more: str) -> tuple[str, Store, list[str] | None, dict[str, Any]]:
    """Suite name, store, selected rows and what was given, for commands that only read; imports no torch.

    Args:
        overrides: of the command line.
        more: keys that the command takes beside those that all take.
    """
    from dpopt.store import Store

    name, rest = suite_name(overrides)
    known: dict[str, Any] = yaml.safe_load((BASE / "stored.yaml").read_text("utf-8")) | dict.fromkeys(more)
    for override in rest:
        key, _, value = override.partition("=")
        if key not in known:
            raise unknown("override", key, known)
        known[key] = value
    store = Store(Path(known["results"]))
    name = Path(name.removesuffix(".yaml")).name
    labels = None if known["optimizers"] is None else names(known["optimizers"])
    if labels is not None:
        present = {entry["label"] for entry in store.manifest(name)["cells"]}
        for label in labels:
            if label not in present:
                raise unknown("optimizers", label, present)
    return name, store, labels, known


def names(text: str | None) -> list[str]:
    """The names in "a" or "[a, b]"."""
    return [name.strip() for name in (text or "").strip("[]").split(",") if name.strip()]


def print_table(table: Any) -> None:
    """Print columns of texts, a mapping or a data frame, each row on a line of its own."""
    columns = dict(table.items())
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        shown.add_column(name, no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        shown.add_row(*row)
    needed = OUT.measure(shown, options=OUT.options.update(max_width=1000)).maximum
    Console(width=max(OUT.width, needed)).print(shown)  # a narrow terminal breaks lines better than cells


def report_problems(problems: list[str]) -> None:
    """Say what was found wrong, a line each."""
    for problem in problems:
        ERR.print(problem, highlight=False, markup=False)


def escape(text: str) -> str:
    """`text` as rich prints it unchanged."""
    return text.replace("[", r"\[")
