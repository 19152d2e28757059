import json

import pytest

from dpopt.errors import ConfigError
from dpopt.harness.cell import Cell
from dpopt.harness.plan import manifest, plan
from dpopt.harness.suite import load_suite


def test_quickstart_is_the_matrix_it_says():
    planned = plan(load_suite("quickstart"))
    count = {label: sum(entry.label == label for entry in planned) for label in {entry.label for entry in planned}}
    searched, single = 3 * 3 * 5, 3 * 3
    assert count == {
        "dp_sgd": searched,
        "dp_adam": searched,
        "fiber": searched,
        "hyfreedp": single,
        "hyfreedp_warm": single,
        "adadp": single,
        "adam_nonprivate": 3 * 5,
    }
    assert len({entry.cell.run_id for entry in planned}) == len(planned)


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
    bounds = {(entry.label, entry.clip, entry.cell.optimizer["clip"]["bound"]) for entry in planned}
    assert bounds == {
        ("dp_sgd", 0.1, 0.1),
        ("dp_sgd", 2.0, 2.0),
        ("adadp", 0.1, 0.1),
        ("adadp", 2.0, 2.0),
        ("hyfreedp", 0.1, 1.0),
        ("hyfreedp", 2.0, 1.0),
    }
    given = plan(write_suite(overrides=["clip=[0.1,2]", "settings.adadp.fields.clip=7"]))
    assert {e.cell.optimizer["clip"]["bound"] for e in given if e.label == "adadp"} == {7.0}


def test_a_row_may_have_seeds_of_its_own(write_suite):
    planned = plan(write_suite(overrides=["settings.adadp.seeds=7", "seeds=[0,1]"]))
    assert {entry.cell.seed for entry in planned if entry.label == "adadp"} == {7}
    assert {entry.cell.seed for entry in planned if entry.label != "adadp"} == {0, 1}


def test_a_row_may_have_epsilon_and_epochs_of_its_own(write_suite):
    overrides = ["settings.adadp.epsilon=[1,inf]", "settings.adadp.epochs=3.5", "seeds=0"]
    planned = plan(write_suite(overrides=overrides))
    found = {(entry.label, entry.cell.epsilon, entry.cell.epochs) for entry in planned}
    assert found == {("dp_sgd", 2, 2), ("hyfreedp", 2, 2), ("adadp", 1, 3.5), ("adadp", float("inf"), 3.5)}


def test_epochs_may_depend_on_epsilon(write_suite):
    planned = plan(write_suite(overrides=["epsilon=[1.5,inf]", "epochs={inf: 2, 1.5: 40}", "seeds=0"]))
    assert {(entry.cell.epsilon, entry.cell.epochs) for entry in planned} == {(1.5, 40), (float("inf"), 2)}


def test_delta_defaults_to_below_one_over_n(write_suite):
    (delta,) = {entry.cell.delta for entry in plan(write_suite())}
    assert delta == 8000**-1.1


def test_manifest_is_json(write_suite):
    suite = write_suite(overrides=["epsilon=inf", "clip=inf"])
    planned = plan(suite)
    content = json.loads(json.dumps(manifest(suite, planned), allow_nan=False))
    assert [cell["run_id"] for cell in content["cells"]] == [entry.cell.run_id for entry in planned]


def test_missing_data_folder_is_found_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPT_DATA", str(tmp_path))
    with pytest.raises(ConfigError, match=r"DPOPT_DATA.*mnist/train-\*\.parquet"):
        plan(load_suite("mnist_five_epochs"))
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-0.parquet").touch()
    with pytest.raises(ConfigError, match=r"mnist/test-\*\.parquet"):
        plan(load_suite("mnist_five_epochs"))


def test_several_values_of_a_workloads_field_are_an_axis(write_suite):
    workloads = "workloads=[{name: digits_mlp, hidden: [8, 16, 32], validation: [100, 200]}, synthetic_logreg]"
    planned = plan(write_suite(overrides=[workloads, "optimizers=[adadp]", "epsilon=1", "seeds=0"]))
    digits = [e.cell.workload for e in planned if e.cell.workload["name"] == "digits_mlp"]
    assert [(w["hidden"], w["validation"]) for w in digits] == [(h, v) for h in (8, 16, 32) for v in (100, 200)]
    assert len(planned) == 7


def test_an_axis_without_values_is_refused(write_suite):
    with pytest.raises(ConfigError, match=r"workloads\.hidden.*\[\]"):
        plan(write_suite(overrides=["workloads=[{name: digits_mlp, hidden: []}]"]))
