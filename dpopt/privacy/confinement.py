"""Restrictions that Linux can put on a process: on its memory for others, its rights, files, network and signals."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_SET_DUMPABLE, _DROP_CAPABILITY, _NO_NEW_PRIVILEGES, _DEATH_SIGNAL = 4, 24, 38, 1  # of prctl(2)
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # system calls of landlock(7), on all architectures
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1


def hide_memory() -> None:
    """Close this process's memory, environment and descriptors to others of its user, until it ends.

    As root only those without `CAP_SYS_PTRACE` are kept out. Debuggers and core dumps are kept out as well.
    """
    if _LIBC:
        # Never undone: a process that an isolated optimizer has left behind would wait for that.
        _LIBC.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def landlock_version() -> int:
    """The version of Landlock that this system has; 0 without it."""
    return max(0, _LIBC.syscall(_CREATE_RULESET, None, 0, 1)) if _LIBC else 0


def confine(readable: Iterable[str | Path], listed: Iterable[str | Path]) -> None:
    """Take all rights from this process that it can give up; what it starts inherits that. It has to have one thread.

    Files and folders that are `readable` can be opened, with all in them, and the names in those that are `listed` can
    be read. OSError if the system has Landlock and refuses to use it.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what it prints could change the terminal
        os.dup2(null, stream)
    if _LIBC is None:
        return
    # It must not outlive the run, nor a killed one.
    _LIBC.prctl(_DEATH_SIGNAL, 9, 0, 0, 0)
    for capability in range(64):  # has no effect but for root
        _LIBC.prctl(_DROP_CAPABILITY, capability, 0, 0, 0)
    _LIBC.capset(struct.pack("=Ii", 0x20080522, 0), bytes(24))
    _call(_LIBC.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    if not (version := landlock_version()):
        return
    files = (1 << (13, 14, 15, 15, 16)[min(version, 5) - 1]) - 1  # every right over files that the version knows
    network = 3 if version >= 4 else 0  # to bind and to connect TCP
    scopes = 3 if version >= 6 else 0  # to reach others by abstract sockets and by signals
    attributes = struct.pack("=QQQ", files, network, scopes)
    rules = _call(_LIBC.syscall(_CREATE_RULESET, attributes, len(attributes), 0))
    rights = [(path, _READ_FILE | _READ_DIR) for path in readable] + [(path, _READ_DIR) for path in listed]
    for path, right in [*rights, (os.devnull, _READ_FILE | _WRITE_FILE)]:
        with suppress(FileNotFoundError, PermissionError):  # what cannot be opened needs no rule
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            right &= ~0 if os.path.isdir(path) else ~_READ_DIR
            if right:
                _call(_LIBC.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", right, descriptor), 0))
            os.close(descriptor)
    _call(_LIBC.syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _call(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"it cannot be confined: {os.strerror(ctypes.get_errno())}")
    return result


def of_python(path: Iterable[str], modules: Iterable[str]) -> tuple[list[str | Path], list[Path]]:
    """The files that imports need, and the folders that they list: `confine`'s arguments.

    `path` is Python's; the top-level `modules` may lie elsewhere, as editable installations do.
    """
    readable: list[str | Path] = [sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/etc/ld.so.cache"]
    readable += ["/dev/urandom"]
    listed = []
    for folder in map(Path, path):
        if folder.name in ("site-packages", "dist-packages") or not folder.is_dir():
            readable.append(folder)
            continue
        listed.append(folder)
        with suppress(PermissionError):
            for each in folder.iterdir():
                # Data may lie beside a script, so only what imports need is readable there.
                is_code = each.suffix in (".py", ".so", ".dist-info", ".egg-info") or (each / "__init__.py").exists()
                readable += [each] if is_code else []
    for name in modules:
        with suppress(ImportError, ValueError):
            spec = find_spec(name)
            readable += [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
    return readable, listed
