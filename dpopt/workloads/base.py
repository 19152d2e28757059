"""A workload: three splits of real or synthetic records, a model, a loss and a metric."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpopt.errors import ConfigError, Missing
from dpopt.fields import Checked
from dpopt.privacy.sampling import derive
from dpopt.workloads.metrics import classification_report

Predict = Callable[[Tensor], Tensor]
"""Any number of inputs [n, ...] as they are stored -> a trained model's outputs [n, ...], on the inputs' device."""


EVALUATION_BATCH = 2048
"""Records that are evaluated at once."""


class Split(NamedTuple):
    """Inputs [n, ...] and targets [n] of one split."""

    x: Tensor
    y: Tensor


class Splits(NamedTuple):
    """Training records are what the privacy guarantee covers; selection looks at `validation`, tables at `test`."""

    train: Split
    validation: Split
    test: Split


class Outline(NamedTuple):
    """The shapes of a workload, on the meta device: what can be counted before there are data or weights."""

    model: nn.Module  # its trained parameters require gradients
    record: Split  # one record as the model takes it, x [1, ...] and y [1, ...]
    tested: int  # records of the test split; a workload may look at some of them only


@dataclass(frozen=True)
class Workload(Checked):
    """A supervised task. A subclass says how many records there are, how to load them, and the model.

    Args:
        validation: records taken out of the training pool for selection; 0 trains on all of it and forbids tuning.

    Attributes:
        pool: number of records that training and validation share; public.
        batch_size: expected batch size B of a suite that names none.
        epochs: passes over the training data of a suite that names none.
        clip: clipping bound C of a suite that names none.
        marks: entries of a run's curve.
        evaluation_batch: records that are evaluated at once; fewer where one takes much memory.
        multiplicity: augmented views of a record in a draw; its gradient is the mean over them, see `clipping.views`.
        shares_randomness: True if records share random numbers that `augment` draws; a draw is then one physical batch
            of one process.
        classes: of a classifier, the number of classes, which `report` wants to know; 0 for another task.
        score: what `metric` measures, in lower case with underscores; names that end in "accuracy" are shares and shown
            as percentages.
        revision: part of every result's identity; raise it when the same fields may give other data or another model.
    """

    validation: int = 0

    pool: ClassVar[int]
    batch_size: ClassVar[int]
    epochs: ClassVar[float]
    clip: ClassVar[float] = 1.0
    marks: ClassVar[int] = 40
    evaluation_batch: ClassVar[int] = EVALUATION_BATCH
    multiplicity: ClassVar[int] = 1
    # In a part of a draw, who else is in the draw would decide which numbers a record gets.
    shares_randomness: ClassVar[bool] = False
    classes: ClassVar[int] = 0
    score: ClassVar[str] = "accuracy"
    revision: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.validation < self.pool:
            raise ConfigError("workload.validation", self.validation, f"expected 0 to {self.pool - 1}")

    @property
    def examples(self) -> int:
        """Number N of training records; public."""
        return self.pool - self.validation

    @property
    def is_public(self) -> bool:
        """True where dpopt brings the data. Of others it is not known if results may tell of one record."""
        from dpopt.workloads.data import catalogue  # the package of which imports this file

        name = getattr(self, "data", "")
        is_own = bool(name) and bool(catalogue.entry(name).origin)
        return type(self).__module__.startswith("dpopt.") and not is_own

    def check(self) -> None:
        """Raise `ConfigError` now if the fields do not go together; cheap, and needs neither data nor weights."""

    def missing(self) -> list[Missing]:
        """Data and weights that are not on this machine, and how to get them; cheap, asks no hub."""
        return []

    def outline(self) -> Outline:
        """Its shapes. A workload whose `load` or `model` reads files gives them without these.

        Raises:
            ConfigError: they cannot be told before the files are there.
        """
        pool, test = self.load()
        with torch.random.fork_rng(devices=[]):
            x, model = self.augment(self.transform(pool.x[:1])), self.model()
        return Outline(model.to("meta"), Split(x.to("meta"), pool.y[:1].to("meta")), len(test.x))

    def load(self) -> tuple[Split, Split]:
        """The pool of training and validation records, and the test split.

        Raises:
            ConfigError: the data are missing or not what they should be.
        """
        raise NotImplementedError

    def read(self, new: Any) -> Tensor:
        """New records of a user's, such as a data frame, a CSV file or a folder of images -> inputs as `load` has them.

        Raises:
            ConfigError: the workload takes tensors alone, or these are not what it takes.
        """
        raise ConfigError("x", type(new).__name__, f"expected a tensor of inputs as {type(self).__name__} loads them")

    def transform(self, x: Tensor) -> Tensor:
        """Inputs [n, ...] as `load` stores them -> as the model takes them, on the device that trains it."""
        return x

    def augment(self, x: Tensor) -> Tensor:
        """Random changes to training inputs [n, ...], after `transform`, to each record on its own.

        Draws from torch's global generators: for each record, or for all of them where `shares_randomness` says so.
        """
        return x

    def model(self) -> nn.Module:
        """The model; initialised from torch's global generator."""
        raise NotImplementedError

    def unfilled(self) -> nn.Module:
        """A model whose state is to be overwritten; needs no records."""
        return self.model()

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """One loss per example, shape [n]."""
        return F.cross_entropy(output, target, reduction="none")

    def metric(self, output: Tensor, target: Tensor) -> Tensor:
        """One number per example, shape [n], higher is better; its mean is the `score` that tuning selects by."""
        return accuracy(output, target)

    def report(self, predict: Predict, split: Split) -> dict[str, Any]:
        """Further scores of the trained model on `split`, by name, as plain data; nothing is selected by them.

        Numbers become columns of tables; anything else stays in the run's record.
        """
        return classification_report(predict(split.x), split.y, self.classes) if self.classes else {}

    def splits(self, seed: int) -> Splits:
        """The three splits; which records are held out for validation depends on `seed` alone."""
        pool, test = self.load()
        if not self.validation:  # a copy would take the memory of the whole pool, which may be mapped from a file
            return Splits(pool, Split(pool.x[:0], pool.y[:0]), test)
        order = np.random.default_rng(derive("split", type(self).__name__, seed)).permutation(self.pool)
        # Sorted, as memory that is mapped from a file is read fastest in its order.
        rows = torch.from_numpy(np.sort(order[self.validation :]))
        held_out = torch.from_numpy(np.sort(order[: self.validation]))
        return Splits(Split(pool.x[rows], pool.y[rows]), Split(pool.x[held_out], pool.y[held_out]), test)


def outlined(make: Callable[[], nn.Module], shape: tuple[int, ...], tested: int) -> Outline:
    """The outline of the classifier that `make` gives, for float32 inputs of this shape."""
    with torch.device("meta"):
        return Outline(make(), Split(torch.empty(1, *shape), torch.empty(1, dtype=torch.int64)), tested)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """1 where all outputs are finite and the largest is the target's, else 0; shape [n]."""
    return ((output.argmax(dim=-1) == target) & output.isfinite().all(dim=-1)).double()


def mlp(*sizes: int, bias: bool = True) -> nn.Sequential:
    """A ReLU network with the given layer sizes."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs, bias=bias), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *layers[:-1])
