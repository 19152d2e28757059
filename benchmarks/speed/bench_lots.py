"""What a draw of a small cell takes in a lot, against the same draw of the cell alone.

    python benchmarks/speed/bench_lots.py                # 1, 4, 16 and 64 runs
    python benchmarks/speed/bench_lots.py dp_sgd fiber   # of these optimizers

Seconds are those that the process computed, on one core, per run and draw; contenders take turns, and the ratios are of
one run and that machine. Data are random: what takes the time are calls, not numbers. The last table is of whole cells
of the digits, with calibration, 40 evaluations, checkpoints and records.
"""

import sys
import tempfile
import time
import warnings
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

from dpopt import clipping, registry
from dpopt.clipping.lot import LotEngine
from dpopt.harness import cell as cells
from dpopt.harness import lots
from dpopt.harness.plan import plan
from dpopt.harness.suite import load_suite
from dpopt.privacy import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.lot import LotOracle
from dpopt.testing.task import advance
from dpopt.workloads.base import mlp

ROUNDS, DRAWS = 5, 20
SIZES = (4, 16, 64)
TASKS = {
    "64-64-10 network, N = 1257, B = 128": (lambda: mlp(64, 64, 10), 64, 10, 1257, 128),
    "100-class head on 192 features, N = 9000, B = 256": (lambda: nn.Linear(192, 100), 192, 100, 9000, 256),
}


class Contest:
    """One task and optimizer, ready to take `DRAWS` draws in a lot of any size or alone."""

    def __init__(self, make, features: int, classes: int, examples: int, batch: int, optimizer: str) -> None:
        torch.manual_seed(0)
        self.x, self.y = torch.randn(examples, features), torch.randint(classes, (examples,))
        model, self.optimizer = make(), registry.create(optimizer)
        self.engine = clipping.engine(model, _loss, sample=(self.x[:3], self.y[:3]))
        self.lot_engine = LotEngine(model, _loss)
        size = {"rate": batch / examples, "draws": DRAWS, "dimension": self.engine.dimension}
        self.plan = calibrate(self.optimizer, epsilon=3.0, delta=1e-5, accountant="rdp", **size)

    def seconds(self, runs: int) -> float:
        """Seconds per run and draw of a lot of `runs`; of one alone for 1."""
        oracles = [DataOracle(self.engine, self.x, self.y, self.plan, draw_seed=r, noise_seed=r) for r in range(runs)]
        if runs == 1:
            optimizer, theta, (oracle,) = self.optimizer, self.engine.theta, oracles
        else:
            optimizer, theta = lots.Joined([self.optimizer] * runs), torch.stack([self.engine.theta] * runs)
            oracle = LotOracle(self.lot_engine, oracles)
        state, started = optimizer.init(theta), time.process_time()
        advance(optimizer, state, oracle)
        return (time.process_time() - started) / runs / DRAWS


def _loss(output, target):
    return F.cross_entropy(output, target, reduction="none")


def compare(optimizer: str, task: str) -> None:
    """Print one line of the table."""
    contest, seconds = Contest(*TASKS[task], optimizer), {}
    for size in (1, *SIZES):
        contest.seconds(size)  # the first time is slower
    for _ in range(ROUNDS):
        for size in (1, *SIZES):
            seconds.setdefault(size, []).append(contest.seconds(size))
    alone = median(seconds[1])
    line = " ".join(f"{1e3 * median(each):6.3f} ({alone / median(each):4.1f}x)" for each in seconds.values())
    print(f"{optimizer:22} {line}", flush=True)


def whole(optimizer: str, runs: int = 16) -> None:
    """Time the digits' cells of an optimizer in one lot and one by one, and print seconds per cell."""
    overrides = [f"optimizers=[{optimizer}]", "epsilon=[3]", "accountant=rdp", "workloads=[digits_mlp]"]
    planned = [entry.cell for entry in plan(load_suite("quickstart", [*overrides, "seeds=[0,1,2,3,4,5]"]))]
    lot = lots.group(planned, runs)[0]
    ways = {"alone": lambda store: [cells.run(cell, store, device="cpu") for cell in lot[:4]]}
    ways["lot"] = lambda store: lots.run(lot, store, device="cpu")
    counts, seconds = {"alone": len(lot[:4]), "lot": len(lot)}, {"alone": [], "lot": []}
    from dpopt.store import Store

    for _ in range(ROUNDS):
        for name, way in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                started = time.process_time()
                way(Store(Path(folder)))
                seconds[name].append((time.process_time() - started) / counts[name])
    alone, together = median(seconds["alone"]), median(seconds["lot"])
    print(f"{optimizer:22} {alone:6.3f} {together:6.3f} ({alone / together:4.1f}x) in a lot of {len(lot)}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    names = sys.argv[1:] or ["dp_sgd", "dp_adam", "fiber", "hyfreedp"]
    for task in TASKS:
        print(f"{task}: ms per run and draw alone, and in lots of {', '.join(map(str, SIZES))}")
        for name in names:
            compare(name, task)
    print("cells of the digits: seconds per cell alone and in a lot")
    for name in names:
        whole(name)
