"""Lots: cells that differ in little are trained as one, by `torch.func.vmap` over their runs.

Most of a small cell's time goes into calling torch, not into computing; a lot calls it once for all of its cells. Each
cell keeps what makes its result: its draws, its noise, its ledger, its lease, curve, checkpoint and record, so that it
can be stopped in a lot and go on alone, or the other way round. Only sums are rounded in another order.

Whether an optimizer can be stepped for several runs at once is tried, once, on a small task with records of its own;
whether a model can, by comparing it with itself. What cannot is refused before a draw is taken, and runs one by one.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from dpopt import records, registry, training
from dpopt.clipping.bookkeeping import BookkeepingEngine
from dpopt.clipping.lot import LotEngine
from dpopt.clipping.recording import Unsupported
from dpopt.errors import Held
from dpopt.harness import stopping
from dpopt.harness.cell import CHECKPOINT_SECONDS, Cell, Loop, Lot, Prepared, RunStore, forget_peak, prepare, train
from dpopt.privacy.lot import LotOracle
from dpopt.privacy.protocol import Optimizer, Oracle
from dpopt.testing.task import Task, advance
from dpopt.workloads.base import Splits, Workload

TOLERANCE = 1e-3
"""How far a trial's state may be from that of one run at a time, as a share of it."""


class Refused(Exception):
    """The cells cannot be trained as one, for the reason given; no draw was taken."""


def group(cells: Iterable[Cell], most: int) -> list[list[Cell]]:
    """Lots of at most `most` cells that may be trained as one, in the order of the first cell of each."""
    groups: list[list[Cell]] = []
    open_ones: dict[str, list[Cell]] = {}
    for cell in cells:
        shape = _shape(cell)
        found = open_ones.get(shape, [])
        if not 0 < len(found) < most:
            groups.append(found := [])
            open_ones[shape] = found
        found.append(cell)
    return [part for lot in groups for part in ([lot] if _is_one(lot) else [[cell] for cell in lot])]


def _shape(cell: Cell) -> str:
    """What the cells of a lot have in common."""
    free = ("optimizer", "epsilon", "seed", "search", "selection")
    rest = {key: value for key, value in cell.content().items() if key not in free}
    return _dumps([_without_numbers(cell.optimizer), rest])


def _is_one(lot: Sequence[Cell]) -> bool:
    """Whether cells of one shape can be trained as one, as far as can be told of cells; a cell alone can."""
    first = lot[0]
    if len(lot) == 1:
        return True
    return not (first.untrained or first.diagnostics) and _can_step(_dumps(_without_numbers(first.optimizer)))


def _without_numbers(spec: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's spec without the numbers in which the runs of a lot may differ: `lr`, and the bound of `clip`."""
    rest = {key: value for key, value in spec.items() if key != "lr"}
    if isinstance(rest.get("clip"), dict):
        rest["clip"] = {key: value for key, value in rest["clip"].items() if key != "bound"}
    return rest


def _dumps(content: Any) -> str:
    return json.dumps(content, sort_keys=True)


def run(
    cells: Sequence[Cell],
    store: RunStore,
    *,
    device: str = "auto",
    report: Callable[[str, float], None] = lambda run_id, fraction: None,
    physical_batch: int | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    stop: Callable[[], bool] = stopping.is_asked,
) -> None:
    """Run cells of one group, those that have taken equally many draws as one, and store their records.

    Cells that other processes run or have finished are left out.

    Args:
        cells: as `group` gives them.
        report: called with the run id and the fraction of the cell that is done.
        store, device, physical_batch, checkpoint_seconds, stop: see `cell.run`.

    Raises:
        Refused: they cannot be trained as one.
        Interrupted: `stop` said so.
    """
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        leases = {}
        for cell in cells:
            with suppress(Held):
                leases[cell.run_id] = stack.enter_context(store.lease(cell.run_id))
        free = [
            cell for cell in cells if cell.run_id in leases and store.state(cell.run_id) not in ("done", "diverged")
        ]
        forget_peak(training.resolve_device(device))
        started, known = time.perf_counter(), dict[int, Splits]()
        options: dict[str, Any] = {"device": device, "physical_batch": physical_batch, "store": store, "known": known}
        runs: dict[int, list[Prepared]] = {}
        for cell in free:
            ready = prepare(cell, **options)
            runs.setdefault(ready.oracle.draws_taken, []).append(ready)
        each = (time.perf_counter() - started) / max(1, len(free))
        for alike in runs.values():
            began = time.perf_counter() - each * len(alike)
            loop = Loop(store, leases, report, checkpoint_seconds, stop, device, began)
            train(join(alike, physical_batch), loop)


def join(runs: Sequence[Prepared], physical_batch: int | None = None) -> Lot:
    """Prepared cells as one lot.

    Args:
        runs: all with as many draws taken.
        physical_batch: see `DataOracle`.

    Raises:
        Refused: they cannot be trained as one.
    """
    first = runs[0]
    if len(runs) == 1:
        return Lot.of_one(first)
    _check(runs, physical_batch)
    try:
        engine = LotEngine(first.model, first.workload.loss)
        split = next(iter(first.watched.values()))
        engine.verify_lot(*records.sample(split, first.workload.transform, engine.theta.device))
        state = _stacked([ready.state for ready in runs])
    except (Unsupported, RuntimeError) as error:
        raise Refused(str(error)) from error
    optimizer = Joined([ready.optimizer for ready in runs])
    return Lot(runs, optimizer, LotOracle(engine, [ready.oracle for ready in runs]), state, _each)


def _check(runs: Sequence[Prepared], physical_batch: int | None) -> None:
    """Raise `Refused` for what can be told without trying."""
    first = runs[0]
    if len({_shape(ready.cell) for ready in runs}) > 1:
        raise Refused("the cells differ in more than those of a lot may")
    if not _is_one([ready.cell for ready in runs]):
        raise Refused("the optimizer cannot be stepped for several runs, or the cells ask for what one alone has")
    if not all(type(ready.engine) is BookkeepingEngine for ready in runs):
        raise Refused("book-keeping cannot follow the model")
    if type(first.workload).augment is not Workload.augment:
        raise Refused("the workload changes its records at random")
    if first.oracle.processes.size > 1:
        raise Refused("several processes train the cell")
    expected = len(runs) * first.oracle.expected_batch
    if min(physical_batch or expected, first.engine.physical_batch(expected)) < expected:
        raise Refused("the draws of all cells together are too large for one physical batch")
    for ready in runs[1:]:
        pairs = zip(_frozen(first.model), _frozen(ready.model), strict=True)
        if not all(torch.equal(one, other) for one, other in pairs):
            raise Refused("the models differ in what is not trained")


def _frozen(model: nn.Module) -> list[Tensor]:
    return [*(p for p in model.parameters() if not p.requires_grad), *model.buffers()]


def _stacked(states: Sequence[Any]) -> Any:
    """States of R runs -> one with leaves [R, ...]."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)


def _each(state: Any) -> list[Any]:
    """The state of each run, in memory of its own: a checkpoint holds the whole of what its tensors are views of."""
    return [pytree.tree_map(lambda leaf, run=run: leaf[run].clone(), state) for run in range(len(state.theta))]


@dataclass(frozen=True)
class Joined:
    """Optimizers that differ in `lr` and in the bound of `clip` alone, as one that steps all of their runs.

    Its states have leaves [R, ...], and it steps with an oracle that answers R runs at once.
    """

    optimizers: Sequence[Any]

    def init(self, theta: Tensor) -> Any:
        """The state before the first step, for the parameters of all runs, [R, d]."""
        pairs = zip(self.optimizers, theta, strict=True)
        return _stacked([optimizer.init(own) for optimizer, own in pairs])

    def step(self, state: Any, oracle: Oracle) -> Any:
        """One step of each run."""
        numbers = {name: torch.tensor(values, dtype=torch.float64) for name, values in self._numbers().items()}
        numbers = {name: value.to(state.theta.device) for name, value in numbers.items()}
        return vmap(lambda own, given: _given(self.optimizers[0], given).step(own, oracle))(state, numbers)

    def _numbers(self) -> dict[str, list[float]]:
        """The numbers in which the runs differ, one of each run."""
        every: dict[str, list[Any]] = {
            "lr": [getattr(optimizer, "lr", None) for optimizer in self.optimizers],
            "bound": [getattr(getattr(optimizer, "clip", None), "bound", None) for optimizer in self.optimizers],
        }
        return {name: values for name, values in every.items() if len(set(values)) > 1}


def _given(optimizer: Any, numbers: dict[str, Tensor]) -> Any:
    """`optimizer` with the numbers of one run, which are tensors, and so are not checked."""
    changed = {"lr": numbers["lr"]} if "lr" in numbers else {}
    if "bound" in numbers:
        changed["clip"] = _with(optimizer.clip, {"bound": numbers["bound"]})
    return _with(optimizer, changed)


def _with(instance: Any, values: dict[str, Any]) -> Any:
    made = copy.copy(instance)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


@cache
def _can_step(spec: str) -> bool:
    """Whether the optimizer can be stepped for several runs at once; `spec` is as `_without_numbers` leaves it."""
    try:
        with _quiet():
            return can_step(registry.from_spec("optimizer", json.loads(spec)))
    except Exception:  # an optimizer can fail in any way, and will say so when it runs alone
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Say nothing of operations for which `vmap` goes through the runs one after the other."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        yield


def can_step(optimizer: Optimizer) -> bool:
    """Whether a trial on a small task leaves runs where they end alone, with another `lr` and bound in one of them.

    Raises:
        Exception: any; then it cannot.
    """
    task, optimizers = Task(), [optimizer, _doubled(optimizer)]
    plan = task.plan(optimizer)

    def oracles() -> list[Any]:
        return [task.oracle(plan, draw_seed=3 * run, noise_seed=3 * run + 1) for run in range(len(optimizers))]

    alone = [task.run(each, oracle) for each, oracle in zip(optimizers, oracles(), strict=True)]
    joined, answering = Joined(optimizers), oracles()
    start = joined.init(torch.stack([task.engine.theta] * len(optimizers)))
    together = _each(advance(joined, start, LotOracle(LotEngine(task.model, task.loss), answering)))
    is_paid = all(oracle.ledger == plan.ledger for oracle in answering)
    return is_paid and all(map(_is_near, pytree.tree_leaves(together), pytree.tree_leaves(alone)))


def _doubled(optimizer: Any) -> Any:
    """`optimizer` with twice the `lr` and twice the bound, where it has them."""
    changes: dict[str, Any] = {"lr": 2 * optimizer.lr} if hasattr(optimizer, "lr") else {}
    clip: Any = getattr(optimizer, "clip", None)
    if hasattr(clip, "bound"):
        changes["clip"] = dataclasses.replace(clip, bound=2 * clip.bound)
    return dataclasses.replace(optimizer, **changes)


def _is_near(leaf: Tensor, expected: Tensor) -> bool:
    if (leaf.dtype, leaf.shape) != (expected.dtype, expected.shape):
        return False
    return bool((leaf - expected).double().norm() <= TOLERANCE * expected.double().norm() + 1e-12)
