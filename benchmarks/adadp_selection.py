"""The outcome of private selection among the candidates that a grid has trained, and its cost.

    python benchmarks/adadp_selection.py results/published/adadp_cifar10

writes `selection.md` there, in seconds. Liu and Talwar, "Private selection from private candidates", STOC 2019: draw a
candidate at random, train it, stop with some probability, and release the best so far. The runs of a grid are one run
of every candidate, so the outcome of the procedure is a mixture of their scores with weights in closed form, and no run
has to be made again.
"""

import sys
from pathlib import Path

import numpy as np
import pandas as pd

import dpopt
from dpopt.privacy.selection import BestOf
from dpopt.results.frames import GROUP
from dpopt.results.scores import shown
from dpopt.results.tables import upper
from dpopt.results.writing import Table
from dpopt.store.runs import RESULTS, score_or_worst

RUNS = (2, 4, 16, 128, 256)
"""Expected numbers of runs: those of Koskela and Honkela 2020, Table 1."""
NOTE = (
    "Simulated from one run of each candidate and seed: a geometric number of runs with the mean given, each of a "
    "candidate drawn at random, of which the best on the validation split is released. ε of the whole procedure by "
    "Renyi divergences (Papernot and Steinke 2022), for the training records; the score is not noised, and the "
    "validation records are not covered."
)


def chances(candidates, runs):
    """Chance that the k-th worst candidate is the best one drawn, shape [candidates].

    All of a geometric number of draws are among the k worst with probability E[(k/m)^R] = p s / (1 - (1 - p) s), where
    s = k/m and p = 1/E[R].
    """
    share, stop = np.arange(candidates + 1) / candidates, 1 / runs
    return np.diff(stop * share / (1 - (1 - stop) * share))


def outcome(group, runs):
    """Mean and standard deviation of the released run's test score; each seed is a procedure of its own."""
    ranked = list(map(score_or_worst, group["validation_score"], group["state"]))
    tests = group["test_score"].where(np.isfinite(group["test_score"]))
    group = group.assign(validated=ranked, test=tests.fillna(tests.min()))
    first = second = 0.0
    seeds = group.groupby("seed")
    for _, candidates in seeds:
        scores = candidates.sort_values("validated", kind="stable")["test"].to_numpy()
        weights = chances(len(scores), runs)
        first += float(weights @ scores) / len(seeds)
        second += float(weights @ scores**2) / len(seeds)
    return first, max(0.0, second - first**2) ** 0.5


def selection(store, cells):
    """The table: a row for each grid whose runs are all done and alike, and each expected number of runs."""
    rows = []
    grids = cells[(cells["tuning"] == "grid") & ~cells["is_widened"]]
    for keys, group in grids.groupby(GROUP, sort=False, dropna=False):
        place = dict(zip(GROUP, keys, strict=True))
        ledgers = {store.ledger(run_id).to_json() for run_id in group["run_id"][group["state"].isin(RESULTS)]}
        if len(ledgers) != 1 or not group["state"].isin(RESULTS).all():
            continue  # the price is known for candidates that release alike
        ledger, delta = store.ledger(group["run_id"].iloc[0]), group["delta"].iloc[0]
        for runs in RUNS:
            rows.append(
                {
                    "workload": place["workload"],
                    "candidates": place["label"],
                    "target ε": f"{place['epsilon_target']:g}",
                    "runs (mean)": f"{runs:g}",
                    "test score": shown(group["score"].iloc[0]).text(*outcome(group, runs)),
                    "ε single": upper(BestOf("geometric", 1).epsilon(ledger, delta)),
                    "ε selected": upper(BestOf("geometric", runs).epsilon(ledger, delta)),
                }
            )
    return Table(pd.DataFrame(rows), note=NOTE)


def main(folder):
    """Write the table of a published suite."""
    results = dpopt.load_results(folder.parent, folder.name)
    (folder / "selection.md").write_text(f"{selection(results.store, results.cells).markdown}\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
