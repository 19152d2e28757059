"""Why the trial of `hyfreedp_search_then_decay` begins anew where curvature shows.

    python benchmarks/trial_path.py results/published/trial_path

takes a quarter of an hour on one core beside the features, and writes `trial_path.csv` and `trial_path.svg`. Until
curvature shows, the trial takes every gradient at the initial parameters, and where it begins at a smaller eta,
curvature shows later. Both begin at four eta: the rule, and one that keeps these draws in its path. The cells
are those of the suites `hyfreedp_starts*` at epsilon = 8, five seeds. The rows hold eta of the training after the trial
and its validation accuracy. Test records are not looked at.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import dpopt
from dpopt import training
from dpopt.optimizers.hyfreedp_search_then_decay import HyFreeDPSearchThenDecay
from dpopt.results import figures
from dpopt.results.drawing import styles_of
from dpopt.runs.prepare import prepare

TASKS = {
    "GTSRB": ("hyfreedp_starts_heads", {"data": "gtsrb_32"}),
    "Fashion-MNIST": ("hyfreedp_starts_mnist", {"data": "fashion_mnist"}),
    "CIFAR-100 subset": ("hyfreedp_starts_heads", {"data": "cifar100_subset"}),
    "digits": ("hyfreedp_starts", {}),
}
"""A suite, and what its workload says where the suite has several."""


class PathKept(HyFreeDPSearchThenDecay):
    """The same trial, with all of its draws in one path."""

    def _continued(self, state, draws, is_found):
        return state


TRIALS = {"begins anew": HyFreeDPSearchThenDecay, "path kept": PathKept}


def cells(suite, workload):
    """The suite's cells of the trial at epsilon = 8, of one workload."""
    for cell in dpopt.load_suite(suite, epsilon=[8]).cells():
        if cell.optimizer["name"] == "hyfreedp_search_then_decay" and workload.items() <= cell.workload.items():
            yield cell


def trained(cell, trial):
    """A row: in which draw curvature shows, eta of the training after the trial, and what that ends at."""
    ready, lr = prepare(cell), cell.optimizer["lr"]
    shows = state = None
    for draw, (state, _) in enumerate(training.steps(TRIALS[trial](lr=lr), ready.oracle, ready.state), start=1):
        if shows is None and state.rounds > 0:
            shows = draw
    row = {"start": lr, "trial": trial, "seed": cell.seed, "shows": shows, "eta": float(state.eta)}
    return row | {"validation_accuracy": ready.observe(state)["validation_accuracy"]}


def draw(frame):
    """Eta by where it begins, of either trial."""
    styles = styles_of(frame["task"])
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    for axis, trial in zip(axes, TRIALS, strict=True):
        for name, lines in frame[frame["trial"] == trial].groupby("task", sort=False):
            eta = lines.groupby("start")["eta"]
            middle = eta.median()
            axis.plot(middle.index, middle, label=name, **styles[name].line)
            axis.fill_between(middle.index, eta.min(), eta.max(), color=styles[name].colour, alpha=0.15, lw=0)
        axis.set(xscale="log", yscale="log", title=trial, xlabel="η at the beginning")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("η of the training after the trial")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def main(folder):
    """Measure all tasks."""
    runs = ((task, cell, trial) for task, of in TASKS.items() for trial in TRIALS for cell in cells(*of))
    frame = pd.DataFrame({"task": task} | trained(cell, trial) for task, cell, trial in runs)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "trial_path.csv", index=False, float_format="%.6g")
    figures.save(draw(frame), folder, "trial_path", ["svg"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
