"""Two versions of the suite: which numbers of which cells differ, and what that does to each row of a table.

Cells are paired by run id. A version that changes what a cell is (a `revision`, a new field) changes its id: what is
left is paired by its place in the suite, that is by row, point of the search and seed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpopt.errors import ConfigError
from dpopt.results import frames, statistics
from dpopt.results.scores import shown
from dpopt.results.tables import number
from dpopt.store import open_results
from dpopt.store.published import read_parquet
from dpopt.store.runs import RESULTS

ROW = ["suite", *frames.GROUP]
PLACE = [*ROW, "tuned", "stage", "seed"]
"""What a cell of one version has in common with its partner of another version; cells that agree in all of it are
numbered."""
METRICS = ("test_", "validation_", "score_", "noise_", "epsilon", "selection_score", "draws", "examples", "dimension")
"""Prefixes of the columns that are compared; times and versions are not."""
WORDS = ("state", "score")
"""Columns that are compared word by word."""
TOLERANCE = 1e-6
"""Relative difference of two numbers that count as equal."""
SAME_EPSILON = 1e-9
"""The same for epsilons, whatever the tolerance for other numbers is."""
ENDS = ["_old", "_new"]


@dataclass(frozen=True)
class Comparison:
    """What differs between two versions.

    Attributes:
        pairs: one row for each cell that both have: the columns of `PLACE`, `run_id` and `state` and the metrics of
            both, which end in `_old` and `_new`, and `is_changed`.
        changes: one row for each number, state and name of a score that differs: place, `metric`, `old`, `new`.
            What the new version has no column for, or no numbers in it, is lost: it differs.
        missing: cells of the old version that the new one does not have, or has no result of.
        added: cells of the new version that the old one does not have, or has no result of.
    """

    pairs: pd.DataFrame
    changes: pd.DataFrame
    missing: pd.DataFrame
    added: pd.DataFrame

    @property
    def epsilons(self) -> pd.DataFrame:
        """The changes of an epsilon. They are errors: the same cell must not cost something else."""
        return self.changes[self.changes["metric"].str.startswith("epsilon")]

    @property
    def is_same(self) -> bool:
        """Whether the new version has every result of the old one, with the same numbers; it may have more."""
        return self.changes.empty and self.missing.empty


def load(path: Path, suite: str | None = None) -> pd.DataFrame:
    """The cells of a results folder, or of a Parquet file that `dpopt collect` wrote.

    Args:
        path: of the folder or the file.
        suite: this one only; None takes all.

    Raises:
        ConfigError: there is nothing of the kind at `path`.
    """
    if path.is_dir():
        store = open_results(path)
        suites = [suite] if suite else store.suites()
        parts = [frames.load(store, name).cells.assign(suite=name) for name in suites]
    else:
        parts = [_parquet(path)]
    found = pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
    found = found[found["suite"] == suite] if suite and not found.empty else found
    if found.empty:
        raise ConfigError("results", str(path), f"holds no cells{f' of suite {suite}' if suite else ''}")
    return found.reset_index(drop=True)


def _parquet(path: Path) -> pd.DataFrame:
    """Parquet of older versions does not name its suite, which its folder is named by, and knows no stages."""
    cells = read_parquet(path)
    cells = cells.assign(
        **{key: value for key, value in (("suite", path.parent.name), ("stage", "")) if key not in cells}
    )
    if missing := sorted({*PLACE, "run_id", "state"} - set(cells)):
        raise ConfigError("results", str(path), f"not a file of cells: lacks {', '.join(missing)}")
    return cells


def compare(old: pd.DataFrame, new: pd.DataFrame, tolerance: float = TOLERANCE) -> Comparison:
    """Compare two frames of cells as `load` gives them.

    Args:
        old, new: of the two versions.
        tolerance: relative difference up to which numbers count as equal; epsilons by `SAME_EPSILON`.
    """
    old, new = _finished(old), _finished(new)
    metrics = [name for name in old.select_dtypes("number") if name.startswith(METRICS) and name not in PLACE]
    kept = [*PLACE, "run_id", *WORDS]
    old, new = (side[kept].join(_numbers(side, metrics)).assign(index=range(len(side))) for side in (old, new))
    pairs = _paired(old, new)
    changes = pd.concat([_changes(pairs, name, tolerance) for name in [*WORDS, *metrics]], ignore_index=True)
    pairs = pairs.assign(is_changed=pairs.index.isin(changes.pop("pair")))
    return Comparison(
        pairs,
        changes,
        old[~old["index"].isin(pairs["index_old"])].drop(columns="index"),
        new[~new["index"].isin(pairs["index_new"])].drop(columns="index"),
    )


def _numbers(cells: pd.DataFrame, metrics: Sequence[str]) -> pd.DataFrame:
    """The columns `metrics`, without a number where a version has none."""
    return cells.reindex(columns=metrics).apply(pd.to_numeric, errors="coerce")


def _finished(cells: pd.DataFrame) -> pd.DataFrame:
    done = cells[cells["state"].isin(RESULTS)].drop_duplicates(["suite", "label", "run_id"])
    named = {"score": "accuracy", "test_score": done.get("test_accuracy")}  # older versions knew no other score
    return done.assign(**{key: value for key, value in named.items() if key not in done})


def _paired(old: pd.DataFrame, new: pd.DataFrame) -> pd.DataFrame:
    """Pairs by id where both have it, the rest by place and number among those that share it."""
    by_id = _joined(old, new, ["suite", "label", "run_id"])
    rest = [side[~side["index"].isin(by_id[f"index{end}"])] for side, end in zip((old, new), ENDS, strict=True)]
    left, right = (side.assign(number=side.groupby(PLACE, dropna=False).cumcount()) for side in rest)
    return pd.concat([by_id, _joined(left, right, [*PLACE, "number"])], ignore_index=True)


def _joined(old: pd.DataFrame, new: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """One row for each pair that shares `keys`; the place is the old version's."""
    others = [name for name in old if name not in PLACE]
    right = new[[*dict.fromkeys([*keys, *others])]].rename(columns={name: f"{name}_new" for name in others})
    left = old.rename(columns={name: f"{name}_old" for name in others})
    on = [(f"{key}_old", f"{key}_new") if key in others else (key, key) for key in keys]
    return left.merge(right, left_on=[a for a, _ in on], right_on=[b for _, b in on])


def _changes(pairs: pd.DataFrame, metric: str, tolerance: float) -> pd.DataFrame:
    """The pairs that differ in a metric."""
    old, new = (pairs[f"{metric}{end}"] for end in ENDS)
    if metric in WORDS:
        differs = (old != new).to_numpy()
    else:
        relative = SAME_EPSILON if metric.startswith("epsilon") else tolerance
        differs = ~np.isclose(old.to_numpy(float), new.to_numpy(float), rtol=relative, atol=0, equal_nan=True)
    found = pairs.loc[differs, [*PLACE, "run_id_old", "run_id_new"]]
    return found.assign(metric=metric, old=old[differs], new=new[differs], pair=found.index)


def summary(comparison: Comparison) -> pd.DataFrame:
    """One row for each row of a table: what became of its test score.

    Returns:
        The columns of `ROW`, `score` (what was measured), `cells` that both have, `changed` among them, the means `old`
        and `new` of the test score over these cells, and `mean`, `low`, `high`, `p` of the paired difference, each seed
        being one pair: the mean over the points that it was trained at.
    """
    rows = []
    for keys, group in comparison.pairs.groupby(ROW, sort=False, dropna=False):
        by_seed = group.groupby("seed")[["test_score_old", "test_score_new"]].agg(lambda of: of.mean(skipna=False))
        differences = (by_seed["test_score_new"] - by_seed["test_score_old"]).to_numpy(float)
        rows.append(
            {
                **dict(zip(ROW, keys, strict=True)),
                "score": group["score_old"].iloc[0],
                "cells": len(group),
                "changed": int(group["is_changed"].sum()),
                "old": by_seed["test_score_old"].mean(skipna=False),
                "new": by_seed["test_score_new"].mean(skipna=False),
                **_interval(differences),
            }
        )
    return pd.DataFrame(rows)


def _interval(differences: np.ndarray) -> dict[str, float]:
    """Zero for rows that did not change; not a number where a score is none."""
    if not np.isfinite(differences).all():
        return dict.fromkeys(("mean", "low", "high", "p"), math.nan)
    if not differences.any():
        return {"mean": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    return statistics.difference(differences)._asdict()


def readable(rows: pd.DataFrame) -> pd.DataFrame:
    """`summary`'s frame as people read it, without what all rows share."""
    if rows.empty:
        return pd.DataFrame({"no cells in common": []})
    columns = {
        "suite": rows["suite"],
        "workload": rows["workload"],
        "optimizer": rows["label"],
        "target ε": rows["epsilon_target"].map("{:g}".format),
        "B": rows["batch_size"].map("{:g}".format),
        "epochs": rows["epochs"].map("{:g}".format),
        "C": rows["clip"].map(number),
        "cells": rows["cells"].astype(str),
        "changed": rows["changed"].astype(str),
        "test score, old": _texts(rows, "old"),
        "new": _texts(rows, "new"),
        "Δ": [_delta(row) for row in rows.to_dict("records")],
    }
    shared = [name for name in ("suite", "workload", "B", "epochs", "C") if columns[name].nunique() == 1]
    return pd.DataFrame(columns).drop(columns=shared)


def _texts(rows: pd.DataFrame, column: str) -> list[str]:
    return [shown(score).text(value) for score, value in zip(rows["score"], rows[column], strict=True)]


def _delta(row: dict[str, Any]) -> str:
    """The mean difference with its interval, where there is one."""
    if row["mean"] == 0 == row["low"] == row["high"]:
        return "0"
    unit = shown(row["score"])
    return unit._replace(decimals=unit.decimals + 1).difference(row["mean"], row["low"], row["high"])


def lines(comparison: Comparison) -> list[str]:
    """One line for each difference, epsilons first."""
    is_epsilon = comparison.changes["metric"].str.startswith("epsilon")
    ordered = pd.concat([comparison.changes[is_epsilon], comparison.changes[~is_epsilon]])
    changed = [f"{_name(row)}: {row['metric']} {row['old']} -> {row['new']}" for row in ordered.to_dict("records")]
    errors = int(is_epsilon.sum())
    changed = [*(f"error: {line}" for line in changed[:errors]), *changed[errors:]]
    return changed + [f"{_name(row)}: no result in the new version" for row in comparison.missing.to_dict("records")]


def _name(row: dict[str, Any]) -> str:
    """A cell, as a line names it."""
    ids = dict.fromkeys(row[key] for key in ("run_id", "run_id_old", "run_id_new") if key in row)
    tuned = f", {row['tuned']}" if row["tuned"] != "{}" else ""
    return (
        f"{' -> '.join(ids)} ({row['suite']}, {row['label']}, ε = {row['epsilon_target']:g}, seed {row['seed']}{tuned})"
    )
