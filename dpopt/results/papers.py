"""Numbers that papers print, for `dpopt table compare=published`: `benchmarks/published/NAME.csv`, one file a paper."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt._paths import at_hand
from dpopt.errors import ConfigError, unknown
from dpopt.results.naming import workload_names

KEY = ["dataset", "model", "subset"]
"""What a number was measured on, in the paper's words."""
TEXT = ["paper", "table", *KEY, "method", "metric", "unit", "note"]


@dataclass(frozen=True)
class Paper:
    """What one file holds.

    Attributes:
        reference: the paper.
        caveats: what a reader of all its numbers should know.
        numbers: one row a number: paper, table, dataset, model, subset, method, epsilon (infinite without privacy, NaN
            where none is stated), metric, value and std (NaN where none is printed), and a note. What is printed in
            percent is a share here.
    """

    reference: str
    caveats: tuple[str, ...]
    numbers: pd.DataFrame

    def number(self, measured: Sequence[str], method: str, epsilon: float, metric: str) -> dict[str, Any] | None:
        """The row of one number, by preference one with a deviation; a number without an epsilon fits any."""
        rows = self.numbers
        same = (rows[KEY] == list(measured)).all(axis=1) & (rows["method"] == method) & (rows["metric"] == metric)
        found = rows[same & ((rows["epsilon"] == epsilon) | rows["epsilon"].isna())]
        return min(found.to_dict("records"), key=lambda row: pd.isna(row["std"]), default=None)


def papers() -> dict[str, Path]:
    """The files at hand: those that come with dpopt, and in their place those of the current folder."""
    return at_hand("benchmarks/published", "*.csv")


def read(name: str) -> Paper:
    """The numbers of one paper; its file begins with lines "# ...": the reference, then a caveat a line.

    Raises:
        ConfigError: no such file.
    """
    known = papers()
    if name not in known:
        raise unknown("published.paper", name, known)
    lines = known[name].read_text().splitlines()
    reference, *caveats = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    table = "\n".join(line for line in lines if not line.startswith("# "))
    numbers = pd.read_csv(io.StringIO(table), dtype=dict.fromkeys(TEXT, str)).fillna(dict.fromkeys(TEXT, ""))
    scale = numbers.pop("unit").map({"%": 0.01}).fillna(1.0)
    return Paper(reference, tuple(caveats), numbers.assign(value=scale * numbers["value"], std=scale * numbers["std"]))


def beside(
    table: pd.DataFrame, manifest: Mapping[str, Any], scores: Iterable[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """`comparison`'s frame with a paper's numbers beside its own, and what to say of them below the table.

    A number stands beside the row of the same data set, model, subset, method and target epsilon; the suite's key
    `published` says what the paper calls them, and what it states in the place of a target.

    Args:
        table: at least one row.
        manifest: the suite's.
        scores: further scores that are shown.

    Returns:
        The frame with `published`, `published_std` and `published_in` (the paper's table, and the epsilon it states
        where that is not the target), and as many columns, `published_NAME...`, for each of `scores`; and the remarks.

    Raises:
        ConfigError: the suite names no paper, or something that the paper does not hold.
    """
    given = manifest.get("published")
    if not given:
        raise ConfigError("compare", "published", f"the suite {manifest['suite']} has no key `published`")
    paper, names = read(given["paper"]), measured(manifest)
    check(given, paper)
    targets = {float(ours): float(theirs) for ours, theirs in given.get("epsilon", {}).items()}
    columns: dict[str, list[Any]] = {}
    found = []
    for row in table.to_dict("records"):
        at, method = names.get(row["workload"], ()), given["methods"].get(row["label"], "")
        target = row["epsilon_target"]
        for name, metric in {"published": row["score"], **{f"published_{score}": score for score in scores}}.items():
            number = paper.number(at, method, targets.get(target, target), metric) if at else None
            found += [number] if number else []
            for key, value in _cells(name, number, target).items():
                columns.setdefault(key, []).append(value)
    return table.assign(**columns), _remarks(paper, found)


def check(given: Mapping[str, Any], paper: Paper) -> None:
    """Raise `ConfigError` for what a suite's key `published` names and the paper has no number for."""
    names = [("methods", "method", list(given["methods"].values()))]
    for entry in given["workloads"]:
        names += [(f"workloads.is.{key}", key, _choices(item)) for key, item in zip(KEY, entry["is"], strict=True)]
    known = {f"{epsilon:g}" for epsilon in paper.numbers["epsilon"]}
    for theirs in given.get("epsilon", {}).values():
        if (stated := f"{float(theirs):g}") not in known:
            raise unknown("published.epsilon", stated, known)
    for where, column, used in names:
        known = set(paper.numbers[column])
        for name in used:
            if name not in known:
                raise unknown(f"published.{where}", name, known)


def _choices(item: Any) -> list[str]:
    """All names that `_called` may give."""
    return [item] if isinstance(item, str) else [name for names in item.values() for name in names.values()]


def measured(manifest: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What the paper calls a workload, by the workload's name in tables."""
    specs = [cell["cell"]["workload"] for cell in manifest["cells"]]
    names, found = workload_names(specs), {}
    for spec in specs:
        for entry in manifest["published"]["workloads"]:
            called = tuple(_called(item, spec) for item in entry["is"])
            if all(spec.get(key) == value for key, value in entry.items() if key != "is") and all(called):
                found[names[json.dumps(spec, sort_keys=True)]] = called
    return found


def _called(item: Any, spec: Mapping[str, Any]) -> str:
    """The paper's name for one thing about a workload; empty where it has none."""
    if isinstance(item, str):
        return item
    (field, names), *_ = item.items()
    return {str(value): name for value, name in names.items()}.get(str(spec.get(field)), "")


def _cells(name: str, number: Mapping[str, Any] | None, target: float) -> dict[str, Any]:
    """The columns that one number fills."""
    if number is None:
        return {name: math.nan, f"{name}_std": math.nan, f"{name}_in": ""}
    stated = number["epsilon"]
    remark = "ε not stated" if math.isnan(stated) else f"states ε = {stated:g}" if stated != target else ""
    where = ", ".join(filter(None, [f"table {number['table']}", remark]))
    return {name: number["value"], f"{name}_std": number["std"], f"{name}_in": where}


def _remarks(paper: Paper, found: Iterable[Mapping[str, Any]]) -> list[str]:
    """The paper and its caveats, and the notes to the numbers that are shown."""
    notes = dict.fromkeys(f"{number['method']}: {number['note']}." for number in found if number["note"])
    return [f"Published: {paper.reference}.", *paper.caveats, *notes]
