import json

import pytest

from dpopt.store import Damaged, Store, checksums


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path)
    store.write(tmp_path / "a.md", "a")
    store.write(tmp_path / "sub" / "b.md", "b")
    checksums.seal(store, tmp_path, checksums.contents(tmp_path), suite="small")
    return store


def test_a_sealed_folder_has_no_changes(store):
    content = checksums.noted(store.root)
    assert content["files"]["sub/b.md"]["bytes"] == 1
    assert content["suite"] == "small"
    assert content["source"].keys() == {"commit", "dirty", "versions", "python"}
    assert list(checksums.changes(store.root, is_complete=True)) == []
    checksums.seal(store, store.root, checksums.contents(store.root))
    assert list(checksums.changes(store.root, is_complete=True)) == [], "it does not note itself"


def test_every_change_is_found(store):
    (store.root / "a.md").write_text("A")
    (store.root / "sub" / "b.md").unlink()
    (store.root / "c.md").write_text("c")
    changed = {change.path.name: change for change in checksums.changes(store.root, is_complete=True)}
    assert set(changed) == {"a.md", "b.md", "c.md"}
    assert changed["b.md"].found is None
    assert changed["c.md"].claimed is None
    assert {change.path.name for change in checksums.changes(store.root, is_complete=False)} == {"a.md", "b.md"}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"schema": 2, "files": {}}', '{"schema": 1, "files": {"a": 1}}'])
def test_damaged_checksums_are_no_checksums(store, content):
    (store.root / checksums.NAME).write_text(content)
    with pytest.raises(Damaged, match=checksums.NAME):
        checksums.noted(store.root)


def test_rows_of_parquet_are_noted(store):
    import pandas as pd

    pd.DataFrame({"x": [1, 2, 3]}).to_parquet(store.root / "x.parquet")
    path = checksums.seal(store, store.root, [store.root / "x.parquet"])
    assert json.loads(path.read_text())["files"]["x.parquet"]["rows"] == 3
