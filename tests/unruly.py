"""A workload that raises, hangs or exhausts memory if it is told to, as a package that worker processes find."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from dpopt.fields import NonNegative
from dpopt.runs import train
from dpopt.workloads.synthetic import SyntheticLogReg

SUITE = """
defaults: [suite, _self_]
workloads:
  - {{name: unruly, mood: {moods}, pause: {pause}}}
  - {{name: unruly, mood: calm, pause: {pause}, dim: {dims}}}
optimizers: [dp_sgd]
settings: {{dp_sgd: {{tuning: fixed}}}}
epsilon: [2]
accountant: rdp
batch_size: 800
epochs: 2
seeds: 0
workers: 2
retries: 100
timeout: {timeout}
grace: 2
memory: 3
"""
KEPT: list[np.ndarray] = []
if "UNRULY_CHECKPOINTS" in os.environ:  # from a worker's second cell on
    train.CHECKPOINT_SECONDS = float(os.environ["UNRULY_CHECKPOINTS"])
if "UNRULY_CLOCK" in os.environ:  # this machine's clock is wrong, and jumps now and then
    right, touch = time.time, os.utime

    def wrong() -> float:
        return right() + float(os.environ["UNRULY_CLOCK"]) * (1 + right() % 60 // 10)

    def touched(path, times=None, **how):
        touch(path, (wrong(), wrong()) if times is None and "ns" not in how else times, **how)

    time.time, os.utime = wrong, touched


@dataclass(frozen=True)
class Unruly(SyntheticLogReg):
    """Logistic regression on synthetic data, with a temper.

    Args:
        mood: what every draw does.
        pause: seconds that each draw takes at least.
    """

    mood: Literal["calm", "raises", "hangs", "grows"] = "calm"
    pause: NonNegative = 0.0

    marks: ClassVar[int] = 5

    def augment(self, x: Tensor) -> Tensor:
        time.sleep(self.pause)
        if self.mood == "raises":
            raise RuntimeError("out of temper")
        if self.mood == "hangs":
            time.sleep(1e6)
        while self.mood == "grows":
            KEPT.append(np.ones(2**23))
        return x


def install(folder: Path) -> None:
    """Make `folder` a place on the path from which dpopt learns of the workload."""
    known = folder / "unruly-1.dist-info"
    known.mkdir(parents=True)
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: unruly\nVersion: 1\n")
    (known / "entry_points.txt").write_text("[dpopt.workloads]\nunruly = unruly:Unruly\n")
    (folder / "unruly.py").write_text(Path(__file__).read_text())
