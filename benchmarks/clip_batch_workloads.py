"""What a step away from the best C and B costs each method, on the workloads of several published suites.

    python benchmarks/clip_batch_workloads.py results/published/clip_batch_methods{,_cifar10,_cifar100,_mnist}

writes `workloads.md` into the first folder, in a minute: the middle block of the figure `clip_batch_answer` of all
suites, at the smallest and the largest epsilon that all of them have.
"""

import sys
from pathlib import Path

import pandas as pd

import dpopt
from dpopt.results import clip_batch
from dpopt.results.naming import titles


def effects(suites):
    """`Results.effects` of all suites, one below the other, their workloads named alike."""
    specs = [[entry["cell"]["workload"] for entry in each.store.manifest(each.suite)["cells"]] for each in suites]
    pairs = zip((each.effects for each in suites), titles(specs), strict=True)
    return pd.concat([frame.assign(workload=frame["workload"].map(names)) for frame, names in pairs], ignore_index=True)


def main(*folders):
    """Write the table of published suites."""
    frame = effects([dpopt.load_results(folder.parent, folder.name) for folder in folders])
    shared = set.intersection(*(set(rows) for _, rows in frame.groupby("workload")["epsilon_target"]))
    table = clip_batch.across(frame, {min(shared), max(shared)})
    (folders[0] / "workloads.md").write_text(f"{table.markdown}\n", "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
