"""A suite is all that was run of it: planning writes nothing, running adds, readers choose; from Python too."""

import math
import shutil

import pandas as pd
import pytest

import dpopt
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results.ranking import reached
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
    "accountant": "rdp",
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
accountant: rdp
epochs: 0.5
seeds: [0, 1]
engine: inline
device: cpu
"""
FIGURE = '''NEEDS = "comparison"


def draw(frame, styles):
    """One bar a method."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    axes.bar(frame["label"], frame["mean"])
    return figure
'''


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the suite, run with two optimizers: four cells each."""
    folder = tmp_path_factory.mktemp("grown")
    (folder / "grown.yaml").write_text(FILE)
    (folder / "figures").mkdir()
    suite = dpopt.load_suite(folder / "grown.yaml", optimizers=["dp_sgd", "adadp"])
    assert dpopt.run_suite(suite, folder / "results", progress=False).ran == 8
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    """A copy of `trained`, which is the current folder."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_bound_that_was_trained_with_is_printed_and_a_run_is_charged_once(tmp_path):
    """Also where a manifest holds copies of what a cell says, as they were written once: they are not believed."""
    assert dpopt.run_suite(dpopt.load_suite(SMALL), tmp_path, progress=False).ran == 3
    results = dpopt.load_results(tmp_path, "small")
    table = results.table().set_index("label")
    assert len(table) == 3
    assert (table["clip"]["half"], table["clip"]["five"]) == (0.5, 5)
    assert math.isnan(table["clip"]["auto"])
    assert table["is_reference"].all(), "values set by hand are not charged"
    assert not table["is_best"].any()
    assert results.ranking(budgets=[3]).empty, "values set by hand are not ranked"
    store = Store(tmp_path)
    entries = reached(store, results.cells, budgets=[3]).set_index("label")
    assert entries["runs"].tolist() == [1, 1, 1]
    assert entries["spent"]["auto"] == pytest.approx(3, rel=1e-3)

    manifest = store.manifest("small")
    (auto,) = [entry for entry in manifest["cells"] if entry["label"] == "auto"]
    old = [{**entry, "clip": 1.0} for entry in manifest["cells"]] + [{**auto, "clip": 0.1}]
    store.extend_suite("small", {**manifest, "cells": old})
    pd.testing.assert_frame_equal(dpopt.load_results(tmp_path, "small").table().set_index("label"), table)


def test_planning_leaves_everything_as_it_is(here):
    shown = ["suite=grown", "plots=figures"]
    assert main(["table", "suite=grown"]) == main(["report", *shown]) == 0
    before = files(here)
    assert main(["plan", "suite=grown.yaml", "epsilon=8", "seeds=[7]", "optimizers=[dp_adam]"]) == 0
    assert files(here) == before
    assert main(["table", "suite=grown"]) == main(["report", *shown]) == 0
    assert files(here) == before


def test_readers_choose_rows_and_do_not_replace_the_whole_table(here, capsys):
    assert main(["table", "suite=grown"]) == 0
    folder = here / "results" / "suites" / "grown"
    whole = (folder / "table.csv").read_bytes(), (folder / "table.md").read_bytes()
    assert main(["table", "suite=grown", "optimizers=[adadp]", "epsilon=3", "seeds=1"]) == 0
    part = pd.read_csv(folder / "part" / "table.csv")
    assert part[["label", "epsilon_target", "seeds"]].values.tolist() == [["adadp", 3.0, 1]]
    capsys.readouterr()
    for chosen in ("optimizers=adad", "epsilon=2", "seeds=9", "workloads=digits_mlp"):
        assert main(["table", "suite=grown", chosen]) == 2
        assert chosen.split("=")[0] in capsys.readouterr().err
    for record in (here / "results" / "runs").rglob("run.json"):
        record.unlink()
    assert main(["table", "suite=grown"]) == 0
    assert ((folder / "table.csv").read_bytes(), (folder / "table.md").read_bytes()) == whole, "nor does an empty one"


def test_cells_need_no_results():
    cells = dpopt.load_suite(SMALL, epsilon=[1, 3], seeds=range(2)).cells()
    assert len({cell.run_id for cell in cells}) == len(cells) == 12
    wrong = {"epsilonn": 3, "seeds": [0, object()], "results": "${oc.env:HOME}", "optimizers": ["fibre"]}
    for key, value in wrong.items():
        with pytest.raises(ConfigError, match="fiber" if key == "optimizers" else key):
            dpopt.load_suite(SMALL, **{key: value}).cells()


def test_a_published_suite_is_read_and_made_again(here, capsys):
    (here / "figures" / "scores.py").write_text(FIGURE)
    of = ["to=published", "plots=figures"]
    assert main(["publish", "suite=grown", *of]) == 0
    there = here / "published" / "grown"
    names = {path.name for path in there.iterdir()}
    assert {"runs.jsonl.xz", "suite.json", "table.md", "ranking_epsilon.md", "scores.svg"} <= names
    assert main(["publish", "check=true", *of]) == 0

    before = files(there)
    stored, published = dpopt.load_results("results", "grown"), dpopt.load_results("published", "grown")
    pd.testing.assert_frame_equal(stored.table(), published.table())
    pd.testing.assert_frame_equal(stored.ranking(), published.ranking())
    pd.testing.assert_frame_equal(stored.curves, published.curves, check_like=True)
    for command in ("table", "rank", "status"):
        assert main([command, "suite=grown", "results=published"]) == 0
    assert main(["report", "suite=grown", "results=published", "plots=figures"]) == 0
    assert (here / "grown.html").stat().st_size > 1000
    assert files(there) == before, "what is published is only read"
    assert main(["run", "suite=grown.yaml", "results=published"]) == 2

    table = there / "table.md"
    table.write_text(table.read_text().replace("ADADP", "ADADQ"))
    capsys.readouterr()
    assert main(["publish", "check=true", *of]) == 1
    assert "table.md" in capsys.readouterr().out
    assert main(["publish", "remake=true", *of]) == main(["publish", "check=true", *of]) == 0
