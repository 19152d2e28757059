"""The change of hard and easy classes' accuracy with the clipping bound C."""

from __future__ import annotations

import pandas as pd

from dpopt.results import statistics
from dpopt.results.drawing import sweeps

GROUPS = HARDEST, ALL, EASIEST = "hardest fifth", "all classes", "easiest fifth"
_CONDITION = ["seed", "epsilon_target", "epochs"]


def groups(scores: pd.DataFrame) -> dict[str, list[int]]:
    """The classes of each group, ranked by their mean accuracy over all rows of a workload's `Results.class_scores`."""
    ranked = scores.groupby("label_of_class")["accuracy"].mean().sort_values(kind="stable").index.tolist()
    fifth = max(1, len(ranked) // 5)
    return {HARDEST: ranked[:fifth], ALL: ranked, EASIEST: ranked[-fifth:]}


def changes(scores: pd.DataFrame) -> pd.DataFrame:
    """The test accuracy of groups of classes at each C, less that at the smallest C, of `Results.class_scores`.

    At each C a seed has the B and learning rate that validate best on its own records. What is compared are the methods
    whose C the suite varies; the others rank the classes, so that no cell takes part in both.

    Returns:
        One row for each workload, label, `group` and `clip`: `mean` over seeds of the mean over epsilon and epochs,
        `low` and `high` (95 % interval over seeds), `seeds`, and `reference`, the smallest C; `left_out`, the number of
        combinations of seed, epsilon and epochs where a run at some C has no scores of classes. Empty without methods
        of both kinds.
    """
    if scores.empty:
        return scores
    compared, rows = sweeps(scores), []
    rankers = scores.drop(compared.index)
    for (workload, label), runs in compared.groupby(["workload", "label"], sort=False):
        ranking = rankers[rankers["workload"] == workload]
        if ranking.empty:
            continue
        each = runs.drop_duplicates("run_id").sort_values("batch_size", kind="stable")
        best = each.loc[each.groupby([*_CONDITION, "clip"])["selected_by"].idxmax(), "run_id"]
        of_classes = runs[runs["run_id"].isin(best)].pivot(
            index=[*_CONDITION, "clip"], columns="label_of_class", values="accuracy"
        )
        for group, classes in groups(ranking).items():
            every = of_classes[classes].mean(axis="columns").unstack("clip")
            by_clip = every.dropna()
            by_seed = by_clip.sub(by_clip[by_clip.columns.min()], axis="index").groupby("seed").mean()
            for clip in by_seed if len(by_seed) else ():
                numbers = statistics.difference(by_seed[clip].to_numpy())._asdict()
                place = {"workload": workload, "label": label, "group": group, "clip": clip}
                counts = {"seeds": len(by_seed), "left_out": len(every) - len(by_clip)}
                rows.append(place | numbers | counts | {"reference": by_clip.columns.min()})
    return pd.DataFrame(rows)
