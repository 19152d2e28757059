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
from dpopt.results.tables import number
from dpopt.results.writing import Table

NOTE = (
    "Points of test accuracy (any other score as it is) that are lost one step of the grid away from the C and B that "
    "validate best, mean of the neighbours and over seeds, with the half-width of the 95 % interval (Student's, paired "
    "by seed, not corrected for the number of entries); bold where the interval leaves out 0. Italics: the method is "
    f"more than {clip_batch.BEHIND:g} points behind the best one of the workload, so that what it loses says little."
)


def effects(suites):
    """`Results.effects` of all suites, one below the other, with names that people read."""
    specs = [[entry["cell"]["workload"] for entry in each.store.manifest(each.suite)["cells"]] for each in suites]
    frames = [
        each.effects.assign(workload=each.effects["workload"].map(names), label=each.effects["label"].map(each.names))
        for each, names in zip(suites, titles(specs), strict=True)
    ]
    return pd.concat(frames, ignore_index=True)


def across(effects, targets):
    """The cost of a step away in C and in B: a row for each method, a column for each workload and target epsilon."""
    lost = effects[(effects["effect"] == clip_batch.LOST) & effects["epsilon_target"].isin(targets)]
    lost = lost.sort_values("part", key=lambda parts: parts.map(clip_batch.PARTS.index), kind="stable")
    rows, bold, italic = [], set(), set()
    for (part, label), cells in lost.groupby(["part", "label"], sort=False):
        row = {"step in": part, "optimizer": label}
        for cell in cells.to_dict("records"):
            name = f"{cell['workload']}, {cell['epochs']:g} epochs, ε = {number(cell['epsilon_target'])}"
            row[name], is_shown = clip_batch.entry(cell)
            bold |= {(len(rows), name)} if is_shown else set()
            italic |= {(len(rows), name)} if cell["is_failing"] else set()
        rows.append(row)
    title = "What a step away in C and in B costs"
    return Table(pd.DataFrame(rows).fillna(""), title, NOTE, bold=bold, italic=italic, numbers=lost)


def main(*folders):
    """Write the table of published suites."""
    frame = effects([dpopt.load_results(folder.parent, folder.name) for folder in folders])
    shared = set.intersection(*(set(rows) for _, rows in frame.groupby("workload")["epsilon_target"]))
    table = across(frame, {min(shared), max(shared)})
    (folders[0] / "workloads.md").write_text(f"{table.markdown}\n", "utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
