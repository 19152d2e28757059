"""A leaderboard of made-up records whose ranks are known."""

import io

import numpy as np
import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results import statistics
from dpopt.results.leaderboard import CHARGED, FREE, PUBLIC, SELF, Leaderboard
from dpopt.results.results import Results
from dpopt.store import Store

WORKLOADS = ("digits_mlp", "mnist_mlp", "gmm")


@pytest.fixture(scope="module")
def store(maker_of, tmp_path_factory):
    """Two methods that need no search, one whose search fits and two that are not charged, in two suites."""
    maker = maker_of(tmp_path_factory.mktemp("board") / "results")
    for number, workload in enumerate(WORKLOADS):
        for seed in range(3):
            of = {"workload": workload, "seconds_cpu": 1800.0}
            maker.add("adadp", seed, 0.5, 0.8 + 0.01 * seed, **of)
            maker.add("prodigy", seed, 0.5, 0.6 + 0.001 * seed + 0.3 * (number == 2), **of)
            maker.add("by_hand", seed, 0.5, 0.95, tuned={"lr": 0.1}, tuning="fixed", **of)
            for lr in (0.1, 1.0):
                maker.add("dp_adam_free", seed, lr, 0.9, tuned={"lr": lr}, tuning="grid", **of)
                maker.add("dp_adam", seed, lr, 0.7, tuned={"lr": lr}, tuning="grid", epsilon=1.2, **of)
                maker.cells[-1]["target"] = 3.0
    made = maker.done()
    cells = maker.cells
    for name, part in (("first", WORKLOADS[:2]), ("second", WORKLOADS[1:])):
        own = [entry for entry in cells if entry["cell"]["workload"]["name"] in part]
        made.extend_suite(name, {"suite": name, "description": "", "cells": own})
    return made


def test_tracks_ranks_and_costs(store):
    board, two = Leaderboard([Results(store, "made")]), Leaderboard([Results(store, "first"), Results(store, "second")])
    pd.testing.assert_frame_equal(board.ranks, two.ranks)
    assert len(two.cells) == len(board.cells), "runs that two suites share count once"
    table = board.ranks.set_index("label")
    assert board.tracks == {"adadp": SELF, "prodigy": SELF, "dp_adam": CHARGED, "dp_adam_free": FREE, "by_hand": FREE}
    assert table["rank"].dropna().to_dict() == pytest.approx({"adadp": 4 / 3, "dp_adam": 7 / 3, "prodigy": 7 / 3})
    assert list(table.index[:1]) == ["adadp"]
    assert table["cpu_hours"].to_dict() == {
        "adadp": 4.5, "prodigy": 4.5, "by_hand": 4.5, "dp_adam": 9, "dp_adam_free": 9
    }  # fmt: skip
    ranked = table[table["rank"].notna()]
    assert (ranked["low"] <= ranked["rank"]).all()
    assert (ranked["rank"] <= ranked["high"]).all()


def test_constants_and_what_they_were_chosen_on(maker):
    chosen = {"adadp": {"tau 1": ["digits MLP", "another task"]}, "dp_adam": {"lr 0.01": []}}
    for workload in WORKLOADS:
        for seed in range(3):
            is_known = workload == "digits_mlp"
            for label, test in (("adadp", 0.9 if is_known else 0.5), ("dp_adam", 0.8), ("prodigy", 0.7)):
                tuning = "public" if label == "dp_adam" else "self"
                maker.add(label, seed, 0.5, test + 0.01 * seed, workload=workload, tuning=tuning)
                maker.cells[-1]["chosen_on"] = chosen.get(label, {})
    board = Leaderboard([Results(maker.done(), "made")])
    assert board.tracks == {"adadp": SELF, "dp_adam": PUBLIC, "prodigy": SELF}
    table = board.ranks.set_index("label")
    assert table["rank"].to_dict() == pytest.approx({"dp_adam": 4 / 3, "prodigy": 7 / 3, "adadp": 7 / 3})
    assert table["unseen"].to_dict() == {"dp_adam": 1, "prodigy": 2, "adadp": 3}
    *_, scores, constants = board.tables()
    assert constants.frame.to_numpy().tolist() == [
        ["DP-Adam", "lr 0.01", "none of our tasks"],
        ["ADADP", "tau 1", "digits MLP; another task"],
    ]
    marked = scores.frame.set_index("method").map(lambda text: text.endswith("°")).stack()
    assert list(marked[marked].index) == [("ADADP", "digits MLP, accuracy (%)")]


def test_a_block_of_one_method_is_in_no_interval(maker):
    for workload in WORKLOADS:
        for seed in range(3):
            for label, test in (("adadp", 0.8), ("prodigy", 0.6)):
                maker.add(label, seed, 0.5, test + 0.01 * seed, workload=workload)
    maker.add("prodigy", 0, 0.5, 0.6, workload="sst2_minilm")
    table = Leaderboard([Results(maker.done(), "made")]).ranks.set_index("label")
    assert table[["rank", "low", "high"]].T.to_dict("list") == {"adadp": [1, 1, 1], "prodigy": [2, 2, 2]}


def test_suites_that_share_no_method_have_no_ranks(maker, tmp_path):
    for workload, labels in (("digits_mlp", ("adadp", "prodigy")), ("gmm", ("dog", "hyfreedp"))):
        for label in labels:
            maker.add(label, 0, 0.5, 0.5, workload=workload)
    board = Leaderboard([Results(maker.done(), "made")])
    assert board.ranks[["rank", "low", "high", "unseen", "draws"]].isna().all(axis=None)
    assert main(["leaderboard", "suite=made", f"results={maker.store.root}", f"to={tmp_path / 'page'}"]) == 0
    assert not (tmp_path / "page" / "leaderboard.svg").exists()


def test_a_page_marks_what_has_no_rank(store, tmp_path):
    assert main(["leaderboard", "suite=[first,second]", f"results={store.root}", f"to={tmp_path / 'page'}"]) == 0
    files = {path.name: path for path in (tmp_path / "page").iterdir()}
    assert set(files) == {"leaderboard" + end for end in (".md", ".html", ".csv", "_scores.csv")}, "no figure of three"
    text = files["leaderboard.md"].read_text()
    assert "*dp_adam_free*" in text
    assert "*95.0 ± 0.0*" in text
    assert "**81.0 ± 1.0**" in text
    assert "Average ranks are not tested" in text
    page = files["leaderboard.html"].read_text()
    assert page.count("<table>") == 2
    assert "<svg" not in page
    read = pd.read_csv(io.StringIO(files["leaderboard.csv"].read_text()))
    assert read["rank"].notna().sum() == 3


def test_what_cannot_be_a_leaderboard_is_refused(maker, tmp_path):
    maker.add("adadp", 0, 0.5, 0.5, status="missing")
    made = Results(maker.done(), "made")
    with pytest.raises(ConfigError, match="no finished private rows"):
        Leaderboard([made])
    other = Store(tmp_path / "other")
    other.extend_suite("made", made.store.manifest("made"))
    with pytest.raises(ConfigError, match="one folder"):
        Leaderboard([made, Results(other, "made")])


def test_samples_of_ranks_vary_with_workloads_and_seeds():
    sure = np.array([[0.9, 0.5], [0.8, 0.4]])
    assert (statistics.rank_samples([[sure], [sure]]) == [1, 2]).all()
    mixed = statistics.rank_samples([[sure], [1 - sure]])
    assert sorted(np.unique(mixed[:, 0])) == [1, 1.5, 2]
    assert (mixed[:, 0] == 1.5).mean() == pytest.approx(0.5, abs=0.04), "two of two workloads, drawn with replacement"
    unsure = statistics.rank_samples([[np.array([[0.9, 0.5], [0.1, 0.5], [0.75, 0.5]])]])
    assert (unsure[:, 0] == 2).mean() == pytest.approx(7 / 27, abs=0.03), "means of 0.1 three times or twice"
