"""The papers' numbers: what the files hold, and how they come to stand beside a suite's own."""

import csv
import json
import math

import pytest
from stored import rewrite

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
RANGES = {"accuracy": 1, "bleu": 1, "meteor": 1, "rouge_l": 1, "cider": 10, "nist": 10, "minutes": 500, "time_ratio": 3}


def rows():
    """Every row of every file as it is written."""
    for file in papers.papers().values():
        yield from csv.DictReader(line for line in file.read_text().splitlines() if not line.startswith("# "))


def key(row, *more):
    return tuple(row[name] for name in ("dataset", "model", "subset", "method", "epsilon", "metric", *more))


def test_every_number_of_the_tables_is_there_once():
    counted = {}
    for row in rows():
        assert list(row) == COLUMNS
        counted[row["paper"], row["table"]] = counted.get((row["paper"], row["table"]), 0) + 1
    assert counted == COUNTS
    keys = [key(row, "paper", "table") for row in rows()]
    assert len(set(keys)) == len(keys)


def test_numbers_are_in_their_ranges():
    for row in rows():
        value, unit = float(row["value"]), {"%": 100, "1": 1, "min": 1}[row["unit"]]
        assert 0 <= value / unit <= RANGES.get(row["metric"], 1000), row
        assert row["epsilon"] in ("", "1", "3", "8", "inf") or row["paper"] == "opacus"
        assert not row["std"] or 0 <= float(row["std"]) <= 0.2 * unit, row


def test_table_6_repeats_the_means_of_table_2():
    """All of them; a disagreement would be listed here by name."""
    by_table = {table: {key(row): float(row["value"]) for row in rows() if row["table"] == table} for table in "26"}
    assert by_table["6"].keys() <= by_table["2"].keys()
    assert {at: value for at, value in by_table["6"].items() if value != by_table["2"][at]} == {}


def test_table_4s_ratios_are_those_of_its_minutes():
    minutes = {key(row)[:4]: float(row["value"]) for row in rows() if row["metric"] == "minutes"}
    ratios = {key(row)[:4]: float(row["value"]) for row in rows() if row["metric"] == "time_ratio"}
    assert ratios.keys() == minutes.keys()
    for at, ratio in ratios.items():
        assert ratio == pytest.approx(minutes[at] / minutes[(*at[:3], "without HyFreeDP")], abs=6e-4)


def test_known_numbers_of_the_papers():
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
    assert lines["hyfreedp", "1"] == "95.8 ± 0.0 (table 6)"
    assert lines["dp_adam", "3"] == "95.8 ± 0.1 (table 6)"
    assert lines["ceiling", "∞"] == ""
    for remark in ("Published: HyFreeDP: Liu and Bu", "about 4.8 and 17", "NonDP-GS: learning rate searched"):
        assert remark in text
    capsys.readouterr()
    assert main(["table", "suite=made", here]) == 0
    assert "published" not in capsys.readouterr().out.splitlines()[0]


def of_suite(maker, name, workload, labels):
    """A run of each of `labels` at epsilon 3 on `workload`, in a suite with the names of the suite `name`."""
    for label in labels:
        run_id = maker.add(label, 0, 0.5, 0.4)
        maker.cells[-1]["cell"]["workload"] = workload
        rewrite(maker.store, run_id, cell=maker.cells[-1]["cell"])
    store = maker.done()
    given = json.loads(json.dumps(manifest(load_suite(name), [])["published"]))
    store.extend_suite("made", {**store.manifest("made"), "published": given})
    return store


def images(subset):
    return {"name": "images", "data": "gtsrb", "architecture": "vit_small_patch16_224.augreg_in21k", "subset": subset}


NUMBERS = {
    ("hyfreedp_table2", "full"): {
        "dp_adamw": "83.1 ± 0.7 (table 6)",
        "dp_adamw_cosine": "",
        "dp_hyper": "42.0 ± 0.5 (table 6)",
        "dadapt_adam": "2.6 ± 0.0 (table 6)",
        "prodigy": "2.7 ± 0.1 (table 6)",
        "hyfreedp": "89.9 ± 0.6 (table 6)",
    },
    ("hyfreedp_table2", "bitfit"): {
        "dp_adamw": "91.5 (table 2)",
        "dp_adamw_cosine": "60.1 (table 2)",
        "dp_hyper": "",
        "dadapt_adam": "",
        "prodigy": "91.6 (table 2)",
        "hyfreedp": "92.4 (table 2)",
    },
    ("hyfreedp_table5", "full"): {"dp_adamw": "83.1 ± 0.7 (table 6)", "dp_adamw_linear": "17.7 (table 5)"},
}
"""What the HyFreeDP paper prints at epsilon 3 for ViT-Small on GTSRB."""


@pytest.mark.parametrize(("name", "subset"), NUMBERS)
def test_rows_of_hyfreedps_suites_have_the_numbers_of_their_method(maker, name, subset):
    expected = NUMBERS[name, subset]
    assert expected.keys() == set(load_suite(name).optimizers)
    store = of_suite(maker, name, images(subset), expected)
    assert main(["table", "suite=made", f"results={store.root}", "compare=published"]) == 0
    text = (store.suite_folder("made") / "table.md").read_text()
    assert {cells[1]: cells[3] for cells in split(text)} == expected
    assert ("DP-hyper: " in text) == (subset == "full" and "dp_hyper" in expected)


def split(text):
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip().replace("\\", "") for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_a_number_without_an_epsilon_says_so(matrix):
    measured = ["CIFAR10", "CNN", "fully connected layers"]
    workloads = [{"name": "digits_mlp", "is": measured}]
    named(matrix, paper="adadp", methods={"hyfreedp": "ADADP"}, workloads=workloads)
    table = tables.comparison(matrix, choosing.select(frames.load(matrix, "made").cells))
    beside, remarks = papers.beside(table, matrix.manifest("made"))
    shown = tables.as_table(beside, "made").frame
    of = shown[shown["optimizer"] == "hyfreedp"]["published accuracy (%)"]
    assert set(of) == {"63.5 ± 0.3 (table 1, ε not stated)"}
    assert set(shown[shown["optimizer"] == "dp_adam"]["published accuracy (%)"]) == {""}
    assert any("σ of this table is not stated" in remark for remark in remarks)


def test_a_number_stands_beside_runs_of_the_same_noise_and_says_which_epsilon_it_states(matrix):
    workloads = [{"name": "digits_mlp", "is": ["MNIST", "End-to-end CNN", "full"]}]
    own = {"paper": "handcrafted", "methods": {"dp_adam": "DP-SGD"}, "workloads": workloads}
    table = tables.comparison(matrix, choosing.select(frames.load(matrix, "made").cells))
    for epsilon, expected in (({1.0: 3}, "table of the README, states ε = 3"), ({}, "")):
        named(matrix, epsilon=epsilon, **own)
        beside, _ = papers.beside(table, matrix.manifest("made"))
        shown = beside[beside["label"] == "dp_adam"].set_index("epsilon_target")["published_in"]
        assert (shown[1.0], shown[3.0]) == (expected, "table of the README")


def test_a_field_says_what_a_workload_is_called(maker):
    for dim in (5, 10, 20):
        maker.add("hyfreedp", 0, 0.5, 0.5)
        maker.cells[-1]["cell"]["workload"] = {"name": "synthetic_logreg", "dim": dim}
        maker.change()
    store = maker.done()
    of_dim = {"dim": {5: "CIFAR10", 10: "SVHN"}}
    content = {**store.manifest("made"), "published": NAMES}
    content["published"] |= {"workloads": [{"name": "synthetic_logreg", "is": [of_dim, "ViT-Small", "full"]}]}
    table = tables.comparison(store, choosing.select(frames.load(store, "made").cells))
    beside, _ = papers.beside(table, content)
    found = dict(zip(beside["workload"], beside["published"], strict=True))
    assert found.pop("synthetic_logreg(dim=5)") == pytest.approx(0.9689)
    assert found.pop("synthetic_logreg(dim=10)") == pytest.approx(0.9221)
    assert all(map(math.isnan, found.values()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"paper": "hyfreedq"}, "did you mean 'hyfreedp'"),
        ({"methods": {"hyfreedp": "HyFreeDp"}}, "did you mean 'HyFreeDP'"),
        ({"workloads": [{"name": "digits_mlp", "is": ["CIFAR10", "ViT-Bass", "full"]}]}, "did you mean 'ViT-Base'"),
        (
            {"workloads": [{"name": "digits_mlp", "is": [{"data": {"a": "CIFAR11"}}, "ViT-Base", "full"]}]},
            "did you mean 'CIFAR10",
        ),
    ],
)
def test_names_that_the_paper_does_not_know(matrix, changes, message, capsys):
    assert main(["table", "suite=made", named(matrix, **changes), "compare=published"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare=published"], "no key `published`"),
        (["compare=ours"], "known: published"),
        (["scores=[f1]"], "scores"),
    ],
)
def test_options_of_a_table_that_cannot_be_used(matrix, arguments, message, capsys):
    assert main(["table", "suite=made", f"results={matrix.root}", *arguments]) == 2
    assert message in capsys.readouterr().err


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
