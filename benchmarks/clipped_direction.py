"""The direction of the mean of automatically clipped gradients against the loss's, along runs of noise-aware HyFreeDP.

    python benchmarks/clipped_direction.py results/published/clipped_direction

takes about five minutes on one core and writes `clipped_direction.csv` and `clipped_direction.svg`. On heads of
pretrained models and on the digits, at 40 points of a run at epsilon = 1, 3, 8: the cosine between the gradient of the
mean loss over all training records and the mean of their gradients as AUTO-S clips them (R = 1, gamma = 0.01). Both
are computed without noise, for diagnosis only. Where the cosine is negative, every step along the mean of clipped
gradients is uphill, however short it is.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import dpopt
from dpopt import training
from dpopt.results import figures
from dpopt.results.drawing import GREY, styles_of
from dpopt.runs.prepare import prepare

EPSILONS = [1, 3, 8]
POINTS = 40
RECORDS = 4096
TASKS = {
    "digits": ("hyfreedp_starts", {}),
    "CIFAR-10": ("hyfreedp_starts_heads", {"data": "cifar10"}),
    "CIFAR-100 subset": ("hyfreedp_starts_heads", {"data": "cifar100_subset"}),
    "20 newsgroups": ("hyfreedp_starts_heads", {"name": "newsgroups_minilm"}),
    "SST-2": ("hyfreedp_starts_heads", {"name": "sst2_minilm"}),
}
"""A suite, and what its workload says where the suite has several."""


def directions(ready, train, theta):
    """The mean loss's gradient, and the mean of clipped gradients, over the records `train`; each of shape [d]."""
    gradient, clipped = torch.zeros_like(theta), torch.zeros_like(theta)
    for x, y in zip(train.x.split(RECORDS), train.y.split(RECORDS), strict=True):
        examples = ready.engine.per_example([(1.0, theta)], ready.workload.transform(x), y)
        gradient += examples.weighted_sum(torch.ones_like(examples.norms))
        clipped += examples.weighted_sum(ready.optimizer.clip.factor(examples.norms))
    return gradient / len(train.x), clipped / len(train.x)


def measured(suite, workload, epsilon):
    """A row for each point of the run from 1e-4."""
    suite = dpopt.load_suite(suite, optimizers=["noise_aware_1e-4"], epsilon=[epsilon], seeds=[0])
    (cell,) = (cell for cell in suite.cells() if workload.items() <= cell.workload.items())
    ready = prepare(cell)
    train = ready.workload.splits(cell.seed).train
    for state, is_mark in training.steps(ready.stepper, ready.oracle, ready.state, POINTS):
        if not is_mark:
            continue
        gradient, clipped = directions(ready, train, state.theta)
        yield {
            "epsilon": epsilon,
            "fraction": ready.oracle.draws_taken / ready.oracle.draws_total,
            "eta": float(state.eta),
            "gradient_norm": float(gradient.norm()),
            "clipped_norm": float(clipped.norm()),
            "cosine": float(torch.cosine_similarity(gradient, clipped, dim=0)),
        } | {key: value for key, value in ready.observe(state).items() if key.startswith("validation_")}


def draw(frame):
    """A panel for each epsilon, a line for each task."""
    styles = styles_of(frame["task"])
    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(11, 3.4), sharey=True, layout="constrained")
    for axis, (epsilon, rows) in zip(axes, frame.groupby("epsilon"), strict=True):
        for name, lines in rows.groupby("task", sort=False):
            axis.plot(lines["fraction"], lines["cosine"], label=name, **styles[name].line)
        axis.axhline(0, color=GREY, linewidth=1)
        axis.set(xlabel="fraction of the draws", title=f"ε = {epsilon:g}", ylim=(-1, 1))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("cosine of the clipped mean\nand the loss's gradient")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def main(folder):
    """Measure all tasks."""
    runs = ((task, *of, epsilon) for task, of in TASKS.items() for epsilon in EPSILONS)
    frame = pd.DataFrame({"task": task} | row for task, *of in runs for row in measured(*of))
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "clipped_direction.csv", index=False, float_format="%.6g")
    figures.save(draw(frame), folder, "clipped_direction", ["svg"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
