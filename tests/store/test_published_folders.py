"""What is published is read and never written; a damaged file of it is one clear error."""

import shutil
from pathlib import Path

import pytest
from fabricated import SMALL

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.store import Store, open_results
from dpopt.store.logs import LoggedStore
from dpopt.store.published import PublishedStore

SUITE = "adadp_gmm"
FOLDER = Path(__file__).parents[2] / "results" / "published" / SUITE
COMMANDS = {
    "run": ["run", *SMALL, "seeds=0"],
    "retry": ["retry", *SMALL, "seeds=0"],
    "collect": ["collect", f"suite={SUITE}"],
    "cancel": ["cancel", f"suite={SUITE}"],
    "bench": ["bench", "cases=[mlp]", "engines=none", "optimizers=[dp_sgd]"],
    "audit": ["audit", "optimizers=[dp_sgd]"],
}


def contents(root):
    return {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def root(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "published" / SUITE)
    return tmp_path / "published"


@pytest.fixture
def refuses(root, capsys):
    """Have a command refuse to write into the folder, which stays as it is."""

    def run(*arguments):
        before = contents(root)
        assert main([*arguments, f"results={root}"]) == 2
        assert "published results are only read" in " ".join(capsys.readouterr().err.split())
        assert contents(root) == before
        assert [path.name for path in root.iterdir()] == [SUITE]

    return run


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_writes_into_a_published_folder(refuses, name, monkeypatch):
    monkeypatch.setattr("dpopt.bench.run.bench", None)  # nothing is measured first
    monkeypatch.setattr("dpopt.harness.audit.run", None)
    refuses(*COMMANDS[name])


def test_nor_does_a_run_with_logs(refuses, root):
    pytest.importorskip("tensorboard")
    refuses(*COMMANDS["run"], "log=[tensorboard]")


def test_nor_does_a_merge(refuses, tmp_path):
    Store(tmp_path / "there").fail("0" * 16, "no luck")
    refuses("merge", str(tmp_path / "there"))


def test_no_store_of_a_published_folder_is_opened_for_writing(root):
    for store in (Store(root), open_results(root), LoggedStore(root)):
        with pytest.raises(ConfigError, match="only read"):
            store.check_writable()
    open_results(root / "..").check_writable()


def test_a_published_store_writes_elsewhere_alone(root, tmp_path):
    store, before = PublishedStore(root), contents(root)
    writes = [
        lambda: store.write(root / SUITE / "page.html", "a page"),
        lambda: store.write(root / SUITE / ".." / "page.html", "a page"),
        lambda: store.write_manifest(SUITE, {"cells": []}),
        lambda: store.cancel(SUITE),
        lambda: store.add("bench", {"rows": []}),
    ]
    for write in writes:
        with pytest.raises(ConfigError, match="only read"):
            write()
    assert contents(root) == before
    store.write(tmp_path / "page.html", "a page")
    assert (tmp_path / "page.html").read_text() == "a page"


@pytest.mark.parametrize("kept", [0, 4, -100])
def test_a_truncated_file_of_cells_is_one_error(root, kept, capsys):
    path = root / SUITE / "cells.parquet"
    path.write_bytes(path.read_bytes()[:kept])
    assert main(["table", f"suite={SUITE}", f"results={root}"]) == 2
    assert f"error: results: '{path}' cannot be used; not Parquet" in " ".join(capsys.readouterr().err.split())


def test_a_truncated_file_of_curves_is_one_error(root):
    path, store = root / SUITE / "curves.parquet", open_results(root)
    run_id = store.manifest(SUITE)["cells"][0]["run_id"]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"curves\.parquet.*not Parquet"):
        store.curve(run_id)
