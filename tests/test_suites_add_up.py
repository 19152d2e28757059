"""A suite is all that was run of it: planning writes nothing, running adds, readers choose; from Python too."""

import math

import pandas as pd
import pytest

import dpopt
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.store import Store

SMALL = {
    "name": "small",
    "workloads": ["synthetic_logreg"],
    "optimizers": ["half", "five", "auto"],
    "settings": {
        "half": {"name": "dp_sgd", "tuning": "fixed", "fields": {"clip": 0.5}},
        "five": {"name": "dp_sgd", "tuning": "fixed", "clip": 5},
        "auto": {"name": "dp_sgd", "tuning": "fixed", "fields": {"clip": "automatic"}, "clip": [0.1, 1]},
    },
    "epsilon": [3],
    "epochs": 0.5,
    "seeds": 0,
    "engine": "inline",
    "device": "cpu",
}
FILE = """
defaults: [suite, _self_]
workloads: [synthetic_logreg]
optimizers: [dp_sgd]
settings: {dp_sgd: {tuning: fixed}}
epsilon: [1, 3]
epochs: 0.5
seeds: [0, 1]
engine: inline
device: cpu
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "grown.yaml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def ids(results):
    return set(results.cells["run_id"])


def test_the_table_prints_the_bound_that_was_trained_with_and_a_run_is_charged_once(tmp_path):
    suite = dpopt.load_suite(SMALL)
    assert dpopt.run_suite(suite, tmp_path, progress=False).ran == 3
    results = dpopt.load_results(tmp_path, "small")
    table = results.table().set_index("label")
    assert len(table) == 3
    assert (table["clip"]["half"], table["clip"]["five"]) == (0.5, 5)
    assert math.isnan(table["clip"]["auto"])
    assert table["is_reference"].all(), "values set by hand are not charged"
    assert not table["is_best"].any()
    ranks = results.ranking(budgets=[3]).set_index("label")
    assert ranks["runs"].tolist() == [1, 1, 1]
    assert ranks["spent"]["auto"] == pytest.approx(3, rel=1e-3)


def test_planning_leaves_everything_as_it_is(here):
    assert main(["run", "suite=grown.yaml"]) == 0
    assert main(["table", "suite=grown"]) == main(["report", "suite=grown", "plots=" + str(figures(here))]) == 0
    before = files(here)
    assert main(["plan", "suite=grown.yaml", "epsilon=8", "seeds=[7]", "optimizers=[dp_adam]"]) == 0
    assert set(files(here)) == set(before)
    assert not [path.name for path, content in files(here).items() if before[path] != content]
    assert main(["table", "suite=grown"]) == main(["report", "suite=grown", "plots=" + str(figures(here))]) == 0
    assert files(here) == before


def figures(folder):
    made = folder / "figures"
    made.mkdir(exist_ok=True)
    return made


def test_planning_makes_no_folder(here):
    assert main(["plan", "suite=grown.yaml"]) == 0
    assert not (here / "results").exists()


def test_one_more_optimizer_is_all_that_is_trained(here, capsys):
    assert main(["run", "suite=grown.yaml"]) == 0
    first = ids(dpopt.load_results("results", "grown"))
    capsys.readouterr()
    assert main(["run", "suite=grown.yaml", "optimizers=[adadp]"]) == 0
    assert "4 cells run, 0 were done" in capsys.readouterr().err
    both = dpopt.load_results("results", "grown")
    assert len(both.cells) == 8
    assert first < ids(both)
    assert set(both.table()["label"]) == {"dp_sgd", "adadp"}
    assert main(["run", "suite=grown.yaml"]) == 0
    assert "0 cells run, 4 were done" in capsys.readouterr().err
    assert len(dpopt.load_results("results", "grown").cells) == 8, "what was there stays"


def test_the_same_from_python(here):
    for optimizers, ran in (["dp_sgd"], 4), (["dp_sgd", "adadp"], 4), (["dp_sgd"], 0):
        suite = dpopt.load_suite("grown.yaml", optimizers=optimizers)
        outcome = dpopt.run_suite(suite, progress=False)
        assert (outcome.ran, outcome.failed) == (ran, {})
    assert set(dpopt.load_results("results", "grown").table()["label"]) == {"dp_sgd", "adadp"}


def test_readers_choose_rows_and_do_not_replace_the_whole_table(here, capsys):
    assert main(["run", "suite=grown.yaml", "optimizers=[dp_sgd,adadp]"]) == 0
    assert main(["table", "suite=grown"]) == 0
    folder = here / "results" / "suites" / "grown"
    whole = (folder / "table.csv").read_bytes()
    assert main(["table", "suite=grown", "optimizers=[adadp]", "epsilon=3", "seeds=1"]) == 0
    assert (folder / "table.csv").read_bytes() == whole
    part = pd.read_csv(folder / "part" / "table.csv")
    assert part[["label", "epsilon_target", "seeds"]].values.tolist() == [["adadp", 3.0, 1]]
    capsys.readouterr()
    for given in ("optimizers=adad", "epsilon=2", "seeds=9", "workloads=digits_mlp"):
        assert main(["table", "suite=grown", given]) == 2
        assert given.split("=")[0] in capsys.readouterr().err


def test_an_empty_table_replaces_no_full_one(here):
    assert main(["run", "suite=grown.yaml"]) == main(["table", "suite=grown"]) == 0
    path = here / "results" / "suites" / "grown" / "table.md"
    whole = path.read_bytes()
    for record in (here / "results" / "runs").rglob("run.json"):
        record.unlink()
    assert main(["table", "suite=grown"]) == 0
    assert path.read_bytes() == whole


def test_cells_need_no_results(tmp_path):
    cells = dpopt.load_suite(SMALL, epsilon=[1, 3], seeds=range(2)).cells()
    assert len({cell.run_id for cell in cells}) == len(cells) == 12
    assert {cell.epsilon for cell in cells} == {1.0, 3.0}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"epsilonn": 3}, "epsilon"),
        ({"epsilon": -1}, r"small\.epsilon"),
        ({"seeds": [0, object()]}, "seeds"),
        ({"results": "${oc.env:HOME}"}, "results"),
        ({"optimizers": ["fibre"]}, "fiber"),
    ],
)
def test_what_cannot_be_used_is_named(given, named):
    with pytest.raises(ConfigError, match=named):
        dpopt.load_suite(SMALL, **given).cells()


def test_a_published_suite_is_read_and_made_again(here, capsys):
    plots = figures(here)
    (plots / "scores.py").write_text(
        'NEEDS = "comparison"\n\n\ndef draw(frame, styles):\n    """One bar a method."""\n'
        "    import matplotlib.pyplot as plt\n\n    figure, axes = plt.subplots()\n"
        '    axes.bar(frame["label"], frame["mean"])\n    return figure\n'
    )
    assert main(["run", "suite=grown.yaml", "optimizers=[dp_sgd,adadp]"]) == 0
    of = ["to=published", f"plots={plots}"]
    assert main(["publish", "suite=grown", *of]) == 0
    there = here / "published" / "grown"
    names = {path.name for path in there.iterdir()}
    assert {"runs.jsonl.xz", "suite.json", "table.md", "ranking_epsilon.md", "scores.svg"} <= names
    assert main(["publish", "check=true", *of]) == 0

    before = files(there)
    own, published = dpopt.load_results("results", "grown"), dpopt.load_results("published", "grown")
    pd.testing.assert_frame_equal(own.table(), published.table())
    pd.testing.assert_frame_equal(own.ranking(), published.ranking())
    pd.testing.assert_frame_equal(own.curves, published.curves, check_like=True)
    for command in ("table", "rank", "status"):
        assert main([command, "suite=grown", "results=published"]) == 0
    assert main(["report", "suite=grown", "results=published", f"plots={plots}", "to=page.html"]) == 0
    assert (here / "page.html").stat().st_size > 1000
    assert files(there) == before, "what is published is only read"
    assert main(["run", "suite=grown.yaml", "results=published"]) == 2

    table = there / "table.md"
    table.write_text(table.read_text().replace("adadp", "adadq"))
    capsys.readouterr()
    assert main(["publish", "check=true", *of]) == 1
    assert "table.md" in capsys.readouterr().out
    assert main(["publish", "remake=true", *of]) == main(["publish", "check=true", *of]) == 0


def test_manifests_with_copies_of_what_a_cell_says_are_read(tmp_path):
    """As they were written before cells were the only carriers: the copy is not believed."""
    suite = dpopt.load_suite(SMALL)
    dpopt.run_suite(suite, tmp_path, progress=False)
    store = Store(tmp_path)
    manifest = store.manifest("small")
    (auto,) = [entry for entry in manifest["cells"] if entry["label"] == "auto"]
    old = [{**entry, "clip": 1.0} for entry in manifest["cells"]] + [{**auto, "clip": 0.1}]
    now = dpopt.load_results(tmp_path, "small").table()
    store.extend_suite("small", {**manifest, "cells": old})
    pd.testing.assert_frame_equal(dpopt.load_results(tmp_path, "small").table(), now)
