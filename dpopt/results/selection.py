"""What private selection would release from the candidates that a grid has trained, and what it would cost.

Liu and Talwar, "Private selection from private candidates", STOC 2019: draw a candidate at random, train it, stop with
some probability, and release the best so far. The runs of a grid are one run of every candidate, so the outcome of the
procedure is a mixture of their scores with weights in closed form, and no run has to be made again.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dpopt.privacy.selection import best_of
from dpopt.results.frames import GROUP
from dpopt.results.scores import shown
from dpopt.results.tables import upper
from dpopt.results.writing import Table
from dpopt.store.runs import RESULTS, Store, score_or_worst

RUNS = (2, 4, 16, 128, 256)
"""Expected numbers of runs: those of Koskela and Honkela 2020, Table 1."""
NOTE = (
    "Simulated from one run of each candidate and seed: a geometric number of runs with the mean given, each of a "
    "candidate drawn at random, of which the best on the validation split is released. ε of the whole procedure by "
    "Renyi divergences (Papernot and Steinke 2022), for the training records; the score is not noised, and the "
    "validation records are not covered."
)


def private_selection(store: Store, cells: pd.DataFrame, runs: tuple[float, ...] = RUNS) -> pd.DataFrame:
    """One row for each searched group of `cells` whose runs are all done and alike, and each expected number of runs.

    As in `choosing.select`, a run that has diverged, or has no number to be selected by, is the worst. A test score
    that is not finite counts as the worst of its group, as in tables.

    Returns:
        The group's keys; `runs`; `score` (what was measured); mean and standard deviation of the released run's test
        score, over the procedure's own randomness and the seeds; `epsilon_single` by Renyi divergences and
        `epsilon_selected`.
    """
    rows = []
    grids = cells[(cells["tuning"] == "grid") & ~(cells["is_refined"] | cells["is_widened"])]
    for keys, group in grids.groupby(GROUP, sort=False, dropna=False):
        if not group["state"].isin(RESULTS).all():
            continue
        ledger, delta = store.ledger(group["run_id"].iloc[0]), group["delta"].iloc[0]
        if any(store.ledger(run_id) != ledger for run_id in group["run_id"].iloc[1:]):
            continue  # its price is known for candidates that release alike
        for number in runs:
            mean, std = _outcome(group, number)
            rows.append(
                {
                    **dict(zip(GROUP, keys, strict=True)),
                    "runs": number,
                    "score": group["score"].iloc[0],
                    "mean": mean,
                    "std": std,
                    "epsilon_single": best_of(ledger, delta, runs=1),
                    "epsilon_selected": best_of(ledger, delta, runs=number),
                }
            )
    return pd.DataFrame(rows)


def as_table(outcome: pd.DataFrame) -> Table:
    """`private_selection`'s frame as people read it."""
    if outcome.empty:
        return Table(pd.DataFrame({"no finished searches": []}), note=NOTE)
    rows = outcome.to_dict("records")
    frame = pd.DataFrame(
        {
            "workload": outcome["workload"],
            "candidates": outcome["label"],
            "target ε": outcome["epsilon_target"].map("{:g}".format),
            "runs (mean)": outcome["runs"].map("{:g}".format),
            "test score": [shown(row["score"]).text(row["mean"], row["std"]) for row in rows],
            "ε single": outcome["epsilon_single"].map(upper),
            "ε selected": outcome["epsilon_selected"].map(upper),
        }
    )
    return Table(frame, note=NOTE, numbers=outcome)


def _outcome(group: pd.DataFrame, runs: float) -> tuple[float, float]:
    """Mean and standard deviation of the released run's test score; each seed is a procedure of its own."""
    known = list(map(score_or_worst, group["validation_score"], group["state"]))
    tests = group["test_score"].where(np.isfinite(group["test_score"]))
    group = group.assign(known=known, test=tests.fillna(tests.min()))
    first = second = 0.0
    seeds = group.groupby("seed")
    for _, candidates in seeds:
        scores = candidates.sort_values("known", kind="stable")["test"].to_numpy()
        weights = chances(len(scores), runs)
        first += float(weights @ scores) / len(seeds)
        second += float(weights @ scores**2) / len(seeds)
    return first, max(0.0, second - first**2) ** 0.5


def chances(candidates: int, runs: float) -> NDArray[np.float64]:
    """Chance that the k-th worst candidate is the best one drawn, shape [candidates].

    All of a geometric number of draws are among the k worst with probability E[(k/m)^R] = p s / (1 - (1 - p) s), where
    s = k/m and p = 1/E[R].
    """
    share, stop = np.arange(candidates + 1) / candidates, 1 / runs
    return np.diff(stop * share / (1 - (1 - stop) * share))
