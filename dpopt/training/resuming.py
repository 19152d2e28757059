"""The checkpoint of a run of `fit`: what tells it from another run, and its seeds for as long as they are needed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dpopt.clipping import ClippingEngine
from dpopt.clipping.flat import random_states
from dpopt.errors import ConfigError, Held, cut
from dpopt.files import read_checked, write_checked
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.plan import Plan
from dpopt.privacy.sampling import derive
from dpopt.store.leases import Lease
from dpopt.training import checkpoint
from dpopt.training.checkpoint import Elapsed, Reached
from dpopt.training.subject import Subject, made_up, unchanged
from dpopt.types import Vector

FILE, LEASE = "checkpoint.pt", "lease.json"
ALIKE = 1e-3
"""How far a behaviour may be from what it was, relatively: devices and versions round differently."""
Behaviour = dict[str, Tensor]
"""What two runs are compared by -> the numbers that it gives, float64 [n]; empty if it cannot be run on made-up
records."""


class Seeds(NamedTuple):
    """What draws and noise are made from."""

    draws: int
    noise: int


class Checkpoint:
    """The file from which a run goes on; it is replaced in one step, and its owner alone may read it.

    When the run has ended, the file holds its end without the seeds: the same call then gives the same result, and
    spends nothing.

    Args:
        folder: where the file is; None keeps none.
        run: what tells this run from others, as plain data; the file holds hashes of it.
        device: where the run's state is.
        is_writer: whether this process writes the file.
        behaviour: of what is trained, at parameters [d].

    Attributes:
        saved: what the file held; None where there is none.

    Raises:
        ConfigError: the file is damaged or another run's. It stays as it is.
    """

    def __init__(
        self,
        folder: str | Path | None,
        run: Mapping[str, Any],
        device: torch.device,
        is_writer: bool,
        behaviour: Callable[[Vector], Behaviour],
    ) -> None:
        self._path = Path(folder, FILE) if folder is not None else None
        self._is_writer, self._behaviour = is_writer, behaviour
        self._run = {name: f"{derive(part):032x}" for name, part in run.items()}
        self.saved = self._read(device)
        found = self.saved["run"] if self.saved else self._run
        if differs := [name for name, value in self._run.items() if found.get(name) != value]:
            self._refuse(f"differs in {', '.join(differs)}")

    def _read(self, device: torch.device) -> dict[str, Any] | None:
        if self._path is None:
            return None
        try:
            saved = checkpoint.parse(read_checked(self._path), device)
            Ledger.from_json(saved["ledger"])
            return {
                key: saved[key] for key in ("run", "seeds", "start", "seen", "leaves", "ledger", "elapsed", "curve")
            }
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever is wrong with the file
            how = "move it away to begin anew; what the run had spent is spent"
            raise ConfigError("checkpoint", str(self._path), f"damaged ({cut(str(error))}): {how}") from error

    def _refuse(self, problem: str) -> NoReturn:
        how = "give the arguments, the model and the data of that run, or another folder"
        raise ConfigError("checkpoint", str(self._path), f"it is another run's, which {problem}: {how}")

    @property
    def is_kept(self) -> bool:
        """Whether there is a file, or will be."""
        return self._path is not None

    @property
    def seeds(self) -> Seeds | None:
        """The run's seeds; None where it begins."""
        if self.saved is None:
            return None
        return Seeds(*(int(seed, 16) for seed in self.saved["seeds"])) if self.saved["seeds"] else Seeds(0, 0)

    @property
    def start(self) -> str | None:
        """The digest of the parameters that the run began with; None where it begins."""
        return self.saved["start"] if self.saved else None

    def reached(self, initial: Any, plan: Plan) -> Reached:
        """How far the run is; `initial` is the state before its first step.

        Raises:
            ConfigError: what is trained does not behave as in that run, or its draws are not the plan's.
        """
        if self.saved is None:
            return Reached(initial, Ledger(), Elapsed(), [])
        try:
            reached = checkpoint.reached(self.saved, initial, plan)
            behaviour = self._behaviour(reached.state.theta)
        except (ValueError, RuntimeError, AttributeError) as error:
            self._refuse(f"cannot go on ({cut(str(error))})")
        self.saved["leaves"] = []  # their memory is free when the first step is made
        if not self.saved["seeds"] and reached.ledger != plan.ledger:
            self._refuse("has no seeds")
        for name, now in behaviour.items():
            before = self.saved["seen"][name].cpu()
            if now.shape != before.shape or not torch.allclose(now, before, ALIKE, ALIKE, equal_nan=True):
                self._refuse(f"differs in {name}")
        return reached

    @contextmanager
    def told(self) -> Iterator[None]:
        """Have Ctrl-C say from which file the run goes on."""
        try:
            yield
        except KeyboardInterrupt:
            if self._path is None:
                raise
            how = "call `fit` again with the same arguments to go on from it"
            raise KeyboardInterrupt(f"the run is kept in {self._path}: {how}") from None

    def save(self, reached: Reached, seeds: Seeds | None, start: str) -> None:
        """Replace the file; without seeds the run has ended."""
        if self._path is None or not self._is_writer:
            return
        content = checkpoint.dump(
            reached,
            run=self._run,
            seeds=[f"{seed:032x}" for seed in seeds] if seeds else [],
            start=start,
            seen=self._behaviour(reached.state.theta),
        )
        try:
            write_checked(self._path, content, is_secret=True)
        except OSError as error:  # a full disk: what the file held before is there, and enough to go on from
            how = "make room and call `fit` again with the same arguments, to go on from the last checkpoint"
            raise ConfigError("checkpoint", str(self._path), f"cannot be written: {error.strerror}; {how}") from error


@contextmanager
def held(folder: str | Path | None, is_writer: bool) -> Iterator[None]:
    """The folder of a checkpoint belongs to this process for a while.

    Raises:
        ConfigError: it belongs to another, or cannot be written.
    """
    if folder is None or not is_writer:
        yield
        return
    try:
        lease = Lease(Path(folder, LEASE))
    except Held as error:
        how = f"{error}; if that is gone, remove {LEASE} there"
        raise ConfigError("checkpoint", str(folder), how) from error
    except OSError as error:
        raise ConfigError("checkpoint", str(folder), f"cannot be written: {error.strerror}") from error
    with lease:
        yield


@contextmanager
def put_off(is_wanted: bool) -> Iterator[threading.Event]:
    """Note Ctrl-C for a while and raise `KeyboardInterrupt` at the end of it; the second one is not put off.

    Not outside the main thread, which alone is told, nor where Ctrl-C means something else already.
    """
    noted = threading.Event()

    def note(number: int, frame: Any) -> None:
        if noted.is_set():
            raise KeyboardInterrupt
        noted.set()

    is_main = threading.current_thread() is threading.main_thread()
    if not (is_wanted and is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if noted.is_set():
        raise KeyboardInterrupt


def behaviour(subject: Subject, seen: Subject, engine: ClippingEngine, theta: Vector) -> Behaviour:
    """What transform, model and loss give on made-up records, by which other ones are recognised.

    Args:
        subject, seen: what is evaluated, and what the engine trains.
        engine: over `seen`.
        theta: parameters of the model, shape [d].
    """
    return {"transform or augment": seen.changed, "model or loss": losses_of(subject, engine, theta)}


def losses_of(
    subject: Subject, engine: ClippingEngine, theta: Vector, *, training: bool = False, seed: int = 0
) -> Tensor:
    """The losses at `theta` of two made-up records; float64 [2], empty where it cannot be run on such."""
    with unchanged(subject.model, subject.device, training), suppress(Exception):
        torch.manual_seed(seed)
        return _losses(subject, engine, theta).detach().double().cpu()
    return torch.empty(0, dtype=torch.float64)


def draws_random_numbers(subject: Subject, engine: ClippingEngine, theta: Vector) -> bool:
    """Whether the losses of two made-up records draw from torch's generators in training, whatever comes of it.

    Two records may show nothing of a dropout of one number in a thousand. Also true where it cannot be run on such.
    """
    with unchanged(subject.model, subject.device, training=True), suppress(Exception):
        before = random_states(subject.device)
        _losses(subject, engine, theta)
        return not all(map(torch.equal, before, random_states(subject.device)))
    return True


def _losses(subject: Subject, engine: ClippingEngine, theta: Vector) -> Tensor:
    x, y = (made_up(part[:2]).to(subject.device) for part in subject.train)
    return subject.loss(engine.outputs(theta, subject.transform(x)), y)
