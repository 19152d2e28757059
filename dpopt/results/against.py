"""How far every method is from one of them at equal cost, workload by workload, and whether that can be told."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from dpopt.errors import ConfigError, unknown
from dpopt.results import statistics
from dpopt.results.budgets import BLOCK, BUDGETS, lacking, unranked
from dpopt.results.scores import shown
from dpopt.results.writing import Table

NOTE = (
    "Scores minus those of {baseline}, paired by seed and averaged over the budgets of a workload, with Student's "
    "interval over seeds, on these test splits. Intervals and p are corrected for the number of workloads of a row "
    "(Bonferroni), so that a row as a whole is right at 95 %. Bold: told apart. Better, worse: on how many workloads. "
    "Replicates that failed count as the worst score of their block; a workload where a budget lets either method "
    "reach nothing is left out."
)


def against(entries: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """One row for each other method and workload.

    Args:
        entries: what each seed reaches in each block, see `budgets.reached`.
        baseline: a method among them.

    Returns:
        `label`, `workload`, `score` (what was measured), `blocks` (budgets that are averaged), `seeds` (pairs), and of
        the paired differences to the baseline `mean`, `low`, `high` and `p`, corrected for the number of workloads that
        the method has; `verdict`: 1 where the method is better, -1 where it is worse, 0 where neither can be told.

    Raises:
        ConfigError: no such method, or none to compare it with.
    """
    labels = [] if entries.empty else list(entries["label"].unique())
    if baseline not in labels:
        raise unknown("against", baseline, labels)
    rows = [row for workload, own in entries.groupby("workload", sort=False) for row in _pairs(workload, own, baseline)]
    found = []
    for label in labels:
        own = [row for row in rows if row["label"] == label]
        for row in own:
            found.append(row | statistics.difference(row.pop("values"), comparisons=len(own))._asdict())
    if not found:
        reason = "there is no workload on which it and another row have scores at every budget"
        raise ConfigError("against", baseline, reason)
    level = 1 - statistics.CONFIDENCE
    return pd.DataFrame(
        [row | {"verdict": int(math.copysign(1, row["mean"])) if row["p"] < level else 0} for row in found]
    )


def _pairs(workload: Any, entries: pd.DataFrame, baseline: str) -> Iterator[dict[str, Any]]:
    """The differences of each method that is in all blocks of a workload, for the seeds that both have there."""
    blocks = []
    for _, block in entries.groupby(BLOCK, sort=False):
        tests = block["test"].mask(block["failed"], block["test"].min())
        scores = block.assign(test=tests).pivot(index="seed", columns="label", values="test")
        blocks.append(scores.drop(columns={*lacking(block), *unranked(block)}))
    means = sum(blocks[1:], blocks[0]) / len(blocks)  # not a number where a block lacks a seed or a method
    for label in means.columns.drop(baseline, errors="ignore"):
        values = (means[label] - means[baseline]).dropna() if baseline in means else pd.Series(dtype=float)
        if len(values):
            place = {"label": label, "workload": workload, "score": entries["score"].dropna().iloc[0]}
            yield place | {"blocks": len(blocks), "seeds": len(values), "values": values.to_numpy()}


def as_table(frame: pd.DataFrame, baseline: str, by: str = "epsilon") -> Table:
    """`against`'s frame as people read it: a row for each method, those that are better most often first."""
    order = frame.groupby("label", sort=False)[["verdict", "mean"]].mean()
    labels = list(order.sort_values(["verdict", "mean"], ascending=False, kind="stable").index)
    of = {(row["label"], row["workload"]): row for row in frame.to_dict("records")}
    names = {row["workload"]: f"{row['workload']}, {shown(row['score']).label}" for row in of.values()}
    columns = {"method": labels}
    for workload, name in names.items():
        columns[name] = [_text(of[label, workload]) if (label, workload) in of else "" for label in labels]
    for name, sign in (("better", 1), ("worse", -1)):
        counts = (frame["verdict"] == sign).groupby(frame["label"]).sum()
        columns[name] = [str(counts[label]) for label in labels]
    bold = {(labels.index(label), names[workload]) for (label, workload), row in of.items() if row["verdict"]}
    title = f"Against {baseline}, at equal {BUDGETS[by]}"
    return Table(pd.DataFrame(columns), title, NOTE.format(baseline=baseline), bold=bold, numbers=frame)


def _text(row: dict[str, Any]) -> str:
    return shown(row["score"]).difference(row["mean"], row["low"], row["high"])
