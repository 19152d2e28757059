"""One private training run: `fit` for a model of one's own, and the loop that the harness shares with it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpopt import clipping, fields, registry
from dpopt.clipping import ClippingEngine, Loss
from dpopt.errors import ConfigError
from dpopt.fields import Count
from dpopt.privacy import accountants
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.lot import LotOracle
from dpopt.privacy.plan import NonPrivate, Plan
from dpopt.privacy.protocol import Optimizer, Vector
from dpopt.privacy.sampling import derive, secret_seed, send
from dpopt.workloads.base import EVALUATION_BATCH, Predict, Split, accuracy

Metric = Callable[[Tensor, Tensor], Tensor]
Transform = Callable[[Tensor], Tensor]
"""Inputs [n, ...] as they are stored -> as the model takes them."""


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


def fit(
    model: nn.Module,
    loss: Loss,
    train: Any,
    *,
    optimizer: str | Optimizer,
    epsilon: float,
    delta: float,
    epochs: float,
    batch_size: int,
    accountant: str = "pld",
    engine: str = "auto",
    precision: str = "float32",
    device: str = "auto",
    seed: int | None = 0,
    test: Any = None,
    transform: Transform | None = None,
    physical_batch: int | Literal["auto"] = "auto",
    distributed: bool = False,
    isolate: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train `model` in place under (epsilon, delta)-differential privacy.

    Args:
        model: parameters with `requires_grad` are trained; no layer may mix the examples of a batch.
        loss: (outputs [n, ...], targets [n, ...]) -> one loss per example [n].
        train: a `torch.utils.data.Dataset` of (input, target), a Hugging Face `Dataset` with two columns, one of them
            named label, labels, target or y, or a pair of tensors.
        optimizer: a registered name or an optimizer.
        epsilon: target; infinity trains without noise through the same loop.
        delta: target, usually below 1/N.
        epochs: expected passes over the data; the number of draws is epochs N / B, rounded.
        batch_size: expected batch size B; the sampling rate is B/N.
        accountant: see `dpopt.privacy.epsilon`.
        engine, precision: see `dpopt.clipping.engine`.
        device: "auto" takes CUDA where there is one.
        seed: a whole number decides draws, and with all other arguments the noise. Keep it secret if the model is to be
            published, and take another for each run on the same data: runs of one seed share their draws, and what they
            cost together is then more than the sum of what each states. None takes a new secret from the operating
            system that is kept nowhere, so draws and noise cannot be found out and the run cannot be repeated.
        test: data to evaluate on, as `train`; accuracy is added where the targets are class numbers.
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

    Raises:
        ConfigError: before training starts, for anything that cannot be used, or in which processes differ.
        RuntimeError: the processes came to different parameters, or one of them is gone.
    """
    processes = Processes.of_group() if distributed else ALONE
    if distributed and processes is ALONE:
        raise ConfigError("distributed", True, "call torch.distributed.init_process_group before, in each process")
    if isolate:
        chosen: Any = Isolated(optimizer)
    else:
        chosen = registry.create(optimizer) if isinstance(optimizer, str) else optimizer
    place = resolve_device(device)
    data = as_split(train, "train", place)
    held_out = {"test": as_split(test, "test", place)} if test is not None else {}
    metric = accuracy if held_out and not held_out["test"].y.is_floating_point() else None
    transform = transform or _as_float
    size = None if physical_batch == "auto" else fields.convert(physical_batch, Count, "physical_batch", {})
    source = processes.gather(secret_seed())[0] if seed is None else fields.convert(seed, int, "seed", {})
    first = sample(data, transform, place)
    rate, batch = sampling_rate(batch_size, len(data.x)), min(batch_size, size or batch_size)
    clipper = clipping.engine(model.to(place), loss, engine, sample=first, batch=batch, precision=precision)
    _check_loss(clipper, loss, first)
    plan = calibrate(
        chosen,
        rate=rate,
        draws=number_of_draws(epochs, batch_size, len(data.x)),
        dimension=clipper.dimension,
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
    )
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
    state = initial = chosen.init(clipper.theta)
    with progress_bar(plan.draws, progress and processes.is_first) as advance:
        for state, is_mark in steps(chosen, oracle, initial):
            if is_mark:
                curve.append(observe(clipper, model, state, oracle, loss, metric, held_out, transform))
            advance(oracle.draws_taken)
    clipper.load(state.theta)
    model.train(was_training)
    record = {
        "optimizer": optimizer if isinstance(optimizer, str) else repr(optimizer),
        "seed": seed,
        **summary(plan, oracle, state, epsilon, len(data.x)),
        **{key: value for key, value in curve[-1].items() if key not in ("draw", "epoch", "eta")},
        "train_seconds": time.perf_counter() - started,
        "processes": processes.size,
        "isolated": isolate,
    }
    return FitResult(model, record, oracle.ledger, curve)


def _check_loss(engine: ClippingEngine, loss: Loss, first: Split) -> None:
    """Raise `ConfigError` unless `loss` gives one number per example."""
    x, y = first
    shape = tuple(loss(engine.outputs(engine.theta, x), y).shape)
    if shape != (len(x),):
        raise ConfigError("loss", f"shape {shape}", f"expected one loss per example, shape ({len(x)},)")


def sampling_rate(batch_size: float, examples: int) -> float:
    """Q = B/N.

    Raises:
        ConfigError: B is not in [1, N].
    """
    if not 1 <= batch_size <= examples:
        raise ConfigError("batch_size", batch_size, f"expected 1 to {examples}, the number of training records")
    return batch_size / examples


def number_of_draws(epochs: float, batch_size: float, examples: int) -> int:
    """T = epochs N / B, rounded, at least 1."""
    if not 0 < epochs < math.inf:
        raise ConfigError("epochs", epochs, "expected a number > 0")
    return max(1, round(epochs * examples / batch_size))


def resolve_device(name: str) -> torch.device:
    """The device `name`; "auto" is CUDA where there is one, else the CPU.

    Raises:
        ConfigError: torch does not know the device, or it is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError("device", name, f"not available: {str(error).splitlines()[0]}") from error
    return device


def steps(
    optimizer: Optimizer, oracle: DataOracle | LotOracle, state: Any, marks: int = 40
) -> Iterator[tuple[Any, bool]]:
    """Step until the budget is spent; yields each state and whether one of `marks` even parts of the draws is done."""
    done = oracle.draws_taken * marks // max(1, oracle.draws_total)
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        now = oracle.draws_taken * marks // oracle.draws_total
        yield state, now > done
        done = now


def observe(
    engine: ClippingEngine,
    model: nn.Module,
    state: Any,
    oracle: DataOracle,
    loss: Loss,
    metric: Metric | None,
    splits: dict[str, Split],
    transform: Transform,
    score: str = "accuracy",
    batch: int = EVALUATION_BATCH,
) -> dict[str, Any]:
    """One entry of the curve: draws, epochs, the optimizer's own learning rate (`eta` of its state), metrics.

    Raises:
        RuntimeError: the oracle's processes have come to different parameters, so they do not compute the same.
    """
    _require_same(oracle, state.theta)
    entry: dict[str, Any] = {"draw": oracle.draws_taken, "epoch": oracle.draws_taken * oracle.rate}
    if hasattr(state, "eta"):
        entry["eta"] = float(state.eta)
    model.eval()
    for name, split in splits.items():
        scores = evaluate(engine, state.theta, loss, metric, split, transform, score, batch, oracle.processes)
        entry |= {f"{name}_{key}": value for key, value in scores.items()}
    model.train()
    return entry


def _require_same(oracle: DataOracle, theta: Vector) -> None:
    """Each process steps on its own, from the same releases: their parameters are the same, bit for bit."""
    if oracle.processes.size > 1 and len(set(oracle.processes.gather(digest(theta)))) > 1:
        raise RuntimeError(f"after {oracle.draws_taken} draws the processes have different parameters")


def evaluate(
    engine: ClippingEngine,
    theta: Vector,
    loss: Loss,
    metric: Metric | None,
    split: Split,
    transform: Transform,
    score: str = "accuracy",
    batch: int = EVALUATION_BATCH,
    processes: Processes = ALONE,
) -> dict[str, float]:
    """Mean loss, and mean of `metric` under the name `score`, over `split` at `theta`; `batch` records at a time.

    Several processes take turns, and all get the means.
    """
    sums = {"loss": 0.0} | ({score: 0.0} if metric else {})
    batches = zip(split.x.split(batch), split.y.split(batch), strict=True)
    for parts in islice(batches, processes.rank, None, processes.size):
        x, y = (send(part, theta.device) for part in parts)
        output = engine.outputs(theta, transform(x))
        sums["loss"] += float(loss(output, y).double().sum())
        if metric:
            sums[score] += float(metric(output, y).double().sum())
    gathered = processes.gather(sums)
    return {key: sum(each[key] for each in gathered) / len(split.x) for key in sums}


def predictor(
    engine: ClippingEngine, model: nn.Module, theta: Vector, transform: Transform, batch: int = EVALUATION_BATCH
) -> Predict:
    """What a workload's `report` asks for the outputs of `model` at `theta`, in evaluation mode.

    Batches of `batch` records go to the device of `theta` one after the other; outputs come back to where the inputs
    are.
    """

    def predict(x: Tensor) -> Tensor:
        was_training = model.training
        model.eval()
        parts = (transform(send(part, theta.device)) for part in x.split(batch))
        outputs = torch.cat([engine.outputs(theta, part).to(x.device) for part in parts])
        model.train(was_training)
        return outputs

    return predict


def summary(plan: Plan, oracle: DataOracle, state: Any, target: float, examples: int) -> dict[str, Any]:
    """The part of a record that says what the run spent; epsilon is recomputed from the ledger that it left.

    Raises:
        RuntimeError: the ledger is not the planned one, so the stated epsilon would not be the spent one.
    """
    if oracle.ledger != plan.ledger:
        raise RuntimeError(f"the run left {oracle.ledger}, the plan holds {plan.ledger}")
    spent = accountants.epsilon(oracle.ledger, plan.delta, plan.accountant)
    return {
        "status": "done" if bool(state.theta.isfinite().all()) else "diverged",
        "private": not isinstance(plan, NonPrivate),
        "epsilon_target": target,
        "epsilon": spent,
        "delta": plan.delta,
        "accountant": plan.accountant,
        "noise": dict(plan.noise),
        "rate": plan.rate,
        "draws": plan.draws,
        "examples": examples,
        "dimension": plan.dimension,
    }


def as_split(data: Any, where: str, device: torch.device) -> Split:
    """Inputs and targets as two tensors on `device`.

    Raises:
        ConfigError: `data` is none of the kinds that `fit` names, is empty, or does not stack.
    """
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(part, Tensor) for part in data):
        x, y = data
    elif hasattr(data, "column_names") and hasattr(data, "with_format"):
        x, y = _columns(data, where)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        x, y = _stack(data, where)
    else:
        raise ConfigError(where, type(data).__name__, "expected a Dataset, a Hugging Face Dataset or a pair of tensors")
    if len(x) != len(y) or len(x) == 0:
        raise ConfigError(where, f"{len(x)} inputs, {len(y)} targets", "expected as many inputs as targets, at least 1")
    return placed(Split(x, y), device)


def placed(split: Split, device: torch.device) -> Split:
    """`split` on `device`; on a GPU only if it takes at most half of what is free, else each batch is sent over."""
    is_small = device.type != "cuda" or sum(part.nbytes for part in split) <= torch.cuda.mem_get_info(device)[0] / 2
    return Split(*(part.to(device) for part in split)) if is_small else split


def sample(split: Split, transform: Transform, device: torch.device, count: int = 3) -> Split:
    """The first records of `split` as the model sees them: what a clipping engine is tried on."""
    x, y = (send(part[:count], device) for part in split)
    return Split(transform(x), y)


def _as_float(x: Tensor) -> Tensor:
    """Bytes (pixels, as they are stored) as floats; anything else as it is."""
    return x.float() if x.dtype == torch.uint8 else x


def _columns(data: Any, where: str) -> tuple[Tensor, Tensor]:
    names = list(data.column_names)
    targets = [name for name in names if name in ("label", "labels", "target", "y")]
    if len(targets) != 1 or len(names) != 2:
        allowed = "expected two columns, one of them named label, labels, target or y (use `select_columns`)"
        raise ConfigError(f"{where}.column_names", names, allowed)
    inputs = next(name for name in names if name not in targets)
    columns = data.with_format("torch")[:]
    x, y = columns[inputs], columns[targets[0]]
    if not isinstance(x, Tensor):
        raise ConfigError(f"{where}.{inputs}", type(x).__name__, "the inputs have different shapes: pad or resize them")
    return x, y


def _stack(data: Any, where: str) -> tuple[Tensor, Tensor]:
    try:
        pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in (data[i] for i in range(len(data)))]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            where, type(data).__name__, f"expected (input, target) pairs of one shape ({error})"
        ) from error


@contextmanager
def progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """Show progress over `total` draws; gives a function to call with the number of draws taken."""
    from rich.progress import Progress

    with Progress(disable=not is_shown, transient=True) as progress:
        task = progress.add_task("training", total=total)
        yield lambda done: progress.update(task, completed=done)
