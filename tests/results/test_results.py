"""Which setting of a method a suite shows, that all that were tried are charged, and that reading needs no writing."""

import errno
import math
import os
import re
from collections import Counter

import pytest

from dpopt.cli import main
from dpopt.results import choosing, figures, pricing
from dpopt.results.publishing import publish
from dpopt.results.results import Results
from dpopt.store import Store

BEST_OF = {"rule": "geometric", "runs": 2.0}


def chosen(maker):
    store = maker.done()
    return store, Results(store, "made")


def add(maker, label, seed, clip, validation, test, batch_size=128):
    run_id = maker.add(label, seed, validation, test)
    maker.clip(clip)
    maker.cells[-1]["cell"]["batch_size"] = batch_size
    maker.change()
    return run_id


def test_the_setting_that_validates_best_over_the_seeds_is_shown_and_all_are_charged(maker):
    """Bound 0.1 is best on the test split and for seed 0; bound 1 has the best mean on validation."""
    runs = {}
    for seed, validations in enumerate(((0.9, 0.8, 0.1), (0.2, 0.8, 0.1))):
        for clip, validation, test in zip((0.1, 1.0, 9.0), validations, (0.99, 0.5, 0.7), strict=True):
            runs.setdefault(seed, []).append(add(maker, "dp_adam", seed, clip, validation, test))
        add(maker, "hyfreedp", seed, 1.0, 0.6, 0.6)
    store, shown = chosen(maker)
    rows = shown.selected[shown.selected["label"] == "dp_adam"].set_index("seed")
    assert list(rows["clip"]) == [1.0, 1.0]
    assert list(rows["test_score"]) == [0.5, 0.5]
    for seed in (0, 1):
        assert rows.loc[seed, "run_id"] == runs[seed][1]
        assert sorted(rows.loc[seed, "charges"]) == sorted(runs[0] + runs[1]), "both seeds have decided"
    assert list(rows["runs"]) == [3, 3]
    table = shown.comparison.set_index("label")
    assert table["epsilon_with_tuning"]["dp_adam"] == pricing.epsilon_of_runs(
        store, Counter(runs[0] + runs[1]), 1e-5, "rdp"
    )
    assert table["epsilon_with_tuning"]["hyfreedp"] == table["epsilon_single"]["hyfreedp"]
    assert len(shown.every) == 8, "nothing is lost where every setting is shown"


def test_settings_of_different_seeds_are_compared_and_so_charged_together(maker):
    """B = 100 is done in seed 0 alone, B = 1000 in seed 1 alone: whoever shows one of them has seen both."""
    ids = []
    for seed, (batch_size, validation) in enumerate(((100, 0.5), (1000, 0.7))):
        for search, lr in enumerate((0.1, 1.0)):
            for size in (100, 1000):
                status = "done" if size == batch_size else "missing"
                own = {"tuned": {"lr": lr}, "tuning": "grid", "batch_size": size, "status": status}
                run_id = maker.add("dp_adam", seed, validation, 0.5, search=search + size, **own)
                ids += [run_id] if status == "done" else []
    store, shown = chosen(maker)
    (row,) = shown.selected.to_dict("records")
    assert (row["batch_size"], row["seed"], row["runs"]) == (1000, 1, 2)
    assert sorted(row["charges"]) == sorted(ids)
    (shown_row,) = shown.comparison.to_dict("records")
    assert shown_row["epsilon_with_tuning"] == pricing.epsilon_of_runs(store, Counter(ids), 1e-5, "rdp")


def test_a_noised_score_decides_where_there_is_one(maker):
    for clip, released, validation in ((0.1, 0.9, 0.3), (1.0, 0.4, 0.8)):
        maker.add_search("dp_adam", 0, [(released, validation, 0.5)], {"rule": "composed", "runs": 1}, clip=clip)
    (row,) = chosen(maker)[1].selected.to_dict("records")
    assert (row["clip"], row["selection_score"]) == (0.1, 0.9)


TWICE = {
    "another bound": ({"clip": 0.1}, {"clip": 1.0}),
    "another grid": ({}, {}),
    "another rule": ({}, {"rule": {"rule": "geometric", "runs": 4.0}}),
    "a rule at last": ({"rule": None}, {}),
    "other numbers": ({"search_id": "first"}, {"search_id": "second", "first": 7}),
    "other numbers, of an old plan": ({}, {"first": 7}),
}
"""The first and the second search of a label."""


@pytest.mark.parametrize("kind", TWICE)
def test_the_better_of_two_private_searches_costs_all_of_their_runs(maker, tmp_path, kind):
    """A rule prices one search, and a suite may be edited. A plan that called all searches alike keeps its price."""
    (first, second), ids = TWICE[kind], []
    for of, released in ((first, (0.5, 0.6)), (second, (0.7,))):
        more = {"rule": BEST_OF, **of}
        if more["rule"]:
            ids += maker.add_search("dp_adam", 0, [(score, 0.5, 0.5) for score in released], **more)
        else:
            ids += [maker.add("dp_adam", 0, 0.4, 0.5, tuned={"lr": score}, tuning="grid") for score in released]
    store, shown = chosen(maker)
    (row,) = shown.selected.to_dict("records")
    assert (row["run_id"], row["runs"]) == (ids[2], 3)
    every, rule = pricing.epsilon_of_runs(store, Counter(ids), 1e-5, "rdp"), row["epsilon_total"]
    assert every > rule
    price = rule if kind == "other numbers, of an old plan" else every
    assert pricing.price(store, row)[0] == price
    publish(shown, tmp_path / "published", tmp_path)
    assert Results(Store(tmp_path / "published"), "made").comparison["epsilon_with_tuning"].tolist() == [price]


def test_nothing_is_chosen_where_nothing_validates(maker):
    """The table has both settings; what shows one of a method leaves it out: only the test split tells them apart."""
    for label, clip in (("diverging", 0.1), ("diverging", 1.0), ("single", 1.0)):
        add(maker, label, 0, clip, math.nan, 0.5)
    for clip in (0.1, 1.0):
        maker.add("diverging", 0, 0.5 * clip, 1 - clip, epsilon=1.0)  # where it validates
        maker.clip(clip)
    _, shown = chosen(maker)
    assert sorted(shown.selected["label"]) == ["diverging", "single"]
    assert sorted(shown.table()["label"]) == [*["diverging"] * 4, "single"]
    assert set(shown.comparison["label"]) == set(shown.curves["label"]) == {"diverging", "single"}
    assert shown.selected.set_index("label").loc["diverging", ["epsilon_target", "clip"]].tolist() == [1, 1]


def swept(maker, scores):
    """Settings of one method: (clip, batch size) -> for each seed its validation score, or None where it diverged."""
    for (clip, batch_size), of_seeds in scores.items():
        for seed, validation in enumerate(of_seeds):
            own = {"batch_size": batch_size, "status": "done" if validation else "diverged"}
            maker.add("dp_adam", seed, validation or 0.99, 0.5, examples=1e4, noise={"gradient": 1.0}, **own)
            maker.clip(clip)
    return Results(maker.done(), "made")


@pytest.mark.parametrize(
    "scores",
    [
        {(0.1, 64): (0.5, 0.6), (1.0, 64): (0.9, None), (0.1, 128): (0.4, 0.4), (1.0, 128): (0.3, 0.3)},
        {(1.0, 128): (0.6, 0.6), (0.1, 64): (0.6, 0.6), (0.1, 128): (0.2, 0.2), (1.0, 64): (0.5, 0.5)},
    ],
    ids=["a replicate diverged", "equal scores"],
)
def test_figures_mark_the_setting_that_is_selected(maker, scores):
    found = swept(maker, scores)
    assert {(row.clip, row.batch_size) for row in found.selected.itertuples()} == {(0.1, 64)}
    marked = choosing.validated_best(found.sweep, ["workload", "epsilon_target"])
    assert [(row.clip, row.batch_size) for row in marked.itertuples()] == [(0.1, 64)]
    assert "selected_by" not in found.table(), "published tables keep their columns"


def test_only_selected_runs_are_published_with_curves_and_diagnostics(maker, tmp_path):
    for rate, score in ((0.1, 0.7), (1.0, 0.8)):
        rest = {"tuned": {"lr": rate}, "tuning": "grid", "diagnostics": {"class_norms": [rate]}}
        maker.add("grid", 0, score, score, **rest)
    store = maker.done()
    publish(Results(store, "made"), tmp_path / "published", tmp_path)
    left, right = (run for run in Store(tmp_path / "published").archive("made").runs.values())
    assert (left.curve, "diagnostics" in left.record) == (None, False)
    assert {**left.record, "diagnostics": {"class_norms": [0.1]}} == store.record(left.record["run_id"])
    assert right == store.run(right.record["run_id"])
    assert left.ledger == store.run(left.record["run_id"]).ledger


def test_frames_of_nothing_are_empty(maker):
    maker.add("dp_adam", 0, 0.5, 0.5, status="missing")
    results = chosen(maker)[1]
    assert all(results.frame(name).empty for name in ("selected", *figures.OF_SUITES))


@pytest.fixture
def read_only(monkeypatch):
    """Nothing can be written where results are."""

    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("dpopt.files.write", refuse)


def test_who_may_not_write_reads_all_the_same(matrix, read_only, capsys):
    assert main(["rank", "suite=made", f"results={matrix.root}"]) == 0
    printed = capsys.readouterr()
    assert "DP-Adam" in printed.out
    assert f"not written to {matrix.suite_folder('made')}: Read-only file system" in printed.err


def test_a_page_that_cannot_be_written_is_refused_before_any_work(matrix, read_only, monkeypatch, capsys):
    monkeypatch.setattr(Results, "report", lambda *_: pytest.fail("worked"))
    assert main(["report", "suite=made", f"results={matrix.root}"]) == 2
    said = capsys.readouterr().err
    assert re.search(r"error: to: '.*/made' cannot be used; cannot be written: Read-only file system; to=FILE", said)
