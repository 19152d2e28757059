from unittest.mock import patch

import pytest

from dpopt.runs.train import train
from dpopt.store import Store
from dpopt.suites.plan import manifest, plan
from dpopt.suites.suite import load_suite

SUITE = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 4}]
optimizers: [dp_sgd, hyfreedp, adadp]
settings:
  dp_sgd: {grid: {lr: [0.1, 1.0]}}
epsilon: [2]
accountant: rdp
batch_size: 800
epochs: 2
seeds: [0, 1]
"""
QUICK = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 3}]
epsilon: [4]
accountant: rdp
batch_size: 8000
epochs: 2
engine: inline
"""
"""The beginning of a suite whose cells take a moment: all of the records are in each draw."""
SEARCHES = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 4}]
optimizers: [free, composed, few, simulated, logarithmic, poisson, linear, adadp, hyfreedp]
settings:
  free: {name: dp_sgd, grid: {lr: [0.1, 10]}}
  composed: {name: dp_sgd, grid: {lr: [0.1, 1, 10]}, selection: composed}
  few: {name: dp_sgd, grid: {lr: [0.1, 1, 10]}, tuning: random, runs: 2, selection: composed}
  simulated: {name: dp_sgd, grid: {lr: [0.1, 10]}, selection: {rule: simulated, share: 0.9}}
  logarithmic: {name: dp_sgd, grid: {lr: [0.1, 1, 10]}, tuning: private, selection: {rule: logarithmic, runs: 3}}
  poisson: {name: dp_sgd, grid: {lr: [0.1, 1]}, tuning: private, selection: {rule: poisson, runs: 1}}
  linear: {name: dp_sgd, grid: {lr: [0.1, 1, 10]}, tuning: linear_scaling, runs: 2}
  adadp: {grid: {tau: [1.0, 4.0]}, tuning: private, selection: {rule: geometric, runs: 2}}
  hyfreedp: {grid: {probe_every: [1, 2]}, tuning: grid, selection: composed}
epsilon: [2]
accountant: rdp
batch_size: 8000
epochs: 4
seeds: [0, 1]
"""
"""A row for each way to search, and methods with pairs of draws and with two kinds of noise; all of the records are in
each draw, whose accounting takes no time.
"""


def train_cell(cell, store, checkpoint_seconds=60.0, **how):
    """Train a cell under its lease, as a worker does; gives its record."""
    pause = patch("dpopt.runs.train.CHECKPOINT_SECONDS", checkpoint_seconds)
    with pause, store.lease(cell.run_id) as lease:
        return train(cell, store, lease, **how)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results")


@pytest.fixture
def write_suite(tmp_path):
    """Write a suite file and load it."""

    def write(text=SUITE, overrides=(), name="small"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return load_suite(str(path), overrides)

    return write


@pytest.fixture
def write_searches(write_suite):
    """As `write_suite`, for `SEARCHES`."""
    return lambda overrides=(): write_suite(SEARCHES, overrides, "searches")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    """`SEARCHES` with all of its runs made: the store, and what was planned at the end."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "searches.yaml").write_text(SEARCHES)
    suite, store = load_suite(str(folder / "searches.yaml")), Store(folder / "results")
    for _ in range(2):  # the last runs of linear scaling follow from the others
        planned = plan(suite, store)
        for entry in planned:
            if store.state(entry.cell.run_id) == "pending":
                train_cell(entry.cell, store, device="cpu")
    store.extend_suite(suite.name, manifest(suite, planned))
    return store, planned
