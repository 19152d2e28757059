import pytest

from dpopt.harness.suite import load_suite
from dpopt.store import Store

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
