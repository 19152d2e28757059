"""The other side of `privacy.isolation`: the process in which an isolated optimizer runs. It never holds data.

    python -m dpopt.isolated DESCRIPTOR

waits on a socket for connections, and forks a process for each.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dpopt import registry
from dpopt.errors import ConfigError
from dpopt.privacy.calibration import trace
from dpopt.privacy.oracle import Asking, BudgetSpent, UnplannedRelease
from dpopt.privacy.wire import (
    Channel,
    Gone,
    Vectors,
    leaves_from,
    leaves_message,
    query_message,
    release_from,
)
from dpopt.types import Query, Release

REFUSALS = {kind.__name__: kind for kind in (BudgetSpent, UnplannedRelease)}


class RemoteOracle:
    """An oracle whose answers come from another process; see `Oracle`."""

    def __init__(self, channel: Channel, vectors: Vectors, public: dict[str, Any]) -> None:
        self._channel, self._vectors = channel, vectors
        self.dimension = vectors.dimension
        self.rate, self.expected_batch = public["rate"], public["expected_batch"]
        self.draws_total, self.draws_left = public["draws_total"], public["draws_left"]

    @contextmanager
    def draw(self) -> Iterator[_RemoteBatch]:
        self.told({"do": "draw"})
        try:
            yield _RemoteBatch(self, self._vectors)
        finally:
            self.told({"do": "close"})

    def told(self, message: dict[str, Any]) -> dict[str, Any]:
        """The other process's answer to a message.

        Raises:
            BudgetSpent, UnplannedRelease, ConfigError: what it refuses.
        """
        self._channel.send(message)
        answer, _ = self._channel.receive()
        self.draws_left = answer["draws_left"]
        if "refused" in answer:
            kind = REFUSALS.get(answer["refused"])
            raise kind(answer["because"]) if kind else ConfigError("query", message.get("kind"), answer["because"])
        return answer


class _RemoteBatch(Asking):
    def __init__(self, oracle: RemoteOracle, vectors: Vectors) -> None:
        self._oracle, self._vectors = oracle, vectors

    @torch.no_grad()
    def ask(self, query: Query) -> Release:
        return release_from(self._oracle.told(query_message(query, self._vectors)), self._vectors)


class _Session:
    """One optimizer's life."""

    def __init__(self, connection: socket.socket, file: int) -> None:
        self._channel, self._file = Channel(connection), file
        self._optimizer: Any = None
        self._state: Any = None
        self._vectors: Vectors | None = None

    def run(self) -> None:
        """Do as the other process says until it hangs up."""
        while True:
            message, payload = self._channel.receive(most=sys.maxsize)
            try:
                answer, content = getattr(self, f"_{message['do']}")(message, payload)
            except Gone:
                raise
            except ConfigError as error:
                answer, content = {"config": str(error)}, b""
            except BaseException:  # whatever the optimizer does, the other process is to know
                answer, content = {"failed": traceback.format_exc()}, b""
            self._channel.send(answer, content)

    def _make(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        sys.path[:] = message["path"]
        torch.set_num_threads(message["threads"])
        given = pickle.loads(payload)  # from the process that holds the data: it needs no code to harm this one
        self._optimizer = _made(given)
        clip = getattr(self._optimizer, "clip", None)
        return {
            "text": repr(self._optimizer),
            "noise_inflation": getattr(self._optimizer, "noise_inflation", None),
            "shares": dict(getattr(self._optimizer, "shares", {})),
            "sensitivity": None if clip is None else str(float(clip.sensitivity)),
        }, b""

    def _trace(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        return {"structure": trace(self._optimizer, rate=message["rate"], draws=message["draws"])}, b""

    def _init(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        self._vectors = Vectors(self._file, message["dimension"])
        self._state = self._optimizer.init(self._vectors.take(0, message["dtype"]))
        return self._fields(), b""

    def _load(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        _, structure = pytree.tree_flatten(self._state)
        self._state = pytree.tree_unflatten(leaves_from(message, payload), structure)
        return {}, b""

    def _step(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        assert self._vectors is not None
        self._state = self._optimizer.step(self._state, RemoteOracle(self._channel, self._vectors, message))
        return {"done": True, **self._fields()}, b""

    def _fetch(self, message: dict[str, Any], payload: bytes) -> tuple[dict[str, Any], bytes]:
        return leaves_message(pytree.tree_leaves(self._state))

    def _fields(self) -> dict[str, Any]:
        """Where the fields of the state lie among its tensors."""
        places, position = {}, 0
        for name in self._state._fields:
            count = len(pytree.tree_leaves(getattr(self._state, name)))
            if count == 1:
                places[name] = position
            position += count
        return {"fields": places}


def _made(given: Any) -> Any:
    if isinstance(given, str):
        return registry.create(given)
    return registry.from_spec("optimizer", given) if isinstance(given, dict) else given


def main(descriptor: int) -> None:
    """Fork a process for each connection that comes over the socket, until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C reaches all processes; the one that asks ends the others
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=descriptor) as control:
        while True:
            content, files, _, _ = socket.recv_fds(control, 1, 2)
            if not content:
                return
            if os.fork() == 0:
                control.close()
                _serve(*files)
            for file in files:
                os.close(file)


def _serve(connection: int, file: int) -> None:
    try:
        with socket.socket(fileno=connection) as opened:
            _Session(opened, file).run()
    except Gone:
        pass
    finally:
        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]))
