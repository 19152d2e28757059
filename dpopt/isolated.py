"""The other side of `privacy.isolation`: the process in which an isolated optimizer runs. It never holds data.

`python -m dpopt.isolated DESCRIPTOR` waits on a socket for connections, and forks a process for each.
"""

from __future__ import annotations

import math
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

import torch
from torch.utils import _pytree as pytree

from dpopt import registry
from dpopt.errors import ConfigError, cut
from dpopt.privacy.calibration import cost, trace
from dpopt.privacy.confinement import confine, hide_memory, of_python
from dpopt.privacy.oracle import Asking, BudgetSpent, UnplannedRelease
from dpopt.privacy.wire import Channel, IsolatedFailure, NotImportable
from dpopt.types import Query, Release, laid_out

_REFUSALS = {kind.__name__: kind for kind in (BudgetSpent, UnplannedRelease)}


class _RemoteOracle(Asking):
    """An oracle whose answers come from another process, and its own batch."""

    def __init__(self, channel: Channel, public: dict[str, Any]) -> None:
        self._channel, self._lock = channel, Lock()
        self.dimension, self.rate, self.expected_batch = (public[k] for k in ("dimension", "rate", "expected_batch"))
        self.layout = laid_out((name, shape, module) for name, shape, module, _ in public["layout"])
        self.draws_total, self.draws_left = public["draws_total"], public["draws_left"]

    @contextmanager
    def draw(self) -> Iterator[_RemoteOracle]:
        self._request(do="draw")
        try:
            yield self
        finally:
            self._request(do="close")

    @torch.no_grad()
    def ask(self, query: Query) -> Release:
        answer = self._request(do="ask", query=query)
        return Release(answer["value"], answer["std"])

    def _request(self, **message: Any) -> dict[str, Any]:
        with self._lock:  # threads are answered in turn
            self._channel.send(**message)
            answer = self._channel.receive(math.inf, math.inf)  # the trainer is trusted
        self.draws_left = answer["draws_left"]
        if "refused" in answer:
            kind, reason = _REFUSALS.get(answer["refused"]), answer["reason"]
            raise kind(reason) if kind else ConfigError("query", "isolated", reason)
        return answer


def _serve(channel: Channel) -> None:
    """The life of an optimizer, or of several one after the other: do as the other process says until it hangs up."""
    optimizer: Any = None
    state: Any = None
    is_confined = False
    while True:
        task = channel.receive(math.inf, math.inf)
        answer: dict[str, Any] = {}
        try:
            match task.pop("do"):
                case "make":
                    if not is_confined:
                        channel.imports = task["imports"]
                        _confine(task)
                        is_confined = True
                    optimizer = _make(task["content"])
                    clip = getattr(optimizer, "clip", None)
                    answer = {
                        "text": repr(optimizer),
                        "noise_inflation": getattr(optimizer, "noise_inflation", None),
                        "shares": dict(getattr(optimizer, "shares", {})),
                        "sensitivity": None if clip is None else float(clip.sensitivity),
                    }
                case "trace":
                    answer = {"structure": trace(optimizer, **task)}
                case "cost":
                    answer = {"cost": cost(optimizer)}
                case "spec":
                    answer = {"spec": registry.spec("optimizer", task["name"], optimizer)}
                case "init":
                    state = optimizer.init(task["theta"])
                    answer = {"places": _places(state)}
                case "load":
                    state = pytree.tree_unflatten(task["leaves"], pytree.tree_structure(state))
                case "step":
                    state = optimizer.step(state, _RemoteOracle(channel, task))
                    answer = {"places": _places(state)}
                case "fetch":
                    answer = {"leaves": pytree.tree_leaves(state)}
            channel.send(**answer)
        except IsolatedFailure:
            raise
        except ConfigError as error:
            channel.send(refused=str(error), importable=not isinstance(error, NotImportable))
        except BaseException:  # whatever the optimizer does, the other process is to know
            channel.send(failed=cut(traceback.format_exc(), 20_000))


def _confine(task: dict[str, Any]) -> None:
    """Give up all rights that imports do not need; only then may code of the optimizer run, which an import does."""
    sys.path[:] = task["path"]
    torch.set_num_threads(task["threads"])
    targets = [entry.target for entry in registry.entries("optimizer").values()] + task["modules"]
    confine(*of_python(sys.path, {target.partition(":")[0].partition(".")[0] for target in targets}))


def _make(pickled: torch.Tensor) -> Any:
    # It comes from the process that holds the data, which needs no code to harm this one.
    content = pickle.loads(bytes(pickled.numpy()))
    if isinstance(content, str):
        return registry.create(content)
    if type(content) is tuple:
        return registry.make("optimizer", *content)
    return registry.from_spec("optimizer", content) if isinstance(content, dict) else content


def _places(state: Any) -> dict[str, int]:
    """Place among the tensors of `state` of each of its fields that is one tensor."""
    places, position = {}, 0
    for name in state._fields:
        count = len(pytree.tree_leaves(getattr(state, name)))
        if count == 1:
            places[name] = position
        position += count
    return places


def main(descriptor: int) -> None:
    """Fork a process for each connection that comes over the socket, until it is closed."""
    hide_memory()  # of this process, which keeps its rights, from those that it forks
    torch.backends.cpu.get_cpu_capability()  # is read from files that they cannot open, and decides the last bits
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=descriptor) as control:
        while True:
            content, files, _, _ = socket.recv_fds(control, 1, 1)
            if not content:
                return
            if os.fork() == 0:
                control.close()
                try:
                    with suppress(IsolatedFailure):
                        _serve(Channel(socket.socket(fileno=files[0])))
                finally:
                    os._exit(0)
            os.close(files[0])


if __name__ == "__main__":
    main(int(sys.argv[1]))
