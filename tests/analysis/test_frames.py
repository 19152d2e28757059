import json
import math
import time

import pandas as pd
import pytest

from dpopt.analysis import frames, tables
from dpopt.analysis.naming import workload_names
from dpopt.analysis.results import Results
from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.privacy.selection import best_of
from dpopt.store.runs import sealed


def test_selection_looks_at_validation_only_and_at_each_seed_alone(matrix):
    """Mistake 9: the run with 90 % test accuracy was worse on validation, so it is never reported."""
    selected = frames.select(frames.load(matrix, "made").cells)
    searched = selected[selected["label"] == "dp_adam"]
    assert len(searched) == 6
    assert (searched["tuned"] == '{"lr": 1.0}').all()
    assert sorted(searched["test_accuracy"].unique()) == pytest.approx([0.5, 0.6, 0.7])
    assert (searched["runs"] == 2).all()
    assert (selected[selected["label"] == "hyfreedp"]["runs"] == 1).all()


def test_a_search_is_charged(matrix):
    """Mistake 8: two runs on the same data cost what two runs cost."""
    selected = frames.select(frames.load(matrix, "made").cells)
    row = selected[(selected["label"] == "dp_adam") & (selected["epsilon_target"] == 3)].iloc[0]
    once, twice = Ledger(), Ledger()
    once.append(Draw(0.1, (5 / 3**0.85,)), 100)
    twice.append(Draw(0.1, (5 / 3**0.85,)), 200)
    assert row["epsilon"] == epsilon(once, 1e-5, "rdp")
    assert frames.epsilon_with_tuning(matrix, row) == epsilon(twice, 1e-5, "rdp")
    assert frames.composed(matrix, row["run_ids"][:1], 1e-5, "rdp") == epsilon(once, 1e-5, "rdp")


def ledger(*parts):
    """Of (rate, noises, count)."""
    made = Ledger()
    for rate, noises, count in parts:
        made.append(Draw(rate, noises), count)
    return made


class Runs:
    """A store of runs: id -> (seed, number within its search, ledger)."""

    def __init__(self, **runs):
        self.runs = runs

    def ledger(self, run_id):
        return self.runs[run_id][2]

    def record(self, run_id):
        seed, number, _ = self.runs[run_id]
        return {"cell": {"seed": seed} | ({"search": number} if number else {})}


ONE, OTHER = ledger((0.1, (2.0,), 30), (0.1, (2.0, 5.0), 20)), ledger((0.2, (3.0,), 40))
TOGETHER = ledger((0.2, (2.0, 3.0), 30), (0.2, (2.0, 5.0, 3.0), 10), (0.1, (2.0, 5.0), 10))


def test_runs_that_share_their_draws_are_charged_as_one_draw_each():
    """As a suite leaves them that is run again with other values: the same record is in the k-th draw of both."""
    store = Runs(one=(0, 0, ONE), other=(0, 0, OTHER), third=(0, 0, OTHER), apart=(0, 1, OTHER), seed=(1, 0, OTHER))
    spent = frames.composed(store, ["one", "other"], 1e-5, "rdp")
    assert spent == epsilon(TOGETHER, 1e-5, "rdp") > 1.05 * epsilon(ONE + OTHER, 1e-5, "rdp")
    for further in ("apart", "seed"):
        assert frames.composed(store, ["one", further], 1e-5, "rdp") == epsilon(ONE + OTHER, 1e-5, "rdp")
    three = ledger((0.2, (2.0, 3.0, 3.0), 30), (0.2, (2.0, 5.0, 3.0, 3.0), 10), (0.1, (2.0, 5.0), 10))
    assert frames.composed(store, ["one", "other", "third"], 1e-5, "rdp") == epsilon(three, 1e-5, "rdp")


def test_a_run_that_is_charged_again_is_a_further_one():
    store = Runs(one=(0, 0, ONE), other=(0, 0, OTHER))
    spent = frames.composed(store, ["one", "other", "one", "one"], 1e-5, "rdp")
    assert spent == epsilon(TOGETHER + ONE + ONE, 1e-5, "rdp")


def test_long_runs_that_share_their_draws_are_charged_at_once():
    alternating = Ledger(Draw(0.01, (1.0 + draw % 2,)) for draw in range(20_000))
    store = Runs(**{f"run_{number}": (0, 0, alternating) for number in range(40)})
    began = time.monotonic()
    counts = frames._merged([alternating] * 40)
    assert time.monotonic() - began < 10
    assert counts == {Draw(0.01, (1.0,) * 40): 10_000, Draw(0.01, (2.0,) * 40): 10_000}
    assert frames.composed(store, list(store.runs), 1e-5, "rdp") > 0


def test_a_search_that_was_planned_again_with_other_values_is_charged_for_shared_draws(maker):
    """`dpopt run suite=made settings.dp_adam.grid.lr=[0.1,1]`, and again with [10]: its run has the number 0 too."""
    for number, lr in ((0, 0.1), (1, 1.0), (0, 10.0)):
        maker.add("dp_adam", 0, 0.5, 0.5, tuned={"lr": lr}, tuning="grid", search=number)
    noise = 5 / 3**0.85
    (row,) = frames.select(frames.load(maker.done(), "made").cells).to_dict("records")
    expected = epsilon(ledger((0.1, (noise, noise), 100), (0.1, (noise,), 100)), 1e-5, "rdp")
    assert frames.epsilon_with_tuning(maker.store, row) == expected
    assert tables.comparison(maker.store, pd.DataFrame([row]))["epsilon_composed"].tolist() == [expected]


def test_rows_of_one_label_are_told_apart_by_accountant_and_average(maker):
    """Otherwise they are one search, of which the run that validates best is shown."""
    maker.add("fiber", 0, 0.6, 0.5)
    maker.add("fiber", 0, 0.7, 0.9)
    maker.change(average=0.99)
    maker.add("dp_sgd", 0, 0.4, 0.4)
    maker.add("dp_adam", 0, 0.5, 0.4)
    maker.add("dp_adam", 1, 0.5, 0.4)
    maker.change(accountant="prv")
    cells = frames.load(maker.done(), "made").cells
    kept = frames.load(maker.store, "made", {"seeds": [1]}).cells
    names = ["fiber (average=0.0)", "fiber (average=0.99)", "dp_sgd"]
    assert cells["label"].tolist() == [*names, "dp_adam (accountant=rdp)", "dp_adam (accountant=prv)"]
    assert kept["label"].tolist() == ["dp_adam (accountant=prv)"]  # the same name whatever part is read
    selected = frames.select(cells[cells["optimizer"] == "fiber"])
    assert selected["test_accuracy"].tolist() == [0.5, 0.9]
    assert selected["runs"].tolist() == [1, 1]


@pytest.mark.parametrize("status", ["failed", "missing"])
def test_an_incomplete_search_is_not_a_result(maker, status):
    maker.add("dp_adam", 0, 0.6, 0.6, tuned={"lr": 0.1}, tuning="grid")
    lost = maker.add("dp_adam", 0, 0.9, 0.9, tuned={"lr": 1.0}, tuning="grid", status=status)
    maker.add("dp_adam", 1, 0.6, 0.6, tuned={"lr": 0.1}, tuning="grid")
    results = frames.load(maker.done(), "made")
    selected = frames.select(results.cells)
    assert list(selected["seed"]) == [1]
    assert any(lost in problem and "no luck" in problem for problem in results.problems) == (status == "failed")


def test_damaged_and_foreign_files_are_reported_and_skipped(maker):
    good, bad = maker.add("adadp", 0, 0.5, 0.5), maker.add("adadp", 1, 0.5, 0.5)
    store = maker.done()
    path = store.folder(bad) / "record.json"
    path.write_text(path.read_text()[:50])
    (store.root / "runs" / "notes.txt").write_text("mine")
    results = frames.load(store, "made")
    assert list(frames.select(results.cells)["run_id"]) == [good]
    assert len(results.problems) == 2
    assert any("notes.txt" in problem for problem in results.problems)
    assert any(bad in problem and "move it away" in problem for problem in results.problems)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ledger.json", None),
        ("ledger.json", "{}"),
        ("record.json", {"epsilon": "a lot"}),
        ("record.json", {"provenance": 3}),
        ("record.json", {"epsilon": 0.1}),
        ("record.json", {"cell": {}}),
        ("record.json", {"test_accuracy": None}),
        ("record.json", {"score": "bleu"}),
        ("record.json", {"scores": [1.0]}),
        ("ledger.json", '{"draws":[{"rate":0.1,"noises":[1]}],"runs":[[0,-3]]}'),
    ],
)
def test_files_of_the_right_name_and_the_wrong_content(maker, name, content):
    bad = maker.add("adadp", 0, 0.5, 0.5)
    store = maker.done()
    path = store.folder(bad) / name
    if content is None:
        path.unlink()
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(sealed({**store.record(bad), **content})))
    results = frames.load(store, "made")
    assert list(results.cells["state"]) == ["damaged"]
    assert name in results.problems[0]
    assert frames.select(results.cells).empty


def test_curves_have_a_learning_rate_for_everyone(matrix):
    curves = frames.curves(matrix, frames.select(frames.load(matrix, "made").cells))
    assert set(curves["label"]) == {"dp_adam", "hyfreedp", "ceiling"}
    assert len(curves) == 2 * (6 + 6 + 3)
    assert set(curves[curves["label"] == "dp_adam"]["eta"]) == {1.0}
    assert set(curves[curves["label"] == "ceiling"]["eta"]) == {0.1}
    assert sorted(curves[curves["label"] == "hyfreedp"]["eta"].unique()) == pytest.approx([0.05, 0.1])


def test_workloads_of_one_name_are_not_mixed(maker):
    for dim in (5, 10):
        maker.add("adadp", 0, 0.5, 0.5)
        maker.cells[-1]["cell"]["workload"] = {"name": "synthetic_logreg", "dim": dim}
        store = maker.store
        path = store.folder(maker.cells[-1]["run_id"]) / "record.json"
        path.write_text(json.dumps({**store.record(path.parent.name), "cell": maker.cells[-1]["cell"]}))
    selected = frames.select(frames.load(maker.done(), "made").cells)
    assert list(selected["workload"]) == ["synthetic_logreg(dim=5)", "synthetic_logreg(dim=10)"]
    assert list(selected["runs"]) == [1, 1]


def rewrite(store, run_id, **changes):
    path = store.folder(run_id) / "record.json"
    path.write_text(json.dumps(sealed({**store.record(run_id), **changes})))


def test_runs_of_one_workload_with_two_scores_are_not_compared(maker):
    good, other = maker.add("adadp", 0, 0.5, 0.5), maker.add("hyfreedp", 0, 0.5, 0.5)
    store = maker.done()
    rewrite(store, other, score="log_likelihood", test_log_likelihood=-2.0)
    results = frames.load(store, "made")
    assert list(frames.select(results.cells)["run_id"]) == [good]
    assert any(other in problem and "log_likelihood" in problem for problem in results.problems)


def test_a_score_that_is_not_a_number_is_never_selected(maker):
    runs = [maker.add("adadp", 0, 0.5, 0.5, tuned={"lr": lr}, tuning="grid") for lr in (0.1, 1.0, 10.0)]
    store = maker.done()
    for run_id, value in zip(runs, (math.nan, -3.0, -math.inf), strict=True):
        rewrite(store, run_id, score="log_likelihood", test_log_likelihood=value, validation_log_likelihood=value)
    assert list(frames.select(frames.load(store, "made").cells)["run_id"]) == [runs[1]]


def test_further_scores_become_columns(maker):
    first, second = maker.add("adadp", 0, 0.5, 0.5), maker.add("adadp", 1, 0.5, 0.5)
    store = maker.done()
    rewrite(store, first, scores={"nll": 1.5, "by_class": [0.1, 0.2], "meteor": None})
    rewrite(store, second, scores={"nll": 2, "why": "no java"})
    cells = frames.load(store, "made").cells
    assert cells["score_nll"].tolist() == [1.5, 2.0]
    assert cells["score_meteor"].isna().all()
    assert not {"score_by_class", "score_why"} & set(cells.columns)


def test_labels_select_rows(matrix):
    cells = frames.load(matrix, "made", {"optimizers": ["hyfreedp"]}).cells
    assert set(cells["label"]) == {"hyfreedp"}
    assert json.loads(cells["tuned"].iloc[0]) == {}


def test_a_part_that_no_row_has_as_a_whole_is_refused(matrix):
    """Some row is of the ceiling, and some row has epsilon 1; none is both."""
    for part in ({"optimizers": ["ceiling"], "epsilon": [1.0]}, {"optimizers": ["cieling"]}):
        with pytest.raises(ConfigError, match="optimizers"):
            Results(matrix, "made", part)
    both = {"optimizers": ["ceiling", "hyfreedp"], "epsilon": [1.0]}
    assert set(Results(matrix, "made", both).cells["label"]) == {"hyfreedp"}


def test_workloads_are_chosen_by_either_name(maker):
    for dim in (5, 10):
        maker.add("adadp", 0, 0.5, 0.5)
        maker.change(workload={"name": "synthetic_logreg", "dim": dim})
    store = maker.done()
    printed = frames.load(store, "made").cells["workload"].tolist()
    for asked, found in ((["synthetic_logreg"], printed), (["synthetic_logreg(dim=10)"], printed[1:])):
        assert Results(store, "made", {"workloads": asked}).cells["workload"].tolist() == found
    with pytest.raises(ConfigError, match=r"did you mean 'synthetic_logreg\(dim=10\)'"):
        Results(store, "made", {"workloads": ["synthetic_logreg(dim=11)"]})


def test_an_accountant_that_nobody_knows_costs_one_cell(maker):
    good, bad = maker.add("adadp", 0, 0.5, 0.5), maker.add("adadp", 1, 0.5, 0.5)
    maker.change(accountant="pdl")
    stored = frames.load(maker.done(), "made")
    assert dict(zip(stored.cells["run_id"], stored.cells["state"], strict=True)) == {good: "done", bad: "damaged"}
    assert any(bad in problem and "did you mean 'pld'" in problem for problem in stored.problems)


def names(*specs):
    return list(workload_names([{"name": "images", "revision": 1, **spec} for spec in specs]).values())


def test_workloads_are_named_by_their_data_and_what_tells_them_apart():
    assert names({"validation": 5}) == ["images"]
    assert names({"validation": 5, "data": "a"}) == ["images(data=a)"]
    assert names({"name": "mnist_scatter", "data": "mnist"}) == ["mnist_scatter"]
    assert names({"name": "mnist_scatter", "data": "other"}) == ["mnist_scatter(data=other)"]
    assert names({"validation": 5, "data": "a"}, {"validation": 9, "data": "b"}) == ["images(data=a)", "images(data=b)"]
    alike = [{"validation": 5, "data": "a"}, {"validation": 9, "data": "a"}]
    assert names(*alike) == ["images(validation=5, data=a)", "images(validation=9, data=a)"]
    three = names(*alike, {"validation": 9, "data": "b"})
    assert three == ["images(validation=5, data=a)", "images(validation=9, data=a)", "images(data=b)"]


BEST_OF = {"rule": "geometric", "runs": 2.0}


def selected(store):
    return frames.select(frames.load(store, "made").cells)


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
    assert row["run_ids"] == tuple(runs)
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
    assert (row["run_id"], row["runs"], row["run_ids"]) == (ids[2], 3, tuple(ids))
    assert row["epsilon_target"] == 3
    total = frames.composed(store, ids, 1e-5, "rdp")
    assert row["epsilon_total"] == frames.epsilon_with_tuning(store, row) == pytest.approx(total)
    assert total > row["epsilon"]


def test_a_search_in_parts_without_its_last_run_releases_nothing(maker):
    part = {"rule": "part", "runs": 2, "total": 3.0}
    maker.add_search("linear", 0, [(0.9, 0.9, 0.9, 0.3, "search")], part, tuning="linear_scaling")
    maker.add("adadp", 0, 0.5, 0.5)
    assert list(selected(maker.done())["label"]) == ["adadp"]


def test_the_price_of_a_search_is_its_rules_only_where_the_number_of_runs_is_random(maker):
    scores = [(0.5, 0.5, 0.5)] * 4
    maker.add_search("private", 0, scores, BEST_OF)
    maker.add_search("composed", 0, scores, {"rule": "composed", "runs": 4})
    maker.add_search("simulated", 0, [(None, 0.5, 0.5)] * 4, {"rule": "simulated", "share": 0.85})
    store = maker.done()
    rows = {row["label"]: row for row in selected(store).to_dict("records")}
    composed = frames.composed(store, rows["private"]["run_ids"], 1e-5, "rdp")
    price = {label: frames.epsilon_with_tuning(store, row) for label, row in rows.items()}
    assert price["composed"] == rows["composed"]["epsilon_total"] == composed
    assert price["simulated"] == composed > 1.5 * rows["simulated"]["epsilon_total"]
    ledger = store.ledger(rows["private"]["run_id"])
    assert price["private"] == best_of(ledger, 1e-5, runs=2, number="geometric") < composed


@pytest.mark.parametrize("stated", [0.1, 1e9, "a lot", None, math.nan, [1]])
@pytest.mark.parametrize("rule", [BEST_OF, {"rule": "composed", "runs": 1}, {"rule": "simulated", "share": 0.85}])
def test_a_record_that_states_another_price_of_its_search_is_damaged(maker, rule, stated):
    (bad,) = maker.add_search("dp_adam", 0, [(0.5, 0.5, 0.5)], rule)
    store = maker.done()
    assert list(frames.load(store, "made").cells["state"]) == ["done"]
    rewrite(store, bad, epsilon_total=stated)
    results = frames.load(store, "made")
    assert list(results.cells["state"]) == ["damaged"]
    assert "record.json" in results.problems[0]
    assert frames.select(results.cells).empty


@pytest.mark.parametrize("content", [{"value": None}, {"value": "good"}, "good"])
def test_a_released_score_that_is_no_number_is_damage(maker, content):
    (bad,) = maker.add_search("dp_adam", 0, [(0.5, 0.5, 0.5)], BEST_OF)
    store = maker.done()
    rewrite(store, bad, released_score=content)
    assert list(frames.load(store, "made").cells["state"]) == ["damaged"]
