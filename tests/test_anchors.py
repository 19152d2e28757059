"""Suites of settings that others published run with the noise, the draws and the other settings that these state."""

import pytest

from dpopt import registry
from dpopt.privacy import epsilon
from dpopt.privacy.ledger import Draw, Ledger, number_of_draws, sampling_rate
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite

SEEDS = {"opacus_mnist": 10}
ANCHORS = {
    # suite, label: noise multiplier, draws, batch size, learning rate, momentum, clipping bound, parameters
    ("scatternet_mnist", "dp_sgd"): (3.04, 40 * 14, 4096, 8, 0.9, 0.1, 39_700),
    ("scatternet_fashion_mnist", "dp_sgd"): (4.05, 40 * 7, 8192, 16, 0.9, 0.1, 39_700),
    ("scatternet_cifar10", "dp_sgd"): (5.67, 60 * 6, 8192, 4, 0.9, 0.1, 155_530),
    ("handcrafted_cnn_mnist", "dp_sgd"): (1.23, 40 * 117, 512, 0.5, 0.9, 0.1, 26_010),
    ("handcrafted_cnn_fashion_mnist", "dp_sgd"): (2.15, 40 * 29, 2048, 4, 0.9, 0.1, 26_010),
    ("opacus_mnist", "noise_07"): (0.7, 45 * 250, 240, 0.25, 0, 1.5, 26_010),
    ("opacus_mnist", "noise_11"): (1.1, 60 * 250, 240, 0.15, 0, 1.0, 26_010),
    ("opacus_mnist", "noise_13"): (1.3, 15 * 250, 240, 0.25, 0, 1.5, 26_010),
}


@pytest.mark.parametrize(("suite", "label"), ANCHORS)
def test_settings_are_those_that_were_published(suite, label, monkeypatch):
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    noise, draws, batch, lr, momentum, clip, parameters = ANCHORS[suite, label]
    cells = [entry.cell for entry in plan(load_suite(suite)) if entry.label == label]
    assert [cell.seed for cell in cells] == list(range(SEEDS.get(suite, 5)))
    cell, workload = cells[0], registry.from_spec("workload", cells[0].workload)
    optimizer = registry.from_spec("optimizer", cell.optimizer)
    assert (optimizer.lr, optimizer.momentum, optimizer.clip.bound) == (lr, momentum, clip)
    assert (cell.batch_size, workload.validation) == (batch, 0)
    assert sum(p.numel() for p in workload.outline().model.parameters() if p.requires_grad) == parameters
    rate, found = sampling_rate(batch, workload.examples), number_of_draws(cell.epochs, batch, workload.examples)
    assert found == draws
    assert (cell.delta, cell.accountant) == (1e-5, "pld")
    more, less = (epsilon(Ledger([Draw(rate, (noise * factor,))] * draws), 1e-5) for factor in (1 + 5e-5, 1 - 5e-5))
    assert more < cell.epsilon < less, "the noise is theirs to four digits"
