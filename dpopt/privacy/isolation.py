"""Optimizers in a process of their own, which holds no data, model, engine or noise.

Queries go out and releases come back, so all that such an optimizer can do is ask, and what it may ask is in the plan.
Its process is forked from one that was started anew and has only imported libraries, and is confined before any code of
the optimizer runs. `docs/guide/isolation.md` says what each system prevents, and what none does.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import re
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from dpopt import markup
from dpopt.errors import ConfigError
from dpopt.privacy.confinement import hide_memory, landlock_version
from dpopt.privacy.oracle import BudgetSpent, OpenDraw, UnplannedRelease
from dpopt.privacy.wire import SENDS, TENSORS, Answer, Channel, IsolatedFailure, NotImportable
from dpopt.types import Vector

_LARGEST_STATE = 64
"""The most bytes of an optimizer's state, for each byte of its vectors."""
_REFUSALS = (BudgetSpent, UnplannedRelease, ConfigError)
"""The errors that are for an isolated optimizer to handle: it has asked for what it cannot have."""
_ENVIRONMENT = re.compile(
    r"PATH|LANG|LC_\w+|TZ|LD_LIBRARY_PATH|DYLD_LIBRARY_PATH|PYTHONHOME|PYTHONHASHSEED|"
    r"(OMP|KMP|MKL|ONEDNN|DNNL|OPENBLAS|ATEN)_\w+"  # they decide the last bits of what is computed
)
"""The variables that its process is given."""
_LOG = logging.getLogger(__name__)


@dataclass
class _IsolatedState:
    """The state of an isolated optimizer, which stays in its process until somebody looks; `number` is from 1."""

    optimizer: Isolated
    number: int
    fetched: list[Tensor] | None = None

    @property
    def leaves(self) -> list[Tensor]:
        if self.fetched is None:
            self.fetched = self.optimizer.fetch(self.number)
        return self.fetched

    def __getattr__(self, name: str) -> Tensor:
        if name not in self.optimizer.places:
            raise AttributeError(name)
        return self.leaves[self.optimizer.places[name]]


pytree.register_pytree_node(
    _IsolatedState,
    lambda state: (state.leaves, state.optimizer),
    lambda leaves, optimizer: _IsolatedState(optimizer, -1, list(leaves)),
)


class Isolated:
    """An optimizer that runs in a process of its own; used as any optimizer, from one thread.

    The numbers are those without isolation, bit for bit. Its process ends with `close`, or when nobody refers to this
    object. From the first such object on, this process hides its memory until it ends.

    Args:
        optimizer: its registered name, or (name, values of fields); a spec as `registry.spec` gives it; or an object,
            which has to be importable there. An object has already run code in this process; the others have not.
        imports: whether queries and clip rules that are not the kernel's may be imported and evaluated here, beside the
            data: for code that somebody has read.

    Attributes:
        noise_inflation, shares, clip: see `calibrate`; of the clip rule, only the sensitivity is here.
        places: name of each field of its state that is one tensor -> its place among all tensors.

    Raises:
        ConfigError: there is no such optimizer, or it cannot be built there; `NotImportable` if it cannot be imported.
    """

    def __init__(self, optimizer: Any, *, imports: bool = False) -> None:
        content = _pickled(optimizer)
        # Before the first process exists that could look at it.
        hide_memory()
        self._channel = Channel(_connect(), imports=imports)
        self.close = weakref.finalize(self, self._channel.close)
        self._theta, self._number = torch.empty(0), 0
        self.places: dict[str, int] = {}
        self._make(
            content,
            modules=[] if type(optimizer) in (str, tuple, dict) else [type(optimizer).__module__],
            path=[os.path.abspath(entry) for entry in sys.path if os.path.isabs(entry) or not entry],  # autodp adds ..
            threads=torch.get_num_threads(),
            imports=imports,
        )

    def remake(self, optimizer: Any) -> None:
        """Put another optimizer in the place of this one, in the same process; see the class for what it may be."""
        self._make(_pickled(optimizer))

    def _make(self, pickled: bytes, **first: Any) -> None:
        answer = self._ask(do="make", content=torch.frombuffer(bytearray(pickled), dtype=torch.uint8), **first)
        self._text, self.noise_inflation, self.shares = answer.text, answer.noise_inflation, answer.shares
        self.clip = None if answer.sensitivity is None else SimpleNamespace(sensitivity=answer.sensitivity)

    def __repr__(self) -> str:
        return markup.line(self._text)

    def trace(self, *, rate: float, draws: int) -> tuple[tuple[tuple[str, ...], int], ...]:
        """The kinds of release of every draw, run-length encoded; see `calibration.trace`."""
        structure = self._ask(do="trace", rate=rate, draws=draws).structure
        # Its word is checked, since the noise is solved for this structure.
        if (count := sum(count for _, count in structure)) != draws:
            raise ConfigError("optimizer", f"{count} draws", f"expected {draws}, as many as the plan holds")
        return tuple((tuple(kinds), count) for kinds, count in structure)

    def cost(self) -> tuple[float, float, float]:
        """See `calibration.cost`."""
        return self._ask(do="cost").cost

    def spec(self, name: str) -> dict[str, Any]:
        """See `registry.spec`."""
        return {**self._ask(do="spec", name=name).spec, "name": name}

    def init(self, theta: Vector) -> _IsolatedState:
        """The state before the first step; ConfigError if `theta` is not on the CPU."""
        if theta.device.type != "cpu":
            raise ConfigError("isolate", str(theta.device), "isolated optimizers run on the CPU")
        self._theta = theta
        return self._state(self._ask(do="init", theta=theta))

    def step(self, state: _IsolatedState, oracle: Any) -> _IsolatedState:
        if state.number != self._number:  # of a checkpoint
            self._ask(do="load", leaves=state.leaves)
        names = ("dimension", "layout", "rate", "expected_batch", "draws_total", "draws_left")
        self._channel.send(do="step", **{name: getattr(oracle, name) for name in names})
        with ExitStack() as stack:
            batch: OpenDraw | None = None
            while (message := self._answer()).do != "done":
                answer: dict[str, Any] = {}
                try:
                    if message.do == "draw":
                        batch = stack.enter_context(oracle.draw())
                    elif message.do == "close":
                        stack.pop_all().close()
                    elif batch is None or message.query is None:
                        raise UnplannedRelease("there is no draw to ask")
                    else:
                        release = batch.ask(message.query)
                        answer = {"value": release.value, "std": release.std}
                # Only what the optimizer may handle goes back: any other message could tell of the data.
                except _REFUSALS as error:
                    answer = {"refused": type(error).__name__, "reason": str(error)}
                self._channel.send(**answer, draws_left=oracle.draws_left)
        return self._state(message)

    def fetch(self, number: int) -> list[Tensor]:
        """The tensors of the latest state.

        Raises RuntimeError if another step has been made since, `IsolatedFailure` if they are no state.
        """
        if number != self._number:
            raise RuntimeError("only the latest state of an isolated optimizer can be fetched")
        self._channel.send(do="fetch")
        leaves = self._answer(2**16, 8 * _LARGEST_STATE * len(self._theta) + 2**20).leaves
        is_whole = len(leaves) > max(self.places.values())
        if not is_whole or (leaves[0].shape, leaves[0].dtype) != (self._theta.shape, self._theta.dtype):
            raise IsolatedFailure(f"{SENDS} a state without theta, or without its fields")
        return leaves

    def _state(self, answer: Answer) -> _IsolatedState:
        self.places, self._number = {**answer.places, "theta": 0}, self._number + 1
        return _IsolatedState(self, self._number)

    def _ask(self, **message: Any) -> Answer:
        self._channel.send(**message)
        return self._answer()

    def _answer(self, tensors: int = TENSORS, size: int = 0) -> Answer:
        answer = self._channel.receive(tensors, size or 8 * TENSORS * len(self._theta) + 2**10, Answer)
        if answer.refused:
            kind = ConfigError if answer.importable else NotImportable
            raise kind("optimizer", "isolated", markup.lines(answer.refused))
        if answer.failed:
            raise IsolatedFailure(markup.lines(answer.failed))
        return answer


def _pickled(optimizer: Any) -> bytes:
    try:
        # Importing the main module there would run the whole script once more.
        if type(optimizer).__module__ == "__main__":
            raise AttributeError("define it in a module: its own process cannot import the main one")
        return pickle.dumps(optimizer)
    except Exception as error:
        kind = NotImportable if isinstance(error, pickle.PicklingError | AttributeError) else ConfigError
        raise kind("optimizer", optimizer, f"it cannot be sent to a process of its own ({error})") from error


_LOCK = threading.Lock()
_nursery: tuple[int, socket.socket, subprocess.Popen[bytes]] | None = None
"""The process that forks those of optimizers, with its socket and the process that it belongs to."""


def _connect() -> socket.socket:
    global _nursery
    ours, theirs = socket.socketpair()
    with _LOCK, theirs:
        if _nursery is None or _nursery[0] != os.getpid() or _nursery[2].poll() is not None:
            control, descriptor = socket.socketpair()
            with descriptor:
                environment = {key: value for key, value in os.environ.items() if _ENVIRONMENT.fullmatch(key)}
                # The two processes work in turns: threads that spin while they wait would hold the other one's cores.
                environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_WAIT_POLICY": "passive"}
                # Started anew, not forked: it shares no memory with this process, and does not run its main module.
                child = subprocess.Popen(
                    [sys.executable, "-P", "-m", "dpopt.isolated", str(descriptor.fileno())],
                    pass_fds=[descriptor.fileno()],
                    env=environment,
                    start_new_session=True,
                )
            _nursery = os.getpid(), control, child
            atexit.register(child.terminate)
            if not landlock_version():
                _LOG.warning("isolate: without Landlock, the optimizer may open the files that this user may")
        socket.send_fds(_nursery[1], [b"n"], [theirs.fileno()])
    return ours
