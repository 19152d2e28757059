"""Whatever happens to a results folder or is typed as an override: a clear word, no traceback, and no record lost."""

import contextlib
import io
import json
import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_suites import QUICK

from dpopt import configurations
from dpopt.cells import identity
from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.files import Damaged
from dpopt.results.publishing import publish
from dpopt.results.results import Results
from dpopt.results.verify import verify
from dpopt.store import Store

SUITE = QUICK + "optimizers: [dp_sgd, hyfreedp]\nsettings: {dp_sgd: {grid: {lr: [0.1, 1.0]}}}\nseeds: [0]\n"
EXPENSIVE = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}
HARM = ["remove", "empty", "cut", "noise", "text", "list", "null", "number", "folder", "older", "swap"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A results folder with a suite that is done, one cell that failed, and tables."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "small.yaml").write_text(SUITE)
    of_suite = [f"suite={folder / 'small.yaml'}", f"results={folder / 'results'}"]
    assert main(["run", *of_suite]) == 0
    store = Store(folder / "results")
    first = store.manifest("small")["cells"][0]["run_id"]
    (store.folder(first) / "run.json").unlink()
    store.fail(first, "out of luck", "Traceback: [none]")
    assert main(["table", *of_suite]) == 0
    return folder


def said(*arguments):
    """Exit code and all output of a command; an exception that gets out of it fails the test."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main(list(arguments))
        except SystemExit as error:  # argparse's way to refuse
            code = error.code
    return code, out.getvalue()


def harm(path, kind, number):
    """Damage a file."""
    content = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "older":
        with contextlib.suppress(ValueError, TypeError):  # it may be damaged already
            content = json.dumps({**json.loads(content), "schema": 0}).encode()
        path.write_bytes(content)
    elif kind != "remove":
        place = number % max(1, len(content))
        noise = bytes((byte + 1) % 256 for byte in content[place : place + 5])
        made = {
            "empty": b"",
            "cut": content[:place],
            "noise": content[:place] + noise + content[place + 5 :],
            "text": b"what is this?\n",
            "list": b"[1, 2, {}]",
            "null": b"null",
            "number": b"-1e400",
            "swap": content[place:] + content[:place],
        }
        path.write_bytes(made[kind])


def damage(root, harms):
    files = sorted(path for path in root.rglob("*") if path.is_file())
    for which, kind, number in harms:
        path = files[which % len(files)]
        if path.is_file():
            harm(path, kind, number)


harms = st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(HARM), st.integers(0, 10**6)), min_size=1, max_size=4)


def survives(sound, tmp_path_factory, harms):
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(sound / "results", folder / "results")
    damage(folder / "results", harms)
    store, before = Store(folder / "results"), {}
    for path in store.root.glob("runs/*/*/run.json"):
        with contextlib.suppress(OSError):
            before[path] = path.read_bytes()
    of_suite = [f"suite={sound / 'small.yaml'}", f"results={store.root}"]
    for command in ("status", "table", "verify", "run", "retry"):
        code, output = said(command, *of_suite)
        assert code in (0, 1, 2), output
        assert "Traceback (most recent call last)" not in output
        assert output.strip(), f"{command} said nothing"
    after = {path: path.read_bytes() for path in before}
    assert after == before, "a record was lost or changed"
    for path in before:
        with contextlib.suppress(Damaged):
            assert store.record(path.parent.name)["run_id"] == path.parent.name
    shutil.rmtree(folder)


@given(harms)
@settings(max_examples=4, **EXPENSIVE)
def test_a_damaged_folder(sound, tmp_path_factory, harms):
    survives(sound, tmp_path_factory, harms)


@pytest.mark.slow
@given(harms)
@settings(max_examples=300, **EXPENSIVE)
def test_many_damaged_folders(sound, tmp_path_factory, harms):
    survives(sound, tmp_path_factory, harms)


KEYS = configurations.keys("suite")
VALUES = [
    *("0", "-1", "1", "1e400", "nan", "inf", "-inf", "null", "true", "''", "[]", "{}", "[0,0]", "[1,[2]]", "{a: b}"),
    *("dp_sgd", "[dp_sgd,dp_sgd]", "nonsense", "${oc.env:HOME}", "${missing}", "[", "{", "=", "\\", "é", "1_000"),
    *("{name: dp_sgd}", "[{name: digits_mlp}]", "[{name: synthetic_logreg, dim: -3}]", "{dp_sgd: {grid: {}}}"),
    *("{dp_sgd: {tuning: private}}", "{dp_sgd: {fields: {lr: no}}}", "{3: 4}", "pld", "cuda:99", "slurm"),
]
overrides = st.lists(
    st.builds(
        lambda prefix, key, value: f"{prefix}{key}={value}",
        st.sampled_from(["", "", "", "+", "++", "~"]),
        st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS), st.text(max_size=8)),
        st.one_of(st.sampled_from(VALUES), st.sampled_from(VALUES), st.text(max_size=12)),
    ),
    min_size=1,
    max_size=3,
)


def is_refused_or_planned(sound, tmp_path_factory, given):
    """Not trained: a fuzzed suite may well be a sound one of a million draws."""
    given = [text for text in given if not text.lstrip("+~").startswith(("results", "plots", "suite"))]
    code, output = said("plan", f"suite={sound / 'small.yaml'}", f"results={sound / 'planned'}", *given)
    assert code in (0, 2), output
    assert "Traceback (most recent call last)" not in output
    assert code == 0 or output.strip()


@given(overrides)
@settings(max_examples=15, **EXPENSIVE)
def test_any_overrides(sound, tmp_path_factory, given):
    is_refused_or_planned(sound, tmp_path_factory, given)


@pytest.mark.slow
@given(overrides)
@settings(max_examples=200, **EXPENSIVE)
def test_many_overrides(sound, tmp_path_factory, given):
    is_refused_or_planned(sound, tmp_path_factory, given)


@pytest.fixture(scope="module")
def whole(sound, tmp_path_factory):
    """All kinds of files that are read: runs interrupted, failed and done, a suite, measurements, published ones."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(sound / "results", folder / "results")
    store = Store(folder / "results")
    known = Results(store, "small")
    (folder / "plots").mkdir()
    publish(known, store.root / "published", folder / "plots", partial=True)
    cell = {**store.manifest("small")["cells"][-1]["cell"], "seed": 7}
    store.begin(identity(cell), cell)
    store.append_curve(identity(cell), {"draw": 1, "test_accuracy": 0.5})
    store.save_checkpoint(identity(cell), b"half" * 9)
    entry = {**store.manifest("small")["cells"][-1], "cell": cell, "run_id": identity(cell)}
    del entry["search_id"]  # of a search with another seed
    store.extend_suite("small", {**store.manifest("small"), "cells": [entry]})
    store.add("bench", {"schema": 1, "rows": [0.1]})
    published = Path(__file__).parents[1] / "results" / "published"
    shutil.copytree(published / "audit" / "noise_aware", store.root / "published" / "audit")
    return store.root


def printed(root):
    """The numbers that a reader is shown of all that a folder holds."""
    shown = []
    for store in (Store(root), Store(root / "published")):
        known = Results(store, "small")
        shown += [known.table().to_csv(), known.ranking().to_csv(), known.cells["state"].tolist()]
    texts = sorted((root / "published").rglob("*.*"))
    return shown, [path.read_bytes() for path in texts if path.suffix in (".md", ".csv", ".tex")]


def notices_flips(whole, folder, number):
    shutil.copytree(whole, folder / "results")
    root, chance = folder / "results", random.Random(number)
    paths, before = sorted(path for path in root.rglob("*") if path.is_file()), printed(root)
    assert verify(Store(root)).findings == []
    for path in [*paths, *chance.choices(paths, k=max(0, number - len(paths)))][:number]:
        content = path.read_bytes()
        place = chance.randrange(len(content))
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << chance.randrange(8)]) + content[place + 1 :])
        try:
            is_noticed = bool(verify(Store(root)).findings) or printed(root) == before
        except ConfigError as error:
            is_noticed = "cannot be used" in str(error)
        assert is_noticed, (path, place)
        path.write_bytes(content)


def test_a_flipped_bit_of_any_file_is_noticed_or_changes_no_number(whole, tmp_path):
    notices_flips(whole, tmp_path, 20)


@pytest.mark.slow
def test_four_hundred_flipped_bits_are_noticed(whole, tmp_path):
    notices_flips(whole, tmp_path, 400)
