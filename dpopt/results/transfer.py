"""The loss of a learning rate at another epsilon than the one at which it was selected."""

from __future__ import annotations

import math
from itertools import permutations

import pandas as pd

from dpopt.results import statistics
from dpopt.results.choosing import select
from dpopt.results.frames import GROUP
from dpopt.store.runs import score_or_worst

_PLACE = [key for key in GROUP if key != "epsilon_target"]
# Runs that agree in these may differ in other keys of the suite: then the one that `select` would take counts.
_POINT = ["epsilon_target", "seed", "tuned"]


def transfers(cells: pd.DataFrame) -> pd.DataFrame:
    """One row for each search of a grid and each pair of epsilons at which it was made: the cost of a transfer.

    The point of the grid that validates best at `epsilon_from` is used at `epsilon_target`; the loss is the test score
    of the point that validates best there, less that of the one that was taken over, by seed. It is negative where
    selection on validation records was unlucky. A run without a score counts as the worst of its search.

    Each seed chooses for itself, as its search does, and a few seeds that choose badly are part of the loss. What is
    left of it when the mean over seeds chooses one point for all of them is `shared_loss`.

    Returns:
        The place; `score` (what was measured), `loss` (its mean over seeds), `low`, `high`, `p` (see
        `statistics.difference`) and `seeds`; `shared_loss` and so on, the same for one point for all seeds.
    """
    if cells.empty or "test_score" not in cells:
        return pd.DataFrame()
    searched = cells[(cells["tuning"] == "grid") & (cells["stage"] == "") & ~cells["is_widened"]]
    rows = []
    for place, search in searched.groupby(_PLACE, sort=False, dropna=False):
        selected = select(search)
        if search["tuned"].nunique() < 2 or selected.empty:
            continue
        search = search.merge(selected[["epsilon_target", "seed"]])  # without the searches that are not finished
        search = search.assign(selected_by=[*map(score_or_worst, search["selection_score"], search["state"])])
        once = search.sort_values("selected_by", ascending=False, kind="stable").drop_duplicates(_POINT)
        tests = once.pivot(index=["epsilon_target", "seed"], columns="tuned", values="test_score")
        tests = tests.apply(lambda scores: scores.fillna(scores.min()), axis="columns")
        chosen = selected.set_index(["epsilon_target", "seed"])["tuned"]
        # One that fails in any seed has the mean -inf, and is last.
        means = once.sort_index().groupby(["epsilon_target", "tuned"], sort=False)["selected_by"].mean()
        shared = means.unstack("tuned", sort=False, fill_value=-math.inf).idxmax(axis="columns").to_dict()
        for source, target in permutations(sorted(selected["epsilon_target"].unique()), 2):
            of_target, best, taken = tests.loc[target], chosen.loc[target], chosen.loc[source]
            seeds = best.index.intersection(taken.index)
            pairs = {seed: of_target.at[seed, best[seed]] - of_target.at[seed, taken[seed]] for seed in seeds}
            losses = pd.Series(pairs, dtype=float).dropna()
            if len(losses):
                where = dict(zip(_PLACE, place, strict=True)) | {"epsilon_from": source, "epsilon_target": target}
                one = of_target[shared[target]] - of_target[shared[source]]
                numbers = _numbers(losses) | {f"shared_{name}": value for name, value in _numbers(one.dropna()).items()}
                rows.append(where | {"score": selected["score"].iloc[0]} | numbers)
    return pd.DataFrame(rows)


def _numbers(losses: pd.Series) -> dict[str, float]:
    numbers = statistics.difference(losses.to_numpy())._asdict()
    return {"loss": numbers.pop("mean"), **numbers, "seeds": len(losses)}
