"""The papers' numbers: what the files hold, and how they come to stand beside a suite's own."""

import csv
import json
import math

import pandas as pd
import pytest

from dpopt import registry
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.results import choosing, frames, papers, tables
from dpopt.suites.plan import manifest, plan
from dpopt.suites.suite import load_suite, suite_files

COLUMNS = ["paper", "table", "dataset", "model", "subset", "method", "epsilon", "metric", "unit", "value", "std"]
COLUMNS.append("note")
COUNTS = {
    ("hyfreedp", table): count for table, count in {"2": 260, "3": 40, "4": 40, "5": 40, "6": 140, "7": 80}.items()
}
COUNTS |= {("adadp", "1"): 12, ("handcrafted", "of the README"): 9, ("opacus", "of the README"): 4}


def rows():
    """Every row of every file as it is written."""
    for file in papers.papers().values():
        yield from csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("# "))


def test_every_number_of_the_tables_is_there_once():
    counted = {}
    for row in rows():
        assert list(row) == COLUMNS
        counted[row["paper"], row["table"]] = counted.get((row["paper"], row["table"]), 0) + 1
    assert counted == COUNTS
    keys = [tuple(row[name] for name in COLUMNS if name not in ("value", "std", "note")) for row in rows()]
    assert len(set(keys)) == len(keys)


def test_numbers_of_the_papers():
    paper = papers.read("hyfreedp")
    at = ("CIFAR100", "ViT-Small", "full")
    number = paper.number(at, "HyFreeDP", 1.0, "accuracy")
    assert (number["value"], number["std"], number["table"]) == (pytest.approx(0.7817), pytest.approx(0.0012), "6")
    assert paper.number(at, "NonDP-GS w/ linear LS", math.inf, "accuracy")["value"] == pytest.approx(0.8911)
    assert paper.number(at, "NonDP-GS w/ LS", math.inf, "accuracy") is None, "a cosine, for BitFit alone"
    assert paper.number(("E2E", "GPT-2", "full"), "HyFreeDP", 8.0, "nist")["value"] == 6.702
    assert paper.number(at, "HyFreeDP", 2.0, "accuracy") is None
    assert paper.number(at, "HyFreeDP", 1.0, "bleu") is None
    own = papers.read("adadp").number(("CIFAR10", "CNN", "fully connected layers"), "ADADP", 0.66, "accuracy")
    assert (own["value"], own["std"]) == (0.6349, 0.0033)
    assert math.isnan(own["epsilon"])
    with pytest.raises(ConfigError, match="did you mean 'hyfreedp'"):
        papers.read("hyfredp")


NAMES = {
    "paper": "hyfreedp",
    "workloads": [{"name": "digits_mlp", "is": ["CIFAR10", "ViT-Base", "full"]}],
    "methods": {"hyfreedp": "HyFreeDP", "dp_adam": "NonDP-GS"},
}


def named(store, **changes):
    store.extend_suite("made", {**store.manifest("made"), "published": {**NAMES, **changes}})
    return f"results={store.root}"


def test_the_papers_numbers_stand_beside_the_same_rows(matrix, capsys):
    here = named(matrix)
    assert main(["table", "suite=made", here, "compare=published"]) == 0
    text = (matrix.suite_folder("made") / "table.md").read_text()
    assert "| published accuracy (%)" in text.splitlines()[0]
    lines = {(cells[1].strip("*"), cells[0]): cells[3] for cells in split(text)}
    assert lines["HyFreeDP", "1"] == "95.8 ± 0.0 (table 6)"
    assert lines["DP-Adam", "3"] == "95.8 ± 0.1 (table 6)"
    assert lines["ceiling", "∞"] == ""
    for remark in ("Published: HyFreeDP: Liu and Bu", "about 4.8 and 17", "NonDP-GS: learning rate searched"):
        assert remark in text
    capsys.readouterr()
    assert main(["table", "suite=made", here]) == 0
    assert "published" not in capsys.readouterr().out.partition("Test score")[0]


def test_a_key_and_a_csv_of_ones_own_are_read_at_once(matrix, tmp_path, monkeypatch, capsys):
    """Neither was there when the suite ran: nothing is run again for a comparison."""
    monkeypatch.chdir(tmp_path)
    here = ["table", "suite=made", f"results={matrix.root}", "compare=published"]
    assert main(here) == 2
    assert "no key `published`" in capsys.readouterr().err
    folder = tmp_path / "benchmarks" / "published"
    folder.mkdir(parents=True)
    head = "paper,table,dataset,model,subset,method,epsilon,metric,unit,value,std,note"
    folder.joinpath("mine.csv").write_text(
        f"# Mine 2026\n{head}\nmine,7,Digits,MLP,full,Theirs,1,accuracy,%,61.5,0.5,\n"
    )
    names = "{paper: mine, methods: {hyfreedp: Theirs}, workloads: [{name: digits_mlp, is: [Digits, MLP, full]}]}"
    suite = f"defaults: [suite, _self_]\noptimizers: [hyfreedp]\npublished: {names}\n"
    folder.parent.joinpath("made.yaml").write_text(suite)
    assert main(here) == 0
    printed = capsys.readouterr().out
    assert "61.5 ± 0.5 (table 7)" in printed
    assert "Published: Mine 2026." in printed
    folder.joinpath("mine.csv").write_text(f"# Mine 2026\n{head.replace('unit,', '')}\n")
    with pytest.raises(ConfigError, match=r"mine\.csv: \['unit'\] .*columns are missing"):
        papers.read("mine")


def split(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("\\", "") for cell in line.strip("|").split("|")] for line in lines[1:]]


IMAGES = {"name": "images", "data": "gtsrb", "architecture": "vit_small_patch16_224.augreg_in21k", "subset": "full"}
NUMBERS = {
    "hyfreedp_table2": {
        "dp_adamw": (0.8308, "table 6"),
        "dp_adamw_cosine": None,
        "dp_hyper": (0.4202, "table 6"),
        "dadapt_adam": (0.0265, "table 6"),
        "prodigy": (0.0268, "table 6"),
        "hyfreedp": (0.8992, "table 6"),
    },
    "hyfreedp_table5": {"dp_adamw": (0.8308, "table 6"), "dp_adamw_linear": (0.1768, "table 5")},
}
"""What the HyFreeDP paper prints at epsilon 3 for ViT-Small on GTSRB."""


@pytest.mark.parametrize("name", NUMBERS)
def test_rows_of_hyfreedps_suites_have_the_numbers_of_their_method(name):
    expected = NUMBERS[name]
    assert expected.keys() == set(load_suite(name).optimizers)
    specs = [IMAGES, {**IMAGES, "data": "unknown"}]
    cells = [{"cell": {"workload": spec}} for spec in specs]
    content = {**json.loads(json.dumps(manifest(load_suite(name), []))), "cells": cells}
    of, elsewhere = papers.measured(content), "images(data=unknown)"
    rows = [{"workload": at, "label": label} for at in (*of, elsewhere) for label in expected]
    table = pd.DataFrame(rows).assign(score="accuracy", epsilon_target=3.0)
    beside, remarks = papers.beside(table, content)
    found = {row["label"]: row for row in beside.to_dict("records") if row["workload"] in of}
    for label, number in expected.items():
        row = found[label]
        value, where = number or (math.nan, "")
        assert row["published"] == pytest.approx(value, nan_ok=True)
        assert row["published_in"] == where
    assert beside.loc[beside["workload"] == elsewhere, "published"].isna().all()
    assert any("DP-hyper: " in remark for remark in remarks) == ("dp_hyper" in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"methods": {"hyfreedp": "HyFreeDp"}}, "did you mean 'HyFreeDP'"),
        ({"workloads": [{"name": "x", "is": [{"data": {"a": "CIFAR11"}}, "ViT-Base", "full"]}]}, "mean 'CIFAR10"),
        ({"epsilon": {1: 2.5}}, "published.epsilon: '2.5'"),
    ],
)
def test_names_that_the_paper_does_not_know(changes, message):
    with pytest.raises(ConfigError, match=message):
        papers.check(NAMES | changes, papers.read("hyfreedp"))


def test_a_number_stands_beside_runs_of_the_same_noise_and_says_which_epsilon_it_states(matrix):
    workloads = [{"name": "digits_mlp", "is": ["MNIST", "End-to-end CNN", "full"]}]
    own = {"paper": "handcrafted", "methods": {"dp_adam": "DP-SGD"}, "workloads": workloads}
    table = tables.comparison(matrix, choosing.select(frames.load(matrix, "made").cells))
    for epsilon, expected in (({1.0: 3}, "table of the README, states ε = 3"), ({}, "")):
        named(matrix, epsilon=epsilon, **own)
        beside, _ = papers.beside(table, matrix.manifest("made"))
        shown = beside[beside["label"] == "dp_adam"].set_index("epsilon_target")["published_in"]
        assert (shown[1.0], shown[3.0]) == (expected, "table of the README")
    task = {"name": "digits_mlp", "is": ["CIFAR10", "CNN", "fully connected layers"]}
    named(matrix, paper="adadp", methods={"hyfreedp": "ADADP"}, workloads=[task])
    beside, remarks = papers.beside(table, matrix.manifest("made"))
    shown = tables.as_table(beside, "made").frame
    of = shown["optimizer"] == "hyfreedp"
    assert set(shown["published accuracy (%)"][of]) == {"63.5 ± 0.3 (table 1, ε not stated)"}
    assert set(shown["published accuracy (%)"][~of]) == {""}
    assert any("σ of this table is not stated" in remark for remark in remarks)


SUITE = """
defaults: [suite, _self_]
workloads: [synthetic_logreg]
optimizers: [hyfreedp]
published:
  paper: hyfreedp
  workloads:
    - name: synthetic_logreg
      is: [{margin: {a.b_c: CIFAR10, 4.0: CIFAR100}}, ViT-Small, full]
  methods: {hyfreedp: HyFreeDP}
"""


def test_a_suite_carries_the_names_into_its_manifest(tmp_path):
    path = tmp_path / "named.yaml"
    path.write_text(SUITE)
    suite = load_suite(str(path))
    content = json.loads(json.dumps(manifest(suite, plan(suite))))
    assert content["published"]["workloads"][0]["is"][0] == {"margin": {"a.b_c": "CIFAR10", "4.0": "CIFAR100"}}
    papers.check(content["published"], papers.read("hyfreedp"))
    assert papers.measured(content) == {"synthetic_logreg": ("CIFAR100", "ViT-Small", "full")}
    plain = load_suite(str(path), ["published=null"])
    assert "published" not in manifest(plain, [])
    assert [entry.cell.run_id for entry in plan(plain)] == [cell["run_id"] for cell in content["cells"]]


@pytest.mark.parametrize(
    "wrong",
    ["methods: {hyfreedp: HyFreeDP}", "is: [CIFAR10, full]", "is: [CIFAR10, ViT-Small, {subset: full}]", "paper: 3"],
)
def test_a_key_published_that_cannot_be_used(tmp_path, wrong):
    key, _, _ = wrong.partition(":")
    right = next(line.strip() for line in SUITE.splitlines() if line.strip().startswith(f"{key}:"))
    path = tmp_path / "named.yaml"
    path.write_text(SUITE.replace(right, "" if wrong == right else wrong))
    with pytest.raises(ConfigError, match="published"):
        load_suite(str(path))


def test_every_suites_names_are_known_to_its_paper(matrix):
    named = {name for name, file in suite_files().items() if "\npublished:" in file.read_text("utf-8")}
    for name in sorted(named):
        suite = load_suite(name)
        content = json.loads(json.dumps(manifest(suite, [])))
        if given := content.get("published"):
            papers.check(given, papers.read(given["paper"]))
            assert set(given["methods"]) <= {*suite.optimizers, *suite.settings, *registry.optimizers()}, name
            registered = {entry if isinstance(entry, str) else entry["name"] for entry in suite.workloads}
            assert {entry["name"] for entry in given["workloads"]} <= registered, name
