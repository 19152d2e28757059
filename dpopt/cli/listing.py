"""`dpopt list`: the registered names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from rich.table import Table
from tabulate import tabulate

from dpopt import registry
from dpopt.cli.console import OUT, print_wide
from dpopt.errors import ConfigError
from dpopt.fields import key
from dpopt.markup import MARKDOWN


@dataclass(frozen=True, kw_only=True)
class List:
    """Print the registered names, a table for each kind."""

    what: Literal["optimizers", "workloads", "data", "suites", "models"] | None = key("print one table alone", None)
    format: Literal["markdown"] | None = key("print it as Markdown, by default that of the optimizers", None)

    def __call__(self) -> None:
        if self.format:
            rows = LISTED[self.what or "optimizers"]()
            shown = [{name: MARKDOWN.escape(value) for name, value in row.items()} for row in rows]
            OUT.print(tabulate(shown, headers="keys", tablefmt="pipe"))
            return
        kinds = [self.what] if self.what else [name for name in LISTED if name != "models"]  # counting takes seconds
        for what in kinds:
            rows = LISTED[what]()
            # A note is longer than a cell can be: notes stand below the tables.
            table, columns = Table(box=None, pad_edge=False), [name for name in rows[0] if name != "note"]
            for name in columns:
                table.add_column(name, no_wrap=name not in ("what it does", "reference"))
            for row in rows:
                table.add_row(*(row[name] for name in columns))
            print_wide(table, 180)
            OUT.print()
        if self.what in (None, "optimizers"):
            print_notes(registry.optimizers())
        if not self.what:
            from dpopt.workloads.data import catalogue

            for name, entry in catalogue.entries().items():
                if entry.note:
                    OUT.print(f"{name}: {entry.note}", style="dim")


def print_notes(names: Iterable[str]) -> None:
    """Print what the registry notes of optimizers, a line each."""
    for name in names:
        if note := registry.entry("optimizer", name).note:
            OUT.print(f"{name}: {note}", style="dim")


def _optimizers() -> list[dict[str, str]]:
    from dpopt.privacy.calibration import cost

    rows = []
    for name, entry in registry.entries("optimizer").items():
        try:
            counted = [f"{value:.3g}" for value in cost(registry.create(name))]
        except ConfigError:  # its package is an extra that is not installed
            counted = ["?"] * 3
        row = {"optimizer": name, "family": entry.family}
        row["tuning"] = ", ".join(f"{name}: {len(values)} values" for name, values in entry.grid.items()) or "none"
        row |= dict(zip(("draws/step", "gradients/draw", "releases/draw"), counted, strict=True))
        rows.append(row | {"what it does": entry.summary, "reference": entry.reference})
    return rows


def _workloads() -> list[dict[str, str]]:
    entries = registry.entries("workload").items()
    return [{"workload": name, "what it is": entry.summary, "reference": entry.reference} for name, entry in entries]


def _data_sets() -> list[dict[str, str]]:
    from dpopt.workloads.data.catalogue import entries

    return [
        {
            "data set": name,
            "kind": entry.kind,
            "records": " + ".join(f"{part.records:,} {split}" for split, part in entry.splits.items()),
            "classes": str(entry.classes or "pairs"),
            "licence": entry.licence,
            "hub": ", by ".join(filter(None, (entry.hub or "local folder only", entry.origin))),
            "reference": entry.reference,
            "note": entry.note,
        }
        for name, entry in entries().items()
    ]


def _suites() -> list[dict[str, str]]:
    from dpopt.suites.suite import suite_files

    return [{"suite": name, "file": str(path)} for name, path in suite_files().items()]


def _models() -> list[dict[str, str]]:
    from dpopt.workloads.models import parameter_counts

    def shown(value: int | str | None) -> str:
        return "none" if value is None else f"{value:,}" if isinstance(value, int) else value

    return [{name: shown(value) for name, value in row.items()} for row in parameter_counts()]


LISTED: dict[str, Callable[[], list[dict[str, str]]]] = {
    "optimizers": _optimizers,
    "workloads": _workloads,
    "data": _data_sets,
    "suites": _suites,
    "models": _models,
}
