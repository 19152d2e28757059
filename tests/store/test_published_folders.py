"""What is published is read and never written; a damaged file of it is one clear error."""

import json
import shutil
import tarfile
from pathlib import Path

import pandas as pd
import pytest
from fabricated import SMALL

from dpopt.cli import main
from dpopt.errors import ConfigError
from dpopt.store import Store, checksums, open_results
from dpopt.store.logs import LoggedStore
from dpopt.store.merge import merge
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
    monkeypatch.setattr("dpopt.audit.command.run", None)
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


MIXED = """
defaults: [suite, _self_]
workloads: [{name: synthetic_logreg, dim: 3}]
optimizers: [dp_sgd, adadp_equilibrium, hyfreedp]
settings: {dp_sgd: {fields: {lr: 0.1}, tuning: fixed}}
epsilon: [4]
accountant: rdp
batch_size: 8000
epochs: 2
seeds: [0]
engine: inline
"""
"""A method with a constant rate, one that says which constant it has found, and one that changes it."""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A folder with the suite's `results`, and with `published`; not to be changed."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "mixed.yaml").write_text(MIXED)
    assert main(["run", f"suite={folder / 'mixed.yaml'}", f"results={folder / 'results'}"]) == 0
    of = [f"results={folder / 'results'}", f"to={folder / 'published'}", "figures=[accuracy_by_method]"]
    assert main(["publish", "suite=mixed", *of]) == 0
    return folder


@pytest.fixture
def copied(mixed, tmp_path):
    """A copy to change."""
    shutil.copytree(mixed, tmp_path / "mixed")
    return tmp_path / "mixed"


def test_what_is_published_is_the_same_as_what_it_was_published_from(mixed, tmp_path):
    published, results = open_results(mixed / "published"), Store(mixed / "results")
    merged = merge(published, results)
    assert (merged.same, merged.copied, merged.conflicts, merged.damaged) == (3, [], [], [])
    again = Store(tmp_path / "again")
    assert len(merge(published, again).copied) == 3
    for run_id in results.run_ids():
        assert again.curve(run_id) == results.curve(run_id) == published.curve(run_id) != []


@pytest.mark.parametrize("source", ["published", "published/mixed", "published.tar", "above.tar"])
def test_every_way_to_name_what_is_published(copied, tmp_path, source, monkeypatch):
    monkeypatch.chdir(copied)
    for name, inside in (("published.tar", "."), ("above.tar", "published")):
        with tarfile.open(name, "w") as archive:
            archive.add("published", inside)
    assert main(["merge", source, f"results={tmp_path / 'again'}"]) == 0
    assert len(Store(tmp_path / "again").run_ids()) == 3


def test_what_is_collected_is_not_taken_for_published(mixed, copied, capsys):
    assert main(["collect", "suite=mixed", f"results={copied / 'results'}"]) == 0
    folder = copied / "results" / "suites" / "mixed"
    assert main(["merge", str(folder), f"results={copied / 'again'}"]) == 2
    assert "holds collected files: expected the results folder above it" in " ".join(capsys.readouterr().err.split())


HARM = {
    "record": ["{", "[]", "null", '{"schema": 1}', '{"delta": NaN}', None],
    "ledger": ["{}", "{", "[[]]", None],
    "cell": ["{", "[]", '{"epsilon": NaN}', None],
}


@pytest.mark.parametrize(
    ("column", "content"), [(column, each) for column, several in HARM.items() for each in several]
)
def test_a_row_that_cannot_be_used_is_named_and_the_others_are_read(copied, tmp_path, column, content, capsys):
    path = copied / "published" / "mixed" / "cells.parquet"
    frame = pd.read_parquet(path)
    frame.loc[1, column] = content
    frame.to_parquet(path)
    merged = main(["merge", str(copied / "published"), f"results={tmp_path / 'again'}"])
    assert merged == 1
    assert str(path) in capsys.readouterr().err.replace("\n", "")
    assert len(Store(tmp_path / "again").run_ids()) == (2 if column != "cell" else 3)
    table = main(["table", "suite=mixed", f"results={copied / 'published'}"])
    assert table == (0 if column != "cell" else 2), "a manifest without a cell cannot be read"


def test_a_record_that_was_changed_in_its_row_is_damaged(copied, tmp_path):
    path = copied / "published" / "mixed" / "cells.parquet"
    frame = pd.read_parquet(path)
    frame.loc[1, "record"] = frame.loc[1, "record"].replace('"test_loss": 0.', '"test_loss": 0.9')
    frame.to_parquet(path)
    merged = merge(open_results(copied / "published"), Store(tmp_path / "again"))
    assert len(merged.copied) == 2
    (line,) = merged.damaged
    assert "checksum that it was written with" in line
    assert frame.loc[1, "run_id"] in line


def test_publishing_a_suite_does_not_vouch_for_another(copied):
    published, table = copied / "published", copied / "published" / "mixed" / "table.md"
    shutil.copytree(FOLDER, published / SUITE)
    table.write_text("changed")
    assert main(["publish", f"suite={SUITE}", f"to={published}", "remake=true"]) == 0
    assert [change.path for change in checksums.changes(published, is_complete=True)] == [table]
    (published / "checksums.json").write_text("{")
    assert main(["publish", f"suite={SUITE}", f"to={published}", "remake=true"]) == 2


def test_a_run_is_found_whatever_was_read_before(copied):
    shutil.copytree(FOLDER, copied / "published" / SUITE)
    store = open_results(copied / "published")
    (first, *_) = PublishedStore(copied / "published", only="mixed").run_ids()
    store.manifest(SUITE)
    assert store.state(first) == "done"
    assert store.curve(first)


def test_of_two_suites_rows_of_a_run_the_fuller_record_counts(copied):
    path = copied / "published" / "mixed" / "cells.parquet"
    frame = pd.read_parquet(path)
    shutil.copytree(path.parent, copied / "published" / "a")
    shutil.copytree(path.parent, copied / "published" / "z")
    for name in "az":
        less = [json.dumps({"run_id": run_id}) for run_id in frame["run_id"]]
        frame.assign(record=less).to_parquet(copied / "published" / name / "cells.parquet")
    assert not merge(open_results(copied / "published"), Store(copied / "again")).damaged
