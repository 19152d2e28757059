"""Each rule of the protocol is kept by the leaderboard, and noticed where a suite breaks it."""

import pytest

from dpopt.cli import main
from dpopt.suites import protocol
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite

KEPT = {
    "name": "kept",
    "optimizers": ["dp_sgd", "dp_adam", "hyfreedp"],
    "settings": {
        "dp_sgd": {"selection": "composed"},
        "dp_adam": {"selection": "composed"},
        "hyfreedp": {"fields": {"clip": "abadi"}},
        "by_hand": {"name": "fiber", "tuning": "fixed"},
        "free": {"name": "fiber"},
        "simulated": {"name": "fiber", "selection": {"rule": "simulated", "share": 0.85}},
        "decayed": {"name": "scheduled", "fields": {"base": "dp_sgd"}, "selection": "composed"},
    },
    "epsilon": [1],
    "seeds": [0, 1, 2, 3, 4],
}
COMPOSED = {"selection": "composed"}
BROKEN = [
    ({"seeds": [0, 1, 2]}, ["3 seeds, expected 5 (10 where a cell takes seconds): all rows"]),
    (
        {"settings": {"dp_adam": COMPOSED | {"seeds": [0]}}},
        ["1 seed, expected 5 (10 where a cell takes seconds): dp_adam"],
    ),
    ({"settings": {"hyfreedp": {"fields": {}}}}, ["clip rules differ: abadi: dp_sgd, dp_adam; automatic: hyfreedp"]),
    (
        {"settings": {"dp_adam": COMPOSED | {"grid": {"lr": [0.1, 0.2]}}}},
        ["searches differ in their runs: 2: dp_adam; 5: dp_sgd"],
    ),
    ({"optimizers": [*KEPT["optimizers"], "free"]}, ["searches that are not charged, for reference only: free"]),
    (
        {"optimizers": [*KEPT["optimizers"], "simulated"]},
        ["searches that are not charged, for reference only: simulated"],
    ),
    ({"optimizers": [*KEPT["optimizers"], "by_hand"]}, ["set by hand, and how that was found is not charged: by_hand"]),
    ({"optimizers": ["dp_adam"]}, ["no row searches DP-SGD"]),
    (
        {
            "optimizers": [*KEPT["optimizers"], "free"],
            "epsilon": [float("inf"), 1],
            "settings": {"free": {"name": "fiber"}},
        },
        ["searches that are not charged, for reference only: free"],
    ),
    (
        {"settings": {"dp_adam": COMPOSED | {"batch_size": [64, 128]}}},
        ["searches differ in their runs: 5: dp_sgd; 10: dp_adam"],
    ),
    ({"optimizers": ["dp_adam", "decayed"]}, []),
]


def departures(**changed):
    return protocol.departures(plan(load_suite(KEPT, **changed)))


@pytest.mark.parametrize("task", ["", "_heads", "_texts", "_scatter", "_tabular"])
def test_the_leaderboard_keeps_the_protocol(task, monkeypatch):
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    given = {"workloads": ["digits_mlp"]} if task else {}  # rows are what it is about
    found = protocol.departures(plan(load_suite(f"leaderboard{task}", epsilon=[1], **given)))
    assert found == ["searches that are not charged, for reference only: dp_sgd_free, dp_adam_free"]


def test_a_suite_that_keeps_it_is_not_told_anything():
    assert departures() == []


@pytest.mark.parametrize(("changed", "told"), BROKEN, ids=[told[0] if told else "decay" for _, told in BROKEN])
def test_every_departure_is_told(changed, told):
    assert departures(**changed) == told


def test_plan_prints_them(capsys, tmp_path):
    assert main(["plan", "suite=quickstart", f"results={tmp_path}"]) == 0
    assert "protocol: 3 seeds, expected 5" in capsys.readouterr().out
