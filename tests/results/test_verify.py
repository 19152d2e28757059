"""Whatever is tampered with is found, and nothing is found where nothing was."""

import contextlib
import errno
import json
import os
import random
import shutil

import pandas as pd
import pytest

from dpopt.cli import main
from dpopt.harness import cell as cells
from dpopt.harness.plan import manifest, plan
from dpopt.harness.suite import load_suite
from dpopt.privacy import Draw, Ledger, epsilon
from dpopt.privacy.selection import selection_rule
from dpopt.results import choosing, frames, tables
from dpopt.results.collecting import collect
from dpopt.results.results import Results
from dpopt.results.verify import opinions, verify
from dpopt.results.verify import runs as runs_of_verify
from dpopt.store import Damaged, Store, checksums, runs
from dpopt.store.runs import sealed

SUITE = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 3}]
optimizers: [hyfreedp, composed, private, simulated, ceiling]
settings:
  composed: {name: dp_sgd, grid: {lr: [0.1, 1]}, selection: composed}
  private: {name: dp_sgd, grid: {lr: [0.1, 1]}, tuning: private, selection: {rule: geometric, runs: 2}}
  simulated: {name: dp_sgd, grid: {lr: [0.1, 1]}, selection: simulated}
  ceiling: {name: dp_sgd, fields: {lr: 1.0}, tuning: fixed, epsilon: inf}
epsilon: [2]
accountant: pld
batch_size: 8000
epochs: 4
seeds: [0]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A suite with its Parquet, which is also published with its table; not to be changed."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "small.yaml").write_text(SUITE)
    suite, store = load_suite(str(folder / "small.yaml")), Store(folder / "results")
    planned = plan(suite, store)
    store.write_manifest(suite.name, manifest(suite, planned))
    for entry in planned:
        if store.state(entry.cell.run_id) == "pending":
            cells.run(entry.cell, store, device="cpu")
    collect(Results(store, "small"))
    publish(store)
    return store


def publish(store):
    """What `dpopt table` and `dpopt seal` make of the suite."""
    results, published = frames.load(store, "small"), store.root / "published" / "small"
    published.mkdir(parents=True, exist_ok=True)
    comparison = tables.comparison(store, choosing.select(results.cells))
    (published / "table.md").write_text(tables.as_table(comparison, "small").markdown)
    for kind in ("cells", "curves"):
        shutil.copy(store.suite_folder("small") / f"{kind}.parquet", published)
    seal(store)


def seal(store):
    checksums.seal(store, store.root / "published", checksums.contents(store.root / "published"))


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
    assert verified.checked["rows of Parquet"] == 2 * len(made.manifest("small")["cells"])
    assert verified.checked["published files"] == 3
    assert main(["verify", f"results={made.root}"]) == 0
    assert f"{runs} runs" in capsys.readouterr().out
    assert main(["verify", f"results={made.root}", "suite=small"]) == 0


def change(record, *path, to):
    for key in path[:-1]:
        record = record[key]
    record[path[-1]] = to(record[path[-1]])


SCALED = [
    ("hyfreedp", ("epsilon",), "epsilon: claimed"),
    ("hyfreedp", ("delta",), "delta"),
    ("hyfreedp", ("epsilon_target",), "epsilon_target"),
    ("hyfreedp", ("rate",), "rate of its ledger"),
    ("hyfreedp", ("examples",), "rate of B and N"),
    ("hyfreedp", ("noise", "gradient"), "noise of its ledger"),
    ("hyfreedp", ("noise", "losses"), "noise of its ledger"),
    ("hyfreedp", ("test_accuracy",), "test_accuracy at the end of its curve"),
    ("hyfreedp", ("eta",), "eta at the end of its curve"),
    ("composed", ("epsilon_total",), "epsilon of the search"),
    ("private", ("epsilon_total",), "epsilon of the search"),
    ("simulated", ("epsilon_total",), "epsilon of the search"),
    ("composed", ("released_score", "value"), "released score"),
    ("composed", ("released_score", "std"), "noise of a share of records|records that are held out"),
    ("private", ("released_score", "noise"), "epsilon of the released scores"),
]


@pytest.mark.parametrize(("label", "path", "what"), SCALED, ids=[f"{label}-{path[-1]}" for label, path, _ in SCALED])
def test_every_number_of_a_record_is_held_to_what_it_follows_from(store, label, path, what):
    run_id = run_of(store, label)
    record = store.record(run_id)
    change(record, *path, to=lambda value: value * 0.98)
    (store.folder(run_id) / "record.json").write_text(json.dumps(sealed(record)))
    lines = [line for line in found(store, "small") if line.startswith(run_id)]
    assert any(name in line for line in lines for name in what.split("|")), lines


REPLACED = [
    (("draws",), 5, "draws"),
    (("accountant",), "rdp", "accountant"),
    (("private",), False, "private"),
    (("cell", "seed"), 1, "run id of its cell"),
    (("run_id",), "ab" * 8, "files"),
    (("schema",), 2, "files"),
    (("status",), "great", "files"),
    (("noise",), "much", "that it can be checked"),
    (("cell",), 3, "files"),
    (("provenance",), {}, "provenance"),
]


@pytest.mark.parametrize(("path", "value", "what"), REPLACED, ids=[path[-1] for path, _, _ in REPLACED])
def test_what_is_no_number_is_held_to_it_too(store, path, value, what):
    run_id = run_of(store, "hyfreedp")
    record = store.record(run_id)
    change(record, *path, to=lambda _: value)
    (store.folder(run_id) / "record.json").write_text(json.dumps(sealed(record)))
    lines = [line for line in found(store, "small") if line.startswith(run_id)]
    assert any(what in line for line in lines), lines


@pytest.mark.parametrize("name", ["cell.json", "curve.jsonl", "ledger.json", "record.json"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "bytes"])
def test_damaged_files_of_a_run_are_found(store, name, damage):
    path = store.folder(run_of(store, "hyfreedp")) / name
    content = path.read_bytes()
    path.write_bytes({"truncated": content[: len(content) // 2], "emptied": b"", "bytes": b"\xff" + content}[damage])
    assert path.parent.name in " ".join(found(store, "small"))


def test_why_a_ledger_cannot_be_read_is_told(store):
    path = store.folder(run_of(store, "hyfreedp")) / "ledger.json"
    path.write_text(path.read_text()[:-1])
    (line,) = (line for line in found(store, "small") if "not a ledger" in line)
    assert "Expecting ',' delimiter" in line


@pytest.mark.parametrize("name", ["cell.json", "curve.jsonl", "ledger.json"])
def test_missing_files_of_a_run_are_found(store, name):
    path = store.folder(run_of(store, "hyfreedp")) / name
    path.unlink()
    assert path.parent.name in " ".join(found(store, "small"))


def tampered_ledger(store, run_id, change_draw):
    path = store.folder(run_id) / "ledger.json"
    ledger = Ledger()
    for draw, count in Ledger.from_json(path.read_text()).counts().items():
        ledger.append(*change_draw(draw, count))
    path.write_text(ledger.to_json())


LEDGERS = {
    "noise": lambda draw, count: (Draw(draw.rate, tuple(noise * 1.01 for noise in draw.noises)), count),
    "rate": lambda draw, count: (Draw(draw.rate * 0.5, draw.noises), count),
    "draws": lambda draw, count: (draw, count + 1),
    "releases": lambda draw, count: (Draw(draw.rate, draw.noises[:1]), count),
}


@pytest.mark.parametrize("kind", LEDGERS)
def test_a_ledger_that_is_not_the_runs_is_found_without_its_checksum(store, kind):
    run_id = run_of(store, "hyfreedp")
    tampered_ledger(store, run_id, LEDGERS[kind])
    record = store.record(run_id)
    del record["checksums"]
    (store.folder(run_id) / "record.json").write_text(json.dumps(record))
    assert any(line.startswith(f"{run_id}: epsilon") for line in found(store, "small"))


def test_a_line_in_the_middle_of_a_curve_is_found(store):
    path = store.folder(run_of(store, "hyfreedp")) / "curve.jsonl"
    first, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first.replace("0.", "0.1", 1), *rest]) + "\n")
    assert any("SHA-256 of curve.jsonl" in line for line in found(store, "small"))


def test_a_run_under_another_name_is_found(store):
    run_id = run_of(store, "hyfreedp")
    other = store.folder("ab" * 8)
    shutil.copytree(store.folder(run_id), other)
    (other / "record.json").write_text(json.dumps(sealed(store.record(run_id) | {"run_id": "ab" * 8})))
    assert any(line.startswith(f"{'ab' * 8}: run id of its cell") for line in found(store))


def test_a_plan_that_names_another_cell_is_found(store):
    planned = store.manifest("small")
    planned["cells"][0]["cell"]["epochs"] = 5.0
    store.write_manifest("small", planned)
    assert any("run id of a planned cell" in line for line in found(store, "small"))


def every_parquet(store):
    return [f / f"{kind}.parquet" for f in folders(store) for kind in ("cells", "curves")]


def folders(store):
    return [store.suite_folder("small"), store.root / "published" / "small"]


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("part", [0.001, 0.3, 0.6, 0.99])
def test_a_changed_byte_of_parquet_is_found(store, number, part):
    path = every_parquet(store)[number]
    content = bytearray(path.read_bytes())
    content[int(part * len(content))] ^= 1
    path.write_bytes(content)
    assert any(f"{path}: SHA-256" in line for line in found(store))


COLUMNS = {
    "epsilon": 1.9,
    "draws": 5.0,
    "delta": 1e-3,
    "noise_gradient": 99.0,
    "test_accuracy": 0.99,
    "seed": 7,
    "cell": '{"seed": 0}',
    "ledger": '{"schema":1,"draws":[{"rate":1.0,"noises":[99.0]}],"runs":[[0,4]]}',
    "suite": "other",
    "run_id": "ab" * 8,
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("number", [0, 1], ids=["collected", "published"])
def test_changed_parquet_is_found_though_it_was_sealed_again(store, number, column):
    folder = folders(store)[number]
    frame = pd.read_parquet(folder / "cells.parquet")
    row = frame.index[frame["label"] == "hyfreedp"][0]
    frame[column] = frame[column].astype(object)
    frame.loc[row, column] = COLUMNS[column]
    frame.to_parquet(folder / "cells.parquet")
    if number == 0:
        checksums.seal(store, folder, folder.glob("*.parquet"), suite="small")
    seal(store)
    assert any(str(folder) in line and "SHA-256" not in line for line in found(store)), column


def test_published_parquet_is_verified_without_its_runs(store):
    """The rows hold what they follow from, so that a clone of the repository is enough."""
    shutil.rmtree(store.root / "runs")
    shutil.rmtree(store.root / "suites")
    assert found(store) == []
    path = store.root / "published" / "small" / "cells.parquet"
    frame = pd.read_parquet(path)
    frame.assign(epsilon=frame["epsilon"] * 0.9).to_parquet(path)
    seal(store)
    lines = found(store)
    assert sum(": epsilon: claimed" in line for line in lines) == (frame["epsilon"] < float("inf")).sum()
    assert any("table.md" in line for line in lines)


def test_one_published_suite_is_verified_alone(store, capsys):
    published = store.root / "published"
    shutil.copytree(published / "small", published / "other")
    seal(store)
    (published / "small" / "table.md").write_text("changed")
    shutil.rmtree(store.root / "suites")
    of = f"results={store.root}"
    assert main(["verify", "suite=other", of]) == 1, "its rows are those of another suite"
    assert "small/table.md" not in capsys.readouterr().out
    assert main(["verify", "suite=small", of]) == 1
    said = capsys.readouterr().out.replace("\n", "")
    assert "table.md: SHA-256" in said
    assert "3 published files" in said
    assert main(["verify", "suite=smal", of]) == 2


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("number", [0.9999, "?"])
def test_a_record_that_is_not_that_of_its_row_is_found(store, number, is_sealed):
    """Merging and pricing read the record, tables the columns beside it."""
    path = store.root / "published" / "small" / "cells.parquet"
    frame = pd.read_parquet(path)
    record = runs.unsealed(json.loads(frame.loc[0, "record"]), "the row") | {"test_loss": number}
    frame.loc[0, "record"] = json.dumps(sealed(record) if is_sealed else record)
    frame.to_parquet(path)
    seal(store)
    (line,) = [line for line in found(store) if "record" in line]
    assert frame.loc[0, "run_id"] in line


@pytest.mark.parametrize("origin", ["device", "cpu", "torch"])
def test_scores_of_another_machine_are_held_to_a_tolerance(store, origin):
    """A run that was made again elsewhere: near the published scores is a remark, farther off or at home a mismatch."""
    run_id = run_of(store, "hyfreedp")
    whole = store.record(run_id)
    away = {
        "device": {"device": "cpu of another"},
        "cpu": {"cpu": "of another"},
        "torch": {"versions": {"torch": "9"}},
    }

    def lines(is_away, **changes):
        moved = {**whole["provenance"], **(away[origin] if is_away else {})}
        record = {**whole, "provenance": moved, **{key: whole[key] + by for key, by in changes.items()}}
        (store.folder(run_id) / "record.json").write_text(json.dumps(sealed(record)))
        verified = verify(store)
        remarks = [line for line in verified.remarks if "1 rows have their run here from another" in line]
        assert len(remarks) == (2 if is_away else 0)  # collected and published
        return [str(each) for each in verified.findings if "published" in each.where and "of the record" in each.what]

    assert lines(True, test_accuracy=0.015) == []
    assert len(lines(True, test_accuracy=0.025)) == 1
    assert len(lines(False, test_accuracy=0.015)) == 1
    assert len(lines(True, epsilon=1e-9)) == 1


def test_scores_of_another_kind_of_device_are_not_compared(store):
    """Its noise is another, so it is another replicate; what was spent is the same."""
    run_id = run_of(store, "hyfreedp")
    whole = store.record(run_id)
    for changes, count in (({"test_accuracy": 0.0}, 0), ({"epsilon": whole["epsilon"] + 1e-9}, 1)):
        record = {**whole, "provenance": {**whole["provenance"], "device": "cuda of a card"}, **changes}
        (store.folder(run_id) / "record.json").write_text(json.dumps(sealed(record)))
        verified = verify(store)
        assert sum("another kind of device" in line for line in verified.remarks) == 2  # collected and published
        assert sum("published" in each.where and "of the record" in each.what for each in verified.findings) == count


def test_another_suites_parquet_is_found(store, tmp_path):
    folder = store.root / "suites" / "other"
    shutil.copytree(store.suite_folder("small"), folder)
    planned = store.manifest("other")
    store.write_manifest("other", planned | {"cells": planned["cells"][:1]})
    lines = found(store, "other")
    assert any("no cell of the suite" in line for line in lines)
    assert any("suite: claimed small, found other" in line for line in lines)


def test_a_table_that_is_not_of_its_parquet_is_found(store):
    path = store.root / "published" / "small" / "table.md"
    text = path.read_text()
    for tampered in (text.replace("| 2 ", "| 3 ", 1), "\n".join(text.splitlines()[:3])):
        path.write_text(tampered)
        seal(store)
        assert any("table.md: row" in line for line in found(store))


def test_published_files_that_come_and_go_are_found(store):
    root = store.root / "published"
    (root / "new.svg").write_text("<svg/>")
    (root / "small" / "table.md").unlink()
    lines = found(store)
    assert any("new.svg: SHA-256: claimed not noted" in line for line in lines)
    assert any("table.md: SHA-256" in line and "no such file" in line for line in lines)
    for content in (None, "{", '{"schema": 1, "files": {"small/table.md": "abc"}}'):
        (root / checksums.NAME).unlink() if content is None else (root / checksums.NAME).write_text(content)
        assert any(f"{checksums.NAME}: checksums" in line for line in found(store))


def test_measurements_are_what_they_are_named_by(store):
    folder = store.add("bench", {"schema": 1, "rows": [0.1]})
    assert found(store) == []
    (folder / "record.json").write_text('{"schema": 1, "rows": [0.2]}')
    assert any("name of its content" in line for line in found(store))


def test_where_runs_come_from_is_said(store):
    run_id = run_of(store, "hyfreedp")
    path = store.folder(run_id) / "record.json"
    record = store.record(run_id)
    for commit, dirty in ((None, False), ("0" * 40, True)):
        record["provenance"] |= {"commit": commit, "dirty": dirty}
        path.write_text(json.dumps(sealed(record)))
        verified = verify(store, "small")
        assert verified.findings == []
        remarks = " ".join(verified.remarks)
        assert ("do not know their commit" in remarks) == (commit is None)
        assert ("not in this history" in remarks) == (commit is not None)
        assert "files that differ from their commit" in remarks or not dirty


def test_unfinished_runs_are_counted(store):
    """Without Parquet that would say that they were done."""
    of = store.folder(run_of(store, "hyfreedp"))
    for name in (of / "record.json", of / "ledger.json", store.suite_folder("small") / "cells.parquet"):
        name.unlink()
    verified = verify(store, "small")
    assert (verified.checked["unfinished"], verified.findings) == (1, [])


def test_a_record_that_was_deleted_is_found(store):
    """By the ledger that it leaves behind, and by what was collected of it."""
    run_id = run_of(store, "hyfreedp")
    of = store.folder(run_id)
    (of / "record.json").unlink()
    lines = found(store, "small")
    assert any(line.startswith(f"{run_id}: record beside its ledger") for line in lines)
    assert any(line.startswith(f"{store.suite_folder('small')}/cells.parquet, {run_id}: record") for line in lines)
    (of / "ledger.json").unlink()
    (line,) = found(store, "small")
    assert "found none, the run is interrupted" in line
    shutil.rmtree(of)
    (line,) = found(store, "small")
    assert "found none, the run is pending" in line


def test_collected_parquet_may_be_kept_without_its_runs(store):
    shutil.rmtree(store.root / "runs")
    assert found(store, "small") == []


def test_a_run_in_flight_has_not_lost_its_record(store, tmp_path):
    """At no moment of a run that follows a lost record, is stopped, goes on, and ends."""
    run_id = run_of(store, "hyfreedp")
    cell = cells.Cell.from_content(store.record(run_id)["cell"])
    for name in ("record.json", "ledger.json"):
        (store.folder(run_id) / name).unlink()

    class Watched(Store):
        looks = 0

        def __getattribute__(self, name):
            if name in ("begin", "restart_curve", "append_curve", "save_checkpoint", "finish", "lease"):
                look()
            return super().__getattribute__(name)

    def look():
        Watched.looks += 1
        verified = verify(store, "small")
        assert not [line for line in map(str, verified.findings) if "record beside its ledger" in line]

    (store.suite_folder("small") / "cells.parquet").unlink()
    answers = iter([False, True])
    with pytest.raises(cells.Interrupted):
        cells.run(cell, Watched(store.root), device="cpu", stop=lambda: next(answers))
    look()
    cells.run(cell, Watched(store.root), device="cpu")
    look()
    assert Watched.looks > 8
    assert found(store, "small") == []


def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("ends", [full, lambda *_: os._exit(0)], ids=["full", "killed"])
def test_a_run_that_ends_between_ledger_and_record_has_not_lost_it(store, monkeypatch, ends):
    """Where the disk is full, the ledger is taken back; who is killed leaves the lease behind."""
    run_id = run_of(store, "hyfreedp")
    record = store.record(run_id)
    (store.folder(run_id) / "record.json").unlink()
    assert store.has_lost_its_record(run_id)
    monkeypatch.setattr(runs, "_publish", ends)
    if (child := os.fork()) == 0:
        with contextlib.suppress(OSError), store.lease(run_id):
            store.finish(run_id, record, "{}")
        os._exit(0)
    os.waitpid(child, 0)
    assert (store.folder(run_id) / "ledger.json").exists() == (store.holder(run_id) is not None)
    assert not store.has_lost_its_record(run_id)


BITS = 400


@pytest.mark.parametrize("label", ["hyfreedp", "composed"])
def test_any_flipped_bit_of_a_record_is_noticed(store, label):
    """In the name of any key and in any value, but where the number is the same: 1e-05 and 1E-05."""
    run_id = run_of(store, label)
    path = store.folder(run_id) / "record.json"
    sound, record = path.read_bytes(), store.record(run_id)
    for bit in random.Random(label).sample(range(8 * len(sound)), BITS):
        changed = bytearray(sound)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            claims = runs_of_verify.load(store, run_id)
        except Damaged:
            continue
        is_same = claims.numbers == record and json.loads(changed) == json.loads(sound)
        assert is_same or list(runs_of_verify.check(store, claims)), bytes(changed[bit // 8 - 20 : bit // 8 + 20])


def test_the_command_says_what_it_found(store, capsys):
    run_id = run_of(store, "composed")
    tampered_ledger(store, run_id, LEDGERS["noise"])
    assert main(["verify", f"results={store.root}"]) == 1
    printed = capsys.readouterr().out
    assert f"{run_id}: epsilon: claimed" in printed
    assert main(["verify", "results=/nowhere"]) == 2
    assert main(["verify", f"results={store.root / 'published'}"]) == 2
    assert "expected the results folder above it" in capsys.readouterr().err
    assert main(["verify", f"results={store.root}", "suite=smal"]) == 2
    assert "did you mean 'small'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rate", "noise", "draws"), [(1.0, 4.0, 10), (0.1, 1.3, 100), (0.1, 1000.0, 10), (0.02, 2.0, 10**5)]
)
def test_the_second_accountant_agrees_and_sees_a_wrong_one(rate, noise, draws):
    ledger = Ledger()
    ledger.append(Draw(rate, (noise,)), draws)
    for accountant in opinions.TIGHT:
        claimed = epsilon(ledger, 1e-5, accountant)
        second = opinions.tight(ledger, 1e-5, accountant)
        assert not opinions.disagrees(claimed, second, accountant)
        assert opinions.disagrees(0.98 * claimed - 0.04, second, accountant)
        assert opinions.disagrees(1.02 * claimed + 0.04, second, accountant)
    assert not opinions.disagrees(epsilon(ledger, 1e-5, "rdp"), second, "rdp")
    assert opinions.disagrees(0.98 * claimed - 0.04, second, "rdp")


def test_the_best_of_a_random_number_of_runs_costs_at_least_one():
    ledger = Ledger()
    ledger.append(Draw(1.0, (4.0,)), 10)
    rule = selection_rule({"rule": "geometric", "runs": 3})
    least = opinions.of_search(rule, ledger, 1e-5, "pld")
    assert not opinions.disagrees(rule.epsilon(ledger, 1e-5), least, "pld", is_bound=True)
    assert opinions.disagrees(0.9 * least, least, "pld", is_bound=True)


@pytest.mark.parametrize("share", [0.01, 0.85])
def test_errors_grow_with_what_a_simulated_search_is_taken_to_spend(share):
    """0.015 above the second opinion on a run are 1.5 on a hundred times as much, and no mistake."""
    made = Ledger()
    made.append(Draw(0.1, (1.3,)), 100)
    rule = selection_rule({"rule": "simulated", "share": share})
    second = opinions.of_search(rule, made, 1e-5, "pld")
    assert second == pytest.approx(opinions.tight(made, 1e-5, "pld") / share)
    assert opinions.share_of(rule) == share
    for error, is_wrong in ((0.015, False), (0.1, True)):
        for claimed in (second - error / share, second + error / share):
            assert opinions.disagrees(claimed, second, "pld", share=opinions.share_of(rule)) == is_wrong
    assert opinions.share_of(selection_rule({"rule": "composed", "runs": 2})) == 1


@pytest.mark.parametrize("change", [{"delta": None}, {"delta": [1e-5]}, {"accountant": "pdl"}])
def test_a_cell_that_cannot_be_priced_is_a_finding(store, change):
    run_id = run_of(store, "hyfreedp")
    record = store.record(run_id)
    record["cell"] = {key: value for key, value in (record["cell"] | change).items() if value is not None}
    (store.folder(run_id) / "record.json").write_text(json.dumps(sealed(record)))
    findings = [finding for finding in verify(store).findings if finding.where == run_id]
    assert ["epsilon", "that it can be checked"] in [[finding.what, finding.claimed] for finding in findings]


def test_no_noise_and_no_draws_need_no_second_opinion():
    assert opinions.tight(Ledger([Draw(0.5, (0.0,))]), 1e-5, "pld") is None
    assert opinions.tight(Ledger(), 1e-5, "pld") is None
    assert not opinions.disagrees(float("inf"), None, "pld")
