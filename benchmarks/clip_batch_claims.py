"""Three questions about C and B that the suite `clip_batch_sweep` answers without any further run.

    python benchmarks/clip_batch_claims.py results/published/clip_batch_sweep

writes `claims.md` there, in minutes, most of which checks every epsilon: who loses by a C that is too small or too
large, the cost of a C, B and learning rate that are not searched together, and gradient norms and the best bound C* at
one C and B. The claims are those of "On optimal hyperparameters for differentially private deep transfer learning"
(arXiv 2510.20616). Of each seed everything is chosen by its own validation records, and differences are paired by seed.
"""

import math
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

import dpopt
from dpopt import markup
from dpopt.results import hard_classes, statistics
from dpopt.results.naming import titles
from dpopt.results.writing import Table
from dpopt.study.batch_size import Noise, best_batch

PLACE = ["workload", "epsilon_target", "epochs", "seed"]
SETTING = ["batch_size", "clip"]
FIXED = (2048, 1.0)
"""The pair (B, C) with which docs/guide/hyperparameters.md says to begin."""
LATE = 3 / 4
"""Norms are those of the last quarter of a run."""
CLASSES_NOTE = (
    "Points of test accuracy, C against C = 0.1, mean over ε and epochs, with 95 % intervals over seeds; at each C the "
    "B and η that validate best. Classes are ranked by the runs of AUTO-S, which are not compared. Intervals are not "
    "corrected for their number."
)
LOST_NOTE = (
    "Points of test accuracy lost, mean over ε and epochs, with 95 % intervals over seeds; worst: of all workloads, ε "
    "and numbers of epochs, mean over seeds. The first rows lose against a search of C, B and η, and search η "
    "themselves; the last ones lose against η searched again at the same C and B. No search is in ε."
)
NORMS_NOTE = (
    "C = 1, B = 2048, 10 epochs, each ε with its best η; last quarter of training, geometric mean over seeds. The last "
    "column has the 95 % interval over seeds."
)


def interval(by_seed, digits=1):
    """The mean of differences by seed, with the interval over seeds."""
    mean, low, high, _ = statistics.difference(by_seed.to_numpy())
    return f"{mean:+z.{digits}f} [{low:+z.{digits}f}, {high:+z.{digits}f}]".replace("-", "−")


def of_classes(scores):
    """A row for each workload and larger C: the change for the hardest fifth of the classes, all and the easiest."""
    changes = hard_classes.changes(scores)
    changes = changes[changes["clip"] > changes["reference"]]
    ends = (100 * changes[["mean", "low", "high"]]).round(1) + 0.0  # no "-0.0"
    changes["text"] = [f"{mean:+} [{low:+}, {high:+}]".replace("-", "−") for mean, low, high in ends.to_numpy()]
    table = changes.pivot(index=["workload", "clip"], columns="group", values="text")[list(hard_classes.GROUPS)]
    return table.reset_index().assign(clip=lambda rows: rows["clip"].map("{:g}".format)).rename(columns={"clip": "C"})


def by_setting(runs, column):
    """A column of `Results.every`, a row for each workload, epsilon, number of epochs and seed, a column for (B, C)."""
    return runs.pivot(index=PLACE, columns=SETTING, values=column)


def picked(table, settings):
    """The entry of each row of a table by settings at the row's own setting."""
    return pd.Series([table.at[row, setting] for row, setting in settings.items()], settings.index)


def by_rules(runs):
    """The setting on the grid that the study's rules name for each row of `by_setting`, from public numbers alone.

    B: the smallest in the plateau of cumulative noise, of those that leave 20 steps. C: from 1 half a decade up for
    each of a small epsilon, few epochs, a weak model and hard data, and half a decade down for each opposite that the
    suite has; as the grid is coarser, the nearest C, of two that are as near the smaller.
    """
    clips, chosen = np.sort(runs["clip"].unique()), {}
    for place, of in runs.groupby(PLACE):
        rows = of.groupby("batch_size")[["draws", "noise_gradient"]].mean().itertuples()
        size = best_batch([Noise(int(size), int(draws), noise) for size, draws, noise in rows]).batch_size
        workload, epsilon, epochs, _ = place
        signs = (epsilon <= 1) - (epsilon >= 8) + (epochs <= 5)
        signs += (1 if "size 64" in workload else -1) + (1 if "CIFAR-100" in workload else -1)
        chosen[place] = size, float(clips[np.abs(np.log10(clips) - signs / 2).round(6).argmin()])
    return pd.Series(chosen).rename_axis(PLACE)


def from_elsewhere(lost, best, key):
    """Mean loss of each row with the settings that are best in the rows that differ from it in `key` alone."""
    rest = [name for name in PLACE if name != key]
    losses = {}
    for _, alike in best.reset_index().groupby(rest, sort=False):
        settings = dict(zip(map(tuple, alike[PLACE].to_numpy()), alike[0], strict=True))
        for row in settings:
            losses[row] = np.mean([lost.at[row, setting] for other, setting in settings.items() if other != row])
    return pd.Series(losses).rename_axis(PLACE)


def kept_rate(cells, runs, to):
    """The loss of the learning rate that is best at the fixed pair, kept at the setting `to`."""
    place = [*PLACE, *SETTING, "lr"]
    tests = cells.drop_duplicates(place).set_index(place)["test_score"]
    rates, again = by_setting(runs, "lr"), by_setting(runs, "test_score")
    return pd.Series(
        {row: again.at[row, to] - tests.get((*row, *to, rates.at[row, FIXED]), math.nan) for row in rates.index}
    ).rename_axis(PLACE)


def losses(cells, runs):
    """Name -> the share of test records lost, by workload, epsilon, epochs and seed, of runs whose C is varied."""
    tests, best = by_setting(runs, "test_score"), by_setting(runs, "selected_by").idxmax(axis="columns")
    lost = tests.rsub(picked(tests, best), axis="index")
    size, clip = FIXED
    searched = {
        "C searched, B = 2048": by_setting(runs[runs["batch_size"] == size], "selected_by").idxmax(axis="columns"),
        "B searched, C = 1": by_setting(runs[runs["clip"] == clip], "selected_by").idxmax(axis="columns"),
        "C and B by the study's rules": by_rules(runs),
    }
    table = {"C = 1, B = 2048": lost[FIXED]} | {name: picked(lost, of) for name, of in searched.items()}
    table |= {
        "C and B of the search at another ε": from_elsewhere(lost, best, "epsilon_target"),
        "C and B of the search on another workload": from_elsewhere(lost, best, "workload"),
    }
    moves = [*product((128, 512, 8192), [clip]), *product([size], (0.1, 5.0, 20.0))]
    return table | {
        f"η of C = 1, B = 2048 kept at C = {C:g}, B = {B}": kept_rate(cells, runs, (B, C)) for B, C in moves
    }


def of_losses(losses):
    """A row for each choice that is not searched, a column for each workload."""
    rows = []
    for name, by_run in losses.items():
        row = {"choice": name}
        for workload, of in by_run.groupby("workload"):
            row[workload] = interval(100 * of.groupby("seed").mean())
        rows.append(row | {"worst": f"{100 * by_run.groupby(PLACE[:-1]).mean().max():.1f}"})
    return pd.DataFrame(rows)


def elsewhere(runs):
    """The pair (B, C) that validates best on the other workloads, for each workload."""
    scores = by_setting(runs, "selected_by").groupby(PLACE[:-1]).mean()
    behind = scores.sub(scores.max(axis="columns"), axis="index")
    return {name: behind.drop(name, level="workload").mean().idxmax() for name in scores.index.unique("workload")}


def late(diagnostics):
    """Median norm and best bound C* of each run, in the last quarter."""
    place = [*PLACE, *SETTING]
    ends = diagnostics.groupby(place)["epoch"].transform("max")
    return diagnostics[diagnostics["epoch"] >= LATE * ends].groupby(place)[["q50", "best_clip"]].mean()


def of_norms(norms):
    """A row for each workload at the fixed pair: norms and C* at each epsilon, and how many times C* grows."""
    rows, here = [], norms.xs(FIXED, level=SETTING).reset_index()
    for workload, of in here[here["epochs"] == here["epochs"].max()].groupby("workload"):
        row = {"workload": workload}
        for key, name in (("q50", "median norm"), ("best_clip", "C*")):
            logs = np.log(of.pivot(index="seed", columns="epsilon_target", values=key))
            row |= {f"{name}, ε = {target:g}": f"{math.exp(logs[target].mean()):.2g}" for target in logs}
            if key == "best_clip":
                ratio = np.exp(statistics.difference((logs.iloc[:, -1] - logs.iloc[:, 0]).to_numpy())[:3])
                row["C*, largest ε / smallest"] = "{:.1f} [{:.1f}, {:.1f}]".format(*ratio)
        rows.append(row)
    return pd.DataFrame(rows)


def counted(norms):
    """In how many settings norms are larger, and C* smaller, at the smallest epsilon than at the largest."""
    means = norms.groupby([key for key in norms.index.names if key != "seed"]).mean().unstack("epsilon_target")
    norm, best = means["q50"], means["best_clip"]
    ratios = best.iloc[:, -1] / best.iloc[:, 0]
    return (
        f"Of {len(means)} combinations of workload, epochs, B and C, {(norm.iloc[:, 0] > norm.iloc[:, -1]).sum()} have "
        f"a larger median norm at the smallest ε than at the largest, and {(ratios > 1).sum()} have a smaller C*, by a "
        f"factor of {ratios.min():.1f} to {ratios.max():.0f}."
    )


def text(cells, every, diagnostics, scores):
    """All tables, in Markdown, of the frames of `Results`."""
    cells, runs, diagnostics = (frame[frame["label"] == "dp_adam"] for frame in (cells, every, diagnostics))
    norms, pairs = late(diagnostics), [*elsewhere(runs).values()]
    chosen = (
        f"C = 1, B = 2048 validates best on the other workloads for {pairs.count(FIXED)} of {len(pairs)} workloads."
    )
    tables = (
        Table(of_classes(scores), "Hard and easy classes", CLASSES_NOTE),
        Table(of_losses(losses(cells, runs)), "C, B and η that are not searched together", f"{LOST_NOTE} {chosen}"),
        Table(of_norms(norms), "Norms and the best bound C* at one C and B", f"{NORMS_NOTE} {counted(norms)}"),
    )
    return "\n\n".join(f"**{markup.MARKDOWN.escape(table.title)}**\n\n{table.markdown}" for table in tables)


def main(folder):
    """Write the tables of a published suite."""
    results = dpopt.load_results(folder.parent, folder.name)
    specs = [entry["cell"]["workload"] for entry in results.store.manifest(results.suite)["cells"]]
    (names,) = titles([specs])
    frames = (results.cells, results.every, results.diagnostics, results.class_scores)
    named = (frame.assign(workload=frame["workload"].map(names)) for frame in frames)
    (folder / "claims.md").write_text(f"{text(*named)}\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
