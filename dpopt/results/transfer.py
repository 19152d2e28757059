"""The loss of a learning rate at another epsilon than the one at which it was selected."""

from __future__ import annotations

import math
from itertools import permutations

import pandas as pd

from dpopt.results import statistics
from dpopt.results.choosing import select
from dpopt.results.frames import GROUP
from dpopt.store.runs import score_or_worst

PLACE = [key for key in GROUP if key != "epsilon_target"]
POINT = ["epsilon_target", "seed", "tuned"]
"""Runs that agree in these may have been trained with other keys of the suite; then the one that `select` would take
counts."""


def transfers(cells: pd.DataFrame) -> pd.DataFrame:
    """One row for each search of a grid and each pair of epsilons at which it was made: what the point costs.

    The point of the grid that validates best at `epsilon_from` is used at `epsilon_target`; the loss is the test score
    of the point that validates best there, less that of the one that was taken over, by seed. It is negative where
    selection on validation records was unlucky. A run without a score counts as the worst of its search.

    Each seed chooses for itself, as its search does, and a few seeds that choose badly are part of the loss. What is
    left of it when the mean over seeds chooses one point for all of them is `shared_loss`.

    Args:
        cells: of `frames.Stored`.

    Returns:
        `workload`, `label`, B, epochs, C; `epsilon_from`, `epsilon_target`; `score` (what was measured), `loss` (its
        mean over seeds), `low`, `high`, `p` (see `statistics.difference`) and `seeds`; `shared_loss` and so on, the
        same for one point for all seeds.
    """
    if cells.empty or "test_score" not in cells:
        return pd.DataFrame()
    searched = cells[(cells["tuning"] == "grid") & (cells["stage"] == "") & ~cells["is_widened"]]
    rows = []
    for place, search in searched.groupby(PLACE, sort=False, dropna=False):
        selected = select(search)
        if search["tuned"].nunique() < 2 or selected.empty:
            continue
        search = search.merge(selected[["epsilon_target", "seed"]])  # without the searches that are not finished
        scores = map(score_or_worst, search["selection_score"], search["state"])
        search = search.assign(selected_by=list(scores))
        once = search.sort_values("selected_by", ascending=False, kind="stable").drop_duplicates(POINT)
        tests = once.pivot(index=["epsilon_target", "seed"], columns="tuned", values="test_score")
        tests = tests.apply(lambda scores: scores.fillna(scores.min()), axis="columns")
        chosen = selected.set_index(["epsilon_target", "seed"])["tuned"]
        shared = _shared(once)
        for source, target in permutations(sorted(selected["epsilon_target"].unique()), 2):
            losses = _losses(tests.loc[target], chosen.loc[source], chosen.loc[target])
            if len(losses):
                where = dict(zip(PLACE, place, strict=True)) | {"epsilon_from": source, "epsilon_target": target}
                one = tests.loc[target][shared[target]] - tests.loc[target][shared[source]]
                numbers = _numbers(losses) | {f"shared_{name}": value for name, value in _numbers(one.dropna()).items()}
                rows.append(where | {"score": selected["score"].iloc[0]} | numbers)
    return pd.DataFrame(rows)


def _shared(once: pd.DataFrame) -> dict[float, str]:
    """The point that validates best on average over the seeds, by epsilon; one that fails in any of them is last."""
    scores = once.sort_index().groupby(["epsilon_target", "tuned"], sort=False)["selected_by"]
    return scores.mean().unstack("tuned", sort=False, fill_value=-math.inf).idxmax(axis="columns").to_dict()


def _losses(tests: pd.DataFrame, taken: pd.Series, best: pd.Series) -> pd.Series:
    """By seed: the test score of the `own` point less that of the `taken` one."""
    seeds = best.index.intersection(taken.index)
    pairs = {seed: tests.at[seed, best[seed]] - tests.at[seed, taken[seed]] for seed in seeds}
    return pd.Series(pairs, dtype=float).dropna()


def _numbers(losses: pd.Series) -> dict[str, float]:
    difference = statistics.difference(losses.to_numpy())
    return {
        "loss": difference.mean,
        "low": difference.low,
        "high": difference.high,
        "p": difference.p,
        "seeds": len(losses),
    }
