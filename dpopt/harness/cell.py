"""One cell: what identifies it, and how it is run, interrupted and continued."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from dpopt import clipping, registry, sizes, training
from dpopt.clipping import ClippingEngine
from dpopt.clipping.views import Multiplied, multiplied
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError, Held
from dpopt.harness import checkpoint, stopping
from dpopt.harness.checkpoint import Elapsed, Reached
from dpopt.optimizers.averaged import averaged
from dpopt.privacy import sampling
from dpopt.privacy.calibration import calibrate, scaled_down, score_noise
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import Processes
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Ledger
from dpopt.privacy.plan import Plan
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import selection_rule
from dpopt.store.identity import clipping_bound, identity
from dpopt.store.leases import Lease
from dpopt.store.provenance import provenance
from dpopt.store.runs import SETTLED, Store
from dpopt.study.diagnostics import Diagnostics
from dpopt.training import inputs
from dpopt.types import Optimizer, Vector
from dpopt.workloads.base import Split, Workload

CHECKPOINT_SECONDS = 60.0


STORED = {"scale_down": "dry_run"}
"""The fields that have another name in stored cells. A new name there would change the ids of these cells."""


@dataclass(frozen=True)
class Cell:
    """One run. Equal cells give equal results; where and when it runs is not part of it.

    Args:
        workload, optimizer: as `registry.spec` describes them.
        epsilon: target; infinity trains without noise.
        delta, accountant: see `dpopt.privacy.epsilon`.
        batch_size: expected batch size B.
        epochs: expected passes over the training data.
        seed: replicate number.
        search: number of the run within a search, over all batch sizes, clipping bounds and epochs that it tries. The
            runs of one search have draws of their own, so that composing them one after the other is what they cost;
            runs of different searches are paired by number and seed.
        kernel: `sampling.REVISION` of the draws and the noise that it is run with; no other can run it.
        selection: where the run is one of a search that is charged, the rule by which (see `selection_spec`); `epsilon`
            is then the search's.
        untrained: a search whose number of runs came out as 0 releases the model as it was initialised.
        scale_down: factor by which batch and noise are smaller than those that spend `epsilon`. The steps are as many,
            and have the same ratio of signal to noise; they cost less to compute by this factor and spend far more
            (Sander et al. 2023).
        diagnostics: whether gradient norms and what is made of them go into the curve; they are not private.
        average: decay of the weights in the average of the parameters, which is evaluated and is the result; 0 for
            none, see `Averaged`. It changes no release.
    """

    workload: dict[str, Any]
    optimizer: dict[str, Any]
    epsilon: float
    delta: float
    accountant: str
    batch_size: int
    epochs: float
    seed: int
    search: int = 0
    kernel: int = 1
    selection: dict[str, Any] | None = None
    untrained: bool = False
    scale_down: float = 1.0
    diagnostics: bool = False
    average: float = 0.0

    def content(self) -> dict[str, Any]:
        """The cell as plain JSON data; infinity becomes "inf".

        A field at its default is left out, so that cells older than the field keep their ids.
        """
        return dict(self._content)

    @cached_property
    def _content(self) -> dict[str, Any]:
        content = {field.name: (_plain(getattr(self, field.name)), field.default) for field in dataclasses.fields(self)}
        return {STORED.get(key, key): value for key, (value, default) in content.items() if value != default}

    @classmethod
    def from_content(cls, content: Mapping[str, Any]) -> Cell:
        """The cell that `content` described."""
        names = {stored: name for name, stored in STORED.items()}
        given: dict[str, Any] = {names.get(key, key): value for key, value in content.items()}
        return cls(**{**given, "epsilon": float(content["epsilon"])})

    @cached_property
    def run_id(self) -> str:
        """The cell's name, see `identity`."""
        return identity(self._content)

    @property
    def releases(self) -> str:
        """What names the releases: the run id without an average, as the average changes no release."""
        return dataclasses.replace(self, average=0.0).run_id


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return "inf" if value == math.inf else value


def _finite(value: Any) -> Any:
    """Plain data with null in place of numbers that JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Interrupted(Exception):
    """The cell was asked to stop; its checkpoint is written."""


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to train.

    Attributes:
        cell: what is trained.
        workload, optimizer: as the cell describes them.
        stepper: the optimizer, with an average of its parameters where the cell asks for one.
        model, engine: the model, on its device, and the clipping engine over it.
        plan: the calibrated noise.
        oracle: the training data; some draws are taken already where the cell goes on from a checkpoint.
        state: where training begins.
        elapsed: what training up to there has taken.
        watched: the splits that the curve is about, by name.
        examples: number N of training records.
        curve: the entries up to there; training adds to them.
        diagnostics: where the cell asks for them.
    """

    cell: Cell
    workload: Workload
    optimizer: Optimizer
    stepper: Optimizer
    model: nn.Module
    engine: ClippingEngine
    plan: Plan
    oracle: DataOracle
    state: Any
    elapsed: Elapsed
    watched: dict[str, Split]
    examples: int
    curve: list[dict[str, Any]] = field(default_factory=list)
    diagnostics: Diagnostics | None = None

    def observe(self, state: Any) -> dict[str, Any]:
        """One entry of the curve."""
        of = self.workload
        where = (self.watched, of.transform, of.score, of.evaluation_batch)
        entry = training.observe(self.engine, self.model, state, self.oracle, of.loss, of.metric, *where)
        return entry | ({"diagnostics": _finite(self.diagnostics.entry())} if self.diagnostics else {})

    def scores(self, state: Any) -> dict[str, Any]:
        """The workload's further scores on the test split."""
        of = self.workload
        predict = training.predictor(self.engine, self.model, state.theta, of.transform, of.evaluation_batch)
        return of.report(predict, self.watched["test"])


def prepare(
    cell: Cell,
    *,
    device: str = "auto",
    physical_batch: int | None = None,
    isolate: bool = False,
    store: Store | None = None,
) -> Prepared:
    """Load, build and calibrate what a cell trains; see `run`.

    Args:
        store: where to look for a checkpoint to go on from; nothing is written.
    """
    if cell.kernel != sampling.REVISION:
        raise ConfigError("cell.kernel", cell.kernel, f"draws and noise are now those of revision {sampling.REVISION}")
    torch.set_num_threads(1)
    place = training.resolve_device(device)
    workload = registry.from_spec("workload", cell.workload)
    optimizer = Isolated(cell.optimizer) if isolate else registry.from_spec("optimizer", cell.optimizer)
    train, *others = (inputs.placed(split, place) for split in workload.splits(cell.seed))
    watched = dict(zip(("validation", "test"), others, strict=True))
    torch.manual_seed(_seed("init", cell) >> 65)
    model = workload.model().to(place)
    processes = Processes.of_group()
    if workload.shares_randomness:
        if processes.size > 1:
            raise ConfigError("engine", f"{processes.size} processes", "records share random numbers: use one process")
        physical_batch = len(train.x)
    batch = min(cell.batch_size, physical_batch or math.inf)
    sample = inputs.sample(train, workload.transform, place)
    seen = _seen(workload, model, sample.x.ndim)
    if workload.multiplicity > 1:
        sample = inputs.sample(train, seen.transform, place)
    engine = clipping.engine(seen.model, seen.loss, sample=sample, batch=batch)
    plan = _plan(cell, optimizer, len(train.x), engine.dimension)
    diagnostics = _diagnostics(seen, cell, plan, train) if cell.diagnostics else None
    stepper = averaged(optimizer, cell.average)
    reached = Reached(stepper.init(engine.theta), Ledger(), Elapsed(), [])
    if store is not None:
        reached = checkpoint.load(store, cell.run_id, reached.state, plan, diagnostics)
    oracle = DataOracle(
        engine,
        train.x,
        train.y,
        plan,
        draw_seed=_seed("draws", cell, cell.search),
        noise_seed=derive("noise", cell.releases),
        physical_batch=physical_batch,
        transform=seen.transform,
        device=place,
        ledger=reached.ledger,
        watch=diagnostics,
        processes=processes,
    )
    model.train()
    watched = {name: split for name, split in watched.items() if len(split.x)}
    return Prepared(
        cell=cell,
        workload=workload,
        optimizer=optimizer,
        stepper=stepper,
        model=model,
        engine=engine,
        plan=plan,
        oracle=oracle,
        state=reached.state,
        elapsed=reached.elapsed,
        watched=watched,
        examples=len(train.x),
        curve=reached.curve,
        diagnostics=diagnostics,
    )


def _seen(workload: Workload, model: nn.Module, dims: int) -> Multiplied:
    """What the engine trains; `dims` is the number of dimensions of a batch."""
    if workload.multiplicity == 1:
        return Multiplied(model, workload.loss, lambda x: workload.augment(workload.transform(x)))
    return multiplied(
        model,
        workload.loss,
        transform=workload.transform,
        augment=workload.augment,
        multiplicity=workload.multiplicity,
        dims=dims,
    )


def _plan(cell: Cell, optimizer: Optimizer, examples: int, dimension: int) -> Plan:
    """What the cell may release."""
    rate = sizes.sampling_rate(cell.batch_size, examples)
    if cell.untrained:
        return Plan({}, Ledger(), 0.0, rate, 0, dimension, cell.delta, cell.accountant)
    plan = calibrate(
        optimizer,
        rate=rate,
        draws=sizes.number_of_draws(cell.epochs, cell.batch_size, examples),
        dimension=dimension,
        epsilon=cell.epsilon,
        delta=cell.delta,
        accountant=cell.accountant,
        selection=selection_rule(cell.selection) if cell.selection else None,
    )
    return plan if cell.scale_down == 1 else scaled_down(plan, cell.scale_down)


def _diagnostics(seen: Multiplied, cell: Cell, plan: Plan, train: Split) -> Diagnostics:
    is_class = train.y.ndim == 1 and not train.y.is_floating_point()
    bound = clipping_bound(cell.content())  # an isolated optimizer does not show its rule
    return Diagnostics(
        VmapEngine(seen.model, seen.loss),
        bound=None if math.isnan(bound) else bound,
        noise=plan.noise.get("gradient", 0.0),
        expected_batch=plan.rate * len(train.x),
        draws=plan.draws,
        classes=int(train.y.max()) + 1 if is_class else 0,
    )


def run(
    cell: Cell,
    store: Store,
    *,
    device: str = "auto",
    physical_batch: int | None = None,
    isolate: bool = False,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    stop: Callable[[], bool] = stopping.is_asked,
) -> dict[str, Any]:
    """Run a cell, from its checkpoint if it left one, and store its record.

    Seeds go by axis: initial weights, split and draws depend on (workload, seed), draws also on the number within a
    search, so that optimizers are compared on the same ones; the noise depends on the whole cell but for its average.
    On the CPU a cell uses one thread, so that its numbers do not depend on how many cells run beside it.

    Args:
        cell: what to run.
        store: where its files go.
        device: see `training.resolve_device`.
        physical_batch: see `DataOracle`; None leaves it to the clipping engine.
        isolate: run the optimizer in a process of its own, see `privacy.isolation`; the numbers are the same.
        checkpoint_seconds: at least so much time lies between two checkpoints.
        stop: asked after every step; by default whether this process has been asked to stop.

    Returns:
        The record.

    Raises:
        ConfigError: the cell belongs to another revision of the kernel, or cannot be run here.
        Held: another process runs the cell, or nothing is left to do: it has a result or has failed, or its record is
            damaged.
        Interrupted: `stop` said so.
    """
    with store.lease(cell.run_id) as lease:
        if (known := store.state(cell.run_id)) in SETTLED:
            raise Held(f"it is {known}")
        forget_peak(training.resolve_device(device))
        loop = Loop(store, lease, checkpoint_seconds, stop, device)
        ready = prepare(cell, device=device, physical_batch=physical_batch, isolate=isolate, store=store)
        return train(ready, loop)


@dataclass
class Loop:
    """What goes on around the steps of a cell.

    Attributes:
        store: where its files go; `writing` alone gives it out.
        lease: the right to write them.
        checkpoint_seconds, stop, device: see `run`.
        started: when this object was made. Make it before the cell is prepared.
        seconds: how long the steps of this process have taken.
    """

    store: Store
    lease: Lease
    checkpoint_seconds: float
    stop: Callable[[], bool]
    device: str
    started: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    def writing(self) -> Store:
        """The store, for one write to a run. Ask for it when the content is ready: making the content may take minutes.

        Raises:
            Held: another process has taken over the run.
        """
        self.lease.check()
        return self.store


def train(ready: Prepared, loop: Loop) -> dict[str, Any]:
    """Train a prepared cell to its end and store its record, which is returned; see `run`."""
    run_id, oracle = ready.cell.run_id, ready.oracle
    loop.writing().begin(run_id, ready.cell.content())
    loop.writing().restart_curve(run_id, ready.curve)
    begin, taken = Elapsed.now(), oracle.draws_taken
    state = _train(ready, loop)
    final = _end(ready, state, loop)
    trained = ready.elapsed.since(begin)
    record = {
        **_record(ready, state, final),
        "seconds_prepare": begin.wall - loop.started,
        "seconds_train": trained.wall,
        "seconds_cpu": trained.cpu,
        "seconds_draw": loop.seconds / max(1, oracle.draws_taken - taken),
        "peak_memory": peak_memory(ready.engine.theta.device),
        **({"isolated": True} if isinstance(ready.optimizer, Isolated) else {}),
        **({"processes": oracle.processes.size} if oracle.processes.size > 1 else {}),
        "provenance": provenance(training.resolve_device(loop.device)),
    }
    loop.writing().finish(run_id, record, oracle.ledger.to_json())
    return record


def _end(ready: Prepared, state: Any, loop: Loop) -> dict[str, Any]:
    """The last entry of a run's curve, which a run without draws does not have yet."""
    if not ready.curve:
        _observe(ready, state, loop)
    return ready.curve[-1]


def _record(ready: Prepared, state: Any, final: dict[str, Any]) -> dict[str, Any]:
    """The part of a record that does not depend on where and how fast the cell ran."""
    cell, oracle, score = ready.cell, ready.oracle, ready.workload.score
    spent = training.summary(ready.plan, oracle, state, cell.epsilon, ready.examples)
    validation = ready.watched.get("validation")
    scores = ready.scores(state) if spent["status"] == "done" and oracle.processes.is_first else {}
    return {
        "schema": 1,
        "run_id": cell.run_id,
        "cell": cell.content(),
        **_plain(spent),
        **({"tested": len(ready.watched["test"].x)} if "test" in ready.watched else {}),
        **_search(cell, oracle.ledger, final, len(validation.x) if validation else 0, score),
        **{key: value for key, value in final.items() if key not in ("draw", "epoch", "diagnostics")},
        **({} if score == "accuracy" else {"score": score}),
        **({"scores": _finite(scores)} if scores else {}),
        **({"diagnostics": _finite(ready.diagnostics.summary())} if ready.diagnostics else {}),
    }


def _search(cell: Cell, ledger: Ledger, final: dict[str, Any], examples: int, score: str) -> dict[str, Any]:
    """What the search that the cell is a run of spends, and the score that it may release of this run.

    A score is a share of validation records, which one record changes by one; their number is public.
    """
    if cell.selection is None:
        return {}
    if cell.untrained:  # that there were no runs was drawn by a search that could have spent its target
        return {"epsilon_total": _plain(cell.epsilon)}
    rule = selection_rule(cell.selection)
    content = {"epsilon_total": _plain(rule.epsilon(ledger, cell.delta, cell.accountant))}
    noise = score_noise(rule, cell.epsilon, cell.delta, cell.accountant)
    if not noise or not examples:
        return content
    std = noise / examples
    normal = np.random.default_rng(derive("score", cell.run_id)).standard_normal()
    released = {"value": final[f"validation_{score}"] + std * normal, "std": std, "noise": noise}
    return content | {"released_score": released}


def _train(ready: Prepared, loop: Loop) -> Any:
    """The last state; curve and checkpoints go to the store on the way."""
    oracle, begin = ready.oracle, Elapsed.now()
    saved = since = begin.wall
    state = ready.state  # a run may have been stopped after its last draw
    for state, is_mark in training.steps(ready.stepper, oracle, ready.state, ready.workload.marks):
        is_stopped = loop.stop() and oracle.draws_left > 0
        is_late = time.perf_counter() - saved >= loop.checkpoint_seconds
        is_due = is_stopped or (is_late and oracle.processes.is_first)
        if not (is_mark or is_due):
            continue
        loop.seconds += finished_at(state.theta) - since
        loop.lease.check()  # before work that would be in vain
        if is_mark:
            _mark(ready, state, loop)
        if is_due:
            _save(ready, state, loop, ready.elapsed.since(begin))
            saved = time.perf_counter()
        if is_stopped:
            raise Interrupted
        since = finished_at(state.theta)
    return state


def _mark(ready: Prepared, state: Any, loop: Loop) -> None:
    """Add an entry to a run's curve, and say how far the run is."""
    fraction = ready.oracle.draws_taken / ready.oracle.draws_total
    _observe(ready, state, loop)
    loop.lease.note(fraction)


def _observe(ready: Prepared, state: Any, loop: Loop) -> None:
    entry = ready.observe(state)
    loop.writing().append_curve(ready.cell.run_id, entry)
    ready.curve.append(entry)


def _save(ready: Prepared, state: Any, loop: Loop, elapsed: Elapsed) -> None:
    """Write a run's checkpoint."""
    run_id, reached = ready.cell.run_id, Reached(state, ready.oracle.ledger, elapsed, ready.curve)
    content = checkpoint.dump(run_id, reached, ready.diagnostics)
    loop.writing().save_checkpoint(run_id, content)


def finished_at(theta: Vector) -> float:
    """The time when the device has computed all that it was asked to."""
    if theta.is_cuda:
        torch.cuda.synchronize(theta.device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process held at once since `forget_peak`, or that the GPU's allocator did."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def forget_peak(device: torch.device) -> None:
    """Begin anew: a worker runs cell after cell. Where the system cannot forget, it is the peak of all of them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _seed(axis: str, cell: Cell, *more: int) -> int:
    return derive(axis, cell.workload, cell.seed, *filter(None, more))
