"""Cells per hour: `dpopt run` against a plain Opacus training loop that trains the same cells.

    python benchmarks/speed/cells_per_hour.py quickstart optimizers=[dp_sgd,dp_adam] seeds=[0]
    python benchmarks/speed/cells_per_hour.py mnist_five_epochs optimizers=[dp_adam] seeds=[0,1] epochs=1  # DPOPT_DATA
    python benchmarks/speed/cells_per_hour.py quickstart optimizers=[dp_adam] epsilon=3 rounds=1 device=cuda

The plain loop is what Opacus' tutorials show: a DataLoader, `make_private_with_epsilon`, one model after the other, one
evaluation at the end. On the CPU it has all cores for one model, or one core for each of as many models. `dpopt run`
does more in the same time: 40 evaluations of a curve, a checkpoint, ledger and record of each cell, and epsilon by the
tighter accountant. Contenders start cold and take turns; the ratios are of one run, and of that machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from multiprocessing import get_context
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from dpopt import registry
from dpopt.cells import Cell
from dpopt.privacy.ledger import number_of_draws
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite

_TORCH = {"dp_sgd": torch.optim.SGD, "dp_adam": torch.optim.Adam}
_PLAIN = "--plain"

Command = Callable[[str], list[str]]
"""Folder for results -> the words of a command that trains all cells."""


def rows(
    suite: str, overrides: Sequence[str], device: str, rounds: int = 1, only: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """One row for each contender, as plain data; `failure` says why one has no time.

    Args:
        suite, overrides: what to train, with methods that Opacus has too.
        device: as torch names it.
        rounds: each contender's time is the median of so many.
        only: names of contenders; by default all.
    """
    chosen, commands = cells(suite, overrides), contenders(suite, overrides, device)
    commands = {name: command for name, command in commands.items() if only is None or name in only}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    failures = dict.fromkeys(commands, "")
    for _ in range(rounds):
        for name, command in commands.items():
            taken, failures[name] = _timed(command)
            seconds[name].append(taken)
    for name, taken in seconds.items():
        row = {"suite": suite, "contender": name, "cells": len(chosen), "seconds": median(taken)}
        per_hour = None if failures[name] else 3600 * len(chosen) / median(taken)
        yield row | {"cells_per_hour": per_hour, "failure": failures[name]}


def cells(suite: str, overrides: Sequence[str]) -> list[Cell]:
    """The distinct cells of a suite."""
    return list({entry.cell.run_id: entry.cell for entry in plan(load_suite(suite, overrides))}.values())


def contenders(suite: str, overrides: Sequence[str], device: str) -> dict[str, Command]:
    """The ways to train the cells of a suite, by name."""
    words = [sys.executable, __file__, suite, *overrides, _PLAIN, device]
    run = [sys.executable, "-m", "dpopt", "run", f"suite={suite}", *overrides, f"device={device}"]
    cores = len(os.sched_getaffinity(0))
    plain: dict[str, Command] = {"Opacus, one model at a time": lambda folder: [*words, "1"]}
    if device == "cpu":
        plain["Opacus, one process a core"] = lambda folder: [*words, str(cores)]
    return plain | {"dpopt run": lambda folder: [*run, f"results={folder}"]}


def _timed(command: Command) -> tuple[float, str]:
    """Seconds that a contender takes, and why it failed."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        done = subprocess.run(command(folder), capture_output=True, text=True)
        taken = time.perf_counter() - started
    last = next(reversed(done.stderr.strip().splitlines()), "")
    return taken, f"exit code {done.returncode}: {last}"[:200] if done.returncode else ""


def plain(device: str, cell: Cell) -> float:
    """Train a cell as Opacus' tutorials do; returns the test accuracy."""
    from opacus import PrivacyEngine

    warnings.simplefilter("ignore")
    torch.manual_seed(cell.seed)
    workload = registry.from_spec("workload", cell.workload)
    splits = workload.splits(cell.seed)
    model = workload.model().to(device)
    loader = DataLoader(TensorDataset(splits.train.x, splits.train.y), cell.batch_size)
    draws = number_of_draws(cell.epochs, cell.batch_size, len(splits.train.x))
    engine: Any = PrivacyEngine(accountant="rdp")  # its default takes longer to find the noise than to train the digits
    private, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=_TORCH[cell.optimizer["name"]](model.parameters(), lr=cell.optimizer["lr"]),
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
            workload.loss(private(workload.transform(x.to(device))), y.to(device)).mean().backward()
            optimizer.step()
            left -= 1
            if not left:
                break
    private.eval()
    with torch.no_grad():
        right = private(workload.transform(splits.test.x.to(device))).argmax(dim=1) == splits.test.y.to(device)
    return float(right.float().mean())


def _alone(device: str, cell: Cell) -> float:
    torch.set_num_threads(1)
    return plain(device, cell)


def main(words: Sequence[str]) -> None:
    """Time all contenders in turn and print medians and ratios, or train all cells as one contender."""
    if _PLAIN in words:
        at = words.index(_PLAIN)
        _train(cells(words[0], words[1:at]), words[at + 1], int(words[at + 2]))
        return
    options = {"rounds": "3", "device": "cpu"} | dict(
        word.split("=") for word in words if word.startswith(("rounds=", "device="))
    )
    overrides = [word for word in words[1:] if not word.startswith(("rounds=", "device="))]
    if unknown := {cell.optimizer["name"] for cell in cells(words[0], overrides)} - _TORCH.keys():
        sys.exit(f"Opacus has no {', '.join(sorted(unknown))}: choose among {', '.join(_TORCH)}")
    for row in rows(words[0], overrides, options["device"], int(options["rounds"])):
        print(json.dumps(row))


def _train(chosen: Sequence[Cell], device: str, processes: int) -> None:
    """Train cells plainly, in so many processes."""
    if processes == 1:
        print(*map(partial(plain, device), chosen))
    else:
        with get_context("spawn").Pool(processes) as pool:
            print(*pool.map(partial(_alone, device), chosen, chunksize=1))


if __name__ == "__main__":
    main(sys.argv[1:])
