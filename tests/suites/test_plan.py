import dataclasses
import json
import math

import pytest
import yaml

from dpopt.cells import Cell, clipping_bound
from dpopt.errors import ConfigError, Missing
from dpopt.suites.plan import draws, manifest, missing, plan, require
from dpopt.suites.suite import load_suite
from dpopt.workloads import data
from dpopt.workloads.vision import ImageClassification


def test_quickstart_is_the_matrix_it_says():
    planned = plan(load_suite("quickstart"))
    count = {label: sum(entry.label == label for entry in planned) for label in {entry.label for entry in planned}}
    searched, single = 3 * 3 * 5, 3 * 3
    assert count == {
        "dp_sgd": searched,
        "dp_adam": searched,
        "fiber": searched,
        "hyfreedp": single,
        "hyfreedp_noise_aware": single,
        "adadp": single,
        "adadp_equilibrium_average": single,
        "adam_nonprivate": 3 * 5,
    }
    assert len({entry.cell.run_id for entry in planned}) == len(planned)
    assert {entry.tuning for entry in planned} == {"self", "grid"}, "no value was set by hand"
    private = [entry for entry in planned if entry.label != "adam_nonprivate"]
    assert all(entry.cell.selection for entry in private if entry.tuning == "grid"), "searches are paid for"


def test_the_four_methods_meet_on_data_that_need_no_local_file():
    planned = plan(load_suite("four_methods"))
    assert {entry.label for entry in planned} >= {"hyfreedp", "fiber", "adadp", "dp_adam"}
    workloads = {entry.cell.workload["name"] for entry in planned}
    assert workloads == {"digits_mlp", "breast_cancer", "fashion_mnist_cnn"}
    assert data.entry("fashion_mnist").hub


@pytest.fixture
def unchecked(monkeypatch):
    """No model is made, which takes longer than counting cells."""
    monkeypatch.setattr(ImageClassification, "check", lambda workload: None)


@pytest.mark.parametrize(
    ("name", "rows", "blocks"),
    [
        ("hyfreedp_table2", {"dp_adamw": 20, "dp_adamw_cosine": 20, "dp_hyper": 15, "": 4}, 20 * 3),
        ("hyfreedp_table2_small", {"dp_adamw": 6, "dp_hyper": 6, "": 2}, 2),
        ("hyfreedp_table3", {"dp_adamw": 10, "dp_hyper": 10, "": 2}, 3),
        ("hyfreedp_table5", {"dp_adamw": 20, "dp_adamw_linear": 20}, 10 * 3),
    ],
)
def test_hyfreedps_suites_are_the_matrices_they_say(name, rows, blocks, unchecked):
    """Cells of each row for one workload and seed, those of "" where nothing is searched; all clip automatically."""
    suite = load_suite(name)
    planned = plan(suite)
    count = {label: sum(entry.label == label for entry in planned) for label in suite.optimizers}
    assert count == {label: blocks * rows.get(label, rows.get("")) for label in suite.optimizers}
    assert len({entry.cell.run_id for entry in planned}) == len(planned)
    assert {entry.cell.optimizer["clip"]["rule"] for entry in planned} == {"automatic"}
    rules = {entry.label: entry.cell.selection for entry in planned}
    assert {label for label, rule in rules.items() if rule} == {"dp_hyper"} & set(suite.optimizers)


def test_the_constant_rates_of_table_5_are_cells_of_table_2(unchecked):
    """Nothing is trained twice."""
    of_two, of_five = (
        {entry.cell.run_id: entry.label for entry in plan(load_suite(f"hyfreedp_table{n}", ["seeds=0"]))}
        for n in (2, 5)
    )
    assert {of_five[run_id] for run_id in of_five.keys() - of_two.keys()} == {"dp_adamw_linear"}
    assert {of_two[run_id] for run_id in of_five.keys() & of_two.keys()} == {"dp_adamw"}


def test_a_public_constant_is_one_run_and_says_what_it_was_chosen_on(write_suite):
    def planned(setting):
        suite = write_suite(overrides=[f"settings.dp_sgd={setting}", "+settings.adadp_equilibrium={average: 0.5}"])
        return plan(dataclasses.replace(suite, optimizers=("dp_sgd", "adadp_equilibrium"), seeds=(0,)))

    sgd, resting = planned("{tuning: public, grid: null, chosen_on: {lr 0.5: []}}")
    assert (sgd.tuning, sgd.tuned, sgd.cell.optimizer["lr"]) == ("public", {}, 0.5)
    assert sgd.content()["chosen_on"] == {"lr 0.5": []}
    assert "MNIST MLP" in resting.content()["chosen_on"]["tau 1"]
    with pytest.raises(ConfigError, match=r"dp_sgd.chosen_on: {}.*each constant of the row"):
        planned("{tuning: public, grid: null}")
    with pytest.raises(ConfigError, match=r"say grid, public or fixed"):
        planned("{tuning: self, grid: null}")


def test_run_ids_are_stable():
    """A changed id orphans every stored result: raise a `revision` on purpose instead."""
    cell = Cell(
        workload={"name": "digits_mlp", "revision": 1, "validation": 180, "hidden": 64},
        optimizer={"name": "dp_sgd", "revision": 1, "lr": 0.5, "clip": {"rule": "abadi", "bound": float("inf")}},
        epsilon=float("inf"),
        delta=1e-5,
        accountant="pld",
        batch_size=128,
        epochs=20.0,
        seed=0,
    )
    assert cell.run_id == "d841be20fd6169a0"
    assert Cell.from_content(json.loads(json.dumps(cell.content()))).run_id == cell.run_id


def test_labels_engines_and_folders_are_not_identity(write_suite):
    first = plan(write_suite())
    second = plan(
        write_suite(overrides=["engine=inline", "device=cpu", "results=elsewhere", "physical_batch=9"], name="other")
    )
    assert [entry.cell.run_id for entry in first] == [entry.cell.run_id for entry in second]


def test_clip_axis_reaches_rules_with_a_bound(write_suite):
    planned = plan(write_suite(overrides=["clip=[0.1,2]"]))
    bounds = {(entry.label, entry.cell.optimizer["clip"]["bound"]) for entry in planned}
    assert bounds == {("dp_sgd", 0.1), ("dp_sgd", 2.0), ("adadp", 0.1), ("adadp", 2.0), ("hyfreedp", 1.0)}
    assert len(planned) == len({entry.cell.run_id for entry in planned}), "a rule without a bound makes one cell"
    given = plan(write_suite(overrides=["clip=[0.1,2]", "settings.adadp.fields.clip=7"]))
    assert {e.cell.optimizer["clip"]["bound"] for e in given if e.label == "adadp"} == {7.0}


@pytest.mark.parametrize(
    ("inner", "bounds"), [({}, {0.1, 2.0}), ({"inner": "normalized"}, {0.1, 2.0}), ({"inner": 7}, {7.0})], ids=str
)
def test_clip_axis_reaches_the_rule_of_every_group(write_suite, inner, bounds):
    rule = yaml.safe_dump({"rule": "by_group", **inner}, default_flow_style=True).strip()
    planned = plan(write_suite(overrides=["clip=[0.1,2]", f"settings.adadp.fields.clip={rule}"]))
    cells = [entry.cell for entry in planned if entry.label == "adadp"]
    assert {cell.optimizer["clip"]["inner"]["bound"] for cell in cells} == bounds
    assert {clipping_bound(cell.content()) for cell in cells} == bounds


def test_a_row_may_have_axes_of_its_own(write_suite):
    own = ["settings.adadp.epsilon=[1,inf]", "settings.adadp.epochs=3.5", "settings.adadp.seeds=7", "seeds=0"]
    planned = plan(write_suite(overrides=own))
    found = {(entry.label, entry.cell.epsilon, entry.cell.epochs, entry.cell.seed) for entry in planned}
    of_adadp = {("adadp", 1, 3.5, 7), ("adadp", math.inf, 3.5, 7)}
    assert found == {("dp_sgd", 2, 2, 0), ("hyfreedp", 2, 2, 0)} | of_adadp
    planned = plan(write_suite(overrides=["epsilon=[1.5,inf]", "epochs={inf: 2, 1.5: 40}", "seeds=0"]))
    assert {(entry.cell.epsilon, entry.cell.epochs) for entry in planned} == {(1.5, 40), (math.inf, 2)}


def test_delta_defaults_to_below_one_over_n(write_suite):
    (delta,) = {entry.cell.delta for entry in plan(write_suite())}
    assert delta == 8000**-1.1


def test_manifest_is_json(write_suite):
    suite = write_suite(overrides=["epsilon=inf", "clip=inf"])
    planned = plan(suite)
    content = json.loads(json.dumps(manifest(suite, planned), allow_nan=False))
    assert [cell["run_id"] for cell in content["cells"]] == [entry.cell.run_id for entry in planned]


def test_missing_data_are_found_before_any_work(tmp_path, monkeypatch):
    """Planning goes on without them; what is to be run refuses."""
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path))
    suite = load_suite("mnist_five_epochs")
    assert plan(suite)
    with pytest.raises(Missing, match=r"DPOPT_DATA.*mnist/train-\*\.parquet"):
        require(suite)
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-0.parquet").touch()
    with pytest.raises(Missing, match=r"mnist/test-\*\.parquet"):
        require(suite)
    (tmp_path / "mnist" / "test-0.parquet").touch()
    require(suite)


def test_what_is_missing_is_listed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path))
    names = ["cifar10", "cifar100", "svhn", "gtsrb", "food101"]
    weights = [f"vit_{size}_patch16_224.augreg_in21k" for size in ("small", "base")]
    found = {(entry.kind, entry.name) for entry in missing(load_suite("hyfreedp_table2"))}
    assert found == {("data", name) for name in names} | {("weights", name) for name in weights}
    assert len(missing(load_suite("hyfreedp_table2"))) == 7


def test_what_the_hub_is_asked_for_does_not_stop_a_run(tmp_path, monkeypatch):
    monkeypatch.delenv("DPOPT_DATA", raising=False)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    suite = load_suite("mnist_five_epochs")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    require(suite)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(Missing, match="go online once to load ylecun/mnist"):
        require(suite)


def test_several_values_of_a_workloads_field_are_an_axis(write_suite):
    workloads = "workloads=[{name: digits_mlp, hidden: [8, 16, 32], validation: [100, 200]}, synthetic_logreg]"
    planned = plan(write_suite(overrides=[workloads, "optimizers=[adadp]", "epsilon=1", "seeds=0"]))
    digits = [e.cell.workload for e in planned if e.cell.workload["name"] == "digits_mlp"]
    assert [(w["hidden"], w["validation"]) for w in digits] == [(h, v) for h in (8, 16, 32) for v in (100, 200)]
    assert len(planned) == 7


def test_an_axis_without_values_is_refused(write_suite):
    with pytest.raises(ConfigError, match=r"workloads\.hidden.*\[\]"):
        plan(write_suite(overrides=["workloads=[{name: digits_mlp, hidden: []}]"]))


def test_fields_of_searches_leave_the_ids_of_other_cells_alone(write_suite):
    entry = plan(write_suite())[0]
    assert not {"selection", "untrained", "diagnostics", "grid"} & entry.cell.content().keys()
    assert not {"stage", "target"} & entry.content().keys()
    others = [{"selection": {"rule": "composed", "runs": 2}}, {"untrained": True}, {"search": 1}, {"grid": True}]
    changed = [dataclasses.replace(entry.cell, **change) for change in others]
    assert len({entry.cell.releases, *(cell.releases for cell in changed)}) == 5
    for cell in changed:
        assert Cell.from_content(json.loads(json.dumps(cell.content()))) == cell


def searches(planned, label):
    """The runs of each (epsilon, seed) as (number within the search, point)."""
    found = {}
    for entry in planned:
        if entry.label == label:
            found.setdefault((entry.target, entry.cell.seed), []).append((entry.cell.search, entry.tuned))
    return found


def test_a_private_row_makes_the_runs_that_were_drawn(write_searches):
    axes = ["epsilon=[1,8]", f"seeds={list(range(12))}".replace(" ", ""), "batch_size=[4000,8000]"]
    planned = plan(write_searches(["optimizers=[logarithmic]", *axes]))
    assert len({entry.cell.run_id for entry in planned}) == len(planned)
    by_size = [[e for e in planned if e.cell.batch_size == size] for size in (4000, 8000)]
    found, others = (searches(entries, "logarithmic") for entries in by_size)
    assert len(found) == 2 * 12
    for key, own in found.items():
        assert others[key] == [(len(own) + number, point) for number, point in own], "draws of their own"
    for seed in range(12):
        numbers = [number for number, _ in found[1.0, seed]]
        assert numbers == list(range(len(numbers)))
        assert found[1.0, seed] == found[8.0, seed]
    assert len({str(found[1.0, seed]) for seed in range(12)}) > 6
    assert any(len({str(point) for _, point in runs}) < len(runs) for runs in found.values()), "with replacement"
    rule = {"rule": "logarithmic", "runs": 3.0}
    assert all(entry.cell.selection == rule and entry.cell.epsilon == entry.target for entry in planned)
    assert all(entry.cell.optimizer["lr"] == entry.tuned["lr"] in (0.1, 1, 10) for entry in planned)


def test_a_search_without_runs_is_one_untrained_cell(write_searches):
    planned = plan(write_searches(["optimizers=[poisson]", f"seeds={list(range(20))}".replace(" ", "")]))
    nothing = {entry.cell.seed for entry in planned if entry.cell.untrained}
    assert 3 <= len(nothing) <= 12
    assert all(len(runs) == 1 for (_, seed), runs in searches(planned, "poisson").items() if seed in nothing)
    assert {draws(entry.cell) for entry in planned if entry.cell.untrained} == {0}


def test_rows_that_differ_in_their_rule_share_no_cells(write_searches):
    planned = plan(write_searches(["optimizers=[composed,simulated,logarithmic,linear]", "epsilon=[1,2]", "seeds=0"]))
    assert len({entry.cell.run_id for entry in planned}) == len(planned)


def test_a_rule_may_be_named_alone(write_searches):
    named = plan(write_searches(["optimizers=[composed]"]))
    assert {entry.cell.selection["runs"] for entry in named} == {3}
    assert named == plan(write_searches(["optimizers=[composed]", "settings.composed.selection={rule: composed}"]))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["optimizers=[composed]", "workloads=[{name: digits_mlp, validation: 0}]"], r"digits_mlp\.validation: 0"),
        (["optimizers=[composed]", "workloads=[{name: gmm, validation: 50}]"], r"composed\.tuning.*log_likelihood"),
        (["optimizers=[linear]", "epsilon=[1,inf]"], r"linear\.tuning.*finite epsilon"),
        (["optimizers=[poisson]", "settings.poisson.selection=poisson"], r"poisson\.selection\.runs: None"),
        (["optimizers=[few]", "settings.few.selection=[composed]"], r"few\.selection"),
    ],
)
def test_a_search_that_cannot_be_made_is_refused(write_searches, overrides, named):
    with pytest.raises(ConfigError, match=named):
        plan(write_searches(overrides))


def test_a_search_over_settings_has_draws_of_its_own_for_each(write_suite):
    axes = ["clip=[0.1,2]", "batch_size=[400,800]", "epochs=[1,2]", "epsilon=[1,2]"]
    planned = plan(write_suite(overrides=axes))
    for epsilon in (1, 2):
        mine = [e.cell for e in planned if (e.label, e.target, e.cell.seed) == ("dp_sgd", epsilon, 0)]
        assert sorted(cell.search for cell in mine) == list(range(2**4))
    mine = {e.cell.run_id: e.cell for e in planned if (e.label, e.target, e.cell.seed) == ("hyfreedp", 1, 0)}
    assert sorted(cell.search for cell in mine.values()) == list(range(2**2)), "its rule has no bound"


def test_a_single_setting_keeps_the_numbers_of_its_points(write_suite):
    for entry in plan(write_suite(overrides=["epsilon=[1,2]"])):
        assert entry.cell.search == ([0.1, 1.0].index(entry.tuned["lr"]) if entry.label == "dp_sgd" else 0)
