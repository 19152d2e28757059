"""One private training run of a model of one's own."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpopt import __version__, clipping, fields, registry
from dpopt.clipping import Loss
from dpopt.clipping.recording import Unsupported
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Count, Factor, Positive, Probability, Seed
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.sampling import derive, secret_seed
from dpopt.training import trial
from dpopt.training.inputs import Transform, as_float, as_split, sample
from dpopt.training.loop import (
    Metric,
    number_of_draws,
    observe,
    progress_bar,
    resolve_device,
    sampling_rate,
    steps,
    summary,
)
from dpopt.types import Optimizer
from dpopt.workloads.base import Split, accuracy

GUARANTEE = {"adjacency": "add or remove one record", "unit": "record", "sampling": "Poisson"}
"""What epsilon and delta are about, in words of the record."""


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


@fields.checked
def fit(
    model: nn.Module,
    loss: Loss,
    train: Any,
    *,
    optimizer: str | Optimizer,
    epsilon: Bound,
    delta: Probability,
    epochs: Positive,
    batch_size: Factor,
    accountant: str = "pld",
    engine: str = "auto",
    precision: str = "float32",
    device: str | int | torch.device = "auto",
    seed: Seed | None = 0,
    test: Any = None,
    transform: Transform | None = None,
    physical_batch: Count | Literal["auto"] = "auto",
    distributed: bool = False,
    isolate: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train `model` in place under (epsilon, delta)-differential privacy.

    Args:
        model: parameters with `requires_grad` are trained, all float32 or all float64; no layer may mix the examples of
            a batch.
        loss: (outputs [n, ...], targets [n, ...]) -> one loss per example [n].
        train: a `torch.utils.data.Dataset` of (input, target), a Hugging Face `Dataset` with two columns, one of them
            named label, labels, target or y, or a pair of tensors or arrays. Bytes apart, nothing is converted.
        optimizer: a registered name or an optimizer.
        epsilon: target; infinity trains without noise through the same loop.
        delta: target, usually below 1/N.
        epochs: expected passes over the data; the number of draws is epochs N / B, rounded.
        batch_size: expected batch size B, any number from 1 to N; the sampling rate is B/N.
        accountant: see `dpopt.privacy.epsilon`.
        engine, precision: see `dpopt.clipping.engine`.
        device: "auto" takes CUDA where there is one.
        seed: a whole number decides draws, and with all other arguments the noise. Keep it secret if the model is to be
            published, and take another for each run on the same data: runs of one seed share their draws, and what they
            cost together is then more than the sum of what each states. None takes a new secret from the operating
            system that is kept nowhere, so draws and noise cannot be found out and the run cannot be repeated.
        test: data to evaluate on, as `train`; accuracy is added where the targets are class numbers, [n], and the
            outputs a score for each class, [n, classes].
        transform: a batch of inputs as they are stored, [n, ...] on the device, -> the model's inputs; for training and
            test data, so nothing random. By default bytes become floats.
        physical_batch: the most examples worked on at once; "auto" leaves it to the engine.
        distributed: train together with the other processes of `torch.distributed`'s default group, each on its own
            device, so that a batch takes as many times less time and memory. All call `fit` with the same arguments, on
            models with the same parameters. What is released does not depend on how many there are, to rounding (see
            `physical_batch` of `DataOracle`), and neither does what it costs.
        isolate: run the optimizer in a process of its own that holds no data, for one that nobody has read; give it by
            its name, as an object has already run code here. On the CPU; the numbers are the same.
        progress: show a progress bar.

    Returns:
        The model, the record, the ledger and the curve; the same in each of several processes but for times.

        The record's status is "done", "diverged" (the parameters are not finite) or "no_signal": no record that was
        looked at had a finite loss and a finite gradient other than zero, or the parameters are as they were. The
        budget is spent in each case. Before training, model, loss and data are tried on some records without noise (see
        `dpopt.training.trial`); that there is an error, a warning or "no_signal" is not covered by epsilon.

    Raises:
        ConfigError: before training starts, for anything that cannot be used, or in which processes differ.
        RuntimeError: the processes came to different parameters, or one of them is gone.

    Warns:
        UserWarning: there is nothing to learn from, before training starts.
    """
    processes = Processes.of_group() if distributed else ALONE
    if distributed and processes is ALONE:
        raise ConfigError("distributed", True, "call torch.distributed.init_process_group before, in each process")
    chosen, place = Isolated(optimizer) if isolate else _optimizer(optimizer), resolve_device(device)
    data = as_split(train, "train", place)
    held_out = {"test": as_split(test, "test", place)} if test is not None else {}
    transform = transform or as_float
    rate, draws = sampling_rate(batch_size, len(data.x)), number_of_draws(epochs, batch_size, len(data.x))
    size = None if physical_batch == "auto" else min(physical_batch, len(data.x))
    source = processes.gather(secret_seed())[0] if seed is None else seed
    metric = _tried(model, loss, data, held_out.get("test"), transform, place)
    first, batch = sample(data, transform, place), min(batch_size, size or batch_size)
    with trial.refused("model", type(model).__name__, "making its clipping engine"):
        try:
            clipper = clipping.engine(model, loss, engine, sample=first, batch=batch, precision=precision)
            problem = trial.blindness(clipper, model, data, transform, place)
        except Unsupported:  # where nothing can be learnt, there is nothing to compare an engine by
            clipper = VmapEngine(model, loss)
            problem = trial.blindness(clipper, model, data, transform, place)
            if not problem:
                raise
    plan = calibrate(
        chosen,
        rate=rate,
        draws=draws,
        dimension=clipper.dimension,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
    )
    if problem:
        warnings.warn(f"{problem}: training spends its epsilon and learns nothing", stacklevel=3)
    # Two runs that share their noise would cancel it: the seed depends on everything that tells runs apart.
    start = [digest(clipper.theta), digest(first.x)]
    run = [
        source,
        repr(chosen),
        epsilon,
        delta,
        epochs,
        batch_size,
        accountant,
        plan.noise,
        len(data.x),
        precision,
        *start,
    ]
    if processes.size > 1:
        processes.agree(place, model=digest(*model.state_dict().values()))
    oracle = DataOracle(
        clipper,
        data.x,
        data.y,
        plan,
        draw_seed=derive("draws", source),
        noise_seed=derive("noise", *run),
        physical_batch=size,
        transform=transform,
        device=place,
        processes=processes,
    )
    curve: list[dict[str, Any]] = []
    was_training = model.training
    model.train()
    started = time.perf_counter()
    theta = clipper.theta
    state = initial = chosen.init(theta)
    with progress_bar(plan.draws, progress and processes.is_first) as advance:
        for state, is_mark in steps(chosen, oracle, initial):
            if is_mark:
                curve.append(observe(clipper, model, state, oracle, loss, metric, held_out, transform))
            advance(oracle.draws_taken)
    spent = summary(plan, oracle, state, epsilon, len(data.x))
    if spent["status"] == "done" and (problem or torch.equal(state.theta, theta)):
        spent["status"] = "no_signal"
    clipper.load(state.theta)
    model.train(was_training)
    record = {
        "optimizer": optimizer if isinstance(optimizer, str) else repr(optimizer),
        "seed": seed,
        "seed_is_secret": seed is None,
        "batch_size": batch_size,
        "epochs": epochs,
        **GUARANTEE,
        **spent,
        **{key: value for key, value in curve[-1].items() if key not in ("draw", "epoch", "eta")},
        "train_seconds": time.perf_counter() - started,
        "processes": processes.size,
        "isolated": isolate,
        "versions": {"dpopt": __version__, "torch": str(torch.__version__)},
    }
    return FitResult(model, record, oracle.ledger, curve)


def _optimizer(given: str | Optimizer) -> Optimizer:
    """The optimizer that `fit` is given, or the registered one of that name."""
    chosen = registry.create(given) if isinstance(given, str) else given
    try:
        hash(chosen)
    except TypeError as error:
        raise ConfigError("optimizer", type(chosen).__name__, f"expected a frozen dataclass ({error})") from error
    return chosen


def _tried(
    model: nn.Module, loss: Loss, train: Split, test: Split | None, transform: Transform, device: torch.device
) -> Metric | None:
    """Bring the model to its device and try it there on both splits; gives what can be measured on the second.

    Raises:
        ConfigError: see `trial`.
    """
    trial.check_model(model)
    with trial.refused("model", type(model).__name__, f"moving it to {device}"):
        model.to(device)
    trial.attempt(model, loss, train, "train", transform, device, training=True)
    if test is None:
        return None
    output, y = trial.attempt(model, loss, test, "test", transform, device, training=False)
    is_classes = not y.is_floating_point() and y.ndim == 1 and isinstance(output, Tensor) and output.ndim == 2
    return accuracy if is_classes else None
