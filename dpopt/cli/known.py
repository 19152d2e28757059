"""`dpopt list`: what is known by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.table import Table
from tabulate import tabulate

from dpopt import registry
from dpopt.cli.console import OUT, print_wide
from dpopt.errors import ConfigError, unknown
from dpopt.markup import MARKDOWN


def list_(overrides: Sequence[str]) -> None:
    """Print what is known by name, a table for each kind; what=models (or optimizers, ...) prints one table alone.

    format=markdown prints it as Markdown, by default that of the optimizers; what=data has all that is known.
    """
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    for key, value in given.items():
        allowed = {"format": ["markdown"], "what": list(LISTED)}
        if value not in allowed.get(key, []):
            raise unknown("override", f"{key}={value}", [f"{k}={v}" for k, values in allowed.items() for v in values])
    if "format" in given:
        rows = LISTED[given.get("what", "optimizers")]()
        shown = [{key: MARKDOWN.escape(value) for key, value in row.items()} for row in rows]
        OUT.print(tabulate(shown, headers="keys", tablefmt="pipe"))
        return
    for what in [given["what"]] if given else [name for name in LISTED if name != "models"]:  # counting takes seconds
        _print_rows(LISTED[what]())
    if not given:
        _print_notes()


def _print_notes() -> None:
    from dpopt.workloads.data import catalogue

    for name, entry in [*registry.entries("optimizer").items(), *catalogue.entries().items()]:
        if entry.note:
            OUT.print(f"{name}: {entry.note}", style="dim")


def _optimizers() -> list[dict[str, str]]:
    """One row for each registered optimizer; what it costs is counted by running it without data."""
    rows = []
    for name, entry in registry.entries("optimizer").items():
        grid = ", ".join(f"{key}: {len(values)} values" for key, values in entry.grid.items())
        rows.append(
            {
                "optimizer": name,
                "family": entry.family,
                "tuning": grid or "none",
                **_cost(name),
                "what it does": entry.summary,
                "reference": entry.reference,
            }
        )
    return rows


def _cost(name: str) -> dict[str, str]:
    """What a step of an optimizer costs; unknown where its package is an extra that is not installed."""
    from dpopt.privacy.calibration import cost

    try:
        counted = [f"{value:.3g}" for value in cost(registry.create(name))]
    except ConfigError:
        counted = ["?"] * 3
    return dict(zip(("draws/step", "gradients/draw", "releases/draw"), counted, strict=True))


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
    """How many parameters each trainable subset of well-known models holds."""
    from dpopt.workloads.models import parameter_counts

    def shown(value: int | str | None) -> str:
        return "none" if value is None else f"{value:,}" if isinstance(value, int) else value

    return [{key: shown(value) for key, value in row.items()} for row in parameter_counts()]


LISTED: dict[str, Callable[[], list[dict[str, str]]]] = {
    "optimizers": _optimizers,
    "workloads": _workloads,
    "data": _data_sets,
    "suites": _suites,
    "models": _models,
}
"""The tables of `dpopt list`."""


def _print_rows(rows: list[dict[str, str]]) -> None:
    table, columns = Table(box=None, pad_edge=False), [name for name in rows[0] if name != "note"]  # see `_print_notes`
    for name in columns:
        table.add_column(name, no_wrap=name not in ("what it does", "reference"))
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    print_wide(table, 180)
    OUT.print()
