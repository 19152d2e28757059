"""Cells per hour: `dpopt run` against a plain Opacus training loop that trains the same cells.

    python benchmarks/speed/cells_per_hour.py quickstart optimizers=[dp_sgd,dp_adam] seeds=[0]
    python benchmarks/speed/cells_per_hour.py mnist_five_epochs optimizers=[dp_adam] seeds=[0,1] epochs=1  # DPOPT_DATA
    python benchmarks/speed/cells_per_hour.py quickstart optimizers=[dp_adam] epsilon=3 rounds=1

The plain loop is what Opacus' tutorials show: a DataLoader, `make_private_with_epsilon`, one model after the other, one
evaluation at the end. It has all cores for one model, or (`processes`) one core for each of as many models. `dpopt run`
does more in the same time: 40 evaluations of a curve, a checkpoint, ledger and record of each cell, and epsilon by the
tighter accountant. Contenders start cold and take turns; the ratios are of one run, and of that machine.
"""

import os
import subprocess
import sys
import tempfile
import time
import warnings
from multiprocessing import get_context
from statistics import median

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, TensorDataset

from dpopt import registry, training
from dpopt.harness.plan import plan
from dpopt.harness.suite import load_suite

TORCH = {"dp_sgd": torch.optim.SGD, "dp_adam": torch.optim.Adam}


def cells(suite: str, overrides: list[str]):
    """The distinct cells of a suite."""
    return list({entry.cell.run_id: entry.cell for entry in plan(load_suite(suite, overrides))}.values())


def plain(cell) -> float:
    """Train a cell as Opacus' tutorials do; returns the test accuracy."""
    warnings.simplefilter("ignore")
    torch.manual_seed(cell.seed)
    workload = registry.from_spec("workload", cell.workload)
    splits = workload.splits(cell.seed)
    model = workload.model()
    loader = DataLoader(TensorDataset(splits.train.x, splits.train.y), cell.batch_size)
    draws = training.number_of_draws(cell.epochs, cell.batch_size, len(splits.train.x))
    model, optimizer, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=TORCH[cell.optimizer["name"]](model.parameters(), lr=cell.optimizer["lr"]),
        data_loader=loader,
        epochs=max(1, round(draws / len(loader))),
        target_epsilon=cell.epsilon,
        target_delta=cell.delta,
        max_grad_norm=cell.optimizer["clip"]["bound"],
    )
    left = draws
    while left:
        for x, y in loader:
            optimizer.zero_grad()
            workload.loss(model(workload.transform(x)), y).mean().backward()
            optimizer.step()
            left -= 1
            if not left:
                break
    model.eval()
    with torch.no_grad():
        right = model(workload.transform(splits.test.x)).argmax(dim=1) == splits.test.y
    return float(right.float().mean())


def _alone(cell) -> float:
    torch.set_num_threads(1)
    return plain(cell)


def main(suite: str, overrides: list[str], rounds: int) -> None:
    """Time all contenders in turn and print medians and ratios."""
    chosen = cells(suite, overrides)
    if unknown := {cell.optimizer["name"] for cell in chosen} - TORCH.keys():
        sys.exit(f"Opacus has no {', '.join(sorted(unknown))}: choose among {', '.join(TORCH)}")
    words = [sys.executable, __file__, suite, *overrides]
    run = [sys.executable, "-m", "dpopt", "run", f"suite={suite}", *overrides]
    contenders = {
        "Opacus, one model at a time": lambda folder: [*words, "--plain", "1"],
        "Opacus, one process a core": lambda folder: [*words, "--plain", str(len(os.sched_getaffinity(0)))],
        "dpopt run": lambda folder: [*run, f"results={folder}"],
        "dpopt run lot=16": lambda folder: [*run, f"results={folder}", "lot=16"],
    }
    seconds = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, command in contenders.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.perf_counter()
                subprocess.run(command(folder), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - started)
    own = median(seconds["dpopt run"])
    print(f"{len(chosen)} cells of {suite}, medians of {rounds}")
    for name, taken in seconds.items():
        ratio = median(taken) / own
        print(f"{name:30} {median(taken):8.1f} s {3600 * len(chosen) / median(taken):8.0f} cells/hour {ratio:6.2f}")


if __name__ == "__main__":
    if "--plain" in sys.argv:
        at = sys.argv.index("--plain")
        todo, processes = cells(sys.argv[1], sys.argv[2:at]), int(sys.argv[at + 1])
        if processes == 1:
            print(*map(plain, todo))
        else:
            with get_context("spawn").Pool(processes) as pool:
                print(*pool.map(_alone, todo, chunksize=1))
    else:
        own = [word for word in sys.argv[2:] if word.startswith("rounds=")]
        given = [word for word in sys.argv[2:] if word not in own]
        main(sys.argv[1], given, int(own[-1].partition("=")[2]) if own else 3)
