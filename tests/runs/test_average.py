"""`average` of a suite's row: any optimizer, its releases, and an average of the parameters that follow from them."""

import math

import numpy as np
import pytest
import torch
from small_suites import train_cell

import dpopt
from dpopt import training
from dpopt.runs import train as cells
from dpopt.suites.plan import plan

ROWS = ["settings.dp_sgd.average=0.8", "settings.hyfreedp.average=0.8", "settings.adadp.average=0.8"]
SEARCHED = {
    "name": "searched",
    "workloads": [{"name": "synthetic_logreg", "dim": 4}],
    "optimizers": ["dp_sgd", "averaged"],
    "settings": {
        "dp_sgd": {"grid": {"lr": [0.5, 4]}},
        "averaged": {"name": "dp_sgd", "grid": {"lr": [0.5, 4]}, "average": 0.9, "fields": {"clip": 0.5}},
    },
    "epsilon": 2,
    "accountant": "rdp",
    "batch_size": 800,
    "epochs": 2,
    "seeds": 0,
    "engine": "inline",
    "device": "cpu",
}


def parameters(ready):
    """Those after each step."""
    states = training.steps(ready.stepper, ready.oracle, ready.state)
    return np.stack([state.theta.double().numpy() for state, _ in states])


@pytest.mark.parametrize("label", ["dp_sgd", "hyfreedp", "adadp"])
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


def test_a_search_of_an_averaged_row_is_run_and_shown_as_any(tmp_path):
    assert dpopt.run_suite(dpopt.load_suite(SEARCHED), tmp_path, progress=False).ran == 4
    results = dpopt.load_results(tmp_path, "searched")
    own = results.cells[results.cells["label"] == "averaged"]
    assert sorted(own["lr"]) == [0.5, 4]
    assert set(own["clip"]) == {0.5}
    table = results.table().set_index("label")
    assert dict(table["runs"]) == {"dp_sgd": 2, "averaged": 2}
    assert table.loc["averaged", "clip"] == 0.5
    assert math.isclose(*table["epsilon_with_tuning"])
    lines = results.plot("learning_rate").axes[0].get_lines()
    chosen = results.selected.set_index("label")["lr"]
    assert {line.get_label(): set(line.get_ydata()) for line in lines} == {
        label: {chosen[label]} for label in ("dp_sgd", "averaged")
    }
