"""Whatever is tampered with is found, and nothing is found where nothing was."""

import hashlib
import json
import shutil

import pytest
from small_suites import train_cell
from stored import rewrite

from dpopt.cells import identity
from dpopt.cli import main
from dpopt.privacy import Draw, Ledger, Unit, epsilon
from dpopt.privacy.selection import selection_rule
from dpopt.results.verify import verify
from dpopt.results.verify.claims import Claims, check, disagrees, second_opinion
from dpopt.store import Store
from dpopt.suites.plan import manifest, plan
from dpopt.suites.suite import load_suite

SUITE = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 3}]
optimizers: [hyfreedp, composed, private, simulated, ceiling]
settings:
  composed: {name: dp_sgd, grid: {lr: [0.1, 1]}, selection: composed}
  private: {name: dp_sgd, grid: {lr: [0.1, 1]}, tuning: private, selection: {rule: geometric, runs: 2}}
  simulated: {name: dp_sgd, grid: {lr: [0.1, 1]}, selection: simulated}
  ceiling: {name: dp_sgd, fields: {lr: 1.0}, tuning: fixed, epsilon: inf, epochs: 1}
epsilon: [2]
accountant: pld
batch_size: 8000
epochs: 4
seeds: [0]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A suite; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "small.yaml").write_text(SUITE)
    suite, store = load_suite(str(folder / "small.yaml")), Store(folder / "results")
    planned = plan(suite, store)
    store.extend_suite(suite.name, manifest(suite, planned))
    for entry in planned:
        if store.state(entry.cell.run_id) == "pending":
            train_cell(entry.cell, store, device="cpu")
    return store


@pytest.fixture
def store(made, tmp_path):
    """A copy to tamper with."""
    shutil.copytree(made.root, tmp_path / "results")
    return Store(tmp_path / "results")


def run_of(store, label):
    return next(entry["run_id"] for entry in store.manifest("small")["cells"] if entry["label"] == label)


def found(store, suite=None):
    return [str(finding) for finding in verify(store, suite).findings]


def test_an_untouched_folder_passes(made, capsys):
    verified = verify(made)
    assert verified.findings == []
    runs = len(made.run_ids())
    assert verified.checked["runs"] == runs > 6
    assert verified.checked["suites"] == 1
    assert main(["verify", f"results={made.root}"]) == 0
    assert f"{runs} runs" in capsys.readouterr().out
    assert main(["verify", f"results={made.root}", "suite=small"]) == 0


def change(record, *path, to):
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = to(record[path[-1]])


SCALED = {
    "hyfreedp": [
        (("epsilon",), "epsilon"),
        (("delta",), "delta"),
        (("epsilon_target",), "epsilon_target"),
        (("rate",), "rate of its ledger"),
        (("examples",), "rate of B and N"),
        (("noise", "gradient"), "noise of its ledger"),
        (("test_accuracy",), "test_accuracy at the end of its curve"),
        (("eta",), "eta at the end of its curve"),
    ],
    "composed": [
        (("epsilon_total",), "epsilon of the search"),
        (("released_score", "value"), "released score"),
        (("released_score", "std"), "noise of a share of records"),
        (("test_accuracy",), "test records that are right"),
    ],
    "private": [
        (("epsilon_total",), "epsilon of the search"),
        (("released_score", "noise"), "epsilon of the released scores"),
    ],
    "simulated": [(("epsilon_total",), "epsilon of the search")],
}
"""Label -> numbers of a record that are made smaller, and what is then found; none of them follows from another."""


def test_every_number_of_a_record_is_held_to_what_it_follows_from(store):
    for label, changes in SCALED.items():
        record = store.record(run_of(store, label))
        for path, _ in changes:
            change(record, *path, to=lambda value: value * 0.98)
        rewrite(store, record["run_id"], **record)
    lines = found(store, "small")
    for label, changes in SCALED.items():
        for _, what in changes:
            assert any(line.startswith(f"{run_of(store, label)}: {what}: claimed") for line in lines), (label, what)


@pytest.mark.parametrize(("label", "number"), [("hyfreedp", "epsilon"), ("composed", "epsilon_total")])
def test_a_claim_that_is_wrong_alone_is_found(store, label, number):
    record = store.record(run_of(store, label))
    rewrite(store, record["run_id"], **{number: 0.98 * record[number]})
    assert found(store, "small")[0].startswith(f"{record['run_id']}: epsilon")


def test_an_accuracy_is_a_whole_number_of_records_and_that_of_its_bits(store):
    record = store.record(run_of(store, "composed"))
    rewrite(store, record["run_id"], test_accuracy=0.98 * record["test_accuracy"])
    assert sum("test records that are right: claimed" in line for line in found(store, "small")) == 2


def test_texts_are_held_to_it_too(store):
    record = store.record(run_of(store, "hyfreedp"))
    record["cell"]["seed"] = 1
    changes = {"draws": 5, "accountant": "rdp", "private": False, "noise": "much", "provenance": {}, "unit": "record"}
    ledger = Ledger(store.ledger(record["run_id"]), Unit("person")).to_json()
    rewrite(store, record["run_id"], ledger=json.loads(ledger), **record | changes)
    lines = " ".join(line for line in found(store, "small") if line.startswith(record["run_id"]))
    run_id, check, unit = "run id of its cell", "that it can be checked", "unit: claimed record, found person"
    for what in ("draws", "accountant", "private", "provenance", run_id, check, unit):
        assert what in lines


@pytest.mark.parametrize("damage", ["truncated", "emptied", "run_id", "schema", "status", "cell"])
def test_a_damaged_run_is_a_finding(store, damage):
    run_id = run_of(store, "hyfreedp")
    path = store.folder(run_id, "run.json")
    content = path.read_bytes()
    if damage in ("truncated", "emptied"):
        path.write_bytes(content[: len(content) // 2 * (damage == "truncated")])
    else:
        rewrite(store, run_id, **{damage: {"run_id": "ab" * 8, "schema": 2, "status": "great", "cell": 3}[damage]})
    assert any(line.startswith(f"{run_id}: file: claimed whole") for line in found(store, "small"))


def tampered_ledger(store, run_id, change_draw):
    ledger = Ledger()
    for draw, count in store.ledger(run_id).counts().items():
        ledger.append(*change_draw(draw, count))
    rewrite(store, run_id, ledger=json.loads(ledger.to_json()))


LEDGERS = {
    "noise": lambda draw, count: (Draw(draw.rate, tuple(noise * 1.01 for noise in draw.noises)), count),
    "rate": lambda draw, count: (Draw(draw.rate * 0.5, draw.noises), count),
    "draws": lambda draw, count: (draw, count + 1),
    "releases": lambda draw, count: (Draw(draw.rate, draw.noises * 2), count),
}


def test_a_ledger_that_is_not_the_runs_is_a_finding(store):
    labels = dict(zip(LEDGERS, ("hyfreedp", "composed", "private", "simulated"), strict=True))
    for kind, label in labels.items():
        tampered_ledger(store, run_of(store, label), LEDGERS[kind])
    lines = found(store, "small")
    for label in labels.values():
        assert any(line.startswith(f"{run_of(store, label)}: epsilon: claimed") for line in lines)


def test_a_run_or_a_plan_under_another_name_is_found(store):
    run_id = run_of(store, "hyfreedp")
    shutil.copytree(store.folder(run_id), store.folder("ab" * 8))
    assert any(line.startswith(f"{'ab' * 8}: file: claimed whole") for line in found(store))
    named = store.run(run_id)._replace(record={**store.record(run_id), "run_id": "ab" * 8})
    store.write(store.folder("ab" * 8, "run.json"), named.line())
    planned = store.manifest("small")
    planned["cells"][0]["cell"]["epochs"] = 5.0
    store.extend_suite("small", planned)
    lines = found(store)
    assert any(line.startswith(f"{'ab' * 8}: run id of its cell") for line in lines)
    assert any("run id of a planned cell" in line for line in lines)


def test_a_part_that_is_gone_is_seen_as_long_as_its_runs_are_there(store):
    parts = store.suite_folder("small") / "parts"
    whole, cells = store.manifest("small"), store.manifest("small")["cells"]
    (only,) = parts.iterdir()
    kept = [entry for entry in cells if entry["label"] != "composed"]
    only.unlink()
    store.extend_suite("small", {**whole, "cells": kept})
    gone = {entry["run_id"] for entry in cells} - {entry["run_id"] for entry in kept}
    findings = verify(store).findings
    assert {each.where for each in findings if each.what == "suite that it is a run of"} == gone
    assert len(gone) == len(findings) == len(found(store, "small")) == 2
    shutil.rmtree(parts)
    assert any("cells of the suite" in line for line in found(store, "small"))
    (store.suite_folder("small") / "suite.json").unlink()
    assert len(verify(store).findings) == len(store.run_ids())


def test_a_part_that_another_names_is_seen_though_another_suite_holds_its_runs(store):
    """Parts of two machines that began alike are a merge; what then goes, or is moved to the other suite, shows."""
    folder, other = store.suite_folder("small"), store.suite_folder("other")
    whole = store.manifest("small")
    machine = Store(store.root.parent / "machine")
    for at, root in enumerate((store, machine)):
        for cells in (whole["cells"], [whole["cells"][at] | {"gradients_per_draw": 7.0}]):
            root.extend_suite("small", {**whole, "cells": cells})
    shutil.copytree(machine.suite_folder("small"), folder, dirs_exist_ok=True)
    store.extend_suite("other", {**whole, "suite": "other"})
    store.extend_suite("small", {**whole, "cells": [whole["cells"][2] | {"gradients_per_draw": 7.0}]})
    parts = [*(folder / "parts").iterdir()]
    assert (len(parts), found(store)) == (4, [])
    last = max(parts, key=lambda path: json.loads(path.read_bytes())["number"])
    for path in {*parts} - {last}:
        path.rename(other / "parts" / path.name)
        assert any(path.stem in line for line in found(store, "small"))
        assert any(str(other / "parts" / path.name) in line for line in found(store, "other"))
        (other / "parts" / path.name).rename(path.with_suffix(".JSON"))
        assert any(path.stem in line and "not read" in line for line in found(store, "small"))
        path.with_suffix(".JSON").rename(path)
    shutil.copy(other / "suite.json", folder)
    assert found(store) == [f"{folder / 'suite.json'}: suite: claimed other, found small"]


def test_a_cell_that_is_gone_leaves_a_gap(store):
    """Though its run is gone too: the numbers of a row count from 0, and so do those beyond the end of its grid."""
    whole = store.manifest("small")
    (first, second) = (entry for entry in whole["cells"] if entry["label"] == "composed")
    assert (first["cell"].get("search", 0), second["cell"]["search"]) == (0, 1)
    shutil.rmtree(store.suite_folder("small"))
    shutil.rmtree(store.folder(first["run_id"]))
    rest = [entry for entry in whole["cells"] if entry != first]
    store.extend_suite("small", {**whole, "cells": rest})
    gap, search = found(store)
    assert "composed, epsilon 2.0, seed 0: numbers of its runs: claimed 0 to 1" in gap
    assert "composed: search of these runs: claimed" in search
    beyond = {**second, "cell": second["cell"] | {"search": 2 * 10**6}}
    store.extend_suite("small", {**whole, "cells": [first, beyond | {"run_id": identity(beyond["cell"])}]})
    assert [line for line in found(store) if "none has 0" in line]


def test_a_run_of_smaller_batches_has_a_smaller_rate(made):
    run_id = run_of(made, "hyfreedp")
    record = made.record(run_id)
    claims = Claims("here", made.ledger(run_id), record | {"cell": record["cell"] | {"dry_run": 2.0}}, None)
    (rate,) = (finding for finding in check(claims) if finding.what == "rate of B and N")
    assert (rate.claimed, rate.result) == (1.0, 0.5)


def test_where_runs_come_from_is_said(store):
    folder = store.add("bench", {"schema": 1, "rows": [0.1]})
    run_id = run_of(store, "hyfreedp")
    record = store.record(run_id)
    for commit, dirty in ((None, False), ("0" * 40, True)):
        record["provenance"] |= {"commit": commit, "dirty": dirty}
        rewrite(store, run_id, **record)
        verified = verify(store)
        assert verified.findings == []
        remarks = " ".join(verified.remarks)
        assert ("do not know their commit" in remarks) == (commit is None)
        assert ("not in this history" in remarks) == (commit is not None)
        assert "files that differ from their commit" in remarks or not dirty
    (folder / "record.json").write_text('{"schema": 1, "rows": [0.2]}')
    assert any("name of its content" in line for line in found(store)), "a measurement has its content as its name"


def test_the_command_says_what_it_found(store, capsys):
    run_id = run_of(store, "composed")
    tampered_ledger(store, run_id, LEDGERS["noise"])
    assert main(["verify", f"results={store.root}"]) == 1
    printed = capsys.readouterr().out
    assert f"{run_id}: epsilon: claimed" in printed
    assert main(["verify", "results=/nowhere"]) == 2
    assert main(["verify", f"results={store.root}", "suite=smal"]) == 2
    assert "did you mean 'small'" in capsys.readouterr().err


LONG = pytest.param(0.02, 2.0, 10**5, marks=pytest.mark.slow)


@pytest.mark.parametrize(("rate", "noise", "draws"), [(1.0, 4.0, 10), (0.1, 1.3, 100), (0.1, 1000.0, 10), LONG])
def test_the_second_accountant_agrees_and_sees_a_wrong_one(rate, noise, draws):
    ledger = Ledger([Draw(rate, (noise,))] * draws)
    for accountant in ("pld", "prv"):
        claimed = epsilon(ledger, 1e-5, accountant)
        second = second_opinion(ledger, 1e-5, accountant)
        assert not disagrees(claimed, second, accountant)
        assert disagrees(0.98 * claimed - 0.04, second, accountant)
        assert disagrees(1.02 * claimed + 0.04, second, accountant)
    assert not disagrees(epsilon(ledger, 1e-5, "rdp"), second, "rdp")
    assert disagrees(0.98 * claimed - 0.04, second, "rdp")


def test_the_best_of_a_random_number_of_runs_costs_at_least_one():
    ledger = Ledger([Draw(1.0, (4.0,))] * 10)
    rule = selection_rule({"rule": "geometric", "runs": 3})
    least = second_opinion(ledger, 1e-5, "pld", rule)
    assert not disagrees(rule.epsilon(ledger, 1e-5), least, "pld", rule)
    assert disagrees(0.9 * least, least, "pld", rule)
    assert not disagrees(2 * least, least, "pld", is_bound=True)


@pytest.mark.parametrize("share", [0.01, 0.85])
def test_errors_grow_with_what_a_simulated_search_is_taken_to_spend(share):
    """0.015 above the second opinion on a run are 1.5 on a hundred times as much, and no mistake."""
    ledger, rule = Ledger([Draw(0.1, (1.3,))] * 100), selection_rule({"rule": "simulated", "share": share})
    second = second_opinion(ledger, 1e-5, "pld", rule)
    assert second == pytest.approx(second_opinion(ledger, 1e-5, "pld") / share)
    for error, is_wrong in ((0.015, False), (0.1, True)):
        for claimed in (second - error / share, second + error / share):
            assert disagrees(claimed, second, "pld", rule) == is_wrong


def test_a_cell_that_cannot_be_priced_is_a_finding(store):
    changes = {"hyfreedp": {"delta": None}, "composed": {"delta": [1e-5]}, "private": {"accountant": "pdl"}}
    for label, change in changes.items():
        record = store.record(run_of(store, label))
        record["cell"] = {key: value for key, value in (record["cell"] | change).items() if value is not None}
        rewrite(store, record["run_id"], **record)
    findings = {(each.where, each.what, each.claimed) for each in verify(store, "small").findings}
    assert {(run_of(store, label), "epsilon", "that it can be checked") for label in changes} <= findings


def test_no_noise_and_no_draws_need_no_second_opinion():
    assert second_opinion(Ledger([Draw(0.5, (0.0,))]), 1e-5, "pld") is None
    assert second_opinion(Ledger(), 1e-5, "pld") is None
    assert not disagrees(float("inf"), None, "pld")


@pytest.mark.parametrize(
    ("label", "key", "value"),
    [
        ("composed", "tuning", "fixed"),
        ("private", "tuning", "grid"),
        ("ceiling", "tuning", "grid"),
        ("ceiling", "tuned", {"lr": 7}),
        ("composed", "tuned", {"lr": "x"}),
        ("composed", "tuned", {}),
        ("composed", "target", 1.0),
        ("composed", "stage", "final"),
        ("composed", "search_id", "0" * 32),
    ],
)
def test_a_part_that_is_named_anew_by_its_hash_is_held_to_its_cells(label, key, value, store):
    (path,) = (store.suite_folder("small") / "parts").iterdir()
    part = json.loads(path.read_bytes())
    part["cells"] = [entry | {key: value} if entry["label"] == label else entry for entry in part["cells"]]
    text = json.dumps(part).encode()
    path.write_bytes(text)
    path.rename(path.with_stem(hashlib.sha256(text).hexdigest()))
    assert any(line.startswith("suite small,") for line in found(store, "small"))
