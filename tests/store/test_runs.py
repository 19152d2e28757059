import json
import math
import os
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from stored import copied

from dpopt import files
from dpopt.errors import ConfigError, Held
from dpopt.files import Damaged
from dpopt.store import Store

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


def finished(store, run_id=RUN, **changes):
    store.begin(run_id, {"seed": 0})
    store.append_curve(run_id, {"draw": 1})
    store.append_curve(run_id, {"draw": 2})
    store.finish(run_id, {**RECORD, "run_id": run_id, **changes}, '{"draws": [], "runs": []}')
    return store.folder(run_id) / "run.json"


def test_life_of_a_run(store):
    assert store.state(RUN) == "pending"
    store.begin(RUN, {"seed": 0})
    assert (store.state(RUN), store.tries(RUN).number) == ("interrupted", 0)
    store.save_checkpoint(RUN, b"half")
    path = finished(store)
    assert store.state(RUN) == "done"
    assert store.record(RUN) == RECORD
    assert [entry["draw"] for entry in store.curve(RUN)] == [1, 2]
    assert list(store.folder(RUN).iterdir()) == [path]


def test_whoever_runs_a_cell_is_named_with_the_part_that_is_done(store):
    store.begin(RUN, {"epochs": 20.0})
    with store.lease(RUN):
        assert (store.holder(RUN).pid, store.holder(RUN).fraction) == (os.getpid(), 0)
        for epoch, fraction in ((5.0, 0.25), (20.1, 1.0)):
            store.append_curve(RUN, {"draw": 1, "epoch": epoch})
            assert store.holder(RUN).fraction == fraction
    assert store.holder(RUN) is None


def test_a_failure_can_be_forgotten(store):
    store.fail(RUN, "reason", "trace")
    assert store.state(RUN) == "failed"
    assert store.error(RUN) == {"kind": "failed", "reason": "reason", "traceback": "trace"}
    store.forget_failure(RUN)
    assert store.state(RUN) == "pending"


DAMAGE = [
    b"",
    b'{"schema": 1',
    b"[1, 2]",
    files.sealed({"record": RECORD}),
    *(
        files.sealed({"record": {**RECORD, **changes}, "ledger": {}, "curve": []})
        for changes in ({"schema": 99}, {"run_id": "cd" + "0" * 14}, {"status": "great"}, {"cell": 3})
    ),
    files.sealed({"record": {key: value for key, value in RECORD.items() if key != "epsilon"}, "ledger": {}}),
    files.sealed({"record": RECORD, "ledger": {}, "curve": 3}),
]


@pytest.mark.parametrize("content", DAMAGE)
def test_damaged_runs_are_never_used_or_overwritten(store, content):
    store.begin(RUN, {})
    path = store.folder(RUN) / "run.json"
    path.write_bytes(content)
    assert store.state(RUN) == "damaged"
    with pytest.raises(Damaged, match=r"run\.json"):
        store.record(RUN)
    with pytest.raises(Held, match="exists"):
        store.finish(RUN, RECORD, "{}")
    assert path.read_bytes() == content


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_run_with_any_byte_changed_is_damaged(tmp_path_factory, data):
    store = Store(tmp_path_factory.mktemp("flipped"))
    path = finished(store, test_accuracy=0.5, cell={"seed": 3})
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    assert Store(store.root).state(RUN) == "damaged"


def test_a_run_of_an_older_layout_names_the_script_that_rewrites_it(store):
    store.begin(RUN, {})
    (store.folder(RUN) / "record.json").write_text(json.dumps(RECORD))
    assert store.state(RUN) == "damaged"
    with pytest.raises(Damaged, match=r"benchmarks/migrate\.py"):
        store.record(RUN)
    folder = store.suite_folder("old")
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"cells": []}')
    for look in (store.suites, store.check_writable, lambda: store.manifest("old")):
        with pytest.raises(ConfigError, match=r"benchmarks/migrate\.py"):
            look()


@pytest.mark.parametrize("leftover", ["checkpoint.pt", "curve.jsonl", "cell.json", "error.json", "lease"])
def test_a_copy_that_skips_what_exists_is_a_merge(tmp_path, leftover):
    """Each of two folders has finished what the other has begun; both are copied into the other."""
    one, other = Store(tmp_path / "one"), Store(tmp_path / "other")
    ids = ["ab" + "0" * 14, "cd" + "1" * 14]
    for store, done, begun in ((one, *ids), (other, *reversed(ids))):
        finished(store, done)
        store.begin(begun, {"seed": 1})
        store.append_curve(begun, {"draw": 7})
        (store.folder(begun) / leftover).write_text('{"draw": 1}')
        store.extend_suite("both", {"suite": "both", "cells": [{**PLANNED, "run_id": done}]})
    copied(one.root, other.root)
    copied(other.root, one.root)
    for store in (Store(one.root), Store(other.root)):
        assert {store.state(run_id) for run_id in ids} == {"done"}
        assert [entry["draw"] for run_id in ids for entry in store.curve(run_id)] == [1, 2, 1, 2]
        assert {entry["run_id"] for entry in store.manifest("both")["cells"]} == set(ids)


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
    names = ["backup", "ab" + "x" * 14, "cd" + "0" * 14, RUN + "0"]
    for name in names:
        (store.root / "runs" / "ab" / name).mkdir()
    places = [*(store.root / "runs" / "ab" / name for name in names), store.root / "runs" / "notes.txt"]
    assert store.foreign() == [f"{place}: not a run directory" for place in sorted(places)]
    assert store.run_ids() == [RUN]


PLANNED = {
    "run_id": RUN,
    "label": "dp_sgd",
    "tuning": "self",
    "tuned": {},
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
SUITE = {"suite": "quickstart", "description": "", "cells": [PLANNED]}


@pytest.mark.parametrize("key", PLANNED["cell"])
@pytest.mark.parametrize("value", [None, {"name": 3}])
def test_a_part_with_an_entry_that_cannot_be_read(store, key, value):
    store.extend_suite("quickstart", {"cells": [PLANNED | {"cell": PLANNED["cell"] | {key: value}}]})
    with pytest.raises(ConfigError, match="dpopt run"):
        store.manifest("quickstart")


def test_cells_are_added_and_the_later_of_two_entries_holds(store):
    with pytest.raises(ConfigError, match="known: none"):
        store.manifest("quickstart")
    assert store.extend_suite("quickstart", SUITE) == 1
    assert store.manifest("quickstart") == SUITE
    assert store.extend_suite("quickstart", SUITE) == 0
    other = PLANNED | {"run_id": "cd" + "0" * 14}
    changed = PLANNED | {"search_id": "f"}
    assert store.extend_suite("quickstart", {**SUITE, "cells": [changed, other], "description": "two"}) == 1
    assert store.manifest("quickstart") == {**SUITE, "cells": [changed, other], "description": "two"}
    assert len(list((store.suite_folder("quickstart") / "parts").iterdir())) == 2
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        store.manifest("quikstart")


def test_two_processes_that_add_cells_at_once_lose_none(store):
    entries = [PLANNED | {"run_id": f"{number:016x}"} for number in range(24)]
    threads = [threading.Thread(target=store.extend_suite, args=("q", {"cells": [entry]})) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids = {entry["run_id"] for entry in Store(store.root).manifest("q")["cells"]}
    assert ids == {entry["run_id"] for entry in entries}


@pytest.mark.parametrize("name", ["suite.json", "parts"])
def test_a_suite_with_any_byte_changed_is_refused(store, name):
    store.extend_suite("quickstart", SUITE)
    path = store.suite_folder("quickstart") / name
    path = path if path.is_file() else next(path.iterdir())
    content = path.read_bytes()
    for place in range(0, len(content), 7):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ConfigError, match="move it away"):
            store.manifest("quickstart")


HARM = {
    "deep": lambda path: path.write_text("[" * 100_000),
    "nested": lambda path: path.write_text('{"a":' * 60 + "1" + "}" * 60),
    "endless": lambda path: path.write_text('{"schema": 1' + "0" * 10_000 + "}"),
    "overflowing": lambda path: path.write_text('{"draw": 1e400}'),
    "large": lambda path: path.touch() or os.truncate(path, 2**27),
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path),
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("name", ["run.json", "error.json", "curve.jsonl", "checkpoint.pt", "cancel", "suite.json"])
def test_nothing_on_the_disk_makes_a_reader_wait_or_grow(store, name, harm):
    """A pipe that nobody writes to, a device without end, a folder, a link to itself, files deep and large."""
    store.extend_suite("q", SUITE)
    folder = store.suite_folder("q") if name in ("cancel", "suite.json") else store.folder(RUN)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    HARM[harm](folder / name)
    assert store.state(RUN) in ("damaged", "failed", "pending")
    assert store.curve(RUN) == []
    assert store.cancelled("q") in ("", "[" * 1000) or name == "cancel"
    assert store.error(RUN)["reason"]
    for look in (store.record, store.load_checkpoint):
        with pytest.raises((Damaged, FileNotFoundError)):
            look(RUN)
    if name == "suite.json":
        with pytest.raises(ConfigError):
            store.manifest("q")
