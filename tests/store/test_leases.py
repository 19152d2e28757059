"""Leases: one process has a cell, a dead holder is replaced at once, a silent one after a while, by steady clocks."""

import os
import signal
import socket
import time

import pytest

from dpopt.errors import Held
from dpopt.store import leases
from dpopt.store.leases import Lease


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / "lease"


def in_child(work):
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
        lease = Lease(path).take()
        lease.check()
        os.kill(os.getpid(), signal.SIGKILL)

    assert ended(in_child(work)) == -signal.SIGKILL


def foreign(path, **changes):
    """A lease of another machine."""
    with Lease(path):
        lines = dict(line.partition("=")[::2] for line in path.read_text().splitlines()[1:])
    lines |= {"token": "0" * 32, "host": "elsewhere", **changes}
    path.write_text("\n".join(["filelock/2", *(f"{key}={value}" for key, value in lines.items())]) + "\n")


class Clock:
    """A steady clock that goes on when it is told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_one_process_has_a_lease_and_gives_it_back(path):
    with Lease(path) as lease:
        lease.check()
        with pytest.raises(Held, match=f"process {os.getpid()} of"):
            Lease(path).take()
        assert ended(in_child(lambda: Lease(path).take())) == 2
        holder = leases.read(path)
        assert (holder.pid, holder.is_gone) == (os.getpid(), False)
        assert holder.age < 60
        os.utime(path, (later := time.time() + 100, later))
        assert leases.read(path).age == 0, "of a clock that is behind"
        assert str(holder) == f"process {os.getpid()} of {socket.gethostname()}"
    assert not path.exists()
    assert leases.read(path) is None
    assert ended(in_child(lambda: Lease(path).take())) == 0


def test_a_killed_holder_is_replaced_at_once(path):
    leave_behind(path)
    assert leases.read(path).is_gone
    with Lease(path) as lease:
        lease.check()


def test_one_of_many_takes_over(path, tmp_path):
    """All see the same dead holder at the same time; the one that takes over keeps the lease until all have tried."""
    for attempt in range(3):
        leave_behind(path)
        start, tried = tmp_path / f"start{attempt}", tmp_path / f"tried{attempt}"
        tried.mkdir()

        def work(start=start, tried=tried):
            while not start.exists():
                pass
            lease = Lease(path)
            try:
                lease.take()
            finally:
                (tried / str(os.getpid())).touch()
            while len(list(tried.iterdir())) < 6:
                time.sleep(0.001)
            lease.check()
            lease.release()

        children = [in_child(work) for _ in range(6)]
        start.touch()
        codes = sorted(map(ended, children))
        assert codes.count(0) <= 1, "never two"
        assert set(codes) <= {0, 2}
        assert [file.name for file in path.parent.iterdir()] in ([], ["lease"])
        Lease(path).take().release()


@pytest.mark.parametrize("host", ["elsewhere", "this"])
def test_a_holder_elsewhere_is_gone_when_its_lease_stands_still(path, monkeypatch, host):
    """Also on a machine that has the name of this one, where no process of this number runs."""
    boot = f"{(12345 << 64) + 7}"
    foreign(path, **({} if host == "elsewhere" else {"host": leases._here().hostname, "pid": "999999", "start": boot}))
    clock, lease = Clock(monkeypatch), Lease(path)

    def is_taken():
        try:
            lease.take()
        except Held:
            return False
        return True

    assert not is_taken()
    assert not leases.read(path).is_gone
    clock.now += leases._PATIENCE - 1
    assert not is_taken()
    os.utime(path, (0, 1))
    clock.now += 2
    assert not is_taken(), "it gave a sign of life, whatever its clock says"
    clock.now += leases._PATIENCE - 1
    assert not is_taken()
    clock.now += 2
    assert is_taken()
    lease.check()
    lease.release()


def test_a_damaged_lease_counts_until_it_has_stood_still(path, monkeypatch):
    path.parent.mkdir()
    for content in (b"", b"{", b"filelock/2\npid=x\n", b"\xff\xfe"):
        path.write_bytes(content)
        with monkeypatch.context() as patch:
            clock, lease = Clock(patch), Lease(path)
            assert leases.read(path) is None
            with pytest.raises(Held):
                lease.take()
            clock.now += leases._PATIENCE
            with lease:
                lease.check()


def test_a_holder_notices_that_it_was_replaced(path):
    lease = Lease(path).take()
    path.unlink()
    with pytest.raises(Held, match="taken over"):
        lease.check()
    with Lease(path) as other:
        with pytest.raises(Held, match="taken over"):
            lease.check()
        lease.release()
        other.check()


def test_a_lease_that_cannot_be_written_is_not_taken(path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("filelock._soft._exclusive._marker.write_all", full)
        with pytest.raises(OSError, match="No space"):
            Lease(path).take()
    assert not path.exists()
    with Lease(path) as lease:
        lease.check()


def test_a_holder_gives_signs_of_life(path, monkeypatch):
    monkeypatch.setattr(leases, "_BEAT", 0.01)
    with Lease(path):
        os.utime(path, (0, 1))
        until = time.monotonic() + 60
        while path.stat().st_mtime == 1:
            assert time.monotonic() < until
            time.sleep(0.01)
