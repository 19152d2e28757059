"""Records of `dpopt audit` -> a frame -> tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpopt.markup import MARKDOWN
from dpopt.results.speed import origin
from dpopt.results.writing import Column, Table, texts, unless_nan

_COLUMNS = ["kind", "name", "what", "epsilon_target", "epsilon", "delta", "trials", "canaries", "seconds", "failure"]
_BOUNDS = ("worst_case", "one_run", "one_run_fdp")
_NOTE = (
    "Lower bounds on ε, each wrong with probability at most {significance:g}. Worst case: an adversary makes the "
    "record, sees every release and plays many runs with and without it (Clopper-Pearson). One run: canaries in a "
    "single training run (Steinke, Nasr and Jagielski 2023); f-DP: the same, if the trade-off curve is Gaussian "
    "(Mahloujifar, Melis and Chaudhuri 2024). Flagged: one of the first two is above the claim, which refutes it; "
    "below it they prove nothing."
)


def frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """One row an audit, as in the record, with `is_flagged`: a lower bound is above the claimed epsilon."""
    rows = pd.DataFrame(record["rows"]).reindex(columns=[*_COLUMNS, *_BOUNDS])
    rows = rows.astype(dict.fromkeys(["epsilon", *_BOUNDS], float))  # null where an audit failed
    # The f-DP bound does not count: it assumes a Gaussian trade-off curve, which is more than what is claimed.
    return rows.assign(is_flagged=rows[["worst_case", "one_run"]].max(axis=1) > rows["epsilon"])


def problems(rows: pd.DataFrame) -> list[str]:
    """Lines on an optimizer that is flagged, a control that is not, and an audit that failed."""
    lines = [f"{row['name']}: {row['failure']}" for _, row in rows[rows["failure"] != ""].iterrows()]
    sound = rows[rows["failure"] == ""]
    for _, row in sound[sound["is_flagged"] != (sound["kind"] == "control")].iterrows():
        verb = "is refuted" if row["is_flagged"] else "is broken on purpose and was not flagged"
        lines.append(f"{row['name']}: epsilon = {row['epsilon']:.4g} {verb}")
    return lines


def markdown(record: Mapping[str, Any]) -> str:
    """The two tables of a record, with a note on their columns and their origin."""
    rows, parts = frame(record), []
    for kind, title in (("optimizer", "Optimizers"), ("control", "Broken on purpose")):
        part = rows[rows["kind"] == kind]
        if len(part):
            table = texts(part, _columns(kind))
            parts += [f"## {title}", Table(table.loc[:, table.ne("").any()]).markdown]  # without empty columns
    setting = f"Suite {record['suite']}, {record['seconds']:.0f} s, {origin(record, 'torch')}."
    return "\n\n".join([*parts, _NOTE.format(**record), MARKDOWN.escape(setting)]) + "\n"


def _columns(kind: str) -> list[Column]:
    def listed(numbers: Any) -> str:  # NaN where an audit plays no such runs
        return ", ".join(f"{number:,}" for number in numbers) if isinstance(numbers, list | tuple) else ""

    return [
        Column(kind, "name"),
        Column("what is wrong", "what", unless_nan(str)),
        Column("claimed ε", "epsilon", unless_nan("{:.3g}".format)),
        Column("worst case", "worst_case", unless_nan("{:.3g}".format)),
        Column("one run", "one_run", unless_nan("{:.3g}".format)),
        Column("one run, f-DP", "one_run_fdp", unless_nan("{:.3g}".format)),
        Column("runs with, without", "trials", listed),
        Column("canaries", "canaries", unless_nan("{:.0f}".format)),
        Column("flagged", "is_flagged", {True: "yes", False: "no"}.__getitem__),
        Column("failure", "failure"),
    ]
