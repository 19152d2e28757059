"""The checkpoint of a run of `fit`: what tells it from another run, and its seeds for as long as they are needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dpopt.clipping import ClippingEngine
from dpopt.errors import ConfigError, Held, cut
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.plan import Plan
from dpopt.privacy.sampling import derive
from dpopt.store.leases import Lease
from dpopt.store.runs import read_checked, write_checked
from dpopt.training import checkpoint
from dpopt.training.checkpoint import Elapsed, Reached
from dpopt.training.subject import Subject
from dpopt.training.trial import unchanged
from dpopt.types import Vector

FILE, LEASE = "checkpoint.pt", "lease.json"
ALIKE = 1e-3
"""How far a model and a loss may be from what they were, relatively: devices and versions round differently."""


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

    Attributes:
        saved: what the file held; None where there is none.

    Raises:
        ConfigError: the file is damaged or another run's. It stays as it is.
    """

    def __init__(
        self, folder: str | Path | None, run: Mapping[str, Any], device: torch.device, is_writer: bool
    ) -> None:
        self._path = Path(folder, FILE) if folder is not None else None
        self._is_writer = is_writer
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
    def seeds(self) -> Seeds | None:
        """The run's seeds; None where it begins."""
        if self.saved is None:
            return None
        return Seeds(*(int(seed, 16) for seed in self.saved["seeds"])) if self.saved["seeds"] else Seeds(0, 0)

    @property
    def start(self) -> str | None:
        """The digest of the parameters that the run began with; None where it begins."""
        return self.saved["start"] if self.saved else None

    def reached(self, initial: Any, plan: Plan, subject: Subject, engine: ClippingEngine) -> Reached:
        """How far the run is; `initial` is the state before its first step.

        Raises:
            ConfigError: model, loss or transform are not those of the run, or its draws are not the plan's.
        """
        if self.saved is None:
            return Reached(initial, Ledger(), Elapsed(), [])
        try:
            reached = checkpoint.reached(self.saved, initial, plan)
            seen, before = behaviour(subject, engine, reached.state.theta), self.saved["seen"].cpu()
        except (ValueError, RuntimeError, AttributeError) as error:
            self._refuse(f"cannot go on ({cut(str(error))})")
        self.saved["leaves"] = []  # their memory is free when the first step is made
        if not self.saved["seeds"] and reached.ledger != plan.ledger:
            self._refuse("has no seeds")
        if seen.shape != before.shape or not torch.allclose(seen, before, ALIKE, ALIKE, equal_nan=True):
            self._refuse("differs in model, loss or transform")
        return reached

    def save(self, reached: Reached, seeds: Seeds | None, start: str, subject: Subject, engine: ClippingEngine) -> None:
        """Replace the file; without seeds the run has ended."""
        if self._path is None or not self._is_writer:
            return
        content = checkpoint.dump(
            reached,
            run=self._run,
            seeds=[f"{seed:032x}" for seed in seeds] if seeds else [],
            start=start,
            seen=behaviour(subject, engine, reached.state.theta),
        )
        write_checked(self._path, content, is_secret=True)


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


def behaviour(subject: Subject, engine: ClippingEngine, theta: Vector) -> Tensor:
    """The losses at `theta` of made-up records, by which another model, loss or transform is told; float64 [2].

    Empty where these cannot be run on such records.
    """
    with unchanged(subject.model, subject.device, training=False), suppress(Exception):
        x, y = (_made_up(part[:2]).to(subject.device) for part in subject.train)
        return subject.loss(engine.outputs(theta, subject.transform(x)), y).detach().double().cpu()
    return torch.empty(0, dtype=torch.float64)


def _made_up(like: Tensor) -> Tensor:
    """Records of the type and shape of `like` that say nothing of it: bytes, numbers from 0 to 1, or zeros."""
    if like.dtype != torch.uint8 and not like.is_floating_point():
        return torch.zeros_like(like)
    values = torch.arange(like.numel()).sin().abs().view(like.shape)
    return (values * (255 if like.dtype == torch.uint8 else 1)).to(like.dtype)
