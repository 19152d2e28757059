"""The search for the largest batch, on a device whose memory is made up, and with real contenders on the CPU."""

import dataclasses
import gc

import pytest
import torch
from speed.largest import KNOWN, PRECISION, Search, largest, repeated

from dpopt.bench.cases import CASES

CPU = torch.device("cpu")
MLP = CASES["mlp"].rehearsal()


NO_ROOM = torch.OutOfMemoryError("no room")


@pytest.fixture
def _no_garbage(monkeypatch):
    """Collecting garbage takes longer than all else of a search that computes nothing."""
    monkeypatch.setattr(gc, "collect", lambda: 0)


class Device:
    """Has room for so many examples; notes what was tried."""

    def __init__(self, room, error=NO_ROOM):
        self.room, self.error, self.tried = room, error, []

    def build(self, case, calls):
        self.tried.append(case.batch_size)
        if case.batch_size > self.room:
            raise self.error
        return lambda: None

    def search(self, begin=64, most=10**6, seconds=1e9):
        case = dataclasses.replace(MLP, batch_size=begin)
        return Search(self.build, case, most, CPU, seconds).largest()


@pytest.mark.usefixtures("_no_garbage")
@pytest.mark.parametrize("room", [0, 1, 63, 65, 999_999])
def test_the_largest_batch_is_found_to_one_part_in_eight(room):
    device = Device(room)
    result = device.search()
    assert result["batch"] <= room < result["batch"] + max(1, result["batch"] // PRECISION) + 1
    assert result["end"] == "memory"
    assert len(device.tried) == len(set(device.tried)) < 25


@pytest.mark.usefixtures("_no_garbage")
def test_the_search_ends_at_the_most_and_when_its_time_is_up():
    assert Device(10**9).search(most=1000) == {"batch": 1000, "seconds": pytest.approx(0, abs=0.1), "end": "most"}
    device = Device(10**9)
    assert (device.search(seconds=0)["end"], device.tried) == ("time", [64])


@pytest.mark.usefixtures("_no_garbage")
def test_errors_of_libraries_are_about_memory_or_end_the_search_with_what_was_found():
    for message in ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"):
        assert Device(100, RuntimeError(message)).search()["end"] == "memory"
    result = Device(100, RuntimeError("indices are too large")).search()
    assert (result["batch"], result["end"]) == (64, "RuntimeError: indices are too large")
    with pytest.raises(RuntimeError, match="too large"):
        Device(10, RuntimeError("indices are too large")).search()


def test_what_failed_is_freed_before_the_next_try():
    """Else the next size would fail as well, and the largest batch would seem smaller than it is."""
    alive = []

    class Tensors:
        def __init__(self):
            alive.append(id(self))

        def __del__(self):
            alive.remove(id(self))

    def build(case, calls):
        held = Tensors()
        if case.batch_size > 1:
            raise torch.OutOfMemoryError("no room")
        assert len(alive) == 1
        return lambda: held

    Search(build, dataclasses.replace(MLP, batch_size=2), 1000, CPU, 1e9).largest()
    gc.collect()
    assert not alive


def test_more_examples_than_are_made_are_the_same_again():
    x, y = repeated(MLP.data, 3 * KNOWN + 1)
    assert torch.equal(x, x[:KNOWN].repeat(4, 1)[: len(y)])
    assert len(x[:KNOWN].unique(dim=0)) == KNOWN
    assert (len(y), len(repeated(MLP.data, 5)[0])) == (3 * KNOWN + 1, 5)


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_rows_of_real_contenders():
    rows = {row["contender"]: row for row in largest(["bookkeeping"], MLP, "full", CPU, 20, 60)}
    assert list(rows) == ["non_private", "bookkeeping"]
    for row in rows.values():
        assert (row["batch"], row["end"], row["failure"], row["case"], row["subset"]) == (20, "most", "", "mlp", "full")
        assert row["seconds"] > 0
