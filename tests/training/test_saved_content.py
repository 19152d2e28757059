"""Whatever stands in the files of a saved model, with checksums that are right: what was saved, or one sentence."""

import json
import math
import os
import shutil
import struct
import subprocess
from collections import Counter
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import short
from torch import nn

import dpopt
from dpopt import files
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, accountants
from dpopt.store import Damaged
from dpopt.training import saved

pytestmark = pytest.mark.filterwarnings("ignore:x. values that were not stated")

MISSING = object()
ODD = [MISSING, None, True, "x", "", "1\n2", -1, 0, 0.5, 7, 1e300, 10**400, math.nan, [], {}, [[1]], {"x": {"y": "z"}}]
JSON = ["record.json", "model.json", "ledger.json", "private.json"]
STATED = {
    *(
        "status",
        "optimizer",
        "adjacency",
        "sampling",
        "versions",
        "seed_is_secret",
        "isolated",
        "tested",
        "clip",
        "data",
    ),
    *("date", "defaults", "epsilon_target", "weights_sha256"),
}
"""Keys of a record that the statement repeats, and that follow from nothing else."""
PEOPLE = pd.DataFrame({"age": np.arange(20, 80) + 0.5, "sex": ["f", "m", "m"] * 20, "label": ["well", "ill"] * 30})


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder of a model of `dpopt fit`."""
    folder = tmp_path_factory.mktemp("sound")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        PEOPLE.to_csv("people.csv", index=False)
        columns = ["ranges.age=[20,80]", "values.sex=[f,m]"]
        assert main(["fit", "from=people.csv", *columns, "epsilon=3", "epochs=2", "accountant=rdp", "to=model"]) == 0
    return folder / "model"


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def put(folder, name, content):
    """Write a file, and make right what tells that it was changed."""
    if isinstance(content, dict | list) and name == "private.json":
        content = files.sealed(content)
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    saved._seal(folder)


def outcome(folder):
    """Predictions and the lines of the statement; or the error."""
    try:
        result = dpopt.load(folder)
        return result.predict(PEOPLE).tolist(), str(result.statement()).splitlines()
    except (ConfigError, Damaged) as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 2000
        return None, str(error)


def places(value, path=()):
    """The keys that lead to each value in JSON data; of a list to the first."""
    items = value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def changed(content, path, value):
    content = deepcopy(content)
    *before, last = path
    inner = content
    for key in before:
        inner = inner[key]
    if value is MISSING:
        del inner[last]
    else:
        inner[last] = value
    return content


@pytest.mark.parametrize("name", JSON)
def test_an_odd_field_is_refused_or_changes_nothing(name, sound, folder):
    content = json.loads((folder / name).read_text())
    content.pop("seal", None)
    predictions, statement = outcome(folder)
    seen = Counter()
    for path in places(content):
        for value in ODD:
            put(folder, name, changed(content, path, value))
            outputs, said = outcome(folder)
            seen[outputs is None] += 1
            if outputs is None:
                continue
            what = f"{path} = {value!r}"
            # From nothing else follows to which numbers a column was scaled.
            assert outputs == predictions or path[:2] == ("data", "columns"), what
            if name == "record.json" and path[0] in STATED:
                guarantee = [
                    [line.partition(" Training")[0] for line in each if "Guarantee" in line]
                    for each in (said, statement)
                ]
                assert guarantee[0] == guarantee[1], what
            else:
                assert said == statement, what
    assert min(seen.values()) > 5


@pytest.mark.parametrize("name", [*JSON, "model.safetensors", "checksums.json"])
def test_a_file_of_something_else_is_refused(name, folder):
    if name == "model.safetensors":
        record = json.loads((folder / "record.json").read_text())
        del record["weights_sha256"]
        put(folder, "record.json", record)
    for content in (b"", b"\xff\xfe\x00", b"[]", b'"x"', b"{", b"[" * 10**5, b"{}", b"NaN"):
        put(folder, name, content)
        (folder / name).write_bytes(content)  # the checksums themselves
        assert outcome(folder)[0] is None, content


def header(path):
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def test_odd_weights_are_refused(folder):
    """Their header is JSON too: types, shapes, places, and which tensors stand for others."""
    record = json.loads((folder / "record.json").read_text())
    del record["weights_sha256"]
    put(folder, "record.json", record)
    predictions, _ = outcome(folder)
    start, numbers = header(folder / "model.safetensors")
    start["__metadata__"] = {}
    for path in [*places(start), ("__metadata__", "format")]:
        for value in (*ODD, "pt", "F64", [1], [10**12]):
            if value is MISSING and path == ("__metadata__", "format"):
                continue
            text = json.dumps(changed(start, path, value)).encode()
            put(folder, "model.safetensors", struct.pack("<Q", len(text)) + text + numbers)
            assert outcome(folder)[0] in (None, predictions), (path, value)


def test_what_follows_is_compared(folder):
    """Each of these is a number as the field may have it, and another one."""
    record = json.loads((folder / "record.json").read_text())
    other = {"weights_sha256": "0" * 64, "classes": ["ill", "ill"], "noise": {"gradient": 99.0}, "rate": 0.5}
    other |= {"draws": 3, "draws_before": 1, "draws_planned": 9, "examples": 50, "batch_size": 47.0, "epochs": 7.0}
    other |= {"dimension": 24, "epsilon": 2.0, "delta": 1e-9, "epsilon_target": 1.0}
    for key, value in other.items():
        assert record.get(key) != value
        put(folder, "record.json", record | {key: value})
        assert outcome(folder)[0] is None, key


def test_three_classes_for_two_outputs(tmp_path):
    result = short.fit(train=short.records())
    result.record["classes"] = [0, 1, 2]
    with pytest.raises(ConfigError, match=r"record\.classes.*shape \[2\]"):
        result.predict(short.records()[0])


def test_no_accountant_is_asked_about_many_draws(folder, monkeypatch):
    monkeypatch.setattr(accountants, "epsilon", None)
    put(folder, "ledger.json", json.loads(Ledger(Draw(0.5, (1 + i / 1e6,)) for i in range(257)).to_json()))
    with pytest.raises(Damaged, match="257 draws differ, expected at most 256"):
        dpopt.load(folder)


def test_keys_of_others_stay_as_they_are(folder):
    record = json.loads((folder / "record.json").read_text())
    put(folder, "record.json", record | {"mine": ["a", {"b": None}]})
    assert dpopt.load(folder).record["mine"] == ["a", {"b": None}]


def test_what_is_no_file_is_refused(folder, tmp_path, monkeypatch):
    """A pipe that someone writes to, so that reading it would end; a device; a folder."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.csv")
    writer = subprocess.Popen(["sh", "-c", f"cat {folder.parent}/people.csv > pipe.csv"])
    try:
        PEOPLE.to_csv("people.csv", index=False)
        for place in ("pipe.csv", "/dev/null", folder):
            with pytest.raises(ConfigError, match=r"x: .*not a regular file"):
                dpopt.load(folder).predict(place)
        with pytest.raises(ConfigError, match="x: .*expected a data frame or a CSV file"):
            dpopt.load(folder).predict("http://localhost/people.csv")
        assert main(["fit", "from=pipe.csv", "to=other"]) == 2
    finally:
        writer.kill()
        writer.wait()


def test_a_record_that_was_changed_in_memory_makes_no_statement():
    result = short.fit(nn.Linear(4, 2))
    result.record["noise"] = "x"
    with pytest.raises(ConfigError, match=r"record\.noise: 'x'"):
        result.statement()
