"""The cache of prepared arrays: made once, whole or not there, never changed."""

import multiprocessing
import os
import random
import shutil

import numpy as np
import pytest

from dpopt.workloads import cache


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("DPOPT_CACHE", str(tmp_path))
    return tmp_path


def test_arrays_are_made_once_and_read_again():
    calls = []

    def build():
        calls.append(1)
        return {"x": np.arange(6).reshape(2, 3), "y": np.ones(2)}

    for _ in range(2):
        arrays = cache.arrays({"kind": "test", "n": 1}, build)
        assert np.array_equal(arrays["x"], [[0, 1, 2], [3, 4, 5]])
        assert np.array_equal(arrays["y"], [1, 1])
    assert len(calls) == 1
    assert cache.arrays({"kind": "test", "n": 2}, lambda: {"x": np.ones(1)})["x"] == 1


def test_writing_to_an_array_changes_nothing_that_is_kept():
    key = {"kind": "test"}
    cache.arrays(key, lambda: {"x": np.zeros(3)})["x"][0] = 7
    assert cache.arrays(key, dict)["x"][0] == 0


def test_a_build_that_fails_leaves_nothing_behind(folder):
    with pytest.raises(ZeroDivisionError):
        cache.arrays({"kind": "test"}, lambda: 1 / 0)
    assert not [path for path in (folder / "test").iterdir() if path.is_dir()]
    assert cache.arrays({"kind": "test"}, lambda: {"x": np.ones(1)})["x"][0] == 1


def test_what_a_killed_process_left_is_removed(folder):
    key = {"kind": "test"}
    cache.arrays(key, lambda: {"x": np.zeros(1)})
    (place,) = [path for path in (folder / "test").iterdir() if path.is_dir()]
    left = place.rename(place.with_name(f"{place.name}.abcd"))
    assert cache.arrays(key, lambda: {"x": np.ones(1)})["x"][0] == 1
    assert place.is_dir()
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


KEY = {"kind": "test"}
MADE = {"x": np.random.default_rng(0).integers(0, 256, (40, 8), dtype=np.uint8), "y": np.arange(40)}


@pytest.fixture
def kept(folder):
    """The folder of arrays that are kept, and how to look what it gives: the arrays, and how often they were made."""
    cache.arrays(KEY, lambda: MADE)
    (place,) = (path for path in (folder / "test").iterdir() if path.is_dir())

    def look():
        times = []
        cache._checksum.cache_clear()  # as in a new process
        return cache.arrays(KEY, lambda: times.append(1) or MADE), len(times)

    return place, look


def is_made(arrays):
    return arrays.keys() == MADE.keys() and all(np.array_equal(arrays[name], MADE[name]) for name in MADE)


def flipped(content, bit):
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def test_no_flipped_bit_is_used(kept, capsys):
    place, look = kept
    files = [path for path in sorted(place.iterdir()) if path.name != "key.json"]  # nothing reads that one
    assert {path.name for path in files} == {"checksums.json", "x.npy", "y.npy"}
    contents, chance = {path: path.read_bytes() for path in files}, random.Random(0)
    for path in files:
        for bit in chance.sample(range(8 * len(contents[path])), 33):
            path.write_bytes(flipped(contents[path], bit))
            arrays, times = look()
            assert is_made(arrays)
            assert times == 1
            assert capsys.readouterr().out.count("making it again") == 1, bit
            assert look()[1] == 0


@pytest.mark.parametrize("name", ["x.npy", "checksums.json"])
@pytest.mark.parametrize("harm", ["gone", "empty", "half", "longer", "text", "folder"])
def test_no_other_harm_is_used(kept, folder, name, harm, capsys):
    place, look = kept
    path = place / name
    content = path.read_bytes()
    path.unlink()
    if harm == "folder":
        path.mkdir()
    elif harm != "gone":
        harmed = {"empty": b"", "half": content[: len(content) // 2], "longer": content + b"\0", "text": b"[1, 2]"}
        path.write_bytes(harmed[harm])
    arrays, times = look()
    assert is_made(arrays)
    assert times == 1
    assert f"cache {place}: " in capsys.readouterr().out
    assert sorted(path.name for path in (folder / "test").iterdir()) == [place.name, f"{place.name}.lock"]


@pytest.mark.parametrize("how", ["file", "gone", "one more"])
def test_a_folder_that_is_none_is_made(kept, how):
    place, look = kept
    if how == "one more":
        np.save(place / "z.npy", np.ones(1))
    else:
        shutil.rmtree(place)
        if how == "file":
            place.write_text("what is this?")
    arrays, times = look()
    assert is_made(arrays)
    assert times == 1
    assert look()[1] == 0


def test_a_file_is_read_once_in_a_process_and_again_when_it_has_changed(kept, monkeypatch):
    place, look = kept
    look()
    with monkeypatch.context() as patch:
        patch.setattr(cache.hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert is_made(cache.arrays(KEY, dict))
    path = place / "x.npy"
    path.write_bytes(flipped(path.read_bytes(), 1500))
    os.utime(path, ns=(0, 1))  # a later time than that of the last look, however coarse the clock of the file system
    assert is_made(cache.arrays(KEY, lambda: MADE))


def test_arrays_in_use_stay_when_their_folder_is_made_again(kept):
    """A build that fails leaves the damaged folder."""
    place, look = kept
    cache._checksum.cache_clear()
    used = cache.arrays(KEY, dict)
    (place / "y.npy").unlink()
    before = sorted(path.name for path in place.iterdir())
    with pytest.raises(ZeroDivisionError):
        cache.arrays(KEY, lambda: 1 / 0)
    assert sorted(path.name for path in place.iterdir()) == before
    assert look()[1] == 1
    assert is_made(used)


def test_checksums_follow_the_content(tmp_path):
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    first = cache.checksum(file)
    assert first == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    file.write_bytes(b"abd!")
    assert cache.checksum(file) != first
