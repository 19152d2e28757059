"""One private training run of a model of one's own."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from torch import Tensor, nn

from dpopt import fields, registry
from dpopt.clipping import Loss
from dpopt.clipping.views import Multiplicity, refuse_mixing, refuse_sharing
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Count, Decay, Factor, Positive, Probability, Seed, Shown
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.sampling import send
from dpopt.training import trial
from dpopt.training.goal import Goal
from dpopt.training.inputs import Transform, placed
from dpopt.training.layout import Adapter, Layout
from dpopt.training.loop import Phases, resolve_device
from dpopt.training.reading import read
from dpopt.training.resuming import Checkpoint, behaviour, held
from dpopt.training.run import Callback, FitRun
from dpopt.training.subject import Subject
from dpopt.training.unused import unused
from dpopt.types import Optimizer

if TYPE_CHECKING:
    from dpopt.training.statement import Statement


Stepper = Annotated[
    Optimizer,
    Shown(
        "an optimizer of dpopt such as dpopt.create('dp_adam', lr=0.01); one of torch.optim is taken by"
        " dpopt.create('torch_optim', optimizer='torch.optim.Adam', lr=0.01)"
    ),
]
"""An optimizer object, as errors say it."""


@dataclass(frozen=True)
class FitResult:
    """What `fit` returns.

    Attributes:
        model: the trained model; the object that was passed in.
        record: what the run did, as plain data: privacy, sizes, metrics, times.
        ledger: every draw that was taken, with its noise.
        curve: one entry per evaluation: draws taken, learning rate where the optimizer finds one, metrics.
    """

    model: nn.Module
    record: dict[str, Any]
    ledger: Ledger
    curve: list[dict[str, Any]]

    def __repr__(self) -> str:
        names = [name for name in self.record if name in ("status", "epsilon", "delta", "draws") or "test_" in name]
        return f"FitResult({', '.join(f'{name}={self.record[name]!r}' for name in names)})"

    def statement(self, *, tuned: Sequence[str] | None = None) -> Statement:
        """What may be said of the run's privacy; `str` gives the text. See `Statement.of`."""
        from dpopt.training.statement import Statement

        return Statement.of(self.record, self.ledger, tuned)

    def save(self, folder: str | PathLike[str], *, tuned: Sequence[str] | None = None) -> Path:
        """Write all of it to a new folder; `dpopt.load` reads it again. See `dpopt.training.saved`."""
        from dpopt.training.saved import save

        return save(self, folder, tuned)


@fields.checked
def fit(
    model: nn.Module,
    loss: Loss,
    train: Any,
    *,
    optimizer: str | Stepper,
    epsilon: Bound,
    delta: Probability,
    epochs: Positive,
    batch_size: Factor,
    accountant: str = "pld",
    engine: str = "auto",
    precision: str = "float32",
    device: str | int | torch.device = "auto",
    seed: Seed | None = None,
    target: str | None = None,
    test: Any = None,
    transform: Transform | None = None,
    augment: Transform | None = None,
    multiplicity: Multiplicity = 1,
    average: Decay = 0.0,
    physical_batch: Count | Literal["auto"] = "auto",
    checkpoint: str | Path | None = None,
    callback: Callback | None = None,
    distributed: bool = False,
    isolate: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train `model` in place under (epsilon, delta)-differential privacy.

    Args:
        model: parameters with `requires_grad` are trained, all float32 or all float64; no layer may mix the examples of
            a batch. Models of Hugging Face, and adapters around them, are taken as they are.
        loss: (outputs [n, ...], targets [n, ...]) -> one loss per example [n]. Outputs that have `logits`, as those of
            Hugging Face, are handed over as these logits.
        train: records of one shape, without NaN and infinity, as

            - a pair (inputs, targets) of tensors, NumPy arrays or pandas objects of one index; arrays of `np.memmap`
              stay on disk;
            - a mapping or a pandas DataFrame of columns, or a Hugging Face `Dataset`;
            - whatever has a length and gives (input, target), or a mapping, for a number, such as a
              `torch.utils.data.Dataset`. It is read once into memory, so it must not change its records at random;
            - a `DataLoader`, whose data set is taken: draws are Poisson, so its batch size and its order do not count.

            Inputs with names are passed by name where the model's `forward` has arguments of these names; columns that
            hold one number each, and have other names, become one tensor [n, columns]. Real numbers and bytes are
            converted to the type of the model's parameters, batch by batch; class numbers [n] to int64. What does not
            fit on a GPU is sent there batch by batch.
        optimizer: a registered name or an optimizer.
        epsilon: target; infinity trains without noise through the same loop.
        delta: target, usually below 1/N.
        epochs: expected passes over the data; the number of draws is epochs N / B, rounded.
        batch_size: expected batch size B, any number from 1 to N; the sampling rate is B/N.
        accountant: see `dpopt.privacy.epsilon`.
        engine, precision: see `dpopt.clipping.engine`.
        device: "auto" takes CUDA where there is one.
        seed: None takes a new secret from the operating system that is kept nowhere (but see `checkpoint`), so draws
            and noise cannot be found out and the run cannot be repeated. A whole number decides draws, and with all
            other arguments the noise, for runs that are to be repeated. Epsilon does not protect against anyone who
            knows the seed. Runs of one seed on the same data share their draws: together they cost more than the sum of
            what each states.
        target: the name of the target where inputs and target have names; by default label, labels, target or y.
        test: data to evaluate on, as `train`; accuracy is added where the targets are class numbers, [n], and the
            outputs a score for each class, [n, classes].
        transform: a batch of inputs as they are stored, [n, ...] on the device, -> the model's inputs; for training and
            test data, so nothing random.
        augment: random changes to a batch of training inputs, [n, ...] after `transform`, drawn from torch's
            generators, to each record on its own: no mixup. They are new in each draw.
        multiplicity: number of augmented views of a record in a draw. The record's gradient is the mean over them and
            is clipped once (De et al. 2022), so privacy costs the same, and time and memory about as many times more.
        average: evaluate, and return, an average of the parameters after all steps. The weight of a step decays by this
            factor, say 0.99, for each step after it (see `Averaged`). It costs no privacy; 0 averages nothing.
        physical_batch: the most examples worked on at once; "auto" leaves it to the engine.
        checkpoint: a folder for the run's checkpoint, which is written before the first draw, about once a minute, and
            at Ctrl-C, which waits for the step in progress; a second one does not. A run that was killed goes on from
            there when `fit` is called again with the same arguments, and ends as it would have ended, bit for bit; the
            trained parameters are the checkpoint's, whatever the model's are. The file holds the run's seeds until the
            run has ended. After that the same call gives the same result, and spends nothing. Keep the folder as secret
            as the data.
        callback: called with each entry of the curve, in the first of several processes; the checkpoint is written
            before. An error that it raises ends the run.
        distributed: train together with the other processes of `torch.distributed`'s default group, each on its own
            device, so that a batch takes as many times less time and memory. All call `fit` with the same arguments, on
            models with the same parameters. What is released does not depend on how many there are, to rounding (see
            `physical_batch` of `DataOracle`), and neither does what it costs.
        isolate: run the optimizer in a process of its own that holds no data, for one that nobody has read; give it by
            its name, as an object has already run code here. On the CPU; the numbers are the same.
        progress: show what is being done, from the first second.

    Returns:
        The model, the record, the ledger and the curve; the same in each of several processes but for times.

        The record's status is "done", "diverged" (parameters are not finite, or outputs for test records: these count
        as wrong, and `test_unscored` says how many there are) or "no_signal": no record that was looked at had a finite
        loss and a finite gradient other than zero, or the parameters are as they were. The budget is spent in each
        case. Before training, model, loss and data are tried on some records without noise (see
        `dpopt.training.trial`); that there is an error, a warning or "no_signal" is not covered by epsilon.

    Raises:
        ConfigError: before training starts: an argument cannot be used, processes differ in one, or the checkpoint is
            damaged or belongs to another run.
        RuntimeError: the processes came to different parameters, or one of them is gone.

    Warns:
        UserWarning: before training starts: there is nothing to learn; the loss does not use some parameters; the seed
            is known; delta is above 1/N; a loader's batch size is another one.
    """
    checkpoint = None if checkpoint is None else fields.path(checkpoint, "checkpoint")
    if multiplicity > 1 and augment is None:
        raise ConfigError("multiplicity", multiplicity, "the views of a record would be the same: give `augment`")
    processes, place = _processes(distributed), resolve_device(device)
    chosen = Isolated(optimizer) if isolate else _optimizer(optimizer)
    goal = Goal(
        chosen,
        epsilon=epsilon,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        accountant=accountant,
        precision=precision,
        seed=seed,
        average=average,
        multiplicity=multiplicity,
    )
    is_first = processes.is_first
    with Phases(progress and is_first) as phases, processes.together() as settle, held(checkpoint, is_first):
        phases.begin("reading the data")
        subject = _subject(model, loss, train, test, target=target, transform=transform, device=place)
        examples = len(subject.train.x)
        for doubt in goal.doubts(examples, train):
            warnings.warn(doubt, stacklevel=3)
        phases.begin("trying the model")
        subject = trial.tried(subject)
        if transform:
            some = send(subject.train.x[:8], place)
            refuse_mixing(transform, some, "transform")
            refuse_sharing(transform, some, "transform")
        seen = trial.augmented(subject, augment, multiplicity) if augment else subject
        size = None if physical_batch == "auto" else min(physical_batch, examples)
        clipper, problem = trial.clipping_engine(seen, engine, min(batch_size, size or batch_size), precision)
        goal = replace(goal, unused=unused(seen, subject.train, place, model))
        known = goal.identity(subject) if checkpoint is not None else {}
        told = partial(behaviour, subject, seen, clipper)
        file = Checkpoint(checkpoint, known, place, processes.is_first, told)
        phases.begin("calibrating the noise")
        plan = goal.plan(examples, clipper.dimension)
        if goal.unused.warning:
            warnings.warn(goal.unused.warning, stacklevel=3)
        if problem:
            warnings.warn(f"{problem}: training spends its epsilon and learns nothing", stacklevel=3)
        if file.start not in (None, digest(clipper.theta)):
            warnings.warn("model: its run began with other parameters, and goes on from its checkpoint's", stacklevel=3)
        settle()
        run = FitRun.of(
            goal,
            subject,
            seen,
            clipper,
            plan,
            file,
            callback,
            processes=processes,
            engine_name=engine,
            physical_batch=size,
        )
        end = run.train(phases)
        done = run.finish(end, teaches=not problem)
    name = optimizer if isinstance(optimizer, str) else repr(optimizer)
    record = {"optimizer": name, **done, "isolated": isolate}
    return FitResult(model, record, end.ledger, end.curve)


def _processes(distributed: bool) -> Processes:
    processes = Processes.of_group() if distributed else ALONE
    if distributed and processes is ALONE:
        raise ConfigError("distributed", True, "call torch.distributed.init_process_group before, in each process")
    return processes


def _optimizer(given: str | Optimizer) -> Optimizer:
    """The optimizer that `fit` is given, or the registered one of that name."""
    chosen = registry.create(given) if isinstance(given, str) else given
    try:
        hash(chosen)
    except TypeError as error:
        raise ConfigError("optimizer", type(chosen).__name__, f"expected a frozen dataclass ({error})") from error
    return chosen


def _subject(
    model: nn.Module,
    loss: Loss,
    train: Any,
    test: Any,
    *,
    target: str | None,
    transform: Transform | None,
    device: torch.device,
) -> Subject:
    """Read the data for a model of which nothing is known, and bring both to the device.

    Raises:
        ConfigError: see `reading.read`, `Layout` and `trial.check_model`.
    """
    trial.check_model(model)
    records = read(train, "train", target)
    layout = Layout.of(records.inputs, model, "train")
    if transform and layout.fields:
        names = ", ".join(layout.names)
        raise ConfigError("transform", trial.named(transform), f"inputs have names ({names}): change them in the data")
    splits = {"train": layout.split(records, "train")}
    del records  # its memory is free while the rest is read
    if test is not None:
        splits["test"] = layout.split(read(test, "test", target), "test")

    def prepared(x: Tensor) -> Tensor:
        # What changes its argument in place must not change the records.
        return layout.converted(transform(x.clone()) if transform else x)

    with trial.refused("model", type(model).__name__, f"moving it to {device}"):
        model.to(device)
    there = {name: placed(split, device) for name, split in splits.items()}
    taken = Adapter(model, layout) if layout.fields else model
    return Subject(taken, loss, there.pop("train"), there, prepared, layout, device)
