"""Each rule of the protocol is kept by the leaderboard, and noticed where a suite breaks it."""

from dataclasses import replace

import pytest

from dpopt import registry
from dpopt.cli import main
from dpopt.results.naming import readable_names
from dpopt.suites import protocol
from dpopt.suites.plan import plan
from dpopt.suites.suite import load_suite, suite_files

LEADERBOARDS = sorted(name for name in suite_files() if name.startswith("leaderboard"))

FREE = "searches that are not charged, for reference only (`selection: composed` charges them)"
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
    (
        {"settings": {"hyfreedp": {"fields": {"clip": "automatic"}}}},
        ["clip rules differ: abadi: dp_sgd, dp_adam; automatic: hyfreedp"],
    ),
    (
        {"settings": {"dp_adam": COMPOSED | {"grid": {"lr": [0.1, 0.2]}}}},
        ["searches differ in their runs: 2: dp_adam; 5: dp_sgd"],
    ),
    (
        {"optimizers": [*KEPT["optimizers"], "free"]},
        [f"{FREE}: free"],
    ),
    (
        {"optimizers": [*KEPT["optimizers"], "simulated"]},
        [f"{FREE}: simulated"],
    ),
    ({"optimizers": [*KEPT["optimizers"], "by_hand"]}, ["set by hand, and how that was found is not charged: by_hand"]),
    ({"optimizers": ["dp_adam"]}, ["no row searches DP-SGD"]),
    (
        {
            "optimizers": [*KEPT["optimizers"], "free"],
            "epsilon": [float("inf"), 1],
            "settings": {"free": {"name": "fiber"}},
        },
        [f"{FREE}: free"],
    ),
    (
        {"settings": {"dp_adam": COMPOSED | {"batch_size": [64, 128]}}},
        ["searches differ in their runs: 5: dp_sgd; 10: dp_adam"],
    ),
    ({"optimizers": ["dp_adam", "decayed"]}, []),
]


def departures(**changed):
    return protocol.departures(plan(load_suite(KEPT, **changed)))


def test_every_leaderboard_keeps_the_protocol(monkeypatch):
    """One of them does, and the others have its rows, with five seeds or more."""
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    first, *others = (load_suite(name) for name in LEADERBOARDS)
    found = protocol.departures(plan(load_suite(first.name, epsilon=[1])))
    assert found == [f"{FREE}: dp_sgd_free, dp_adam_free"]
    may_differ = ("name", "description", "workloads", "batch_size", "epochs", "marks", "seeds")
    for suite in others:
        assert replace(suite, **{key: getattr(first, key) for key in may_differ}) == first, suite.name
        assert len(suite.seeds) >= 5


def test_constants_name_tasks_as_the_page_of_the_leaderboard_does():
    """By the whole name or the beginning of it: else no score is marked as one of a task that they were chosen on."""
    workloads = [workload for name in LEADERBOARDS for workload in load_suite(name).workloads]
    stated = [{"name": each} if isinstance(each, str) else each for each in workloads]
    specs = [{**registry.entry("workload", each["name"]).fields, **each} for each in stated]
    names = set(readable_names(specs))
    constants = [entry.chosen_on for entry in registry.entries("optimizer").values()]
    stating = [name for name, path in suite_files().items() if "chosen_on" in path.read_text("utf-8")]
    constants += [row.get("chosen_on", {}) for name in stating for row in load_suite(name).settings.values()]
    tasks = {task for of in constants for tasks in of.values() for task in tasks}
    assert len(tasks) > 5
    assert [task for task in tasks if not any(name == task or name.startswith(f"{task}, ") for name in names)] == []


def test_a_suite_that_keeps_it_is_not_told_anything():
    assert departures() == []


@pytest.mark.parametrize(("changed", "told"), BROKEN, ids=[told[0] if told else "decay" for _, told in BROKEN])
def test_every_departure_is_told(changed, told):
    assert departures(**changed) == told


def test_plan_prints_them(capsys, tmp_path):
    assert main(["plan", "suite=quickstart", f"results={tmp_path}"]) == 0
    assert "protocol: 3 seeds, expected 5" in capsys.readouterr().out
