"""Checkpoints: state, ledger, curve and times of a run as bytes, for cells and for `fit`; and the file of `fit`.

That file also holds the run's seeds, for as long as they are needed, and what tells the run from another one.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from dpopt.clipping.names import plain
from dpopt.errors import ConfigError, Held, cut
from dpopt.files import read_checked, write_checked
from dpopt.privacy.distributed import digest
from dpopt.privacy.ledger import Ledger, Plan
from dpopt.privacy.sampling import derive
from dpopt.store.leases import LEASE, Lease

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""The part of a printed object that is another one in each process."""


class Elapsed(NamedTuple):
    """Seconds on the clock, and seconds that this process has computed: what a run takes where it has a core alone."""

    wall: float = 0.0
    cpu: float = 0.0

    @classmethod
    def now(cls) -> Elapsed:
        return cls(time.perf_counter(), time.process_time())

    def since(self, begin: Elapsed) -> Elapsed:
        """The sum of this time and that from `begin` to now."""
        now = Elapsed.now()
        return Elapsed(self.wall + now.wall - begin.wall, self.cpu + now.cpu - begin.cpu)


class Reached(NamedTuple):
    """The progress of a run: its state, the ledger of its draws, what it has taken, and its curve up to here."""

    state: Any
    ledger: Ledger
    elapsed: Elapsed
    curve: list[dict[str, Any]]


def dump(reached: Reached, **more: Any) -> bytes:
    """A checkpoint's content; `more` is what else it holds, as tensors and plain data."""
    content = {
        "leaves": pytree.tree_leaves(reached.state),
        "ledger": reached.ledger.to_json(),
        "elapsed": tuple(reached.elapsed),
        "curve": json.dumps(reached.curve),
        **more,
    }
    file = io.BytesIO()  # written as bytes, a full disk is an OSError
    torch.save(content, file)
    return file.getvalue()


def parse(content: bytes, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint, its tensors on `device`; nothing but tensors and plain data is read."""
    return torch.load(io.BytesIO(content), weights_only=True, map_location=device)


def reached(saved: dict[str, Any], initial: Any, plan: Plan) -> Reached:
    """The progress of the run that left `saved`, as `parse` gives it; `initial` is the state before the first step.

    Raises:
        ValueError: `saved` is not the beginning of a run of this plan.
    """
    taken = Ledger.from_json(saved["ledger"], plan.ledger.unit)  # of an earlier version it says none
    if not plan.ledger.starts_with(taken):
        raise ValueError(f"its {taken} is not how the planned {plan.ledger} begins")
    state = pytree.tree_unflatten(saved["leaves"], pytree.tree_structure(initial))
    return Reached(state, taken, Elapsed(*saved["elapsed"]), json.loads(saved["curve"]))


class Checkpoint:
    """The file from which a run of `fit` goes on; it is replaced in one step, and its owner alone may read it.

    It lies in `folder` (None keeps none) and holds hashes of `run`: the arguments that tell this run from others. A
    file that is damaged or another run's stays as it is, and is refused by `ConfigError`.
    """

    def __init__(self, folder: Path | None, run: Mapping[str, Any], device: torch.device, is_writer: bool) -> None:
        self.path = Path(folder, "checkpoint.pt") if folder is not None else None
        self._is_writer = is_writer
        # Hashes, as the folder may be copied to where the data must not be.
        self._run = {name: f"{derive(part):032x}" for name, part in run.items()}
        self.saved: dict[str, Any] | None = None
        self.seeds: tuple[int, int] | None = None  # of draws and of noise; None before the run has begun
        self.start: str | None = None  # the digest of the parameters that it began with
        self.grid = True  # of releases; a run that began before there was one ends without it
        self.has_ended = False  # no draw is taken any more, be there some left
        if self.path is None:
            return
        try:
            saved = parse(read_checked(self.path), device)
            Ledger.from_json(saved["ledger"])
            self.grid = "grid" in saved
            self.saved = {key: saved[key] for key in ("run", "seeds", "start", "leaves", "ledger", "elapsed", "curve")}
        except FileNotFoundError:
            return
        except Exception as error:  # whatever is wrong with the file
            how = "move it away to begin anew; what the run had spent is spent"
            raise ConfigError("checkpoint", str(self.path), f"damaged ({cut(str(error))}): {how}") from error
        # Compared one by one, so that the error names the argument that differs.
        if differs := [name for name, value in self._run.items() if self.saved["run"].get(name) != value]:
            self._refuse(f"differs in {', '.join(differs)}")
        self.has_ended = not self.saved["seeds"]
        draws, noise = self.saved["seeds"] or ("0", "0")
        self.seeds = int(draws, 16), int(noise, 16)
        self.start = self.saved["start"]

    def _refuse(self, problem: str) -> NoReturn:
        how = "give the arguments, the model and the data of that run, or another folder"
        raise ConfigError("checkpoint", str(self.path), f"it is another run's, which {problem}: {how}")

    def reached(self, initial: Any, plan: Plan) -> Reached:
        """The progress of the run; ConfigError if its draws are not the plan's."""
        if self.saved is None:
            return Reached(initial, Ledger(), Elapsed(), [])
        try:
            there = reached(self.saved, initial, plan)
        except (ValueError, RuntimeError) as error:
            self._refuse(f"cannot go on ({cut(str(error))})")
        self.saved["leaves"] = []  # their memory is free when the first step is made
        return there

    def save(self, there: Reached, *, has_ended: bool = False) -> None:
        """Replace the file, which stays as it is if it cannot be written (ConfigError)."""
        if self.path is None or not self._is_writer or self.seeds is None:
            return
        # Whoever has the seeds can take the noise away, so they go as soon as nothing needs them.
        seeds = [] if has_ended else [f"{seed:032x}" for seed in self.seeds]
        grid = {"grid": True} if self.grid else {}
        content = dump(there, run=self._run, seeds=seeds, start=self.start, **grid)
        try:
            write_checked(self.path, content, is_secret=True)
        except OSError as error:  # a full disk: the file as it was is enough to go on from
            how = "make room and call `fit` again with the same arguments, to go on from the last checkpoint"
            raise ConfigError("checkpoint", str(self.path), f"cannot be written: {error.strerror}; {how}") from error


def fingerprint(value: Any, depth: int = 5) -> Any:
    """Plain data by which a model, a loss or another argument that is code is recognised, the same in each process.

    A model is its layers, their code and settings, and all tensors that are not trained; a function is its bytecode,
    constants, defaults and what it closes over; any other object is its class, that class's code, and its attributes.
    What lies deeper than `depth` is its `repr`.
    """
    if isinstance(value, Tensor):
        return [str(value.dtype), list(value.shape), digest(value)]
    if isinstance(value, nn.Module):  # compiled or not
        layers = {plain(name): each for name, each in value.named_modules()}
        frozen = [*value.buffers(), *(part for part in value.parameters() if not part.requires_grad)]
        kinds = [_code(kind) for kind in dict.fromkeys(map(type, layers.values()))]
        return [fingerprint(frozen), {name: _layer(each) for name, each in layers.items()}, kinds]
    if isinstance(value, CodeType):
        return [value.co_code.hex(), list(value.co_names), [fingerprint(each) for each in value.co_consts]]
    if isinstance(value, Mapping | list | tuple | set | frozenset) and depth:
        items = [fingerprint(each, depth - 1) for each in (value.items() if isinstance(value, Mapping) else value)]
        return items if isinstance(value, list | tuple) else sorted(map(str, items))
    if isinstance(value, partial):
        return fingerprint([value.func, value.args, value.keywords], depth)
    if isinstance(value, MethodType):
        return fingerprint([value.__func__, value.__self__], depth)
    if isinstance(value, FunctionType) and depth:
        # Two functions of one line of code may differ in what they close over.
        around = [cell.cell_contents for cell in value.__closure__ or ()]
        return fingerprint(
            [value.__qualname__, value.__code__, value.__defaults__, value.__kwdefaults__, around], depth
        )
    if not isinstance(value, type) and hasattr(value, "__dict__") and depth:
        return fingerprint([type(value).__qualname__, _code(type(value)), vars(value)], depth - 1)
    return _ADDRESS.sub("", repr(value))


def _layer(layer: nn.Module) -> Any:
    settings = {name: each for name, each in vars(layer).items() if isinstance(each, str | float | int)}
    settings = {name: each for name, each in settings.items() if not name.startswith("_") and name != "training"}
    code = None if type(layer).__module__.startswith("torch.") else type(layer).forward
    return [type(layer).__qualname__, _ADDRESS.sub("", layer.extra_repr()), fingerprint(settings), fingerprint(code)]


def code_of(value: Any) -> dict[str, Any]:
    """The code of a dataclass, such as an optimizer, and of those in its fields, but of torch's and ours."""
    pieces = _code(type(value))
    for field in fields(value) if is_dataclass(value) and not isinstance(value, type) else ():
        pieces |= code_of(getattr(value, field.name))
    return pieces


def _code(kind: type) -> dict[str, Any]:
    """The bytecode of a class's and its bases' functions, and their plain values; but of torch's classes and ours."""
    pieces: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] in ("builtins", "typing", "torch", "dpopt"):
            continue
        for name, each in vars(base).items():
            function = each.fget if isinstance(each, property) else each
            function = function.__func__ if isinstance(function, classmethod | staticmethod) else function
            if isinstance(function, FunctionType):
                code = getattr(inspect.unwrap(function), "__code__", None)
                pieces[f"{base.__qualname__}.{name}"] = fingerprint(code)
            elif isinstance(each, str | int | float) and not name.startswith("_"):
                pieces[f"{base.__qualname__}.{name}"] = each
    return pieces


def leased(folder: Path) -> Lease:
    """A lease on the folder of a checkpoint; ConfigError if another process has it."""
    try:
        return Lease(folder / LEASE).take()
    except Held as error:
        how = f"{error}; if that is gone, remove {LEASE} there"
        raise ConfigError("checkpoint", str(folder), how) from error
    except OSError as error:
        raise ConfigError("checkpoint", str(folder), f"cannot be written: {error.strerror}") from error


@contextmanager
def put_off(path: Path | None) -> Iterator[threading.Event]:
    """Note Ctrl-C and raise `KeyboardInterrupt` at the end; the second one, or one without a file, is not put off."""
    noted = threading.Event()

    def note(number: int, frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    # Python runs signal handlers in the main thread alone.
    is_main = threading.current_thread() is threading.main_thread()
    if not (path and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield noted
        return
    how = f"the run is kept in {path}: call `fit` again with the same arguments to go on from it"
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    except KeyboardInterrupt:
        raise KeyboardInterrupt(how) from None
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if noted.is_set():
        raise KeyboardInterrupt(how)
