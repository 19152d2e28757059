"""Records of `dpopt audit` -> a frame -> tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from dpopt.markup import MARKDOWN
from dpopt.results.speed import origin
from dpopt.results.writing import Table

COLUMNS = ["kind", "name", "what", "epsilon_target", "epsilon", "delta", "trials", "canaries", "seconds", "failure"]
BOUNDS = ("worst_case", "one_run", "one_run_fdp")
NOTE = (
    "Lower bounds on ε, each wrong with probability at most {significance:g}. Worst case: an adversary makes the "
    "record, sees every release and plays many runs with and without it (Clopper-Pearson). One run: canaries in a "
    "single training run (Steinke, Nasr and Jagielski 2023); f-DP: the same, if the trade-off curve is Gaussian "
    "(Mahloujifar, Melis and Chaudhuri 2024). Flagged: one of the first two is above the claim, which refutes it; "
    "below it they prove nothing."
)


def frame(record: Mapping[str, Any]) -> pd.DataFrame:
    """One row an audit, as in the record, with `is_flagged`: a lower bound is above the claimed epsilon.

    The f-DP bound does not count: it assumes a Gaussian trade-off curve, which is more than what is claimed.
    """
    rows = pd.DataFrame(record["rows"]).reindex(columns=[*COLUMNS, *BOUNDS])
    rows = rows.astype(dict.fromkeys(["epsilon", *BOUNDS], float))  # null where an audit failed
    return rows.assign(is_flagged=rows[["worst_case", "one_run"]].max(axis=1) > rows["epsilon"])


def problems(rows: pd.DataFrame) -> list[str]:
    """What should not be: an optimizer that is flagged, a control that is not, an audit that failed."""
    found = [f"{row['name']}: {row['failure']}" for _, row in rows[rows["failure"] != ""].iterrows()]
    sound = rows[rows["failure"] == ""]
    for _, row in sound[sound["is_flagged"] != (sound["kind"] == "control")].iterrows():
        verb = "is refuted" if row["is_flagged"] else "is broken on purpose and was not flagged"
        found.append(f"{row['name']}: epsilon = {row['epsilon']:.4g} {verb}")
    return found


def markdown(record: Mapping[str, Any]) -> str:
    """The two tables of a record, with what the columns mean and where they come from."""
    rows, parts = frame(record), []
    for kind, title in (("optimizer", "Optimizers"), ("control", "Broken on purpose")):
        part = rows[rows["kind"] == kind]
        if len(part):
            parts += [f"## {title}", Table(_readable(part, kind)).markdown]
    setting = f"Suite {record['suite']}, {record['seconds']:.0f} s, {origin(record, 'torch')}."
    return "\n\n".join([*parts, NOTE.format(**record), MARKDOWN.escape(setting)]) + "\n"


def _readable(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    columns = {
        kind: rows["name"],
        "what is wrong": rows["what"],
        "claimed ε": rows["epsilon"].map(_number),
        "worst case": rows["worst_case"].map(_number),
        "one run": rows["one_run"].map(_number),
        "one run, f-DP": rows["one_run_fdp"].map(_number),
        "runs with, without": rows["trials"].map(
            lambda n: ", ".join(f"{k:,}" for k in n) if isinstance(n, list | tuple) else ""
        ),
        "canaries": rows["canaries"].map(lambda n: "" if pd.isna(n) else f"{n:.0f}"),
        "flagged": rows["is_flagged"].map({True: "yes", False: "no"}),
        "failure": rows["failure"],
    }
    table = pd.DataFrame(columns)
    empty = [name for name in table.columns if not table[name].fillna("").astype(str).any()]
    return table.drop(columns=empty)


def _number(value: float) -> str:
    return "" if pd.isna(value) else f"{value:.3g}"
