"""Two versions of the results: which numbers of which cells differ, and what that does to each row of a table.

    python benchmarks/compare.py OLD NEW [SUITE]

OLD and NEW are folders of results, published ones too. Cells are paired by run id. A version that changes what a cell
is (a `revision`, a new field) changes its id; the rest is paired by its place in the suite: row, point and seed. Ends
with 0 where NEW has every result of OLD with the same numbers, and with 1 otherwise; NEW may have more.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

from dpopt.results import frames, statistics
from dpopt.results.scores import shown
from dpopt.store import Store
from dpopt.store.runs import RESULTS

ROW = ["suite", *frames.GROUP]
PLACE = [*ROW, "tuned", "stage", "seed"]
METRICS = ("test_", "validation_", "score_", "noise_", "epsilon", "selection_score", "draws", "examples", "dimension")
"""Prefixes of the columns that are compared; times and versions are not."""
WORDS = ("state", "score")
"""Columns that are compared word by word."""
TOLERANCE, SAME_EPSILON = 1e-6, 1e-9
"""Relative differences of numbers that count as equal; the same cell must not cost something else."""
SHOWN = 200


def load(folder, suite=None):
    """The finished cells of a results folder, numbered where they agree in all of `PLACE`."""
    store = Store(Path(folder))
    parts = [frames.load(store, name).cells.assign(suite=name) for name in ([suite] if suite else store.suites())]
    cells = pd.concat(parts, ignore_index=True)
    cells = cells[cells["state"].isin(RESULTS)].drop_duplicates(["suite", "label", "run_id"])
    return cells.assign(number=cells.groupby(PLACE, dropna=False).cumcount())


def paired(old, new):
    """One row a cell that both have, its columns ending in `_old` and `_new`."""
    ends, index = ("_old", "_new"), ["suite", "label", "run_id"]
    sides = [side.assign(id=range(len(side))) for side in (old, new)]
    by_id = sides[0].merge(sides[1], on=index, suffixes=ends).assign(run_id_old=lambda pairs: pairs["run_id"])
    by_id = by_id.rename(columns={"run_id": "run_id_new", **{f"{key}_old": key for key in PLACE if key not in index}})
    rest = [side[~side["id"].isin(by_id[f"id{end}"])] for side, end in zip(sides, ends, strict=True)]
    by_place = rest[0].merge(rest[1], on=[*PLACE, "number"], suffixes=ends)
    return pd.concat([by_id, by_place], ignore_index=True)


def changes(pairs, old):
    """One row for each number, state and name of a score that differs; what NEW no longer has, differs."""
    metrics = [name for name in old.select_dtypes("number") if name.startswith(METRICS) and name not in PLACE]
    parts = []
    for name in (*WORDS, *metrics):
        before = pairs[f"{name}_old"] if f"{name}_old" in pairs else pairs[name]  # a column that NEW has not at all
        after = pairs.get(f"{name}_new", pd.Series(np.nan, pairs.index))
        if name in WORDS:
            differs = before != after
        else:
            after = pd.to_numeric(after, errors="coerce")
            relative = SAME_EPSILON if name.startswith("epsilon") else TOLERANCE
            differs = ~np.isclose(before.astype(float), after.astype(float), rtol=relative, atol=0, equal_nan=True)
        rows = pairs.loc[differs, [*PLACE, "run_id_old", "run_id_new"]]
        parts.append(rows.assign(metric=name, old=before[differs], new=after[differs], pair=rows.index))
    return pd.concat(parts, ignore_index=True)


def summary(pairs, changed):
    """One row for each row of a table: what became of its test score, a seed being one pair."""
    rows = []
    for keys, group in pairs.groupby(ROW, sort=False, dropna=False):
        unit = shown(group["score_old"].iloc[0])
        scores = group.groupby("seed")[["test_score_old", "test_score_new"]].agg(lambda of: of.mean(skipna=False))
        differences = (scores["test_score_new"] - scores["test_score_old"]).to_numpy(float)
        distance = statistics.difference(differences) if np.isfinite(differences).all() else (np.nan,) * 3
        means = [unit.text(scores[name].mean(skipna=False)) for name in scores]
        finer = unit._replace(decimals=unit.decimals + 1)
        counts = {"cells": len(group), "changed": int(group.index.isin(changed).sum())}
        texts = {"old": means[0], "new": means[1], "Δ": finer.difference(*distance[:3])}
        rows.append(dict(zip(ROW, keys, strict=True)) | counts | texts)
    return pd.DataFrame(rows)


def main(before, after, suite=None):
    """Print what differs; gives the exit code."""
    old, new = load(before, suite), load(after, suite)
    pairs = paired(old, new)
    differ = changes(pairs, old)
    missing = old[~old["run_id"].isin(pairs["run_id_old"])]
    print(summary(pairs, differ["pair"]).to_string(index=False))
    is_epsilon = differ["metric"].str.startswith("epsilon")
    for row in pd.concat([differ[is_epsilon], differ[~is_epsilon]]).head(SHOWN).to_dict("records"):
        ids = " -> ".join(dict.fromkeys([row["run_id_old"], row["run_id_new"]]))
        of = f"{row['suite']}, {row['label']}, seed {row['seed']}"
        print(f"{ids} ({of}): {row['metric']} {row['old']} -> {row['new']}")
    counts = f"{differ['pair'].nunique()} changed, {is_epsilon.sum()} differences of epsilon, {len(missing)} missing"
    print(f"{len(pairs)} cells in both, {counts}")
    return 0 if differ.empty and missing.empty else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
