"""`dpopt audit`: what it reads, the rows it makes, and what it says of them."""

import json
import math
from functools import partial
from pathlib import Path

import pytest

import dpopt
from dpopt.audit import command as audit
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results import audits, figures

PLOTS = Path(__file__).parents[2] / "plots"
QUICK = [
    *("workloads=[{name: synthetic_logreg, dim: 12}]", "accountant=rdp", "epsilon=[2,inf]", "epochs=1", "workers=1"),
    *("trials=20", "game_draws=5", "canaries=10"),
]


@pytest.fixture
def record():
    """Made up: one sound optimizer, one that is refuted, one that failed, a flagged control and one that was missed."""
    common = {"epsilon_target": 2.0, "epsilon": 2.0, "delta": 1e-5, "trials": [100, 100], "seconds": 1.0, "failure": ""}
    rows = [
        {"kind": "optimizer", "name": "sound", "worst_case": 1.0, "one_run": 0.5, "one_run_fdp": 3.0, "canaries": 10},
        {"kind": "optimizer", "name": "leaky", "worst_case": 1.0, "one_run": 2.5, "one_run_fdp": 2.6, "canaries": 10},
        {"kind": "optimizer", "name": "broken", "epsilon": None, "failure": "ValueError: no luck"},
        {"kind": "control", "name": "seen", "what": "it leaks", "worst_case": 3.0, "trials": [10, 2000]},
        {"kind": "control", "name": "missed", "what": "it leaks too", "worst_case": 1.9},
    ]
    return {
        "suite": "made",
        "significance": 0.05,
        "seconds": 7.0,
        "started": "now",
        "provenance": {"dirty": False, "commit": "0" * 40, "versions": {"torch": "2"}},
        "rows": [common | row for row in rows],
    }


def test_all_registered_optimizers_at_the_suites_targets_by_default():
    chosen = audit.settings()
    cells = list(audit._cells(chosen.suite))
    assert {label for label, _ in cells} == set(dpopt.optimizers())
    assert [cell.epsilon for label, cell in cells if label == "dp_adam"] == [1, 3, 8]
    assert len(cells) == 3 * len(dpopt.optimizers())
    assert chosen.controls


def test_own_keys_and_the_suites_can_be_overridden():
    chosen = audit.settings(
        ["optimizers=[adadp_equilibrium_average]", "epsilon=[0.5,inf]", "batch_size=64", "trials=7"]
    )
    ((label, cell),) = audit._cells(chosen.suite)
    assert (label, cell.epsilon, cell.batch_size, chosen.trials) == ("adadp_equilibrium_average", 0.5, 64, 7)
    assert cell.average == 0.95


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trails=3"], "did you mean 'trials'"),
        (["trials=0"], "trials"),
        (["optimizers=[fibre]"], "did you mean 'fiber'"),
        (["epsilon=inf", "controls=false"], "nothing to audit"),
    ],
)
def test_bad_input(overrides, message):
    with pytest.raises(ConfigError, match=message):
        audit.run(audit.settings(overrides))


@pytest.mark.slow
def test_command(tmp_path, capsys):
    overrides = [*QUICK, "optimizers=[dp_sgd]", "controls=false", f"results={tmp_path}"]
    assert main(["audit", *overrides]) == 0
    assert "dp_sgd" in capsys.readouterr().out
    (path,) = (tmp_path / "audit").glob("*/record.json")
    record = json.loads(path.read_text())
    (row,) = record["rows"]
    assert (row["name"], row["failure"]) == ("dp_sgd", "")
    assert 0.99 * 2 <= row["epsilon"] <= 2
    assert 0 <= max(row["worst_case"], row["one_run"]) <= row["epsilon"]
    assert (row["trials"], row["canaries"]) == ([20, 20], 10)
    assert {file.name for file in path.parent.iterdir()} >= {"table.md", "audit.svg", "audit.png"}


def test_problems_are_said_and_make_the_command_fail(record, tmp_path, capsys, monkeypatch):
    """Those of a row that failed in its process, and of bounds."""
    lost = list(audit.side_by_side([lambda: {}], 1))  # what is defined on the spot cannot be sent
    assert [(number, result) for number, result, _ in lost] == [(0, None)]
    assert lost[0][2].startswith("no process could be started: ")
    answers = [(1, {"epsilon": 1.0}, ""), (0, None, "ValueError: no luck")]
    monkeypatch.setattr(audit, "side_by_side", lambda functions, workers: (answer for answer in answers))
    tasks = [({"name": name}, partial(math.sqrt, -1)) for name in ("failing", "sound")]
    assert audit._rows(tasks, 1, None) == [
        {"name": "failing", "epsilon": None, "failure": "ValueError: no luck"},
        {"name": "sound", "epsilon": 1.0, "failure": ""},
    ]
    monkeypatch.setattr(audit, "run", lambda chosen, console: record)
    assert main(["audit", *QUICK, "optimizers=[dp_sgd]", f"results={tmp_path}"]) == 1
    assert "broken: ValueError: no luck" in capsys.readouterr().err
    assert len(list((tmp_path / "audit").glob("*/record.json"))) == 1


def test_flags_and_problems(record):
    rows = audits.frame(record).set_index("name")
    assert rows["is_flagged"].to_dict() == {
        "sound": False,  # the f-DP bound alone does not refute a claim
        "leaky": True,
        "broken": False,
        "seen": True,
        "missed": False,
    }
    problems = audits.problems(rows.reset_index())
    assert len(problems) == 3
    for text in ("leaky: epsilon = 2 is refuted", "missed: epsilon = 2 is broken on purpose", "broken: ValueError"):
        assert any(text in problem for problem in problems)


def test_tables_and_figure(record, tmp_path):
    text = audits.markdown(record)
    assert "10, 2,000" in text
    assert "it leaks too" in text
    assert "probability at most 0.05" in text
    plot = next(plot for plot in figures.plots(PLOTS) if plot.needs == "audit")
    figure = plot.figure(audits.frame(record))
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["ε = 2", "broken on purpose"]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["sound", "leaky"]
    assert all(path.stat().st_size > 5000 for path in figures.save(figure, tmp_path, "audit"))
