import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from dpopt.errors import Held
from dpopt.store import leases
from dpopt.store.leases import Lease, Watch


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "lease.json"


def in_child(work: Callable[[], None]) -> int:
    """Run `work` in a child process; returns its process id, to be waited for."""
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            work()
            code = 0
        except Held:
            code = 2
        finally:
            os._exit(code)
    return pid


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def leave_behind(path):
    """A lease whose holder was killed."""

    def work():
        Lease(path)
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(work)) == -signal.SIGKILL


def foreign(path, **changes):
    """A lease of another machine; returns what it says."""
    with Lease(path):
        content = path.read_bytes()
    said = {**json.loads(content), "token": "0" * 16, "machine": "another", "host": "elsewhere", **changes}
    path.write_text(json.dumps(said))
    return path.read_bytes()


class Clock:
    """A steady clock that goes on when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(leases.time, "monotonic", lambda: self.now)


def test_one_process_has_a_lease_and_gives_it_back(path):
    with Lease(path) as lease:
        lease.check()
        with pytest.raises(Held, match=f"process {os.getpid()} of"):
            Lease(path)
        assert ended(in_child(lambda: Lease(path))) == 2
        assert not Watch(path).try_free()
    assert not path.exists()
    assert Watch(path).try_free()
    assert ended(in_child(lambda: Lease(path))) == 0


def test_a_lease_tells_of_its_holder(path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 0.01)
    with Lease(path) as lease:
        lease.note(0.25)
        limit = time.monotonic() + 60
        while (holder := leases.read(path)) is None or holder.fraction != 0.25:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert holder.pid == os.getpid()
        assert holder.age < 60
        assert not holder.is_gone
        first = path.read_bytes()
        while path.read_bytes() == first:
            assert time.monotonic() < limit
            time.sleep(0.01)
        assert len(first) == len(path.read_bytes()) == leases.WIDTH


def test_a_killed_holder_is_replaced_at_once(path):
    leave_behind(path)
    assert leases.read(path).is_gone
    with Lease(path) as lease:
        lease.check()
    leave_behind(path)
    assert Watch(path).try_free()
    assert not path.exists()


def test_a_process_number_that_is_used_again_is_not_the_holder(path):
    foreign(path, machine=leases._machine(), pid=os.getpid(), started="1")
    assert leases.read(path).is_gone
    foreign(path, machine=leases._machine(), pid=os.getpid())
    assert not leases.read(path).is_gone


def test_one_of_many_takes_over(path, tmp_path):
    """All see the same dead holder at the same time; the one that takes over keeps the lease until all have tried."""
    for attempt in range(10):
        leave_behind(path)
        start, tried = tmp_path / f"start{attempt}", tmp_path / f"tried{attempt}"
        tried.mkdir()

        def work(start=start, tried=tried):
            while not start.exists():
                pass
            try:
                lease = Lease(path)
            finally:
                (tried / str(os.getpid())).touch()
            while len(list(tried.iterdir())) < 6:
                time.sleep(0.001)
            lease.check()
            lease.__exit__(None, None, None)

        children = [in_child(work) for _ in range(6)]
        start.touch()
        assert sorted(map(ended, children)) == [0, 2, 2, 2, 2, 2]
        assert [file.name for file in path.parent.iterdir()] == []


def test_a_holder_elsewhere_is_gone_when_its_lease_stands_still(path, monkeypatch):
    said = foreign(path)
    clock, watch = Clock(monkeypatch), Watch(path)
    assert not watch.try_free()
    clock.now += leases.PATIENCE - 1
    assert not watch.try_free()
    path.write_bytes(said.replace(b'"beats": 1', b'"beats": 2'))
    clock.now += 2
    assert not watch.try_free(), "it gave a sign of life"
    clock.now += leases.PATIENCE - 1
    assert not watch.try_free()
    with pytest.raises(Held, match="elsewhere"):
        Lease(path)
    clock.now += 1
    assert watch.try_free()
    assert not path.exists()


@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_clocks_that_jump_change_nothing(path, monkeypatch, jump):
    foreign(path)
    watch = Watch(path)
    assert not watch.try_free()
    now = time.time()
    monkeypatch.setattr(leases.time, "time", lambda: now + jump)
    os.utime(path, (now - jump, now - jump))
    assert not watch.try_free()
    with pytest.raises(Held):
        Lease(path)
    assert leases.read(path).age >= 0


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff\xfe"])
def test_a_damaged_lease_counts_until_it_has_stood_still(path, monkeypatch, content):
    path.parent.mkdir()
    path.write_bytes(content)
    clock = Clock(monkeypatch)
    watch = Watch(path)
    assert leases.read(path) is None
    assert not watch.try_free()
    with pytest.raises(Held):
        Lease(path)
    clock.now += leases.PATIENCE
    assert watch.try_free()


def test_a_holder_notices_that_it_was_replaced(path):
    lease = Lease(path)
    leases._remove(path, path.read_bytes())
    with Lease(path) as other:
        with pytest.raises(Held, match="taken over"):
            lease.check()
        lease.__exit__(None, None, None)
        other.check()


def test_only_the_observed_lease_is_removed(path):
    """Between the look and the removal, another observer removed the dead holder and a new one began."""
    with Lease(path) as lease:
        leases._remove(path, b"what the dead holder said")
        lease.check()
        assert [file.name for file in path.parent.iterdir()] == ["lease.json"]


def test_a_lease_that_cannot_be_written_is_not_taken(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(leases.os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space"):
            Lease(path)
    assert not path.exists()
    with Lease(path) as lease:
        lease.check()


def test_a_lease_that_cannot_be_kept_up_is_lost_and_not_an_error(path, monkeypatch):
    monkeypatch.setattr(leases, "BEAT", 0.01)

    def full(*_):
        raise OSError(28, "No space left on device")

    with Lease(path) as lease:
        monkeypatch.setattr(leases.os, "pwrite", full)
        time.sleep(0.1)
        lease.check()
    assert not path.exists()
