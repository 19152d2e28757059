"""What a run of `fit` is to spend, and on what: the arguments that decide draws and noise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from dpopt.clipping import ClippingEngine
from dpopt.optimizers.averaged import averaged
from dpopt.optimizers.held import held
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.distributed import Processes, digest
from dpopt.privacy.plan import Plan
from dpopt.privacy.sampling import REVISION, derive, secret_seed
from dpopt.sizes import number_of_draws, sampling_rate
from dpopt.training.reading import repeats
from dpopt.training.resuming import Seeds, draws_random_numbers, losses_of
from dpopt.training.subject import Subject
from dpopt.training.unused import Unused
from dpopt.types import Optimizer


@dataclass(frozen=True)
class Goal:
    """Arguments of `fit`, see there, and what the loss never uses of the model that they are for."""

    optimizer: Optimizer
    epsilon: float
    delta: float
    epochs: float
    batch_size: float
    accountant: str
    precision: str
    seed: int | None
    average: float = 0.0
    multiplicity: int = 1
    unused: Unused = Unused()

    @property
    def stepper(self) -> Optimizer:
        """The optimizer, which leaves what is unused, with an average of its parameters where that is asked for."""
        return averaged(held(self.optimizer, self.unused.spans), self.average)

    def doubts(self, examples: int, train: Any) -> Iterator[str]:
        """Warnings for arguments that are allowed but rarely intended.

        Raises:
            ConfigError: batch size or epochs do not fit the number of records.
        """
        number_of_draws(self.epochs, self.batch_size, examples)
        sampling_rate(self.batch_size, examples)
        own = train.batch_size if isinstance(train, DataLoader) else None
        if own not in (None, self.batch_size):
            yield f"train: the loader's batch size {own} is not used, draws have {self.batch_size:g} on average"
        if self.epsilon == math.inf:
            return
        again, most = repeats(train)
        if again:
            yield (
                f"train: {again} of its {examples} records are others again, one of them {most} times in all: each is"
                " counted as one person's, and someone who is there k times is hidden k times less"
            )
        if self.seed is not None:
            yield (
                f"seed: whoever knows that it is {self.seed} can compute draws and noise again, so leave it out"
                " for a model that is to be released"
            )
        if self.delta > 1 / examples:
            yield (
                f"delta: {self.delta:g} is more than 1/N = {1 / examples:.2g}, which would allow to publish whole"
                " records; take a smaller one"
            )

    def plan(self, examples: int, dimension: int) -> Plan:
        """The calibrated noise."""
        return calibrate(
            self.optimizer,
            rate=sampling_rate(self.batch_size, examples),
            draws=number_of_draws(self.epochs, self.batch_size, examples),
            dimension=dimension,
            epsilon=self.epsilon,
            delta=self.delta,
            accountant=self.accountant,
        )

    def seeds(
        self,
        plan: Plan,
        subject: Subject,
        seen: Subject,
        engine: ClippingEngine,
        processes: Processes,
        how: Sequence[object],
    ) -> Seeds:
        """What draws and noise are made from, the same in all processes.

        Args:
            plan: the calibrated noise.
            subject: what is trained, at its first parameters.
            seen: the subject as the engine trains it, on views of the records where these are augmented.
            engine: over `seen`.
            processes: those that train together.
            how: what else decides which random numbers a layer draws: the engine's name, the physical batch.
        """
        source = processes.gather(secret_seed())[0] if self.seed is None else self.seed
        # Two runs that share their noise would cancel it: it depends on what tells them apart, loss and records too.
        losses = processes.gather(digest(losses_of(seen, engine, engine.theta)))[0]
        views = [] if seen is subject else [processes.gather(digest(seen.changed))[0]]
        apart = [*self._stated, plan.noise, len(subject.train.x), self.precision, self.multiplicity, losses, *views]
        in_training = [losses_of(seen, engine, engine.theta, training=True, seed=seed) for seed in (0, 1)]
        is_random = draws_random_numbers(seen, engine, engine.theta) or not torch.equal(*in_training)
        # One process decides: others may round differently. What random layers draw depends on their settings, and on
        # how a draw is cut into batches.
        is_random, told = processes.gather((is_random, digest(*in_training)))[0]
        if is_random:
            apart += [told, processes.size, *how]
        start = [digest(engine.theta), digest(seen.first.x), *subject.records]
        return Seeds(derive("draws", source), derive("noise", source, *apart, *start))

    def identity(self, subject: Subject) -> dict[str, Any]:
        """What tells a run's checkpoint from another's, as plain data; all records are read for it."""
        names = ("optimizer", "epsilon", "delta", "epochs", "batch_size", "accountant")
        digests = {"train": subject.records, **{name: digest(*split) for name, split in subject.held_out.items()}}
        splits = {"train": subject.train, **subject.held_out}
        return {
            **dict(zip(names, self._stated, strict=True)),
            "precision": self.precision,
            "seed": self.seed,
            "average": self.average,
            "multiplicity": self.multiplicity,
            "device": subject.device.type,
            "kernel": REVISION,
            "parameters": [
                [name.replace("_orig_mod.", ""), list(p.shape), str(p.dtype)]
                for name, p in subject.model.named_parameters()
                if p.requires_grad
            ],
            **{name: [digests[name], [list(part.shape) for part in split]] for name, split in splits.items()},
        }

    @property
    def _stated(self) -> list[Any]:
        return [repr(self.optimizer), self.epsilon, self.delta, self.epochs, self.batch_size, self.accountant]
