from collections import Counter

import pytest

from dpopt.privacy import Ledger
from dpopt.results import choosing, frames, pricing


def test_selection_looks_at_validation_only_and_at_each_seed_alone(matrix):
    """Mistake 9: the run with 90 % test accuracy was worse on validation, so it is never reported."""
    selected = choosing.select(frames.load(matrix, "made").cells)
    searched = selected[selected["label"] == "dp_adam"]
    assert len(searched) == 6
    assert (searched["tuned"] == '{"lr": 1.0}').all()
    assert sorted(searched["test_accuracy"].unique()) == pytest.approx([0.5, 0.6, 0.7])
    assert (searched["runs"] == 2).all()
    assert (selected[selected["label"] == "hyfreedp"]["runs"] == 1).all()


@pytest.mark.parametrize("status", ["failed", "missing"])
def test_an_incomplete_search_is_not_a_result(maker, status):
    maker.add("dp_adam", 0, 0.6, 0.6, tuned={"lr": 0.1}, tuning="grid")
    lost = maker.add("dp_adam", 0, 0.9, 0.9, tuned={"lr": 1.0}, tuning="grid", status=status)
    maker.add("dp_adam", 1, 0.6, 0.6, tuned={"lr": 0.1}, tuning="grid")
    results = frames.load(maker.done(), "made")
    selected = choosing.select(results.cells)
    assert list(selected["seed"]) == [1]
    assert any(lost in problem and "no luck" in problem for problem in results.problems) == (status == "failed")


BEST_OF = {"rule": "geometric", "runs": 2.0}


def selected(store):
    return choosing.select(frames.load(store, "made").cells)


def after(ids, store):
    """The rule of a last run after those before it, as its cell holds it."""
    spent = Ledger()
    for run_id in ids[:-1]:
        spent = spent + store.ledger(run_id)
    return {"rule": "after", "spent": spent.to_json()}


def test_a_charged_search_releases_what_its_noised_scores_say(maker):
    """The middle run is the best by its released score; others are by the raw one, and on the test split."""
    runs = maker.add_search("dp_adam", 0, [(0.5, 0.9, 0.2), (0.7, 0.6, 0.3), (0.6, 0.7, 0.9)], BEST_OF)
    (row,) = selected(maker.done()).to_dict("records")
    assert (row["run_id"], row["selection_score"], row["validation_score"]) == (runs[1], 0.7, 0.6)
    assert row["charges"] == Counter(runs)
    assert row["runs"] == 3


def test_a_search_whose_scores_are_not_released_goes_by_validation(maker):
    runs = maker.add_search("dp_adam", 0, [(None, 0.6, 0.9), (None, 0.8, 0.1)], {"rule": "simulated", "share": 0.5})
    (row,) = selected(maker.done()).to_dict("records")
    assert (row["run_id"], row["selection_score"]) == (runs[1], 0.8)


def test_a_last_run_is_released_whatever_it_scores(maker):
    part = {"rule": "part", "runs": 2, "total": 3.0}
    rule = lambda ids, store: part if len(ids) < 3 else after(ids, store)  # noqa: E731
    runs = [(0.9, 0.9, 0.9, 0.3, "search"), (0.8, 0.8, 0.8, 0.6, "search"), (None, 0.1, 0.2, 2.0, "final")]
    ids = maker.add_search("linear", 0, runs, rule, tuning="linear_scaling")
    store = maker.done()
    (row,) = selected(store).to_dict("records")
    assert (row["run_id"], row["runs"], row["charges"]) == (ids[2], 3, Counter(ids))
    assert row["epsilon_target"] == 3
    total = pricing.epsilon_of_runs(store, Counter(ids), 1e-5, "rdp")
    assert row["epsilon_total"] == pricing.epsilon_with_tuning(store, row) == pytest.approx(total)
    assert total > row["epsilon"]


def test_a_search_in_parts_without_its_last_run_releases_nothing(maker):
    part = {"rule": "part", "runs": 2, "total": 3.0}
    maker.add_search("linear", 0, [(0.9, 0.9, 0.9, 0.3, "search")], part, tuning="linear_scaling")
    maker.add("adadp", 0, 0.5, 0.5)
    assert list(selected(maker.done())["label"]) == ["adadp"]
