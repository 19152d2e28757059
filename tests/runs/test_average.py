"""`average` of a suite's row: any optimizer, its releases, and an average of the parameters that follow from them."""

import numpy as np
import pytest
import torch
from small_suites import train_cell

from dpopt import training
from dpopt.runs import train as cells
from dpopt.suites.plan import plan

ROWS = ["settings.dp_sgd.average=0.8", "settings.hyfreedp.average=0.8", "settings.adadp.average=0.8"]


def parameters(ready):
    """Those after each step."""
    states = training.steps(ready.stepper, ready.oracle, ready.state)
    return np.stack([state.theta.double().numpy() for state, _ in states])


@pytest.mark.parametrize("label", ["hyfreedp", "adadp"])
def test_it_is_the_average_of_what_the_plain_row_passes_through(label, write_suite, store):
    plain, averaged = (
        next(entry.cell for entry in plan(write_suite(overrides=rows)) if entry.label == label) for rows in ([], ROWS)
    )
    ready = cells.prepare(plain)
    path = parameters(ready)
    train_cell(averaged, store)
    curve, of = store.curve(averaged.run_id), ready.workload
    assert len(curve) == len(path)
    for t, entry in enumerate(curve, 1):
        weights = 0.8 ** np.arange(t - 1, -1, -1)
        theta = torch.from_numpy(np.average(path[:t], axis=0, weights=weights)).to(ready.engine.theta)
        expected = training.evaluate(ready.engine, theta, of.loss, of.metric, ready.watched["test"], of.transform)
        assert entry["test_loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert store.ledger(averaged.run_id) == ready.oracle.ledger
    assert ("eta" in curve[0]) == hasattr(ready.state, "eta")


def test_without_one_a_cell_is_what_it_was(write_suite):
    entries, same, other = (
        plan(write_suite(overrides=rows)) for rows in ([], [row.replace("0.8", "0") for row in ROWS], ROWS)
    )
    assert [entry.cell for entry in same] == [entry.cell for entry in entries]
    assert not any("average" in entry.cell.content() for entry in same)
    assert all(entry.cell.content()["average"] == 0.8 for entry in other)
    assert not {entry.cell.run_id for entry in other} & {entry.cell.run_id for entry in entries}
    assert [entry.cell.releases for entry in other] == [entry.cell.run_id for entry in entries]
    assert [cells.Cell.from_content(entry.cell.content()) for entry in other] == [entry.cell for entry in other]
