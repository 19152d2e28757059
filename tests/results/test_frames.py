import math

import pytest
from stored import rewrite

from dpopt.errors import ConfigError
from dpopt.results import choosing, frames
from dpopt.results.naming import workload_names
from dpopt.results.results import Results
from dpopt.store import Store


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
    selected = choosing.select(cells[cells["optimizer"] == "fiber"])
    assert selected["test_accuracy"].tolist() == [0.5, 0.9]
    assert selected["runs"].tolist() == [1, 1]


def test_rows_of_one_label_are_told_apart_by_the_code_that_made_them(maker):
    maker.add("fiber", 0, 0.6, 0.5)
    optimizer = maker.cells[-1]["cell"]["optimizer"]
    maker.add("fiber", 0, 0.7, 0.9)
    maker.change(optimizer=optimizer | {"revision": 2})
    maker.add("dp_adam", 0, 0.6, 0.5)
    maker.add("dp_adam", 0, 0.6, 0.5)
    maker.change(kernel=2, diagnostics=True)
    names = ["fiber (revision=1)", "fiber (revision=2)"]
    names += [f"dp_adam (diagnostics={flag}, kernel={kernel})" for flag, kernel in ((False, 1), (True, 2))]
    assert frames.load(maker.done(), "made").cells["label"].tolist() == names


def test_damaged_and_foreign_files_are_reported_and_skipped(maker):
    good, bad, unpriced = (maker.add("adadp", seed, 0.5, 0.5) for seed in range(3))
    maker.change(accountant="pdl")
    store = maker.done()
    path = store.folder(bad) / "run.json"
    path.write_text(path.read_text()[:50])
    (store.root / "runs" / "notes.txt").write_text("mine")
    results = frames.load(store, "made")
    assert list(choosing.select(results.cells)["run_id"]) == [good]
    assert len(results.problems) == 3
    assert any("notes.txt" in problem for problem in results.problems)
    assert any(bad in problem and "move it away" in problem for problem in results.problems)
    assert any(unpriced in problem and "did you mean 'pld'" in problem for problem in results.problems)


WRONG = [{"epsilon": "a lot"}, {"epsilon": 0.1}, {"provenance": 3}, {"cell": {}}, {"test_accuracy": None}]
WRONG += [{"score": "bleu"}, {"scores": [1.0]}, {"ledger": {"draws": []}}]
WRONG += [{"ledger": {"draws": [{"rate": 0.1, "noises": [1]}], "runs": [[0, -3]]}}]


@pytest.mark.parametrize("content", WRONG, ids=str)
def test_files_of_the_right_name_and_the_wrong_content(maker, content):
    bad = maker.add("adadp", 0, 0.5, 0.5)
    rewrite(store := maker.done(), bad, **content)
    results = frames.load(store, "made")
    assert list(results.cells["state"]) == ["damaged"]
    assert "run.json" in results.problems[0]
    assert choosing.select(results.cells).empty


def test_curves_have_a_learning_rate_for_everyone(matrix):
    curves = frames.curves(matrix, choosing.select(frames.load(matrix, "made").cells))
    assert set(curves["label"]) == {"dp_adam", "hyfreedp", "ceiling"}
    assert len(curves) == 2 * (6 + 6 + 3)
    assert set(curves[curves["label"] == "dp_adam"]["eta"]) == {1.0}
    assert set(curves[curves["label"] == "ceiling"]["eta"]) == {0.25}
    assert sorted(curves[curves["label"] == "hyfreedp"]["eta"].unique()) == pytest.approx([0.05, 0.1])


def test_a_factor_of_another_step_size_is_no_learning_rate(maker):
    for step_size in ("lr", "scheduled_lr", "d"):
        maker.add(step_size, 0, 0.5, 0.5)
        maker.change(optimizer=maker.cells[-1]["cell"]["optimizer"] | {"step_size": step_size})
    assert frames.load(maker.done(), "made").cells["lr"].fillna(0).tolist() == [0.25, 0.25, 0]


def test_runs_of_one_workload_with_two_scores_are_not_compared(maker):
    good, other = maker.add("adadp", 0, 0.5, 0.5), maker.add("hyfreedp", 0, 0.5, 0.5)
    store = maker.done()
    rewrite(store, other, score="log_likelihood", test_log_likelihood=-2.0)
    results = frames.load(store, "made")
    assert list(choosing.select(results.cells)["run_id"]) == [good]
    assert any(other in problem and "log_likelihood" in problem for problem in results.problems)


def test_a_score_that_is_not_a_number_is_never_selected(maker):
    runs = [maker.add("adadp", 0, 0.5, 0.5, tuned={"lr": lr}, tuning="grid") for lr in (0.1, 1.0, 10.0)]
    store = maker.done()
    for run_id, value in zip(runs, (math.nan, -3.0, -math.inf), strict=True):
        rewrite(store, run_id, score="log_likelihood", test_log_likelihood=value, validation_log_likelihood=value)
    assert list(choosing.select(frames.load(store, "made").cells)["run_id"]) == [runs[1]]


def test_further_scores_become_columns(maker):
    first, second = maker.add("adadp", 0, 0.5, 0.5), maker.add("adadp", 1, 0.5, 0.5)
    store = maker.done()
    rewrite(store, first, scores={"nll": 1.5, "by_class": [0.1, 0.2], "meteor": None})
    rewrite(store, second, scores={"nll": 2, "why": "no java"})
    cells = frames.load(store, "made").cells
    assert cells["score_nll"].tolist() == [1.5, 2.0]
    assert cells["score_meteor"].isna().all()
    assert not {"score_by_class", "score_why"} & set(cells.columns)


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
    selected = choosing.select(frames.load(store, "made").cells)
    printed = selected["workload"].tolist()
    assert printed == ["synthetic_logreg(dim=5)", "synthetic_logreg(dim=10)"]
    assert selected["runs"].tolist() == [1, 1], "workloads of one name are not mixed"
    for asked, found in ((["synthetic_logreg"], printed), (["synthetic_logreg(dim=10)"], printed[1:])):
        assert Results(store, "made", {"workloads": asked}).cells["workload"].tolist() == found
    with pytest.raises(ConfigError, match=r"did you mean 'synthetic_logreg\(dim=10\)'"):
        Results(store, "made", {"workloads": ["synthetic_logreg(dim=11)"]})


def names(*specs):
    return workload_names([{"name": "images", "revision": 1, **spec} for spec in specs])


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


@pytest.mark.parametrize("rule", [BEST_OF, {"rule": "simulated", "share": 0.85}])
def test_a_record_that_states_another_price_or_score_of_its_search_is_damaged(maker, rule):
    (bad,) = maker.add_search("dp_adam", 0, [(0.5, 0.5, 0.5)], rule)
    store = maker.done()
    record = store.record(bad)
    assert list(frames.load(store, "made").cells["state"]) == ["done"]
    wrong = [{"epsilon_total": stated} for stated in (0.1, 1e9, "a lot", None, math.nan, [1])]
    wrong += [{"released_score": content} for content in ({"value": None}, {"value": "good"}, "good")]
    for changes in wrong:
        rewrite(store, bad, **record | changes)
        results = frames.load(Store(store.root), "made")
        assert list(results.cells["state"]) == ["damaged"], changes
        assert any("run.json" in problem for problem in results.problems)
        assert choosing.select(results.cells).empty
