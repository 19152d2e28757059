"""One reason why the trial of `hyfreedp_search_then_decay` ends at another learning rate where it begins at another.

    python benchmarks/trial_path.py results/published/trial_path

takes about forty minutes on one core beside the features, and writes `trial_path.csv` and `trial_path.svg`. Until
curvature shows, the trial takes every gradient at the initial parameters. Where it begins at a smaller eta, curvature
shows later. Here a trial that begins at 1e-2 takes the gradients of its first HELD draws at the initial parameters,
whatever it sees. Beside it, beginning at four eta, are the trial as it is and two that go back to the initial
parameters when curvature first shows: one keeps all else, the other keeps eta alone. The cells are those of the suites `hyfreedp_starts*` at epsilon = 8, five seeds.
The rows hold eta at the trial's end and, where no draw is held, the validation accuracy of the training after it. Test
records are not looked at.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd

import dpopt
from dpopt import training
from dpopt.analysis import figures
from dpopt.analysis.drawing import styles_of
from dpopt.harness.cell import prepare
from dpopt.optimizers.hyfreedp_search_then_decay import HyFreeDPSearchThenDecay

HELD = range(1, 11)
TASKS = {
    "GTSRB": ("hyfreedp_starts_heads", {"data": "gtsrb_32"}),
    "Fashion-MNIST": ("hyfreedp_starts_mnist", {"data": "fashion_mnist"}),
    "CIFAR-100 subset": ("hyfreedp_starts_heads", {"data": "cifar100_subset"}),
    "CIFAR-10 (ADADP)": ("hyfreedp_starts_cifar10", {}),
    "digits": ("hyfreedp_starts", {}),
}
"""A suite, and what its workload says where the suite has several."""


class AtStart(HyFreeDPSearchThenDecay):
    """The same trial, with its gradients all taken at the initial parameters."""

    def _viewpoint(self, state):
        return state.start


class PathAnew(HyFreeDPSearchThenDecay):
    """A trial that goes back to the initial parameters when curvature first shows."""

    def step(self, state, oracle):
        draws = oracle.draws_total - oracle.draws_left + 1
        after = super().step(state, oracle)
        return self._anew(after, draws) if state.rounds == 0 and after.rounds > 0 else after

    def _anew(self, after, draws):
        return after._replace(theta=after.start, base=after.base._replace(theta=after.start))


class AllAnew(PathAnew):
    """A trial that begins again when curvature first shows, with eta times the number of draws that led there."""

    def _anew(self, after, draws):
        return after._replace(theta=after.start, base=self.base.init(after.start), eta=after.eta * draws)


TRIALS = {"as it is": HyFreeDPSearchThenDecay, "path begun anew": PathAnew, "all begun anew": AllAnew}


def cells(suite, workload):
    """The suite's cells of the trial at epsilon = 8, of one workload."""
    for cell in dpopt.load_suite(suite, epsilon=[8]).cells():
        if cell.optimizer["name"] == "hyfreedp_search_then_decay" and workload.items() <= cell.workload.items():
            yield cell


def trial(cell, held=0, kind="as it is"):
    """A row: when curvature shows, eta at the trial's end, and what training ends at."""
    ready, lr, shows = prepare(cell), cell.optimizer["lr"], None
    usual, at_start = TRIALS[kind](lr=lr), AtStart(lr=lr)
    state = ready.state
    for draw in range(usual.rounds):
        state = (at_start if draw < held else usual).step(state, ready.oracle)
        if shows is None and state.rounds > 0:
            shows = draw + 1
    row = {"start": lr, "held": held, "trial": kind, "seed": cell.seed, "shows": shows, "eta": float(state.eta)}
    if held:
        return row
    for final, _ in training.steps(usual, ready.oracle, state):
        state = final
    return row | {"validation_accuracy": ready.observe(state)["validation_accuracy"]}


def trials(suite, workload):
    """All rows of a task: each cell by each trial, then those whose eta begins largest with draws held."""
    found = list(cells(suite, workload))
    largest = max(cell.optimizer["lr"] for cell in found)
    for kind in TRIALS:
        yield from (trial(cell, kind=kind) for cell in found)
    for held in HELD:
        yield from (trial(cell, held) for cell in found if cell.optimizer["lr"] == largest)


def draw(frame):
    """Eta by where it begins, of each trial; by the number of held draws, from 1e-2."""
    styles, is_usual = styles_of(frame["task"]), frame["trial"] == "as it is"
    panels = {kind: ("start", frame[(frame["trial"] == kind) & (frame["held"] == 0)]) for kind in TRIALS}
    panels["first draws held"] = ("held", frame[is_usual & (frame["start"] == frame["start"].max())])
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 3.6), sharey=True, layout="constrained")
    for axis, (title, (key, rows)) in zip(axes, panels.items(), strict=True):
        for name, own in rows.groupby("task", sort=False):
            eta = own.groupby(key)["eta"]
            middle = eta.median()
            axis.plot(middle.index, middle, label=name, **styles[name].line)
            axis.fill_between(middle.index, eta.min(), eta.max(), color=styles[name].colour, alpha=0.15, lw=0)
        axis.set(yscale="log", title=title)
        axis.grid(alpha=0.3)
    for axis in axes[:-1]:
        axis.set(xscale="log", xlabel="η at the beginning")
    axes[-1].set_xlabel("draws held, η = 10⁻² at the beginning")
    axes[0].set_ylabel("η at the trial's end")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def main(folder):
    """Measure all tasks."""
    frame = pd.DataFrame({"task": task} | row for task, of in TASKS.items() for row in trials(*of))
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "trial_path.csv", index=False, float_format="%.6g")
    figures.save(draw(frame), folder, "trial_path", ["svg"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
