"""Numbers that papers print, for `dpopt table compare=published`: `benchmarks/published/NAME.csv`, one file a paper."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from dpopt._paths import at_hand
from dpopt.errors import ConfigError, unknown
from dpopt.results.naming import workload_names

_KEY = ["dataset", "model", "subset"]
"""Columns that name the task of a number, in the paper's words."""
_TEXT = ["paper", "table", *_KEY, "method", "metric", "unit", "note"]


@dataclass(frozen=True)
class _Paper:
    """The numbers of one file, its paper, and what a reader of all of them should know.

    In `numbers` epsilon is infinite without privacy and NaN where none is stated; percentages are shares.
    """

    reference: str
    caveats: tuple[str, ...]
    numbers: pd.DataFrame

    def number(self, measured: Sequence[str], method: str, epsilon: float, metric: str) -> dict[str, Any] | None:
        """The row of one number, by preference one with a deviation; a number without an epsilon fits any."""
        rows = self.numbers
        same = (rows[_KEY] == list(measured)).all(axis=1) & (rows["method"] == method) & (rows["metric"] == metric)
        fitting = rows[same & ((rows["epsilon"] == epsilon) | rows["epsilon"].isna())]
        return min(fitting.to_dict("records"), key=lambda row: pd.isna(row["std"]), default=None)


def papers() -> dict[str, Path]:
    """The files at hand: those that come with dpopt, and in their place those of the current folder."""
    return at_hand("benchmarks/published", "*.csv")


def read(name: str) -> _Paper:
    """The numbers of one paper; its file begins with lines "# ...": the reference, then a caveat a line."""
    files = papers()
    if name not in files:
        raise unknown("published.paper", name, files)
    lines = files[name].read_text().splitlines()
    reference, *caveats = [line.removeprefix("# ") for line in lines if line.startswith("# ")]
    table = "\n".join(line for line in lines if not line.startswith("# "))
    numbers = pd.read_csv(io.StringIO(table), dtype=dict.fromkeys(_TEXT, str)).fillna(dict.fromkeys(_TEXT, ""))
    if missing := sorted({*_TEXT, "epsilon", "value", "std"} - {*numbers}):
        raise ConfigError(str(files[name]), missing, "columns are missing")
    scale = numbers.pop("unit").map({"%": 0.01}).fillna(1.0)
    return _Paper(reference, tuple(caveats), numbers.assign(value=scale * numbers["value"], std=scale * numbers["std"]))


def beside(
    table: pd.DataFrame, manifest: Mapping[str, Any], scores: Iterable[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """`comparison`'s frame with a paper's numbers beside its own, and what to say of them below the table.

    A number stands beside the row of the same data set, model, subset, method and target epsilon, as the suite's key
    `published` translates them. `ConfigError` where it names no paper, or something that the paper does not hold.

    Returns:
        The frame with `published`, `published_std` and `published_in` (the paper's table, and the epsilon it states
        where that is not the target), the same as `published_NAME...` for each of `scores`; and the remarks.
    """
    published = manifest.get("published")
    if not published:
        raise ConfigError("compare", "published", f"the suite {manifest['suite']} has no key `published`")
    paper, names = read(published["paper"]), measured(manifest)
    check(published, paper)
    targets = {float(ours): float(theirs) for ours, theirs in published.get("epsilon", {}).items()}
    columns: dict[str, list[Any]] = {}
    numbers = []
    for row in table.to_dict("records"):
        at, method = names.get(row["workload"], ()), published["methods"].get(row["label"], "")
        target = row["epsilon_target"]
        for name, metric in {"published": row["score"], **{f"published_{score}": score for score in scores}}.items():
            number = paper.number(at, method, targets.get(target, target), metric) if at else None
            numbers += [number] if number else []
            cells = {name: math.nan, f"{name}_std": math.nan, f"{name}_in": ""}
            if number:
                stated = number["epsilon"]
                # A number at another epsilon than the target's stands in the table only with that epsilon beside it.
                remark = "ε not stated" if math.isnan(stated) else f"states ε = {stated:g}" if stated != target else ""
                where = ", ".join(filter(None, [f"table {number['table']}", remark]))
                cells = {name: number["value"], f"{name}_std": number["std"], f"{name}_in": where}
            for key, value in cells.items():
                columns.setdefault(key, []).append(value)
    notes = dict.fromkeys(f"{number['method']}: {number['note']}." for number in numbers if number["note"])
    return table.assign(**columns), [f"Published: {paper.reference}.", *paper.caveats, *notes]


def check(published: Mapping[str, Any], paper: _Paper) -> None:
    """Raise `ConfigError` for what a suite's key `published` names and the paper has no number for."""

    def choices(item: Any) -> list[str]:  # a name, or several by the value of a field
        return [item] if isinstance(item, str) else [name for names in item.values() for name in names.values()]

    names = [("methods", "method", list(published["methods"].values()))]
    for entry in published["workloads"]:
        names += [(f"workloads.is.{key}", key, choices(item)) for key, item in zip(_KEY, entry["is"], strict=True)]
    of_paper = {f"{epsilon:g}" for epsilon in paper.numbers["epsilon"]}
    for theirs in published.get("epsilon", {}).values():
        if (stated := f"{float(theirs):g}") not in of_paper:
            raise unknown("published.epsilon", stated, of_paper)
    # A name that the file does not have would leave its column empty without a word.
    for where, column, used in names:
        of_paper = set(paper.numbers[column])
        for name in used:
            if name not in of_paper:
                raise unknown(f"published.{where}", name, of_paper)


def measured(manifest: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The paper's words for each workload, by the workload's name in tables."""
    specs, words = [cell["cell"]["workload"] for cell in manifest["cells"]], {}
    for name, spec in zip(workload_names(specs), specs, strict=True):
        for entry in manifest["published"]["workloads"]:
            called = tuple(_called(item, spec) for item in entry["is"])
            if all(spec.get(key) == value for key, value in entry.items() if key != "is") and all(called):
                words[name] = called
    return words


def _called(item: Any, spec: Mapping[str, Any]) -> str:
    if isinstance(item, str):
        return item
    (field, names), *_ = item.items()
    return {str(value): name for value, name in names.items()}.get(str(spec.get(field)), "")
