"""One reason why the trial of `hyfreedp_search_then_decay` ends at another learning rate from another start.

    python benchmarks/trial_path.py results/published/trial_path

takes about half an hour on one core beside the features, and writes `trial_path.csv` and `trial_path.svg`. Until
curvature shows, the trial takes every gradient at the start, and from a smaller `lr` curvature shows later. Here the
trial starts at 1e-2 and takes the gradients of its first HELD draws at the start, whatever it sees, at epsilon = 8 with
five seeds. Beside it, from four starts, the trial as it is and one that begins its path anew when curvature first
shows. The rows hold eta at the trial's end and, where no draw is held, the validation accuracy of the training after
it. Test records are not looked at.
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

STARTS = [1e-8, 1e-6, 1e-4, 1e-2]
HELD = range(11)
SEEDS = range(5)
VIT = {
    "name": "images",
    "architecture": "vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "pretrained": True,
    "subset": "head",
}
TASKS = {
    "GTSRB": {"workloads": [VIT | {"data": "gtsrb_32", "size": 112, "validation": 4000}], "epochs": 10},
    "Fashion-MNIST": {"workloads": ["fashion_mnist_scatter"], "epochs": 5},
    "CIFAR-100 subset": {"workloads": [VIT | {"data": "cifar100_subset", "validation": 1000}], "epochs": 10},
    "CIFAR-10": {"workloads": ["cifar10_adadp"], "epochs": 5},
    "digits": {"workloads": ["digits_mlp"], "batch_size": 128, "epochs": 20},
}


class AtStart(HyFreeDPSearchThenDecay):
    """The same trial, with its gradients all taken at the start."""

    def _viewpoint(self, state):
        return state.start


class Anew(HyFreeDPSearchThenDecay):
    """A trial that goes back to the start when curvature first shows."""

    def _tried(self, state, batch, size):
        after = super()._tried(state, batch, size)
        if state.rounds > 0 or after.rounds == 0:
            return after
        return after._replace(theta=after.start, base=after.base._replace(theta=after.start))


def trial(task, content, start, held, is_anew, seed):
    """A row: when curvature shows, eta at the trial's end, and what training ends at."""
    settings = {"hyfreedp_search_then_decay": {"fields": {"lr": start}}}
    suite = {"name": "trial_path", "optimizers": [*settings], "settings": settings, "batch_size": 1000}
    (cell,) = dpopt.load_suite(suite | {"epsilon": [8], "seeds": [seed]} | content).cells()
    ready = prepare(cell)
    state, usual, at_start, shows = ready.state, Anew(lr=start) if is_anew else ready.optimizer, AtStart(lr=start), None
    for draw in range(usual.rounds):
        state = (at_start if draw < held else usual).step(state, ready.oracle)
        if shows is None and state.rounds > 0:
            shows = draw + 1
    row = {"task": task, "start": start, "held": held, "anew": is_anew, "seed": seed, "shows": shows}
    row["eta"] = float(state.eta)
    if not held:
        *_, (final, _) = training.steps(usual, ready.oracle, state)
        row["validation_accuracy"] = ready.observe(final)["validation_accuracy"]
    return row


def draw(frame):
    """Eta by the start, of the trial as it is and of one that begins anew; by the number of held draws, from 1e-2."""
    styles, is_held = styles_of(frame["task"]), (frame["start"] == max(STARTS)) & ~frame["anew"]
    panels = {
        "as it is": ("start", frame[(frame["held"] == 0) & ~frame["anew"]]),
        "path begun anew": ("start", frame[frame["anew"]]),
        "first draws held, from 10⁻²": ("held", frame[is_held]),
    }
    figure, axes = plt.subplots(1, 3, figsize=(11.5, 3.6), sharey=True, layout="constrained")
    for axis, (title, (key, rows)) in zip(axes, panels.items(), strict=True):
        for name, own in rows.groupby("task", sort=False):
            eta = own.groupby(key)["eta"]
            middle = eta.median()
            axis.plot(middle.index, middle, label=name, **styles[name].line)
            axis.fill_between(middle.index, eta.min(), eta.max(), color=styles[name].colour, alpha=0.15, lw=0)
        axis.set(yscale="log", title=title, xlabel="draws held at the start" if key == "held" else "start")
        axis.set_xscale("linear" if key == "held" else "log")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("η at the trial's end")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center")
    return figure


def main(folder):
    """Measure all tasks."""
    places = [(start, 0, is_anew) for is_anew in (False, True) for start in STARTS]
    places += [(max(STARTS), held, False) for held in HELD if held]
    rows = [trial(task, content, *place, seed) for task, content in TASKS.items() for place in places for seed in SEEDS]
    frame = pd.DataFrame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "trial_path.csv", index=False, float_format="%.6g")
    figures.save(draw(frame), folder, "trial_path", ["svg"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
