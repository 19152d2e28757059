"""Opacus' example on MNIST at noise multiplier 0.7, by Opacus' own engine on shuffled batches.

    python benchmarks/opacus_sampling.py results/published/opacus_sampling

takes about an hour on one core, needs MNIST in `DPOPT_DATA`, and writes `opacus_sampling.csv`. When its numbers were
printed, Opacus' example shuffled its records and went through them in batches of 240. The suite `opacus_mnist` draws
Poisson samples, which its epsilon is about. Here Opacus' engine trains the network of the suite with the settings of
its row `noise_07` on shuffled batches: clipping, noise and update are Opacus' own. No epsilon of the suite covers
these runs: the numbers are for explaining a difference, and for nothing else.
"""

import sys
from pathlib import Path

import pandas as pd
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dpopt
from dpopt import registry

ROW, NOISE = "noise_07", 0.7
SEEDS = 5


def network(workload):
    """Of the workload, with plain pooling: see "Opacus and channels last" in `docs/guide/sharp_edges.md`."""
    model = workload.model()
    for name, layer in model.named_children():
        if isinstance(layer, nn.MaxPool2d):
            setattr(model, name, nn.MaxPool2d(layer.kernel_size, layer.stride))
    return model


def accuracy(cell):
    """On the test records, after the training that `cell` describes, with shuffled batches."""
    workload = registry.from_spec("workload", cell.workload)
    train, _, test = workload.splits(cell.seed)
    torch.manual_seed(cell.seed)
    model = network(workload)
    model, sgd, batches = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=cell.optimizer["lr"]),
        data_loader=DataLoader(TensorDataset(workload.transform(train.x), train.y), cell.batch_size, shuffle=True),
        noise_multiplier=NOISE,
        max_grad_norm=cell.optimizer["clip"]["bound"],
        poisson_sampling=False,
    )
    for _ in range(round(cell.epochs)):
        for x, y in batches:
            sgd.zero_grad()
            workload.loss(model(x), y).mean().backward()
            sgd.step()
    with torch.no_grad():
        return workload.metric(model(workload.transform(test.x)), test.y).mean().item()


def main(folder):
    """A row for each seed."""
    rows = []
    for cell in dpopt.load_suite("opacus_mnist", optimizers=[ROW]).cells()[:SEEDS]:
        rows.append({"seed": cell.seed, "noise": NOISE, "test_accuracy": accuracy(cell)})
        print(rows[-1], flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(folder / "opacus_sampling.csv", index=False, float_format="%.6g")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
