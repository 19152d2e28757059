"""The outcome of private selection, against the procedure itself."""

import math

import numpy as np
import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.results import frames
from dpopt.results.selection import _outcome, chances, private_selection


def simulated(validation, test, runs, times, generator):
    found = []
    for _ in range(times):
        drawn = generator.integers(len(test), size=generator.geometric(1 / runs))
        found.append(test[drawn[np.argmax(validation[drawn])]])
    return np.array(found)


@pytest.mark.parametrize("runs", [1, 2, 7.5])
def test_outcome_is_the_procedures(runs):
    generator = np.random.default_rng(0)
    validation, test = generator.random(6), generator.random(6)
    group = pd.DataFrame({"seed": 0, "validation_score": validation, "test_score": test, "state": "done"})
    mean, std = _outcome(group, runs)
    found = simulated(validation, test, runs, 20_000, generator)
    assert mean == pytest.approx(found.mean(), abs=0.01)
    assert std == pytest.approx(found.std(), abs=0.01)


def test_chances_are_a_distribution():
    for runs in (1, 3, 1000):
        weights = chances(10, runs)
        assert weights.sum() == pytest.approx(1)
        assert (weights > 0).all()
    assert chances(10, 1) == pytest.approx([0.1] * 10)
    assert chances(10, 1e6)[-1] > 0.999


def test_seeds_are_procedures_of_their_own():
    group = pd.DataFrame({"seed": [0, 1], "validation_score": [0.1, 0.9], "test_score": [0.2, 0.6], "state": "done"})
    assert _outcome(group, 100) == pytest.approx((0.4, 0.2))


@pytest.mark.parametrize(("validation", "state"), [(math.nan, "done"), (0.99, "diverged")])
def test_what_tables_never_select_is_never_released_here(validation, state):
    scores = {"validation_score": [0.8, validation, 0.5], "test_score": [0.7, 0.1, 0.4]}
    group = pd.DataFrame({"seed": 0, "state": ["done", state, "done"], **scores})
    assert _outcome(group, 1e6)[0] == pytest.approx(0.7, abs=1e-4)


def test_a_test_score_that_is_not_finite_is_worth_the_worst():
    scores = {"validation_score": [0.5, 0.8, 0.9], "test_score": [0.4, math.nan, -math.inf]}
    group = pd.DataFrame({"seed": 0, "state": "done", **scores})
    assert _outcome(group, 2) == pytest.approx((0.4, 0.0))


def test_the_table_of_a_suite_says_what_selection_makes_of_its_searches(maker, capsys):
    for lr, validation, test in ((0.1, 0.5, 0.4), (0.2, 0.9, 0.8)):
        maker.add("dp_sgd", 0, validation, test, tuned={"lr": lr}, tuning="grid")
    maker.add("adadp", 0, 0.7, 0.7)
    store = maker.done()
    assert main(["table", "suite=made", f"results={store.root}", "selection=geometric"]) == 0
    printed = capsys.readouterr().out
    table = pd.read_csv(store.suite_folder("made") / "selection.csv").set_index("runs")
    assert set(table["label"]) == {"dp_sgd"}
    stop = 1 / 2
    both_worse = stop / 2 / (1 - (1 - stop) / 2)
    assert table["mean"][2] == pytest.approx(both_worse * 0.4 + (1 - both_worse) * 0.8)
    assert table["epsilon_selected"].is_monotonic_increasing
    assert (table["epsilon_selected"] > table["epsilon_single"]).all()
    assert "ε selected" in printed
    assert "not noised" in (store.suite_folder("made") / "selection.md").read_text()


def test_a_search_that_is_not_done_is_left_out(maker, capsys):
    maker.add("dp_sgd", 0, 0.5, 0.4, tuned={"lr": 0.1}, tuning="grid")
    maker.add("dp_sgd", 0, 0.5, 0.4, tuned={"lr": 0.2}, tuning="grid", status="missing")
    store = maker.done()
    assert main(["table", "suite=made", f"results={store.root}", "selection=geometric"]) == 0
    assert "no finished searches" in capsys.readouterr().out


def test_another_distribution_is_refused(matrix, capsys):
    assert main(["table", "suite=made", f"results={matrix.root}", "selection=poisson"]) == 2
    assert "geometric" in capsys.readouterr().err


def test_candidates_that_release_differently_have_no_price(maker):
    for label, epsilons in (("alike", (3.0, 3.0)), ("unlike", (3.0, 2.0))):
        for lr, epsilon in zip((0.1, 0.2), epsilons, strict=True):
            maker.add(label, 0, 0.5, 0.5, tuned={"lr": lr}, tuning="grid", epsilon=epsilon)
            maker.cells[-1]["target"] = 3.0
    store = maker.done()
    assert set(private_selection(store, frames.load(store, "made").cells)["label"]) == {"alike"}
