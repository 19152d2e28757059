"""Optimizers in a process of their own, which holds no data, model, engine or noise.

Queries go out and releases come back, so all that such an optimizer can do is ask, and what it may ask is in the plan.
Its process is forked from one that was started anew and has only imported libraries. It is a process of the same user:
what the operating system allows that user (to read files, or the memory of other processes) is not prevented here.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpopt import fields
from dpopt.errors import ConfigError
from dpopt.privacy.oracle import BaseOracle, BudgetSpent, OpenDraw, UnplannedRelease
from dpopt.privacy.wire import (
    Channel,
    Gone,
    Vectors,
    leaves_from,
    leaves_message,
    query_from,
    release_message,
    shared_file,
)
from dpopt.types import Vector

LARGEST_STATE = 64
"""The most bytes of an optimizer's state, for each byte of its vectors."""
TOLD = (BudgetSpent, UnplannedRelease, ConfigError)
"""The errors that an isolated optimizer is told of: it has asked for what it cannot have."""


class IsolatedFailure(RuntimeError):
    """The optimizer has failed in its process; the message is its traceback."""


@dataclass
class IsolatedState:
    """The state of an isolated optimizer, which is in its process until somebody looks.

    Attributes:
        optimizer: whose it is.
        number: how many states it had before; only its latest can still be fetched.
    """

    optimizer: Isolated
    number: int
    fetched: list[Tensor] | None = None

    @property
    def leaves(self) -> list[Tensor]:
        """Its tensors; the first is `theta`."""
        if self.fetched is None:
            self.fetched = self.optimizer.fetch(self.number)
        return self.fetched

    @property
    def theta(self) -> Vector:
        return self.leaves[0]

    def __getattr__(self, name: str) -> Tensor:
        fields = self.optimizer.fields
        if name not in fields:
            raise AttributeError(name)
        return self.leaves[fields[name]]


pytree.register_pytree_node(
    IsolatedState,
    lambda state: (state.leaves, state.optimizer),
    lambda leaves, optimizer: IsolatedState(optimizer, -1, list(leaves)),
)


class Isolated:
    """An optimizer that runs in a process of its own; used as any optimizer, from one thread.

    The numbers are those that it gives without isolation, bit for bit. Its process ends with `close`, or when nobody
    refers to this object.

    Args:
        optimizer: its registered name; a spec as `registry.spec` gives it; or an object, which has to be importable
            there. An object has already run code in this process; a name or a spec has not.

    Attributes:
        noise_inflation, shares: see `calibrate`; as the optimizer has them.
        fields: name of each field of its state that is one tensor -> its place among all tensors.

    Raises:
        ConfigError: there is no such optimizer, or it cannot be made there.
    """

    def __init__(self, optimizer: Any) -> None:
        content = _described(optimizer)
        self._channel, self._file = _connect()
        self.close = weakref.finalize(self, _hang_up, self._channel, self._file)
        self._vectors: Vectors | None = None
        self._number = 0
        self.fields: dict[str, int] = {}
        start = {"path": [os.path.abspath(entry) for entry in sys.path], "threads": torch.get_num_threads()}
        about, _ = self._ask({**start, "do": "make"}, content)
        self._text = str(about.get("text"))
        self.noise_inflation = _convert(about.get("noise_inflation"), float | None, "noise_inflation")
        shares = _convert(about.get("shares"), dict, "shares")
        self.shares = {str(kind): _convert(share, float, "shares") for kind, share in shares.items()}
        sensitivity = _convert(about.get("sensitivity"), float | None, "sensitivity")
        self.clip = None if sensitivity is None else _Sensitivity(sensitivity)

    def __repr__(self) -> str:
        return self._text

    def trace(self, *, rate: float, draws: int) -> tuple[tuple[tuple[str, ...], int], ...]:
        """The kinds of release of every draw, run-length encoded; see `calibration.trace`."""
        answer, _ = self._ask({"do": "trace", "rate": rate, "draws": draws})
        try:
            structure = tuple((tuple(map(str, kinds)), int(count)) for kinds, count in answer["structure"])
        except (KeyError, TypeError, ValueError) as error:
            raise Gone(f"a trace that cannot be read ({error})") from error
        counts = [count for _, count in structure]
        if sum(counts) != draws or min(counts) < 1:
            raise ConfigError("optimizer", f"{sum(counts)} draws", f"expected {draws}, as many as the plan holds")
        return structure

    def init(self, theta: Vector) -> IsolatedState:
        """The state before the first step.

        Raises:
            ConfigError: `theta` is not on the CPU.
        """
        if theta.device.type != "cpu":
            raise ConfigError("isolate", str(theta.device), "isolated optimizers run on the CPU")
        self._vectors = Vectors(self._file, len(theta))
        kind = self._vectors.put(0, theta)
        return self._state(self._ask({"do": "init", "dimension": len(theta), "dtype": kind})[0])

    def step(self, state: IsolatedState, oracle: Any) -> IsolatedState:
        """One step, in which the optimizer's queries are put to `oracle`."""
        if state.number != self._number:
            self._ask({"do": "load", **(loaded := leaves_message(state.leaves))[0]}, loaded[1])
        public = {name: getattr(oracle, name) for name in ("rate", "expected_batch", "draws_total", "draws_left")}
        self._channel.send({"do": "step", **public})
        return self._state(self._serve(oracle))

    def fetch(self, number: int) -> list[Tensor]:
        """The tensors of the latest state.

        Raises:
            RuntimeError: another step has been made since.
        """
        if number != self._number:
            raise RuntimeError("only the latest state of an isolated optimizer can be fetched")
        assert self._vectors is not None
        return leaves_from(*self._ask({"do": "fetch"}, most=8 * LARGEST_STATE * self._vectors.dimension + 2**20))

    def _state(self, message: Mapping[str, Any]) -> IsolatedState:
        try:
            self.fields = {str(name): int(place) for name, place in message["fields"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Gone(f"a state that cannot be read ({error})") from error
        self._number += 1
        return IsolatedState(self, self._number)

    def _ask(self, message: Mapping[str, Any], payload: bytes = b"", most: int = 0) -> tuple[dict[str, Any], bytes]:
        self._channel.send(message, payload)
        answer, content = self._channel.receive(most)
        _raise(answer)
        return answer, content

    def _serve(self, oracle: BaseOracle) -> dict[str, Any]:
        """Answer queries until the step is made; gives what it ends with."""
        assert self._vectors is not None
        with ExitStack() as stack:
            batch: OpenDraw | None = None
            while "done" not in (message := self._channel.receive()[0]):
                _raise(message)
                answer: dict[str, Any] = {}
                try:
                    if message.get("do") == "draw":
                        batch = stack.enter_context(oracle.draw())
                    elif message.get("do") == "close":
                        stack.pop_all().close()
                    elif batch is None:
                        raise UnplannedRelease("there is no draw to ask")
                    else:
                        answer = release_message(batch.ask(query_from(message, self._vectors)), self._vectors)
                except TOLD as error:
                    answer = {"refused": type(error).__name__, "because": str(error)}
                self._channel.send({**answer, "draws_left": oracle.draws_left})
        return message


@dataclass(frozen=True)
class _Sensitivity:
    """What is known of an isolated optimizer's clip rule."""

    sensitivity: float


def _convert(value: Any, hint: Any, where: str) -> Any:
    return fields.convert(value, hint, f"optimizer.{where}", {})


def _hang_up(channel: Channel, file: int) -> None:
    channel.close()
    os.close(file)


def _described(optimizer: Any) -> bytes:
    if type(optimizer).__module__ == "__main__":
        raise ConfigError("optimizer", optimizer, "define it in a module: its own process cannot import the main one")
    try:
        return pickle.dumps(optimizer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError("optimizer", optimizer, f"it cannot be sent to a process of its own ({error})") from error


def _raise(message: Mapping[str, Any]) -> None:
    if "config" in message:
        raise ConfigError("optimizer", "isolated", str(message["config"]))
    if "failed" in message:
        raise IsolatedFailure(str(message["failed"]))


_LOCK = threading.Lock()
_nursery: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None


def _connect() -> tuple[Channel, int]:
    """A connection to a new process, forked from the one that imports libraries once, and the file that both share."""
    ours, theirs = socket.socketpair()
    file = shared_file()
    with _LOCK, theirs:
        socket.send_fds(_control(), [b"n"], [theirs.fileno(), file])
    return Channel(ours), file


def _control() -> socket.socket:
    """The socket of this process's nursery, which is started where there is none."""
    global _nursery
    if _nursery is None or _nursery[0] != os.getpid() or _nursery[2].poll() is not None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Started anew, not forked: it shares no memory with this process, and does not run its main module.
            command = [sys.executable, "-m", "dpopt.isolated", str(theirs.fileno())]
            path = os.pathsep.join(entry for entry in sys.path if entry)
            environment = {key: value for key, value in os.environ.items() if key != "DPOPT_DATA"}
            # The two processes work in turns: threads that spin while they wait would hold the other one's cores.
            environment |= {"PYTHONPATH": path, "OMP_WAIT_POLICY": "passive"}
            child = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)
        _nursery = os.getpid(), ours, child
        atexit.register(_end, ours, child)
    return _nursery[1]


def _end(control: socket.socket, child: subprocess.Popen[bytes]) -> None:
    control.close()
    child.terminate()
    child.wait()
