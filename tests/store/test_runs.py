import json
import math

import pytest

from dpopt.errors import ConfigError
from dpopt.store import Damaged, Store

RUN = "ab" + "0" * 14
RECORD = {
    "schema": 1,
    "run_id": RUN,
    "cell": {},
    "status": "done",
    "epsilon": 1.0,
    "epsilon_target": 1.0,
    "delta": 1e-5,
    "provenance": {},
}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


def test_life_of_a_run(store):
    assert store.state(RUN) == "pending"
    store.begin(RUN, {"seed": 0})
    assert store.state(RUN) == "interrupted"
    store.append_curve(RUN, {"draw": 1})
    store.append_curve(RUN, {"draw": 2})
    store.finish(RUN, RECORD, "{}")
    assert store.state(RUN) == "done"
    assert RECORD.items() <= store.record(RUN).items()
    assert set(store.record(RUN)["checksums"]) == {"cell.json", "curve.jsonl", "ledger.json"}
    assert [entry["draw"] for entry in store.curve(RUN)] == [1, 2]
    assert sorted(path.name for path in store.folder(RUN).iterdir()) == [
        "cell.json",
        "curve.jsonl",
        "ledger.json",
        "record.json",
    ]


def test_a_failure_can_be_forgotten(store):
    store.fail(RUN, "reason", "trace")
    assert store.state(RUN) == "failed"
    assert store.error(RUN) == {"kind": "failed", "reason": "reason", "traceback": "trace"}
    store.forget_failure(RUN)
    assert store.state(RUN) == "pending"


DAMAGE = [
    "",
    '{"schema": 1',
    "[1, 2]",
    json.dumps({**RECORD, "schema": 99}),
    json.dumps({**RECORD, "run_id": "cd" + "0" * 14}),
    json.dumps({**RECORD, "status": "great"}),
    json.dumps({**RECORD, "checksums": 3}),
    json.dumps({key: value for key, value in RECORD.items() if key != "epsilon"}),
]


@pytest.mark.parametrize("content", DAMAGE)
def test_damaged_records_are_never_used_or_overwritten(store, content):
    store.begin(RUN, {})
    path = store.folder(RUN) / "record.json"
    path.write_text(content)
    assert store.state(RUN) == "damaged"
    with pytest.raises(Damaged, match=r"record\.json"):
        store.record(RUN)
    with pytest.raises(FileExistsError):
        store.finish(RUN, RECORD, "{}")
    assert path.read_text() == content


@pytest.mark.parametrize("name", ["cell.json", "curve.jsonl", "ledger.json"])
def test_a_run_that_has_lost_a_file_is_damaged(store, name):
    store.begin(RUN, {})
    store.append_curve(RUN, {"draw": 1})
    store.finish(RUN, RECORD, "{}")
    (store.folder(RUN) / name).unlink()
    assert store.state(RUN) == "damaged"


def test_a_damaged_error_is_still_a_failure(store):
    store.begin(RUN, {})
    (store.folder(RUN) / "error.json").write_text("oops")
    assert store.state(RUN) == "failed"
    assert "error.json" in store.error(RUN)["reason"]


def test_a_half_written_line_ends_the_curve(store):
    store.begin(RUN, {})
    store.append_curve(RUN, {"draw": 1})
    with (store.folder(RUN) / "curve.jsonl").open("a") as file:
        file.write('{"draw": 2, "te')
    assert store.curve(RUN) == [{"draw": 1}]
    store.restart_curve(RUN, [{"draw": 1}, {"draw": "2"}, {"draw": 3}])
    assert store.curve(RUN) == [{"draw": 1}]


def test_foreign_files_are_named(store):
    store.begin(RUN, {})
    (store.root / "runs" / "notes.txt").write_text("mine")
    (store.root / "runs" / "ab" / "backup").mkdir()
    found = store.foreign()
    assert len(found) == 2
    assert "notes.txt" in " ".join(found)
    assert "backup" in " ".join(found)


PLANNED = {
    "run_id": RUN,
    "label": "dp_sgd",
    "tuning": "self",
    "tuned": {},
    "clip": 1.0,
    "cell": {
        "workload": {"name": "digits_mlp"},
        "optimizer": {"name": "dp_sgd"},
        "epsilon": math.inf,
        "delta": 1e-5,
        "accountant": "pld",
        "batch_size": 32,
        "epochs": 1.0,
        "seed": 0,
    },
}


@pytest.mark.parametrize("key", PLANNED["cell"])
@pytest.mark.parametrize("value", [None, [], {"name": 3}])
def test_a_manifest_with_a_damaged_entry(store, key, value):
    store.write_manifest("quickstart", {"cells": [PLANNED]})
    assert store.manifest("quickstart") == {"cells": [PLANNED]}
    store.write_manifest("quickstart", {"cells": [PLANNED | {"cell": PLANNED["cell"] | {key: value}}]})
    with pytest.raises(ConfigError, match="dpopt run"):
        store.manifest("quickstart")


def test_manifests(store):
    with pytest.raises(ConfigError, match="known: none"):
        store.manifest("quickstart")
    store.write_manifest("quickstart", {"cells": []})
    assert store.manifest("quickstart") == {"cells": []}
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        store.manifest("quikstart")
    for content in ("{", '{"cells": 3}', '{"cells": [3]}', '{"cells": [{}]}'):
        (store.suite_folder("quickstart") / "manifest.json").write_text(content)
        with pytest.raises(ConfigError, match="dpopt run"):
            store.manifest("quickstart")
