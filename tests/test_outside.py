"""What another distribution adds is found by itself: nothing of dpopt's own files is touched."""

import os
import subprocess
import sys

import pytest
from PIL import Image

POINTS = """
[dpopt.optimizers]
outer_sign = outer.method:OuterSign
[dpopt.workloads]
outer_task = outer.task:OuterTask
[dpopt.data]
outer_data = outer
[dpopt.metrics]
outer_margin = outer.scores:margin
[dpopt.models]
outer_net = outer.nets:small
[dpopt.launchers]
outer_engine = outer.engine:Outer
[dpopt.benchmarks]
outer = outer.suites
[dpopt.plots]
outer = outer.figures
[dpopt.clip_rules]
outer_halved = outer.method:Halved
"""
METHOD = '''"""Sign descent, steps of one length for each parameter, and a query of its own, which counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from dpopt.clipping.rules import Abadi
from dpopt.privacy.queries import Gradient
from dpopt.types import ClipRule, Query, Vector


@dataclass(frozen=True)
class Short(Query):
    """How many gradients are shorter than one, as a share; a record moves the sum by one half."""

    kind: ClassVar[str] = "short"
    follows: ClassVar[str | None] = "gradient"

    releases: ClassVar[int] = 1
    sensitivity: ClassVar[float] = 0.5
    centre: ClassVar[float] = 0.5

    def contribution(self, record):
        return (record.norm < 1).double().unsqueeze(0) - 0.5


@dataclass(frozen=True)
class Halved:
    """A clip rule of its own: half of Abadi's."""

    bound: float = 1.0

    @property
    def sensitivity(self) -> float:
        return self.bound / 2

    def factor(self, norm):
        return (self.bound / norm).clamp(max=1) / 2


class State(NamedTuple):
    """theta_t, and the share of short gradients."""

    theta: Vector
    share: torch.Tensor


@dataclass(frozen=True)
class OuterSign:
    """theta_{t+1} = theta_t - lr (1 - share) sign(g_t) / sqrt(entries of the parameter)."""

    lr: float = 0.01
    clip: ClipRule = Abadi(1.0)
    shares: ClassVar[dict[str, float]] = {"short": 0.01}
    noise_inflation: ClassVar[float] = 1.01
    revision: ClassVar[int] = 1

    def init(self, theta: Vector) -> State:
        return State(theta, theta.new_zeros(()))

    def step(self, state: State, oracle: Any) -> State:
        with oracle.draw() as batch:
            gradient = batch.ask(Gradient(state.theta, self.clip))
            short = batch.ask(Short())
        share = short.value[0].to(state.theta).clamp(0, 1)
        signs = [part.of(gradient.value).sign() / math.prod(part.shape) ** 0.5 for part in oracle.layout]
        step = torch.cat([each.flatten() for each in signs])
        return State(state.theta - self.lr * (1 - share) * step, share)
'''
TASK = '''"""Two Gaussians, and a metric of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from dpopt.workloads.base import Outline, Split, Workload, outlined


@dataclass(frozen=True)
class OuterTask(Workload):
    """Which of two Gaussians a point is of."""

    validation: int = 40
    pool: ClassVar[int] = 400
    batch_size: ClassVar[int] = 100
    epochs: ClassVar[float] = 2.0
    classes: ClassVar[int] = 2

    def load(self):
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 2, (500,), generator=generator)
        x = torch.randn(500, 3, generator=generator) + 2 * y[:, None]
        return Split(x[:400], y[:400]), Split(x[400:], y[400:])

    def outline(self) -> Outline:
        return outlined(self.model, (3,), 100)

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def report(self, predict, split):
        zeros = float((predict(split.x).argmax(1) == 0).double().mean())
        return super().report(predict, split) | {"zeros": zeros}
'''
SCORES = '''"""A metric that every classifier gets."""


def margin(outputs, targets):
    return float(outputs.gather(1, targets[:, None]).mean() - outputs.mean())
'''
NETS = '''"""A model for images of any size."""

from torch import nn


def small(classes, channels, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, classes))
'''
ENGINE = '''"""Jobs are processes of this machine."""


class Outer:
    room = 1

    def __init__(self, suite):
        pass

    def start(self, job, number):
        print("outer engine starts", number, flush=True)
        return [job.start() for _ in range(number)]

    def has_ended(self, started):
        return started.poll() is not None

    def stop(self, started):
        started.terminate()

    def close(self):
        pass
'''
DATA = """kind: text
inputs: sentence
targets: label
classes: 2
splits:
  train: {source: train, records: 400}
  test: {source: test, records: 100}
licence: none
reference: this test
"""
SUITE = """
defaults: [suite, _self_]
workloads: [outer_task, {name: images, data: photos, architecture: outer_net, validation: 10}]
optimizers: [outer_sign]
settings: {outer_sign: {tuning: fixed, fields: {clip: {rule: by_group, inner: outer_halved}}}}
epsilon: 3
accountant: rdp
batch_size: 20
seeds: 0
engine: outer_engine
device: cpu
"""
FIGURE = '''"""A bar for each method."""

NEEDS = "comparison"


def draw(frame, styles):
    """The means."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.bar(frame["label"], frame["mean"])
    return figure
'''
MARK = "the command has ended"
SCRIPT = f"""
import sys
from dpopt.cli import main
sys.stderr = sys.stdout
for command in sys.argv[1:]:
    assert main(command.split()) == 0, command
    print("{MARK}", flush=True)
"""


@pytest.fixture
def outside(tmp_path):
    """A distribution in a folder of Python's path, and an empty working folder."""
    package, about = tmp_path / "site" / "outer", tmp_path / "site" / "outer-1.0.dist-info"
    for folder in (package / "suites", package / "figures", about, tmp_path / "here"):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    files = {
        "__init__.py": "",
        "method.py": METHOD,
        "task.py": TASK,
        "scores.py": SCORES,
        "nets.py": NETS,
        "engine.py": ENGINE,
        "outer_data.yaml": DATA,
    }
    files |= {"suites/outer_suite.yaml": SUITE, "figures/outer_figure.py": FIGURE}
    for name, text in files.items():
        (package / name).write_text(text)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: outer\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(POINTS)
    for number in range(40):
        folder = tmp_path / "here" / "pictures" / "AB"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("L", (8, 8), 100 * (number % 2) + number).save(folder / f"{number}.png")
    return tmp_path


@pytest.mark.slow
def test_everything_that_can_be_added_is(outside):
    """One process runs all commands, as its start takes longer than they do."""
    suite = "suite=outer_suite"
    commands = [
        "list what=data",
        "new data photos from=pictures",
        f"run {suite}",
        f"table {suite} scores=[zeros,outer_margin]",
        f"plot {suite}",
        "verify",
    ]
    path = os.pathsep.join(map(str, [outside / "site", *filter(None, sys.path)]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *commands],
        cwd=outside / "here",
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = ["".join(row.read_text().split()) for row in (outside / "here").glob("results/runs/*/*/run.json")]
    assert all('"inner":{"bound":1.0,"rule":"outer_halved"}' in row for row in rows)
    assert sum('"architecture":"outer_net"' in row for row in rows) == 1
    listed, _, ran, table, plotted, verified = done.stdout.split(MARK)[:-1]
    assert "local folder only, by outer" in listed
    assert ran.count("outer engine starts 1") == 1
    assert "2 cells run, 0 were done, 0 failed" in ran
    assert "outer_sign" in table
    assert "zeros" in table
    assert "margin" in table, table
    assert "outer_figure.svg" in plotted
    assert "0 mismatches" in verified
