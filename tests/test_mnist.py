"""Every method of the suite `mnist_five_epochs` trains on the 60,000 real images; 10 to 15 minutes on two cores."""

import os

import pytest

from dpopt.cli import main
from dpopt.privacy import epsilon
from dpopt.results import choosing, frames
from dpopt.store import Store

FLOOR = {"hyfreedp": 0.15, "hyfreedp_warm": 0.85, "fiber": 0.85, "adadp": 0.85, "dp_adam": 0.85}
"""HyFreeDP from its default start learns little here: its probes see nothing but noise (README, "What we found")."""


@pytest.mark.slow
@pytest.mark.skipif("DPOPT_DATA" not in os.environ, reason="needs DPOPT_DATA")
def test_five_epochs_of_mnist(tmp_path):
    assert main(["run", "suite=mnist_five_epochs", f"results={tmp_path}"]) == 0
    store = Store(tmp_path)
    selected = choosing.select(frames.load(store, "mnist_five_epochs").cells)
    reached = dict(zip(selected["label"], selected["test_accuracy"], strict=True))
    assert reached.keys() == FLOOR.keys()
    assert {label for label, accuracy in reached.items() if accuracy < FLOOR[label]} == set()
    for run_id in selected["run_id"]:
        record = store.record(run_id)
        assert record["examples"] == 60_000
        assert epsilon(store.ledger(run_id), record["delta"]) <= 3
