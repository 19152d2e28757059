"""What an isolated optimizer may try against the process that holds the data, and a trainer that it is tried on.

    python attacks.py [--without-landlock]

prints for each attack whether it succeeded. `docs/guide/isolation.md` holds the table of all of them.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpopt.optimizers.dp_sgd import DPSGD

SECRET = "A_SECRET_OF_THE_TRAINER"
MARK = 0x5EC2E7_5EC2E7_5EC2
"""A record of the trainer is this number."""
SEIZE = 0x4206
_LIBC = ctypes.CDLL(None, use_errno=True)
Aims = dict[str, Any]


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def _memory(aims: Aims) -> bool:
    with open(f"/proc/{aims['pid']}/mem", "rb", buffering=0) as file:
        file.seek(aims["address"])
        return struct.unpack("q", file.read(8))[0] == MARK


def _vector(aims: Aims) -> bool:
    seen = ctypes.c_int64()
    here = (ctypes.c_size_t * 2)(ctypes.addressof(seen), 8)
    there = (ctypes.c_size_t * 2)(aims["address"], 8)
    _checked(_LIBC.process_vm_readv(aims["pid"], here, 1, there, 1, 0))
    return seen.value == MARK


def _namespace(aims: Aims) -> bool:
    """As the root of a new user namespace."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        try:
            _checked(_LIBC.unshare(0x10000000))
            os.write(writing, b"x" if _memory(aims) else b"")
        finally:
            os._exit(0)
    os.close(writing)
    return os.read(reading, 1) == b"x"


def _connected(kind: socket.SocketKind, family: socket.AddressFamily, address: Any) -> bool:
    with socket.socket(family, kind) as client:
        client.settimeout(2)
        client.connect(address)
        return client.send(b"x") == 1


def _listening(aims: Aims) -> bool:
    with socket.socket() as server:
        server.listen()  # without a call to bind, the system chooses the port
        return server.getsockname()[1] > 0


def _program(aims: Aims) -> bool:
    return subprocess.run(["/bin/true"]).returncode == 0


def _written(path: str) -> bool:
    with open(path, "ab"):
        return True


def _right_of_root(aims: Aims) -> bool:
    """To give a file away."""
    os.chown(aims["checkpoint"], 1, 1)
    return True


def _shared(aims: Aims) -> bool:
    """Memory that both map, which could be cut short under the trainer."""
    for descriptor in range(3, 64):
        try:
            os.ftruncate(descriptor, 0)
        except OSError:
            continue
        return True
    return False


ATTACKS: dict[str, Callable[[Aims], Any]] = {
    "a record, through `/proc/PID/mem`": _memory,
    "a record, by `process_vm_readv`": _vector,
    "a record, as the root of a new user namespace": _namespace,
    "attach to the trainer as a debugger": lambda aims: _checked(_LIBC.ptrace(SEIZE, aims["pid"], 0, 0)) == 0,
    "attach to the process that forks those of optimizers": lambda aims: (
        _checked(_LIBC.ptrace(SEIZE, os.getppid(), 0, 0)) == 0
    ),
    "the trainer's environment": lambda aims: SECRET in Path(f"/proc/{aims['pid']}/environ").read_text(),
    "the trainer's open files": lambda aims: os.listdir(f"/proc/{aims['pid']}/fd"),
    "the trainer's command line": lambda aims: Path(f"/proc/{aims['pid']}/cmdline").read_bytes(),
    "the environment of another process of the user": lambda aims: (
        SECRET in Path(f"/proc/{aims['other']}/environ").read_text()
    ),
    "a variable of its own environment": lambda aims: SECRET in os.environ,
    "cut off memory that both share": _shared,
    "send the trainer a signal": lambda aims: os.kill(aims["pid"], signal.SIGURG) is None,
    "set a limit of the trainer's time, which ends it": lambda aims: resource.prlimit(
        aims["pid"], resource.RLIMIT_CPU, resource.prlimit(aims["pid"], resource.RLIMIT_CPU)
    ),
    "set the trainer's priority": lambda aims: (
        os.setpriority(os.PRIO_PROCESS, aims["pid"], os.getpriority(os.PRIO_PROCESS, aims["pid"])) is None
    ),
    "read a file of the data": lambda aims: Path(aims["data"]).read_bytes(),
    "read the checkpoint": lambda aims: Path(aims["checkpoint"]).read_bytes(),
    "write to the checkpoint": lambda aims: _written(aims["checkpoint"]),
    "list the folder of the checkpoint": lambda aims: os.listdir(Path(aims["checkpoint"]).parent),
    "see the size of a file of the data": lambda aims: os.stat(aims["data"]).st_size == len("secret"),
    "change who may read a file of the data": lambda aims: os.chmod(aims["data"], 0o600) is None,
    "write a new file": lambda aims: _written(aims["new"]),
    "remove the checkpoint": lambda aims: os.remove(aims["removable"]) is None,
    "write to a setting of the kernel": lambda aims: _written("/proc/sys/kernel/core_pattern"),
    "start a program": _program,
    "give a file to another user": _right_of_root,
    "use the trainer's terminal": lambda aims: os.getsid(0) == aims["session"] or os.open("/dev/tty", os.O_RDWR),
    "print on the trainer's terminal": lambda aims: os.fstat(1).st_ino == aims["output"],
    "connect by TCP": lambda aims: _connected(socket.SOCK_STREAM, socket.AF_INET, ("127.0.0.1", aims["tcp"])),
    "listen for connections by TCP": _listening,
    "send a packet by UDP": lambda aims: _connected(socket.SOCK_DGRAM, socket.AF_INET, ("127.0.0.1", aims["udp"])),
    "connect to a socket in a folder": lambda aims: _connected(socket.SOCK_STREAM, socket.AF_UNIX, aims["unix"]),
    "connect to an abstract socket": lambda aims: _connected(socket.SOCK_STREAM, socket.AF_UNIX, aims["abstract"]),
    "measure the time that a query takes": lambda aims: aims["seconds"] > 0,
}


@dataclass(frozen=True)
class Attacker(DPSGD):
    """Tries all attacks in its first step, and fails with the names of those that succeeded."""

    aims: str = "{}"

    def step(self, state, oracle):
        aims, succeeded = json.loads(self.aims), []
        if not aims or state.theta.is_meta:
            return super().step(state, oracle)
        with oracle.draw() as batch:
            started = time.perf_counter()
            batch.gradient(state.theta, self.clip)
            aims["seconds"] = time.perf_counter() - started
        for name, attack in ATTACKS.items():
            try:
                succeeded += [name] if attack(aims) else []
            except OSError:  # refused by the system; any other error is the attack's own
                continue
        raise RuntimeError(f"<{json.dumps(succeeded)}>")


@contextmanager
def aimed_at() -> Iterator[Aims]:
    """A trainer's secrets: a record in memory, a file of data, a checkpoint, sockets."""
    record = torch.tensor([MARK])
    os.environ[SECRET] = "secret"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("data", "checkpoint", "removable"):
            (folder / file).write_text("secret")
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
        udp.bind(("127.0.0.1", 0))
        unix, abstract = (socket.socket(socket.AF_UNIX) for _ in range(2))
        unix.bind(str(folder / "socket"))
        abstract.bind(f"\0{folder}")
        sleep = subprocess.Popen(["sleep", "1000"], env={SECRET: "secret", "PATH": os.defpath})
        with tcp, udp, unix, abstract, sleep as other:
            unix.listen()
            abstract.listen()
            files = {key: str(folder / key) for key in ("data", "checkpoint", "removable", "new")}
            aims = {
                "pid": os.getpid(),
                "address": record.data_ptr(),
                "other": other.pid,
                "session": os.getsid(0),
                "output": os.fstat(1).st_ino,
                "tcp": tcp.getsockname()[1],
                "udp": udp.getsockname()[1],
                "unix": str(folder / "socket"),
                "abstract": f"\0{folder}",
                **files,
            }
            try:
                yield aims
            finally:
                other.kill()
    del os.environ[SECRET]


def succeeded() -> list[str]:
    """The attacks that succeed on this process."""
    from dpopt.privacy.isolation import Isolated
    from dpopt.privacy.wire import IsolatedFailure
    from dpopt.testing.task import Task

    with aimed_at() as aims:
        optimizer, task = Isolated(Attacker(aims=json.dumps(aims))), Task()
        try:
            task.run(optimizer, task.oracle(task.plan(optimizer)))
        except IsolatedFailure as failure:
            return json.loads(str(failure).rpartition("<")[2].partition(">")[0])
    raise AssertionError("it did not attack")


def without_landlock() -> None:
    """Start the processes of optimizers as on a kernel that has no Landlock."""
    from dpopt.privacy import isolation

    start = isolation.subprocess.Popen
    patched = (
        "import sys, dpopt.privacy.confinement as c; c.landlock_version = lambda: 0; "
        "import dpopt.isolated as i; i.main(int(sys.argv[1]))"
    )

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return start([command[0], "-P", "-c", patched, command[-1]], **options)

    isolation.subprocess = type(sys)("subprocess")  # this module's alone
    isolation.subprocess.Popen = popen


if __name__ == "__main__":
    import attacks  # under the name that its process imports it by

    if "--without-landlock" in sys.argv:
        attacks.without_landlock()
    print(json.dumps(attacks.succeeded()))
