"""Whatever stands in the files of a saved model, with checksums that are right: what was saved, or one sentence."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import short

import dpopt
from dpopt import files
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.privacy import Draw, Ledger, accountants
from dpopt.store import Damaged
from dpopt.training import saved
from dpopt.training.record import Stated

pytestmark = pytest.mark.filterwarnings("ignore:x. values that were not stated")

MISSING = object()
ODD = [MISSING, None, True, "x", "", "1\n2", -1, 0, 0.5, 7, 48.9, 1e300, 10**400, math.nan, [], {}, [[1]], {"x": {}}]
JSON = ["record.json", "model.json", "ledger.json", "private.json"]
FREE = {each.name for each in dataclasses.fields(Stated)} | {"isolated", "tested", "grid", "classes"}
"""Keys of a record that follow from no other file, if only in part: the statement repeats them, or predictions do."""
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
    """Predictions and the lines of the statement; or None and an error of one line."""
    try:
        result = dpopt.load(folder)
        return result.predict(PEOPLE).tolist(), str(result.statement()).splitlines()
    except (ConfigError, Damaged) as error:
        return None, [f"{error}"[:2000]] if "\n" not in f"{error}" else pytest.fail(f"{error}")


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


def odd(content):
    """The content with an odd value at each of its places, and the place."""
    for path in places(content):
        for value in ODD:
            yield path, changed(content, path, value)


@pytest.mark.parametrize("name", JSON)
def test_an_odd_field_is_refused_or_changes_nothing(name, folder):
    content = json.loads((folder / name).read_text())
    content.pop("seal", None)
    if name == "record.json":
        content |= {"draws_before": 0, "draws_planned": 0, "mine": {"of": ["a", "user"]}}
        put(folder, name, content)
    expected = outcome(folder)
    for path, other in odd(content):
        put(folder, name, other)
        outputs, said = outcome(folder)
        if outputs is not None and path[:2] != ("data", "columns"):  # nothing tells to which numbers they were scaled
            is_free = name == "record.json" and path[0] in FREE
            assert (outputs, guarantee(said)) == (expected[0], guarantee(expected[1])) or path[0] == "classes", path
            assert said == expected[1] or is_free, path


def guarantee(statement):
    return [line.partition(" Training")[0] for line in statement if "Guarantee" in line]


def unheld(folder):
    """Without the digest of the weights in the record."""
    record = json.loads((folder / "record.json").read_text())
    put(folder, "record.json", {key: value for key, value in record.items() if key != "weights_sha256"})


@pytest.mark.parametrize("name", [*JSON, "model.safetensors", "checksums.json"])
def test_a_file_of_something_else_is_refused(name, folder):
    unheld(folder)
    for content in (b"", b"\xff\xfe\x00", b"[]", b'"x"', b"{", b"[" * 10**5, b"{}", b"NaN"):
        put(folder, name, content)
        (folder / name).write_bytes(content)  # the checksums themselves
        assert outcome(folder)[0] is None, content


def test_odd_weights_are_refused(folder):
    """Their header is JSON too: types, shapes, places, and which tensors stand for others."""
    unheld(folder)
    predictions, _ = outcome(folder)
    content = (folder / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for path, header in odd({**json.loads(content[8:end]), "__metadata__": {"format": "pt"}}):
        text = json.dumps(header).encode()
        put(folder, "model.safetensors", len(text).to_bytes(8, "little") + text + content[end:])
        assert outcome(folder)[0] in (None, predictions), path


def test_three_classes_for_two_outputs(tmp_path):
    result = short.fit(train=short.records())
    result.record["classes"] = [0, 1, 2]
    with pytest.raises(ConfigError, match=r"record\.classes.*shape \[2\]"):
        result.predict(short.records()[0])


def test_no_accountant_is_asked_about_many_draws(folder, monkeypatch):
    monkeypatch.setattr(accountants, "epsilon", None)
    put(folder, "ledger.json", json.loads(Ledger(Draw(0.5, (1 + i / 1e6,)) for i in range(257)).to_json()))
    with pytest.raises(Damaged, match="257 .*expected at most 256 draws"):
        dpopt.load(folder)


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
        with pytest.raises(ConfigError, match=r"x: .*expected a data frame or a CSV file"):
            dpopt.load(folder).predict("http://localhost/people.csv")
        assert main(["fit", "from=pipe.csv", "to=other"]) == 2
    finally:
        writer.kill()
        writer.wait()
