"""The cache of prepared arrays: made once, whole or not there, never changed."""

import multiprocessing

import numpy as np
import pytest

from dpopt.workloads import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path))
    return tmp_path


def test_arrays_are_made_once_and_read_again():
    made = []

    def build():
        made.append(1)
        return {"x": np.arange(6).reshape(2, 3), "y": np.ones(2)}

    for _ in range(2):
        found = cache.arrays({"kind": "test", "n": 1}, build)
        assert np.array_equal(found["x"], [[0, 1, 2], [3, 4, 5]])
        assert np.array_equal(found["y"], [1, 1])
    assert len(made) == 1


def test_another_key_makes_others():
    one = cache.arrays({"kind": "test", "n": 1}, lambda: {"x": np.zeros(1)})
    two = cache.arrays({"kind": "test", "n": 2}, lambda: {"x": np.ones(1)})
    assert one["x"] != two["x"]


def test_writing_to_an_array_changes_nothing_that_is_kept():
    key = {"kind": "test"}
    cache.arrays(key, lambda: {"x": np.zeros(3)})["x"][0] = 7
    assert cache.arrays(key, dict)["x"][0] == 0


def test_a_build_that_fails_leaves_nothing_behind(folder):
    def fail():
        yield_first = {"x": np.zeros(3)}
        raise RuntimeError(f"after {len(yield_first)}")

    with pytest.raises(RuntimeError, match="after 1"):
        cache.arrays({"kind": "test"}, fail)
    assert not [path for path in (folder / "test").iterdir() if path.is_dir()]
    assert cache.arrays({"kind": "test"}, lambda: {"x": np.ones(1)})["x"][0] == 1


def test_what_a_killed_process_left_is_removed(folder):
    key = {"kind": "test"}
    cache.arrays(key, lambda: {"x": np.zeros(1)})
    (made,) = [path for path in (folder / "test").iterdir() if path.is_dir()]
    left = made.rename(made.with_name(f"{made.name}.abcd"))
    assert cache.arrays(key, lambda: {"x": np.ones(1)})["x"][0] == 1
    assert made.is_dir()
    assert not left.exists()


def _count(log):
    def build():
        with open(log, "a") as file:
            file.write("made\n")
        return {"x": np.zeros(100_000)}

    cache.arrays({"kind": "race"}, build)


def test_processes_that_race_make_it_once(folder):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_count, args=(folder / "log",)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (folder / "log").read_text() == "made\n"
