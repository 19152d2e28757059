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
        arrays["y"][0] = 7  # which changes nothing that is kept
    assert len(calls) == 1
    assert cache.arrays({"kind": "test", "n": 2}, lambda: {"x": np.ones(1)})["x"] == 1


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
        for bit in chance.sample(range(8 * len(contents[path])), 12):
            path.write_bytes(flipped(contents[path], bit))
            arrays, times = look()
            assert is_made(arrays)
            assert times == 1
            assert capsys.readouterr().out.count("making it again") == 1, bit
            assert look()[1] == 0


@pytest.mark.parametrize("name", ["x.npy", "checksums.json", "z.npy", ""])
@pytest.mark.parametrize("harm", ["gone", "empty", "half", "text", "folder"])
def test_no_other_harm_is_used(kept, folder, name, harm):
    """To one of the files, one more, or the folder itself."""
    place, look = kept
    path = place / name
    content = path.read_bytes() if path.is_file() else b"0" * 200
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if harm == "folder":
        path.mkdir()
    elif harm != "gone":
        path.write_bytes({"empty": b"", "half": content[: len(content) // 2], "text": b"[1, 2]"}[harm])
    arrays, times = look()
    assert is_made(arrays)
    assert times == ((name, harm) != ("z.npy", "gone"))
    assert [path.name for path in (folder / "test").iterdir() if path.is_dir()] == [place.name]
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
