"""A cell made ready to train: data, model, clipping engine, noise, and the state in which it begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dpopt import clipping, registry, training
from dpopt.cells import Cell, clipping_bound, finite
from dpopt.clipping import ClippingEngine
from dpopt.clipping.rules import check_groups
from dpopt.clipping.views import Multiplied, multiplied
from dpopt.clipping.vmap import VmapEngine
from dpopt.errors import ConfigError
from dpopt.optimizers.averaged import Averaged
from dpopt.optimizers.held import Held
from dpopt.privacy import sampling
from dpopt.privacy.calibration import calibrate
from dpopt.privacy.data import DataOracle
from dpopt.privacy.distributed import Processes
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.ledger import Ledger, Plan, number_of_draws, sampling_rate
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import selection_rule
from dpopt.store.runs import Store
from dpopt.study.diagnostics import Diagnostics
from dpopt.training import checkpoint, subject
from dpopt.training.checkpoint import Elapsed, Reached
from dpopt.training.trial import Unused, unused
from dpopt.types import Optimizer
from dpopt.workloads.base import Split, Workload


@dataclass(frozen=True)
class Prepared:
    """A cell that is ready to train."""

    cell: Cell
    workload: Workload  # as the cell describes it
    optimizer: Optimizer  # as the cell describes it
    stepper: Optimizer  # the optimizer, around it an average of its parameters where the cell asks for one
    model: nn.Module  # on its device
    engine: ClippingEngine  # the clipping engine over the model
    plan: Plan  # the calibrated noise
    oracle: DataOracle  # the training data; some draws are taken already where the cell goes on from a checkpoint
    state: Any  # where training begins
    elapsed: Elapsed  # time that training up to there has taken
    watched: dict[str, Split]  # the splits that the curve is about, by name
    examples: int  # number N of training records
    unused: Unused  # parameters that the loss never uses, which stay as they are
    curve: list[dict[str, Any]] = field(default_factory=list)  # the entries up to there; training adds to them
    diagnostics: Diagnostics | None = None  # where the cell asks for them

    def observe(self, state: Any) -> dict[str, Any]:
        """One entry of the curve."""
        of = self.workload
        where = (self.watched, of.transform, of.score, of.evaluation_batch)
        entry = training.observe(self.engine, self.model, state, self.oracle, of.loss, of.metric, *where)
        return entry | ({"diagnostics": finite(self.diagnostics.entry())} if self.diagnostics else {})


def prepare(
    cell: Cell,
    *,
    device: str = "auto",
    physical_batch: int | None = None,
    isolate: bool = False,
    store: Store | None = None,
) -> Prepared:
    """Load, build and calibrate what a cell trains; see `train.train`.

    Args:
        store: where to look for a checkpoint to go on from; nothing is written.
    """
    if cell.kernel != sampling.REVISION:
        raise ConfigError("cell.kernel", cell.kernel, f"draws and noise are now those of revision {sampling.REVISION}")
    torch.set_num_threads(1)  # so that a cell's numbers do not depend on how many cells run beside it
    place = training.resolve_device(device)
    workload = registry.from_spec("workload", cell.workload)
    optimizer = Isolated(cell.optimizer) if isolate else registry.from_spec("optimizer", cell.optimizer)
    train, *others = (subject.placed(split, place) for split in workload.splits(cell.seed))
    watched = dict(zip(("validation", "test"), others, strict=True))

    # Initial weights depend on workload and seed alone, so that optimizers start from the same ones.
    torch.manual_seed(derive("init", cell.workload, cell.seed) >> 65)
    model = workload.model().to(place)
    processes = Processes.of_group()
    if workload.shares_randomness:
        if processes.size > 1:
            raise ConfigError("engine", f"{processes.size} processes", "records share random numbers: use one process")
        physical_batch = len(train.x)  # a draw is never cut: one more record would change the others' random numbers

    # The engine is made for the shapes of one sample; several views of a record make its loss their mean.
    batch = min(cell.batch_size, physical_batch or math.inf)
    sample = subject.sample(train, workload.transform, place)
    seen = Multiplied(model, workload.loss, lambda x: workload.augment(workload.transform(x)))
    if workload.multiplicity > 1:
        views = {key: getattr(workload, key) for key in ("transform", "augment", "multiplicity")}
        seen = multiplied(model, workload.loss, **views, dims=sample.x.ndim)
        sample = subject.sample(train, seen.transform, place)
    engine = clipping.engine(seen.model, seen.loss, sample=sample, batch=batch)
    check_groups(optimizer, engine.layout)
    plan, diagnostics = _noise_plan(cell, optimizer, len(train.x), engine.dimension), None
    if cell.diagnostics:
        is_class = train.y.ndim == 1 and not train.y.is_floating_point()
        bound = clipping_bound(cell.content())  # an isolated optimizer does not show its rule
        diagnostics = Diagnostics(
            VmapEngine(seen.model, seen.loss),
            bound=None if math.isnan(bound) else bound,
            noise=plan.noise.get("gradient", 0.0),
            expected_batch=plan.rate * len(train.x),
            draws=plan.draws,
            classes=int(train.y.max()) + 1 if is_class else 0,
        )

    left = unused(seen, train, place, model)
    stepper: Optimizer = Held(optimizer, left.spans) if left.spans else optimizer
    stepper = Averaged(stepper, cell.average) if cell.average else stepper
    reached = Reached(stepper.init(engine.theta), Ledger(), Elapsed(), [])
    if store is not None:
        reached = _resumed(store, cell.run_id, reached, plan, diagnostics)
    oracle = DataOracle(
        engine,
        train.x,
        train.y,
        plan,
        # Draws are paired over optimizers too, but not within a search, whose runs are composed one after the other.
        draw_seed=derive("draws", cell.workload, cell.seed, *filter(None, (cell.search,))),
        noise_seed=derive("noise", cell.releases),
        physical_batch=physical_batch,
        transform=seen.transform,
        device=place,
        ledger=reached.ledger,
        watch=diagnostics,
        grid=cell.grid,
        processes=processes,
    )
    model.train()
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
        watched={name: split for name, split in watched.items() if len(split.x)},
        examples=len(train.x),
        unused=left,
        curve=reached.curve,
        diagnostics=diagnostics,
    )


def _resumed(store: Store, run_id: str, beginning: Reached, plan: Plan, diagnostics: Diagnostics | None) -> Reached:
    """The progress of a run: that of its last checkpoint, or its beginning where there is none that can be used.

    Whatever is wrong with a checkpoint, its cell starts over: nothing else that an unfinished run has left is read.
    """
    try:
        device = pytree.tree_leaves(beginning.state)[0].device
        saved = checkpoint.parse(store.load_checkpoint(run_id), device)
        if saved["run_id"] != run_id:
            raise ValueError(f"it belongs to run {saved['run_id']}")
        reached = checkpoint.reached(saved, beginning.state, plan)
        if diagnostics is not None:
            diagnostics.restore(saved["diagnostics"])
        return reached
    except FileNotFoundError:
        pass
    except Exception as error:  # of any kind: the file can hold anything
        print(f"run {run_id}: checkpoint cannot be used ({error}); starting over", flush=True)
    return beginning


def _noise_plan(cell: Cell, optimizer: Optimizer, examples: int, dimension: int) -> Plan:
    """The releases that a cell may make, and their noise, for `examples` records and `dimension` parameters."""
    rate = sampling_rate(cell.batch_size, examples)
    if cell.untrained:
        return Plan({}, Ledger(), 0.0, rate, 0, dimension, cell.delta, cell.accountant)
    return calibrate(
        optimizer,
        rate=rate,
        draws=number_of_draws(cell.epochs, cell.batch_size, examples),
        dimension=dimension,
        epsilon=cell.epsilon,
        delta=cell.delta,
        accountant=cell.accountant,
        selection=selection_rule(cell.selection) if cell.selection else None,
    )
