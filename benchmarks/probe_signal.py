"""HyFreeDP's first probes of the loss, against the noise that they are released with, by what is trained.

    python benchmarks/probe_signal.py results/published/probe_signal

takes about ten minutes on one core and writes `probe_signal.csv` and `probe_signal.svg`. At the initial weights, with
the direction G of one private draw, it compares L+ - L- = L(theta + eta G) - L(theta - eta G), means over 200
validation records, with the noise s of one probe, at R_l = 3 L(theta), where the rule of section 4.1 takes it. The
printed rule sets eta to eta (L+ - L-) / (2 (L+ - 2 L0 + L-)). Where curvature is below its noise, the denominator is
2 sqrt(6) 0.6745 s in the median, so that eta grows if L+ - L- is above 3.3 s, and shrinks if it is below.
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import torch

import dpopt
from dpopt import training
from dpopt.optimizers.base import descend
from dpopt.results import figures
from dpopt.results.drawing import GREY, styles_of
from dpopt.runs.prepare import prepare

ETAS = [1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1]
EPSILONS = [1, 3, 8]
RECORDS = 200
THRESHOLD = 3.3


def vit(subset, **fields):
    """A ViT-Ti/16 on CIFAR-10, B = 1,000, five epochs."""
    fixed = {"name": "images", "data": "cifar10", "architecture": "vit_tiny_patch16_224.augreg_in21k_ft_in1k"}
    return {"workloads": [{**fixed, "pretrained": True, "subset": subset, "validation": 5000, **fields}], **LARGE}


LARGE = {"batch_size": 1000, "epochs": 5}
TASKS = {
    "ViT-Ti, 64 px, all": vit("full", size=64),
    "ViT-Ti, 64 px, biases and head": vit("bitfit", size=64),
    "ViT-Ti, 64 px, head": vit("head", size=64),
    "ViT-Ti, 224 px, head": vit("head"),
    "MNIST, MLP": {"workloads": ["mnist_mlp"], **LARGE},
    "digits, MLP": {"workloads": ["digits_mlp"], "batch_size": 128, "epochs": 20},
}


def measured(task, content, epsilon):
    """A row for each eta."""
    suite = {"name": "probe_signal", "optimizers": ["hyfreedp"], "epsilon": [epsilon], "seeds": [0], **content}
    (cell,) = dpopt.load_suite(suite).cells()
    ready = prepare(cell, physical_batch=250)
    optimizer, state, of = ready.optimizer, ready.state, ready.workload
    x, y = (part[:RECORDS] for part in ready.watched["validation"])

    def loss(theta, bound=float("inf")):
        predict = training.predictor(ready.engine, ready.model, theta, of.transform, of.evaluation_batch)
        return of.loss(predict(x), y).clamp(max=bound).double().mean().item()

    start = state.theta
    bound = 3 * loss(start)
    with ready.oracle.draw() as batch:
        gradient = optimizer.base.observe(state.base, batch, optimizer.clip)
        direction, _ = optimizer.base.direction(state.base, gradient)
        noise = float(batch.losses([start] * optimizer.probes, torch.tensor(bound)).std)
    for eta in ETAS:
        ahead, behind = (loss(descend(start, direction, sign * torch.tensor(eta)), bound) for sign in (1, -1))
        yield {
            "trained": task,
            "dimension": ready.engine.dimension,
            "epsilon": epsilon,
            "batch_size": cell.batch_size,
            "eta": eta,
            "signal": behind - ahead,
            "noise": noise,
            "ratio": (behind - ahead) / noise,
        }


def draw(frame):
    """A panel for each epsilon, a line for what is trained."""
    styles = styles_of(frame["trained"])
    figure, axes = plt.subplots(1, len(EPSILONS), figsize=(11, 3.6), sharey=True, layout="constrained")
    for axis, (epsilon, rows) in zip(axes, frame.groupby("epsilon"), strict=True):
        for name, lines in rows.groupby("trained", sort=False):
            shown = lines[lines["ratio"] > 0]
            label = f"{name} ({lines['dimension'].iloc[0]:,})"
            axis.plot(shown["eta"], shown["ratio"], label=label, **styles[name].line)
        axis.axhline(THRESHOLD, color=GREY, linestyle="--", linewidth=1)
        axis.axvline(1e-4, color=GREY, linestyle=":", linewidth=1)
        axis.text(1.2e-4, 2e-4, "start", color=GREY, size=8)
        axis.text(1.1e-6, THRESHOLD * 1.2, "the rule's threshold", color=GREY, size=8)
        axis.set(
            xscale="log", yscale="log", xlabel="distance η of the probes", title=f"ε = {epsilon:g}", ylim=(1e-4, 1e3)
        )
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("(L₊ − L₋) / noise of a probe")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", title="trained (parameters)")
    return figure


def main(folder):
    """Measure all tasks."""
    rows = []
    for task, content in TASKS.items():
        for epsilon in EPSILONS:
            rows += measured(task, content, epsilon)
            print(rows[-len(ETAS) + 2])
    frame = pd.DataFrame(rows)
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / "probe_signal.csv", index=False, float_format="%.6g")
    figures.save(draw(frame), folder, "probe_signal", ["svg"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
