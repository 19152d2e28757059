"""`dpopt list`: the registered names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.table import Table

from dpopt import bars, fields, registry
from dpopt._extras import EXTRAS
from dpopt.cli.console import OUT, Plain
from dpopt.errors import ConfigError, cut
from dpopt.fields import key

if TYPE_CHECKING:
    from dpopt.suites.suite import Suite

SIZE = "rows × tasks\n× ε × seeds"
# Left out of a terminal of fewer than 140 columns.
_FURTHER = {"family", "draws/step", "gradients/draw", "releases/draw", "reference", "licence", "hub", "needs"}
_LONG = ("what it does", "what it is", "reference", "hub", "tuning", "needs")


@dataclass(frozen=True, kw_only=True)
class List:
    """Print the registered names, a table for each kind."""

    what: Literal["optimizers", "workloads", "data", "suites", "models"] | None = key("print one table alone", None)

    def __call__(self) -> None:
        kinds = [self.what] if self.what else [name for name in LISTED if name not in ("models", "suites")]
        for what in kinds:
            rows = LISTED[what]()
            # A note is longer than a cell can be: notes stand below the tables.
            left_out = {"note"} | (_FURTHER if OUT.width < 140 else set())
            table, columns = Table(box=None, pad_edge=False), [name for name in rows[0] if name not in left_out]
            for name in columns:
                table.add_column(name, no_wrap=name not in _LONG, overflow="fold")
            for row in rows:
                table.add_row(*(row[name] for name in columns))
            Plain(width=OUT.width).print(table)  # whose long cells are broken
            OUT.print()
        if self.what in (None, "optimizers"):
            print_notes(registry.optimizers())
        if not self.what:
            OUT.print("`dpopt list suites` and `dpopt list models` print the rest", style="dim")
            from dpopt.workloads.data import catalogue

            for name, entry in catalogue.entries().items():
                if entry.note:
                    OUT.print(f"{name}: {entry.note}", style="dim", soft_wrap=False)


def print_notes(names: Iterable[str]) -> None:
    """Print what the registry notes of optimizers, a line each."""
    for name in names:
        if note := registry.entry("optimizer", name).note:
            OUT.print(f"{name}: {note}", style="dim", soft_wrap=False)


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
    from dpopt.results.naming import readable_names

    rows = []
    for name, entry in registry.entries("workload").items():
        try:
            spec = registry.spec("workload", name, registry.create_workload(name))
        except ConfigError:  # its data are to be named, or its package is an extra that is not installed
            spec = {"name": name, **entry.fields}
        (readable,) = readable_names([spec])
        rows.append(
            {"workload": name, "in tables": readable, "what it is": entry.summary, "reference": entry.reference}
        )
    return rows


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
    from dpopt.suites.suite import load_suite, suite_files

    rows, files = [], suite_files()
    for name in bars.watched(files, len(files), "reading suites"):
        try:
            suite = load_suite(name)
            size = " × ".join(f"{len(getattr(suite, key))}" for key in ("optimizers", "workloads", "epsilon", "seeds"))
            row = {SIZE: size, "needs": _extras(suite), "what it is": suite.description}
        except (ConfigError, OSError) as error:  # a file of the current folder may hold anything
            row = {SIZE: "?", "needs": "?", "what it is": cut(str(error), 100)}
        rows.append({"suite": name, **row})
    return rows


def _extras(suite: Suite) -> str:
    """The extras of dpopt that a suite needs."""
    names = [suite.settings.get(label, {}).get("name", label) for label in suite.optimizers]
    paths = [registry.entry("optimizer", name).fields.get("optimizer", "") for name in names]
    extras = {EXTRAS[top] for path in paths if (top := path.partition(".")[0]) in EXTRAS}
    for each in suite.workloads:
        spec = each if isinstance(each, dict) else {"name": each}
        entry = registry.entry("workload", spec["name"])
        is_lora = "lora" in [*fields.listed({**entry.fields, **spec}.get("subset"))]
        if is_lora or entry.target.partition(":")[0] in ("dpopt.workloads.text", "dpopt.workloads.generation"):
            extras.add("text")
    return ", ".join(sorted(extras))


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
