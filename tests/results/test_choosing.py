"""The run that is released of a search, and the runs that are charged: also beyond the ends of a grid, made or not."""

import json
from collections import Counter

import pytest

from dpopt.privacy import Ledger
from dpopt.results import choosing, frames, pricing, ranking, tables, transfer
from dpopt.results.publishing import publish
from dpopt.results.results import Results
from dpopt.store import Store


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
    unreleased = {"rule": "simulated", "share": 0.5}
    by_validation = maker.add_search("dp_sgd", 0, [(None, 0.6, 0.9), (None, 0.8, 0.1)], unreleased)
    row, other = selected(maker.done()).to_dict("records")
    assert (other["run_id"], other["selection_score"]) == (by_validation[1], 0.8)
    assert (row["run_id"], row["selection_score"], row["validation_score"]) == (runs[1], 0.7, 0.6)
    assert row["charges"] == Counter(runs)
    assert row["runs"] == 3


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
    assert row["epsilon_total"] == pricing.price(store, row)[0] == pytest.approx(total)
    assert total > row["epsilon"]


def test_a_search_in_parts_without_its_last_run_releases_nothing(maker):
    part = {"rule": "part", "runs": 2, "total": 3.0}
    maker.add_search("linear", 0, [(0.9, 0.9, 0.9, 0.3, "search")], part, tuning="linear_scaling")
    maker.add("adadp", 0, 0.5, 0.5)
    assert list(selected(maker.done())["label"]) == ["adadp"]


GRID = {0.1: 0.5, 1.0: 0.7}
"""lr -> validation score."""


def add(maker, seed, scores, most, **more):
    """A search that may make `most` runs beyond `GRID`, with `scores` in order; those beyond are no points of it."""
    for search, (lr, validation) in enumerate(scores.items()):
        own = {"tuned": {"lr": lr}, "tuning": "grid", "search": search}
        maker.add("dp_adam", seed, validation, validation - 0.1, **own, **more)
        maker.cells[-1] |= {"widen": most} if most else {}
        maker.cells[-1] |= {} if lr in GRID else {"widened": True}


def by_seed(store):
    return {row["seed"]: row for row in selected(store).to_dict("records")}


def test_runs_that_were_not_made_are_charged_as_if_they_were(maker, tmp_path):
    add(maker, 0, GRID, 0)
    add(maker, 1, GRID, 3)
    add(maker, 2, GRID | {10.0: 0.8, 100.0: 0.6}, 3)
    store = maker.done()
    found = by_seed(store)
    every = {seed: [e["run_id"] for e in maker.cells if e["cell"]["seed"] == seed] for seed in found}
    assert [row["runs"] for row in found.values()] == [2, 2, 4]
    assert [row["charges"].total() for row in found.values()] == [2, 5, 5]
    assert all(set(row["charges"]) == set(every[seed]) for seed, row in found.items())
    five = pricing.epsilon_of_runs(store, Counter([*every[2], every[1][0]]), 1e-5, "rdp")
    assert pricing.price(store, found[1])[0] == pricing.price(store, found[2])[0] == five
    assert pricing.price(store, found[0])[0] < five
    publish(Results(store, "made"), tmp_path / "published", tmp_path)
    published = by_seed(Store(tmp_path / "published"))
    assert [row["charges"] for row in published.values()] == [row["charges"] for row in found.values()]


@pytest.mark.parametrize(
    ("search", "later", "most"),
    [("a", {"search_id": "a"}, 3), ("a", {"search_id": "b", "widen": 1}, 4), ("", {"search_id": "b", "widen": 1}, 3)],
)
def test_a_later_plan_lowers_no_charge(maker, search, later, most):
    """Three further runs might have been made; the suite is then run without, or as another search of the same runs."""
    add(maker, 0, GRID, 3)
    for entry in maker.cells:
        entry |= {"search_id": search} if search else {}
    maker.done()
    for entry in maker.cells:
        del entry["widen"]
        entry |= later
    plans = len([*maker.done().suite_folder("made").glob("parts/*")])
    (row,) = by_seed(maker.done()).values()
    assert row["charges"].total() == 2 + most
    assert plans == len([*maker.store.suite_folder("made").glob("parts/*")]) == 2, "the same plan adds nothing"


def test_what_was_not_made_is_charged_once_for_each_setting(maker):
    """Two batch sizes are one search, each of which might have made one run more."""
    for size in (64, 128):
        for search, (lr, validation) in enumerate(GRID.items()):
            own = {"tuned": {"lr": lr}, "tuning": "grid", "search": search + size, "batch_size": size}
            maker.add("dp_adam", 0, validation, validation, **own)
            maker.cells[-1] |= {"widen": 1}
    store = maker.done()
    (row,) = choosing.best_setting(selected(store)).to_dict("records")
    assert (len(row["charges"]), row["charges"].total()) == (4, 6)
    (reached,) = ranking.reached(store, frames.load(store, "made").cells, budgets=[1e9]).to_dict("records")
    assert reached["spent"] == pricing.epsilon_of_runs(store, row["charges"], 1e-5, "rdp")
    assert choosing.together(map(Counter, ["abb", "ac", "b"])) == Counter("abbc")


def test_searches_of_two_rules_are_both_charged_in_full(maker):
    """The suite was changed from one further run to three: seven runs, of which four were made."""
    for most, scores in ((1, [0.5, 0.6]), (3, [0.5, 0.6, 0.7])):
        maker.add_search("dp_adam", 0, [(s, s, s) for s in scores], {"rule": "composed", "runs": 2 + most})
        for number, entry in enumerate(maker.cells[-len(scores) :]):
            entry |= {"widen": most} | ({"widened": True} if number == 2 else {})
    (row,) = by_seed(maker.done()).values()
    assert (row["runs"], row["charges"].total()) == (5, 3 + 5)


def test_searches_with_two_grids_are_both_charged_in_full(maker):
    """The suite was run again with a further rate: the first search has made both of its further runs, its second none.

    Whatever the second makes has the numbers that runs of the first have, and is no other end of the first.
    """
    grids = {"first": (0.1, 1.0, 10.0, 100.0), "second": (0.03, 0.1, 1.0)}
    for name, rates in grids.items():
        for number, lr in enumerate(rates):
            is_widened = name == "first" and lr > 1
            search = 10**6 * (number - 1) if is_widened else number
            maker.add("dp_adam", 0, 0.5 + lr / 1000, 0.5, tuned={"lr": lr}, tuning="grid", search=search)
            maker.cells[-1] |= {"widen": 2, "search_id": name} | ({"widened": True} if is_widened else {})
    store = maker.done()
    (row,) = by_seed(store).values()
    assert (row["runs"], row["charges"].total()) == (7, 9)
    assert row["charges"].most_common(1) == [(maker.cells[4]["run_id"], 3)]
    maker.add("dp_adam", 0, 0.9, 0.5, tuned={"lr": 0.01}, tuning="grid", search=10**6)
    maker.cells[-1] |= {"widen": 2, "search_id": "second", "widened": True}
    (row,) = by_seed(maker.done()).values()
    assert (row["runs"], row["charges"].total()) == (8, 9)
    for entry in maker.cells:
        del entry["search_id"]
    assert any("goes on from the same grid" in problem for problem in frames.load(maker.done(), "made").problems)


def test_what_lies_at_the_end_of_its_own_search_is_marked(maker):
    """One seed has gone no further than 10, another to 1000: the first is at an end, whatever the other tries."""
    add(maker, 0, GRID | {10.0: 0.8}, 1)
    add(maker, 1, GRID | {10.0: 0.8, 100.0: 0.9, 1000.0: 0.6}, 3)
    add(maker, 2, GRID | {10.0: 0.6}, 1)
    store = maker.done()
    assert [row["edges"] for row in by_seed(store).values()] == ["lr ↑", "", ""]
    (row,) = tables.comparison(store, selected(store)).to_dict("records")
    assert row["edges"] == "lr ↑ 1/3"


def test_a_value_without_another_lies_at_no_end(maker):
    for lr, validation in ((0.1, 0.6), (1.0, 0.7)):
        maker.add("dp_sgd", 0, validation, 0.5, tuned={"lr": lr, "momentum": 0.9}, tuning="grid")
    assert [row["edges"] for row in by_seed(maker.done()).values()] == ["lr ↑"]


def test_grids_are_compared_without_what_was_added(maker):
    """Other epsilons may not have a point that widening has added."""
    for epsilon, scores in ((1.0, GRID | {10.0: 0.9}), (3.0, GRID)):
        add(maker, 0, scores, 1, epsilon=epsilon)
        add(maker, 1, scores, 1, epsilon=epsilon)
    store = maker.done()
    cells = frames.load(store, "made").cells
    assert list(transfer.transfers(cells)["loss"]) == pytest.approx([0, 0])


@pytest.mark.parametrize(("status", "chosen"), [("done", 10.0), ("diverged", 1.0)])
def test_a_run_that_diverged_is_selected_last(maker, status, chosen):
    add(maker, 0, GRID, 1)
    maker.add("dp_adam", 0, 0.9, 0.9, tuned={"lr": 10.0}, tuning="grid", status=status)
    (row,) = by_seed(maker.done()).values()
    assert json.loads(row["tuned"]) == {"lr": chosen}


def test_two_machines_that_went_on_otherwise_are_not_one_search(maker):
    """Their further runs have the same number and so the same draws, which nobody charges."""
    add(maker, 0, GRID | {10.0: 0.8}, 2)
    add(maker, 1, GRID | {10.0: 0.8}, 2)
    maker.add("dp_adam", 0, 0.9, 0.8, tuned={"lr": 0.01}, tuning="grid", search=2)
    maker.cells[-1] |= {"widen": 2, "widened": True}
    stored = frames.load(maker.done(), "made")
    assert [row["seed"] for row in choosing.select(stored.cells).to_dict("records")] == [1]
    assert any("another run goes on from the same grid otherwise" in problem for problem in stored.problems)


def test_a_run_that_diverged_is_the_worst_between_settings_too(maker):
    for seed in range(2):
        maker.add("dp_sgd", seed, 0.9, 0.2, batch_size=64, status="diverged")
        maker.add("dp_sgd", seed, 0.5, 0.6, batch_size=128)
        maker.add("dp_adam", seed, 0.5, 0.5)
    results = Results(maker.done(), "made")
    assert set(choosing.best_setting(results.selected)["batch_size"]) == {128}
    reached = ranking.reached(results.store, results.cells, budgets=[10.0])
    assert not reached["failed"].any()
    assert set(reached[reached["label"] == "dp_sgd"]["test"]) == {0.6}
