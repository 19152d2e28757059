"""The script that makes the claims of `clip_batch_sweep`, on runs that are few enough to be counted by hand."""

import math
from itertools import product
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from intervals import student

ROOT = Path(__file__).parents[2]
CLAIMS = SimpleNamespace(**run_path(str(ROOT / "benchmarks" / "clip_batch_claims.py")))
WORKLOADS = ("head, CIFAR-10, size 64", "head, CIFAR-100 subset")
SIZES, CLIPS, EPSILONS, SEEDS = (128, 512, 2048, 8192), (0.1, 1.0, 5.0, 20.0), (0.5, 8.0), (0, 1, 2)
RATES = (0.001, 0.01)
KEYS = ["workload", "epsilon_target", "epochs", "seed", "batch_size", "clip"]


@pytest.fixture(scope="module")
def cells():
    """Runs with scores of their own, validated otherwise than tested."""
    generator = np.random.default_rng(0)
    grid = product(WORKLOADS, EPSILONS, (10.0,), SEEDS, SIZES, CLIPS, RATES)
    frame = pd.DataFrame(grid, columns=[*KEYS, "lr"]).assign(label="dp_adam", score="accuracy")
    frame["draws"] = 10 * 9000 // frame["batch_size"]
    frame["noise_gradient"] = 2 * np.sqrt(frame["batch_size"] / 128)  # noise adds up to the same for every B
    return frame.assign(validation_score=generator.random(len(frame)), test_score=generator.random(len(frame)))


@pytest.fixture(scope="module")
def runs(cells):
    """The best learning rate of each setting and seed."""
    best = cells.loc[cells.groupby(KEYS)["validation_score"].idxmax()]
    return best.assign(selected_by=best["validation_score"])


@pytest.fixture(scope="module")
def losses(cells, runs):
    return CLAIMS.losses(cells, runs)


def searched(cells, place, **fixed):
    """The run that a search validates best, of those with the numbers `fixed`, by a walk through all runs."""
    wanted = dict(zip(("workload", "epsilon_target", "epochs", "seed"), place, strict=True)) | fixed
    runs = [row for row in cells.to_dict("records") if all(row[key] == value for key, value in wanted.items())]
    return max(runs, key=lambda row: row["validation_score"])


def written(percentages):
    """As the tables have a mean over seeds."""
    low, high = student(percentages)
    return f"{np.mean(percentages):+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


FIXED = {"batch_size": 2048, "clip": 1.0}
SEARCHES = {"C = 1, B = 2048": FIXED, "C searched, B = 2048": {"batch_size": 2048}, "B searched, C = 1": {"clip": 1.0}}


def test_what_is_lost_against_the_joint_search(cells, losses):
    for name, fixed in SEARCHES.items():
        for place, lost in losses[name].items():
            expected = searched(cells, place)["test_score"] - searched(cells, place, **fixed)["test_score"]
            assert lost == pytest.approx(expected)


def test_what_is_lost_with_the_settings_of_another_search(cells, losses):
    place = WORKLOADS[0], 0.5, 10.0, 1
    others = {"at another ε": (WORKLOADS[0], 8.0, 10.0, 1), "on another workload": (WORKLOADS[1], *place[1:])}
    for name, other in others.items():
        setting = {key: searched(cells, other)[key] for key in ("batch_size", "clip")}
        expected = searched(cells, place)["test_score"] - searched(cells, place, **setting)["test_score"]
        assert losses[f"C and B of the search {name}"][place] == pytest.approx(expected)


def test_what_is_lost_where_the_rate_is_kept(cells, runs, losses):
    place = WORKLOADS[1], 8.0, 10.0, 2
    rate = searched(cells, place, **FIXED)["lr"]
    for clip, size in ((1.0, 128), (0.1, 2048)):
        again, kept = (searched(cells, place, batch_size=size, clip=clip, **lr) for lr in ({}, {"lr": rate}))
        lost = losses[f"η of C = 1, B = 2048 kept at C = {clip:g}, B = {size}"][place]
        assert lost == pytest.approx(again["test_score"] - kept["test_score"])
    gone = cells[(cells["lr"] != rate) | (cells["batch_size"] != 128)]
    assert math.isnan(CLAIMS.kept_rate(gone, runs, (128, 1.0))[place]), "a rate that was not tried"


def test_the_rules_of_the_study(runs):
    chosen = CLAIMS.by_rules(runs)
    # All batches are in the plateau, so that the smallest is taken.
    assert {size for size, _ in chosen} == {128}
    # Weak model, easy data: 1. Strong model, hard data: 1. Half a decade up at epsilon = 0.5, down at 8.
    assert all(clip == {0.5: 5.0, 8.0: 0.1}[epsilon] for (_, epsilon, *_), (_, clip) in chosen.items())
    few = CLAIMS.by_rules(runs.assign(epochs=2.0, noise_gradient=runs["batch_size"] ** 0.1))
    assert {size for size, _ in few} == {2048}, "noise adds up to least for B = 2048, of those with at least 20 steps"
    assert few[(WORKLOADS[0], 0.5, 2.0, 0)][1] == 5.0, "of 10 the nearest are 5 and 20, and 10 / 5 = 20 / 10"


def test_a_pair_is_chosen_on_the_other_workloads(runs):
    """Two workloads have their best score at one pair and one at another, which is the second best of the first."""
    best = {"a": (512, 5.0), "b": (8192, 0.1), "c": (512, 5.0)}
    score = {(workload, *pair): 0.9 for workload, pair in best.items()} | {("a", 8192, 0.1): 0.8, ("b", 512, 5.0): 0.2}
    frame = pd.concat(runs[runs["workload"] == WORKLOADS[0]].assign(workload=name) for name in best)
    places = zip(frame["workload"], frame["batch_size"], frame["clip"], strict=True)
    frame = frame.assign(selected_by=[score.get(place, 0.1) for place in places])
    assert CLAIMS.elsewhere(frame) == {"a": (512, 5.0), "b": (512, 5.0), "c": (8192, 0.1)}


def test_the_table_of_losses_has_intervals_over_seeds(losses):
    table = CLAIMS.of_losses(losses).set_index("choice")
    by_run = losses["C = 1, B = 2048"]
    by_seed = 100 * by_run[WORKLOADS[0]].groupby("seed").mean()
    assert table.at["C = 1, B = 2048", WORKLOADS[0]] == written(by_seed)
    means = [by_run[workload, epsilon].mean() for workload, epsilon in product(WORKLOADS, EPSILONS)]
    assert table.at["C = 1, B = 2048", "worst"] == f"{100 * max(means):.1f}"


@pytest.fixture
def diagnostics():
    """Late in each run norms are 8 at the smaller epsilon and 2 at the larger, times a factor; C* is 1 and 4."""
    rows = []
    for workload, epsilon, seed, size, clip, epoch in product(WORKLOADS, EPSILONS, SEEDS, SIZES, CLIPS, range(1, 9)):
        is_late, factor = epoch >= 6, 2.0 ** (seed - 1)
        numbers = {"q50": {0.5: 8.0, 8.0: 2.0}[epsilon] * factor, "best_clip": {0.5: 1.0, 8.0: 4.0}[epsilon]}
        place = dict(zip(KEYS, (workload, epsilon, 10.0, seed, size, clip), strict=True)) | {"label": "dp_adam"}
        rows.append(place | {"epoch": float(epoch)} | (numbers if is_late else dict.fromkeys(numbers, 1e9)))
    return pd.DataFrame(rows)


def test_norms_and_the_best_bound_are_late_ones_at_one_setting(diagnostics):
    at_one = diagnostics["epsilon_target"] < 1
    ratio = diagnostics["best_clip"].where(at_one, diagnostics["best_clip"] * 2.0 ** diagnostics["seed"])
    others = (diagnostics["batch_size"] != 2048) | (diagnostics["clip"] != 1)
    frame = diagnostics.assign(best_clip=ratio.where(~others, 1e6 / diagnostics["epsilon_target"]))
    row = CLAIMS.of_norms(CLAIMS.late(frame)).iloc[0]
    assert row["median norm, ε = 0.5"] == "8", "the geometric mean of 4, 8 and 16"
    assert row["median norm, ε = 8"] == "2"
    assert [row["C*, ε = 0.5"], row["C*, ε = 8"]] == ["1", "8"]
    low, high = np.exp(student(np.log([4, 8, 16])))
    assert row["C*, largest ε / smallest"] == f"8.0 [{low:.1f}, {high:.1f}]"


def test_settings_are_counted(diagnostics):
    less = (diagnostics["clip"] == 20) & (diagnostics["epsilon_target"] == 8) & (diagnostics["batch_size"] == 128)
    frame = diagnostics.assign(best_clip=diagnostics["best_clip"].mask(less, 0.5))
    count = len(WORKLOADS) * len(SIZES) * len(CLIPS)
    sentence = CLAIMS.counted(CLAIMS.late(frame))
    assert f"Of {count} combinations" in sentence
    assert f"{count} have a larger median norm" in sentence
    assert f"{count - len(WORKLOADS)} have a smaller C*, by a factor of 0.5 to 4." in sentence


def test_the_table_of_classes_is_that_of_the_changes():
    rows = []
    for label, clip, seed, y in product(("dp_adam", "auto_s"), (0.1, 20.0), SEEDS, range(5)):
        accuracy = 0.1 * y + 0.1 * (label == "dp_adam" and clip == 20 and y == 0) * (1 + seed)
        place = {"workload": "w", "label": label, "epsilon_target": 1.0, "epochs": 2.0, "batch_size": 64, "seed": seed}
        place |= {"clip": clip if label == "dp_adam" else math.nan, "run_id": f"{label}{clip}{seed}"}
        rows.append(place | {"selected_by": 0.5, "label_of_class": y, "accuracy": accuracy})
    (row,) = CLAIMS.of_classes(pd.DataFrame(rows)).to_dict("records")
    assert [row["workload"], row["C"]] == ["w", "20"]
    assert row["hardest fifth"] == written([10, 20, 30])
    assert row["all classes"].startswith("+4.0 [")


@pytest.mark.slow
def test_the_published_claims_are_made_again(tmp_path):
    published = ROOT / "results" / "published" / "clip_batch_sweep"
    folder = tmp_path / "clip_batch_sweep"
    folder.mkdir()
    for name in ("suite.json", "runs.jsonl.xz"):
        (folder / name).symlink_to(published / name)
    CLAIMS.main(folder)
    assert (folder / "claims.md").read_bytes() == (published / "claims.md").read_bytes()
