"""One private training run of a user's own model, from its arguments to its record."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich import get_console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpopt import __version__, bars, clipping, fields, registry
from dpopt.clipping import ClippingEngine, Loss
from dpopt.clipping.losses import named
from dpopt.clipping.mixing import Unsupported, kept_modes, watch_generators
from dpopt.clipping.rules import check_groups
from dpopt.clipping.state import State
from dpopt.clipping.views import Multiplicity, refuse_mixing, refuse_sharing
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Count, Decay, Factor, Name, Positive, Probability, Seed
from dpopt.markup import fallen
from dpopt.optimizers.averaged import Averaged
from dpopt.optimizers.held import Held
from dpopt.privacy import accountants
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import ALONE, Processes, digest
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import UNITS, Ledger, Unit, default_delta, number_of_draws, sampling_rate
from dpopt.privacy.sampling import REVISION, derive, secret_seed, send
from dpopt.privacy.selection import After
from dpopt.training import persons, trial
from dpopt.training.checkpoint import Checkpoint, Elapsed, Reached, code_of, fingerprint, leased, put_off
from dpopt.training.loop import ADAPTED, observe, resolve_device, steps, summary
from dpopt.training.reading import read, repeats
from dpopt.training.saved import FitResult
from dpopt.training.subject import Adapter, Layout, Subject, Transform, placed, unchanged
from dpopt.types import Optimizer

Stepper = Annotated[
    Optimizer,
    "an optimizer of dpopt such as dpopt.create('dp_adam', lr=0.01); one of torch.optim is taken by"
    " dpopt.create('torch_optim', optimizer='torch.optim.Adam', lr=0.01)",
]
"""An optimizer object, as errors say it."""
AVERAGE, EPOCHS, UNIT_ROWS = 0.95, 10, 4
"""Defaults: the decay of the default optimizer's average, as in the suite `leaderboard`; epochs; rows of a person that
count at most."""
_FIELDS = "set fields of an optimizer where it is created, as in dpopt.create('dp_adam', lr=0.1)"
_ELSEWHERE = dict.fromkeys(("lr", "clip", "max_grad_norm"), _FIELDS) | {
    "noise_multiplier": "the noise is solved for `epsilon`; `dpopt.privacy.epsilon` has that of a ledger",
    "steps": "say `epochs`: N / B steps are one",
    "log": "say `callback`, which is called with each entry of the curve",
}
"""Arguments of other libraries -> what there is in their place."""
CHECKPOINT_SECONDS = 60.0
"""At least so much time lies between two checkpoints."""


@partial(fields.checked, elsewhere=_ELSEWHERE)
def fit(
    model: nn.Module,
    loss: Loss,
    train: Any,
    *,
    epsilon: Bound,
    optimizer: str | Stepper | None = None,
    delta: Probability | None = None,
    epochs: Positive | None = None,
    batch_size: Factor | None = None,
    accountant: str = "pld",
    engine: str = "auto",
    precision: str = "float32",
    device: str | int | torch.device = "auto",
    seed: Seed | None = None,
    target: str | None = None,
    unit: Any = None,
    unit_rows: Multiplicity | None = None,
    unit_name: Name | None = None,
    test: Any = None,
    transform: Transform | None = None,
    augment: Transform | None = None,
    multiplicity: Multiplicity = 1,
    average: Decay | None = None,
    physical_batch: Count | Literal["auto"] = "auto",
    checkpoint: str | Path | None = None,
    callback: Callable[[dict[str, Any]], Any] | None = None,
    spent: Ledger | None = None,
    distributed: bool = False,
    isolate: bool = False,
    progress: bool = True,
) -> FitResult:
    """Train `model` in place under (epsilon, delta)-differential privacy; docs/tutorials/fit.md says more.

    Args:
        model: parameters with `requires_grad` are trained, all float32 or all float64; no layer may mix examples.
        loss: (outputs [n, ...], targets [n, ...]) -> one loss per example [n]; outputs with `logits` come as these.
        train: records of one shape: a pair (inputs, targets), columns by name, a data set, or a `DataLoader` of one.
        optimizer: a registered name or an optimizer; by default `default_optimizer`, with an average.
        epsilon, delta: target, delta usually below 1/N and by default N^-1.1; an epsilon of infinity has no noise.
        epochs, batch_size: expected passes over N records, expected batch size B; epochs N / B draws at rate B/N. By
            default `EPOCHS` and `default_batch`. The record names the defaults that were taken.
        accountant, engine, precision: see `dpopt.privacy.epsilon`, `dpopt.clipping.engine`.
        device: "auto" takes CUDA where there is one.
        seed: None is a new secret. A number makes the run repeatable, and whoever knows it can take the noise away.
        target: name of the target among columns; by default label, labels, target or y.
        unit: the column that says whose row it is, or the owner of each row: the guarantee is then for all rows of a
            person, which are drawn together and clipped as one record; N is the number of persons.
        unit_rows: rows of a person that count at most, the first ones, by default `UNIT_ROWS`; it is public, and
            memory grows with it.
        unit_name: what `unit` is called, by default its column: runs of one name have the same persons (`spent`).
        test: data to evaluate on, as `train`; accuracy is added where outputs are a score for each class.
        transform: a batch of stored inputs [n, ...] on the device -> the model's inputs; nothing random.
        augment: random changes to a batch of training inputs after `transform`, to each record on its own.
        multiplicity: augmented views of a record in a draw; its gradient is their mean (De et al. 2022).
        average: decay of the weights in an average of the parameters (see `Averaged`); 0, the default where there is
            an `optimizer`, averages nothing.
        physical_batch: the most examples worked on at once; "auto" leaves it to the engine.
        checkpoint: folder from which the same call goes on, bit for bit; keep it as secret as the data.
        callback: called with each entry of the curve. The run ends early where it returns True; an error that it raises
            breaks the run off.
        spent: the ledger of earlier runs on these records, such as `first.ledger`, by the same `unit`. Epsilon and the
            result's ledger are then of all runs together. The parameters go on where the model has them, the optimizer
            begins anew.
        distributed: train together with the other processes of `torch.distributed`'s default group.
        isolate: run the optimizer, given by its name, in a process that holds no data.
        progress: show phases and draws.

    Returns:
        The model, the record, the ledger and the curve. The record's status is "done", "stopped" (by `callback`),
        "diverged" (parameters, or the outputs for a made-up record, are not finite) or "no_signal" (there was nothing
        to learn, or no parameter moved); the budget is spent in each case. `test_unscored` counts the test records for
        which outputs are not finite, where there are any.

    Raises:
        ConfigError: before training: an argument cannot be used; later: the checkpoint cannot be written.
        RuntimeError: the processes came to different parameters, or one of them is gone.

    Warns:
        UserWarning: before training: what is allowed but rarely meant (a known seed, records twice, nothing to learn).
    """
    checkpoint = None if checkpoint is None else fields.path(checkpoint, "checkpoint")
    if multiplicity > 1 and augment is None:
        raise ConfigError("multiplicity", multiplicity, "the views of a record would be the same: give `augment`")
    # Arguments first, before any record is read: a mistake in them costs no time.
    processes, place = Processes.of_group() if distributed else ALONE, resolve_device(device)
    if distributed and processes is ALONE:
        raise ConfigError("distributed", True, "call torch.distributed.init_process_group before, in each process")
    if unit is not None and augment is not None:
        raise ConfigError("unit", unit, "expected it without `augment`: rows and views would be one axis")
    for name, value in {"unit_rows": unit_rows, "unit_name": unit_name}.items():
        if unit is None and value is not None:
            raise ConfigError(name, value, "expected it with `unit`, which says whose row each is")
    accountants.check_claim(delta or 0.5, accountant)
    protected = Unit()
    if unit is not None:
        protected = Unit("person", unit_name or (unit if isinstance(unit, str) else ""))
    spent = spent or Ledger()
    if spent:
        Unit.of_all([spent.unit, protected], "spent")
    # The number of records, which is public, decides some defaults.
    chosen_by_hand = {"epochs": epochs, "batch_size": batch_size, "delta": delta, "optimizer": optimizer}
    chosen_by_hand |= {"average": average} if optimizer is None else {}
    defaults = sorted(name for name, value in chosen_by_hand.items() if value is None)
    if average is None:
        average = AVERAGE if optimizer is None else 0.0
    chosen: Any = None if optimizer is None else _stepper(optimizer, isolate)
    is_first = processes.is_first
    # Whatever a caller has switched off, training takes gradients.
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        bars.bar(get_console(), progress and is_first) as show,
        processes.together() as settle,
        # Several processes of one run share the folder, of which only one writes.
        leased(checkpoint) if checkpoint is not None and is_first else nullcontext(),
    ):
        show("reading the data")
        if isinstance(unit, str):
            with suppress(ConfigError):  # test records may have no owners
                test = persons.split_owners(test, unit)[0]
            train, unit = persons.split_owners(train, unit)
        functions = {"loss": loss, "transform": transform, "augment": augment}
        subject = _subject(model, functions, train, test, target=target, device=place)
        of_person = [] if unit is None else persons.rows_of(unit)
        examples = len(of_person or subject.train.x)
        if optimizer is None:
            optimizer = default_optimizer(is_regression=subject.train.y.is_floating_point())
            chosen = _stepper(optimizer, isolate)
        epochs = epochs or EPOCHS
        batch_size = batch_size or default_batch(examples)
        delta = delta or default_delta(examples)
        # What the noise depends on, in the order in which it is derived from it.
        stated = [repr(chosen), epsilon, delta, epochs, batch_size, accountant]
        stated += [spent.to_json()] if spent else []
        rate, draws = sampling_rate(batch_size, examples), number_of_draws(epochs, batch_size, examples)
        unit_rows = unit_rows or UNIT_ROWS
        if (rows := max(map(len, of_person), default=0)) > unit_rows:
            warnings.warn(f"unit: someone has {rows} rows, of which {unit_rows} count (`unit_rows`)", stacklevel=3)
        # Of persons' rows, those that are there twice are no persons of their own.
        for doubt in _doubts(examples, train, unit, batch_size=batch_size, epsilon=epsilon, delta=delta, seed=seed):
            warnings.warn(doubt, stacklevel=3)

        # Looks at a few records without noise, which no epsilon covers: it ends in an error, a warning or "no_signal".
        show("trying the model")
        subject = trial.try_model(subject)
        if transform:
            some = send(subject.train.x[:8], place)
            refuse_mixing(transform, some, "transform")
            refuse_sharing(transform, some, "transform")
        seen = trial.augmented(subject, augment, multiplicity) if augment else subject
        if of_person:
            seen = persons.by_person(subject, of_person, unit_rows)
        size = None if physical_batch == "auto" else min(physical_batch, examples)
        options: dict[str, Any] = {"batch": min(batch_size, size or batch_size), "precision": precision}
        with trial.refused("model", seen.name, "making its clipping engine"):
            try:
                clipper = clipping.engine(
                    seen.model, seen.loss, engine, sample=seen.first, state=subject.state, **options
                )
            except Unsupported:
                # Where nothing can be learnt, there is nothing to compare an engine by.
                if not trial.blindness(seen):
                    raise
                clipper = VmapEngine(seen.model, seen.loss, subject.state)
            check_groups(chosen, clipper.layout)
            problem = trial.blindness(seen)
        without = trial.unused(seen, seen.train, place, model)

        show("calibrating the noise")
        sizes: dict[str, Any] = {"rate": rate, "draws": draws, "dimension": clipper.dimension}
        before = accountants.epsilon(spent, delta, accountant)
        if before >= epsilon and epsilon < math.inf:
            raise ConfigError("epsilon", epsilon, f"expected more than the {before:.6g} that `spent` has spent")
        sizes |= {"selection": After(spent) if spent else None, "unit": protected}
        plan = calibrate(chosen, epsilon=epsilon, delta=delta, accountant=accountant, **sizes)
        if trial.is_compiled(model):
            warnings.warn(
                "model: training runs it without compilation; predictions use the compiled model", stacklevel=3
            )
        if without.warning:
            warnings.warn(without.warning, stacklevel=3)
        if problem:
            warnings.warn(f"{problem}: training spends its epsilon and learns nothing", stacklevel=3)
        run: dict[str, Any] = {}
        # A secret is another one in each run: only a number, or a file, can be another run's too.
        is_alone = seed is None and checkpoint is None
        code: dict[str, Any] = {}
        if not is_alone:
            code = {name: fingerprint(value) for name, value in {"model": model, **functions}.items()}
            code["optimizer's code"] = code_of(chosen)
        if checkpoint is not None:  # all records are hashed for it
            names = ("optimizer", "epsilon", "delta", "epochs", "batch_size", "accountant", "spent")
            run = dict(zip(names, stated, strict=False)) | {"precision": precision, "seed": seed, "average": average}
            run |= code | {"multiplicity": multiplicity, "device": place.type, "kernel": REVISION, **subject.identity()}
            run |= {"unit": digest(*seen.train)} if of_person else {}
        file, start = Checkpoint(checkpoint, run, place, is_first), clipper.theta
        if file.start not in (None, digest(start)):
            warnings.warn("model: its run began with other parameters, and goes on from its checkpoint's", stacklevel=3)
        settle()  # from here on each process answers the others
        # Processes that differ would add up releases of different models.
        if processes.size > 1:
            processes.agree(place, model=digest(*subject.model.state_dict().values()), checkpoint=file.seeds)
        if file.seeds is None:
            source = processes.gather(secret_seed())[0] if seed is None else seed
            apart = [*stated, plan.noise, examples, precision, multiplicity, "grid"]
            apart += processes.gather(list(code.values()))[0]
            # Draws that two runs of one seed shared would cost more than their ledgers say together.
            draw_source = derive(source, spent.to_json()) if spent else source
            file.seeds = _seeds(draw_source, apart, seen, clipper, processes, [engine, size])
            file.start = digest(start)

        # Around the optimizer, so that neither changes what it asks for, and so what it costs.
        stepper: Optimizer = Held(chosen, without.spans) if without.spans else chosen
        stepper = Averaged(stepper, average) if average else stepper
        with processes.together() as settle:
            initial = stepper.init(start)
            rate = _rate(initial)
            begin = file.reached(initial, plan)
            settle()
        oracle = DataOracle(
            clipper,
            *seen.train,
            plan,
            draw_seed=file.seeds[0],
            noise_seed=file.seeds[1],
            physical_batch=size,
            transform=seen.transform,
            device=place,
            ledger=begin.ledger,
            grid=file.grid,
            processes=processes,
        )
        show("training: draws", 0, plan.draws)
        clock, state, curve = Elapsed.now(), begin.state, list(begin.curve)

        def reached() -> Reached:
            return Reached(state, oracle.ledger, begin.elapsed.since(clock), curve)

        file.save(reached())
        saved = clock.wall
        with kept_modes(subject.model), put_off(file.path) as interrupted:
            subject.model.train()
            for state, is_mark in () if file.has_ended else steps(stepper, oracle, begin.state):
                show("training: draws", oracle.draws_taken, plan.draws)
                if is_mark:
                    watched = (subject.metric, subject.held_out, subject.transform)
                    curve.append(observe(clipper, subject.model, state, oracle, subject.loss, *watched))
                is_told, is_last = is_mark and callback is not None, interrupted.is_set()
                # Draws that are taken again release the same but for rounding: nobody is to have seen what they gave.
                if is_told or is_last or time.perf_counter() - saved >= CHECKPOINT_SECONDS:
                    file.save(reached())
                    saved = time.perf_counter()
                if is_told and callback:
                    answer = callback(dict(curve[-1])) if is_first else None
                    if processes.gather(answer is True)[0]:
                        break
                # Only after its checkpoint, so that no draw is lost.
                if is_last:
                    raise KeyboardInterrupt
        end = reached()
        charged = summary(plan, end.state, epsilon, examples, spent=spent)
        charged |= {"draws_before": len(spent)} if spent else {}
        if _has_outputs(subject, clipper, start) and not _has_outputs(subject, clipper, end.state.theta):
            charged["status"] = "diverged"
        if len(end.ledger) < plan.draws:
            charged |= {"draws": len(end.ledger), "draws_planned": plan.draws}
            charged["status"] = "stopped" if charged["status"] == "done" else charged["status"]
        if charged["status"] != "diverged" and (problem or digest(end.state.theta) == file.start):
            charged["status"] = "no_signal"
        if doubt := fallen(plan.noise, rate, _rate(end.state)):
            warnings.warn(f"optimizer: {doubt}", stacklevel=3)
        # The seeds leave the file first: where that fails, the model is as it was and the run can go on.
        file.save(end, has_ended=True)
        clipper.load(end.state.theta)
    # The model is loaded; what follows is said of it, and costs nothing.
    record = {
        "optimizer": optimizer if isinstance(optimizer, str) else repr(optimizer),
        "seed": seed,
        "seed_is_secret": seed is None,
        "batch_size": batch_size,
        "epochs": epochs,
        "average": average,
        "multiplicity": multiplicity,
        "defaults": defaults,
        "adjacency": UNITS[protected.kind].adjacency,
        "unit": protected.kind,
        "sampling": "Poisson",
        **({"unit_rows": unit_rows, "unit_column": protected.name} if of_person else {}),
        **charged,
        **({"grid": True} if file.grid else {}),
        **({"doubt": doubt} if doubt else {}),
        **without.record,
        **({"evaluation": clipper.way} if clipper.way != "batch" else {}),
        **({"put_back": subject.state.changed} if subject.state.changed else {}),
        "tested": bool(subject.held_out),
        **{key: value for key, value in end.curve[-1].items() if key not in ("draw", "epoch", *ADAPTED)},
        "train_seconds": end.elapsed.wall,
        "resumed_at": len(begin.ledger),
        "processes": processes.size,
        "versions": {"dpopt": __version__, "torch": str(torch.__version__)},
        "isolated": isolate,
        "date": datetime.now(UTC).date().isoformat(),
        **({"clip": float(bound)} if (bound := getattr(getattr(chosen, "clip", None), "sensitivity", None)) else {}),
        "inputs": list(subject.layout.names),
        "transform": named(transform) if transform else None,
        "classes": list(range(subject.classes)),
    }
    # Whoever stops a run, or asks for less, may have looked at what was released, so that what is taken depends on the
    # records. The epsilon of a length that was fixed before does not hold then, that of the whole plan does (Rogers et
    # al., "Privacy odometers and filters", 2016).
    return FitResult(model, record, spent + plan.ledger, end.curve, transform)


def default_optimizer(is_regression: bool = False) -> Any:
    """The best constant of the suite `leaderboard` that needs no search: `adadp_equilibrium`, clipped automatically.

    Its learning rate follows from the noise alone, and is too large for the curvature of a squared error: where targets
    are real numbers, the default is `dp_adam`.
    """
    return registry.create("dp_adam") if is_regression else registry.create("adadp_equilibrium", clip="automatic")


def default_batch(examples: int) -> int:
    """A fortieth of the records, but at least 256 or, of fewer records, all; see the suite `fit_batch`."""
    return max(examples // 40, min(256, examples))


def _stepper(name_or_object: Any, isolate: bool) -> Any:
    if isolate:
        return Isolated(name_or_object)
    stepper = registry.create(name_or_object) if isinstance(name_or_object, str) else name_or_object
    # Calibration remembers what it has traced by the optimizer, so it has to be a value that cannot change.
    try:
        hash(stepper)
    except TypeError as error:
        raise ConfigError("optimizer", type(stepper).__name__, f"expected a frozen dataclass ({error})") from error
    return stepper


def _rate(state: Any) -> float:
    """The learning rate of a state of an optimizer that finds its own; NaN for any other."""
    rate = torch.as_tensor(getattr(state, "eta", math.nan))
    return float(rate) if rate.numel() == 1 else math.nan


def _has_outputs(subject: Subject, engine: ClippingEngine, theta: Tensor) -> bool:
    """False if outputs at `theta` are not finite for a record of ones, or of zeros in whole numbers: none is read."""
    one = torch.full_like(subject.train.x[:1], subject.train.x.is_floating_point())
    with unchanged(subject.model, is_training=False), suppress(Exception):  # the model may take no such record
        return bool(engine.outputs(theta, subject.transform(one)).isfinite().all())
    return True


def _subject(
    model: nn.Module,
    functions: dict[str, Any],
    train: Any,
    test: Any,
    *,
    target: str | None,
    device: torch.device,
) -> Subject:
    trial.check_model(model)
    transform: Transform | None = functions["transform"]
    inputs, targets = read(train, "train", target)
    layout = Layout.of(inputs, model, "train")
    if transform and layout.fields:
        names = ", ".join(layout.names)
        raise ConfigError("transform", named(transform), f"inputs have names ({names}): change them in the data")
    splits = {"train": layout.split(inputs, targets, "train")}
    del inputs, targets  # their memory is free while the rest is read
    if test is not None:
        splits["test"] = layout.split(*read(test, "test", target), "test")

    with trial.refused("model", type(model).__name__, f"moving it to {device}"):
        model.to(device)
    state = State(model, **functions)

    def prepared(x: Tensor) -> Tensor:
        if not transform:
            return layout.converted(x)
        with state:
            # What changes its argument in place must not change the records.
            return layout.converted(transform(x.clone()))

    there = {name: placed(split, device) for name, split in splits.items()}
    taken = Adapter(model, layout) if layout.fields else model
    train = there.pop("train")
    return Subject(taken, functions["loss"], train, there, prepared, layout, device, state)


def _doubts(
    examples: int, train: Any, unit: Any, *, batch_size: float, epsilon: float, delta: float, seed: int | None
) -> Iterator[str]:
    size = train.batch_size if isinstance(train, DataLoader) else None
    if size not in (None, batch_size):
        yield f"train: the loader's batch size {size} is not used, draws have {batch_size:g} on average"
    if epsilon == math.inf:
        return
    again, times = repeats(train) if unit is None else (0, 1)
    if again:
        yield (
            f"train: {again} of its {examples} records repeat another one, which is there {times} times at most:"
            " someone who is there k times is hidden k times less; `unit` says whose each is"
        )
    if seed is not None:
        yield (
            f"seed: whoever knows that it is {seed} can compute draws and noise again, so leave it out for a model that"
            " is to be released"
        )
    if delta > 1 / examples:
        yield (
            f"delta: {delta} is more than 1/N = {1 / examples:.2g}, which would allow to publish whole records; take a"
            " smaller one"
        )


def _seeds(
    source: int, apart: list[Any], seen: Subject, engine: ClippingEngine, processes: Processes, how: list[Any]
) -> tuple[int, int]:
    """The seeds of draws and noise, the same in all processes; runs of one `source` share their draws.

    `apart` are arguments that decide what is released, `seen` is the subject as the engine trains it, and `how` decides
    beside all this which random numbers a layer draws.
    """
    looks: list[object] = []
    x, y = (send(part[:64], seen.device) for part in seen.train)  # enough to tell two runs of one seed apart

    def views_and_losses() -> tuple[Tensor, Tensor]:
        inputs = seen.transform(x)
        return inputs, seen.loss(engine.outputs(engine.theta, inputs[:3]), y[:3])

    for is_training in (False, True):
        with unchanged(seen.model, is_training, seen.state):
            torch.manual_seed(0)
            look, is_random = watch_generators(lambda: digest(*views_and_losses()), seen.device)
            looks.append(look)
    # Where layers or views draw random numbers, these depend on how a draw is cut into batches too. A dropout of one
    # number in a thousand may not show in three records, but in the generator's state. One process decides: others may
    # round differently.
    is_random, looks = processes.gather((is_random, looks))[0]
    cut = [processes.size, *how] if is_random else []
    records = [digest(engine.theta), *seen.records]
    # Two runs that shared their noise would cancel it, so the noise depends on all that tells them apart.
    return derive("draws", source), derive("noise", source, *apart, *looks, *cut, *records)
