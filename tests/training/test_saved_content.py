"""Whatever stands in the files of a saved model, with checksums that are right: what was saved, or one sentence."""

import dataclasses
import json
import math
import shutil

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

ODD = [None, True, "x", "", "1\n2", -1, 0, 0.5, 7, 48.9, 1e300, 10**400, math.nan, [], {}, [[1]], {"x": {}}]
JSON = ["record.json", "model.json", "ledger.json", "private.json"]
WEIGHTS = "model.safetensors"
FREE = {each.name for each in dataclasses.fields(Stated)} | {"isolated", "tested", "grid", "classes"}
"""Keys of a record of which no other file tells all: the statement repeats them, or predictions do."""
PEOPLE = pd.DataFrame({"age": np.arange(20, 80) + 0.5, "sex": ["f", "m", "m"] * 20, "label": ["well", "ill"] * 30})


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """The folder of a model of `dpopt fit`, whose record has the most keys and not the digest of the weights."""
    folder = tmp_path_factory.mktemp("sound")
    PEOPLE.to_csv(folder / "people.csv", index=False)
    columns = ["ranges.age=[20,80]", "values.sex=[f,m]", "epochs=2", "accountant=rdp"]
    assert main(["fit", f"from={folder}/people.csv", *columns, "epsilon=3", f"to={folder}/model"]) == 0
    record = json.loads((folder / "model" / "record.json").read_text())
    del record["weights_sha256"]
    put(
        folder / "model", "record.json", record | {"draws_before": 0, "draws_planned": 0, "mine": {"of": ["a", "user"]}}
    )
    return folder / "model"


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "model")


def put(folder, name, content):
    """Write a file, and make right what tells that it was changed."""
    if isinstance(content, dict) and name == "private.json":
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


def odd(content):
    """Each place in JSON data, of a list the first, and the data with an odd value there, or with none."""
    if isinstance(content, dict):
        for key, inner in content.items():
            yield [key], {name: value for name, value in content.items() if name != key}
            yield from (([key, *path], content | {key: value}) for path, value in odd(inner))
    elif isinstance(content, list) and content:
        yield from (([0, *path], [value, *content[1:]]) for path, value in odd(content[0]))
    yield from (([], value) for value in ODD)


@pytest.mark.parametrize("name", JSON)
def test_an_odd_field_is_refused_or_changes_nothing(name, folder):
    content = json.loads((folder / name).read_text())
    content.pop("seal", None)
    predictions, statement = outcome(folder)
    for path, other in odd(content):
        put(folder, name, other)
        outputs, said = outcome(folder)
        if outputs is not None and path[:2] != ["data", "columns"]:  # nothing tells to which numbers they were scaled
            assert outputs == predictions or path[0] == "classes", path
            assert said == statement or (name == "record.json" and path[0] in FREE), path
            assert guarantee(said) == guarantee(statement), path


def guarantee(statement):
    return [line.partition(" Training")[0] for line in statement if "Guarantee" in line]


def test_odd_weights_are_refused(folder):
    """Their header is JSON too: types, shapes, places, and which tensors stand for others."""
    predictions, _ = outcome(folder)
    content = (folder / WEIGHTS).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    for path, header in odd({**json.loads(content[8:end]), "__metadata__": {"format": "pt"}}):
        text = json.dumps(header).encode()
        put(folder, WEIGHTS, len(text).to_bytes(8, "little") + text + content[end:])
        assert outcome(folder)[0] in (None, predictions), path


@pytest.mark.parametrize("name", [*JSON, WEIGHTS, "checksums.json"])
def test_a_file_of_something_else_is_refused(name, folder):
    for content in (b"", b"\xff\xfe\x00", b"[]", b'"x"', b"{", b"[" * 10**5, b"{}", b"NaN", b'{"files": {}}'):
        put(folder, name, content)
        (folder / name).write_bytes(content)  # the checksums themselves
        assert outcome(folder)[0] is None, content


@pytest.mark.parametrize(
    ("key", "value"),
    [("unit", "person"), ("draws", 7), ("epsilon", 0.5), ("classes", ["ill"]), ("weights_sha256", "0" * 64)],
)
def test_what_ledger_weights_and_workload_contradict_is_refused(key, value, folder):
    put(folder, "record.json", json.loads((folder / "record.json").read_text()) | {key: value})
    if key == "unit":
        put(folder, "ledger.json", json.loads((folder / "ledger.json").read_text()) | {"unit": {}})
    with pytest.raises(Damaged, match=rf"record\.{key}: "):
        dpopt.load(folder)


def test_three_classes_for_two_outputs(tmp_path):
    result = short.fit(train=short.records())
    result.record["classes"] = [0, 1, 2]
    with pytest.raises(ConfigError, match=r"record\.classes.*shape \[2\]"):
        result.predict(short.records()[0])


def test_no_accountant_is_asked_about_many_draws(folder, monkeypatch):
    monkeypatch.setattr(accountants, "epsilon", None)
    put(folder, "ledger.json", Ledger(Draw(0.5, (1 + i / 1e6,)) for i in range(257)).to_json().encode())
    with pytest.raises(Damaged, match=r"257 .*expected at most 256 draws"):
        dpopt.load(folder)


def test_what_is_no_file_is_refused(folder):
    """A device; a pipe would be waited for where this is not looked at."""
    for place, message in {
        "/dev/null": "regular file",
        folder: "regular file",
        "http://localhost/x.csv": "CSV",
    }.items():
        with pytest.raises(ConfigError, match=rf"x: .*{message}"):
            dpopt.load(folder).predict(place)
