"""The expected cost of a suite's cells: counted, and timed by finished runs, by real draws or by FLOPs.

Products of matrices, convolutions and attention are counted as `torch.utils.flop_counter` does: a multiplication and an
addition are two. The rest of a private step is left out: norms, noise, the optimizer, losses that it probes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from dpopt import registry
from dpopt.cells import Cell
from dpopt.errors import ConfigError
from dpopt.markup import duration
from dpopt.store.runs import RESULTS, SETTLED, Store
from dpopt.suites.plan import draws, gradients
from dpopt.suites.searches import Planned

if TYPE_CHECKING:
    import torch

    from dpopt.workloads.base import Outline, Workload

CALL = 2e-3
"""Seconds of a gradient that go into calling torch, in an estimate: about those of the digits' network on a CPU."""
PREPARE = 0.1
"""Seconds of a cell beside its FLOPs, in an estimate: about those of one whose data and noise are kept already."""
SHARE = 0.5
"""The share of the rate of large matrix products that private training is assumed to reach."""


@dataclass(frozen=True)
class Timing:
    """The time of a cell of a row."""

    prepare: float = 0.0  # seconds before the first draw
    draw: float = 0.0  # seconds per draw
    evaluate: float = 0.0  # seconds for all evaluations; 0 where they are part of `draw`
    memory: int | None = None  # most bytes that the process held, or the GPU's allocator
    failure: str = ""  # why nothing was measured; empty if all went well
    is_estimate: bool = False  # the times follow from FLOPs, and nothing was timed

    def seconds(self, draws: int) -> float:
        """Seconds of a cell of `draws` draws."""
        return self.prepare + draws * self.draw + self.evaluate


class Work(NamedTuple):
    """The arithmetic for a record."""

    dimension: int  # trained parameters
    gradient: int  # FLOPs of output and gradient, for all views of a record
    evaluation: int  # FLOPs of an entry of the curve, over all validation and test records
    marks: int  # entries of a curve


@dataclass
class CostRow:
    """The cells of a suite that have label, workload and batch size in common, and so the time of a draw."""

    label: str  # of the row in the suite's tables
    tuning: str
    cells: tuple[Cell, ...]  # all of them
    states: tuple[str, ...]  # of the cells, in the store
    gradients_per_draw: float  # points at which the optimizer computes gradients
    marks: int | None = None  # of the suite: entries of a curve
    timing: Timing | None = None  # of a cell, once it was found

    @property
    def done(self) -> int:
        """Number of cells with a result."""
        return sum(state in RESULTS for state in self.states)

    @property
    def waiting(self) -> list[Cell]:
        """The cells that `dpopt run` would run: neither done nor failed nor damaged."""
        return [cell for cell, state in zip(self.cells, self.states, strict=True) if state not in SETTLED]

    @property
    def draws(self) -> tuple[int, int]:
        """The least and the most draws of a cell."""
        numbers = [draws(cell) for cell in self.cells]
        return min(numbers), max(numbers)

    @property
    def gradients(self) -> float:
        """Expected gradient evaluations, of one example at one point, of the cells that wait."""
        return sum(gradients(cell, self.gradients_per_draw) for cell in self.waiting)

    @property
    def work(self) -> Work | None:
        """The arithmetic for a record; None where it cannot be counted."""
        return _work_of(_key(self.cells[0].workload))

    @property
    def operations(self) -> float | None:
        """FLOPs of all cells that wait; None where they cannot be counted."""
        work = self.work
        return work and self.gradients * work.gradient + len(self.waiting) * self._curve(work)

    @property
    def seconds(self) -> float | None:
        """Seconds of all cells that wait, one after the other; None without a time."""
        timing = self.timing
        return None if timing is None or timing.failure else sum(timing.seconds(draws(cell)) for cell in self.waiting)

    def by_flops(self, rate: float) -> Timing | None:
        """The time of a cell at `rate` FLOPs a second; None where they cannot be counted."""
        if (work := self.work) is None:
            return None
        draw = self.gradients_per_draw * (self.cells[0].batch_size * work.gradient / rate + CALL)
        return Timing(PREPARE, draw, evaluate=self._curve(work) / rate, is_estimate=True)

    def by_records(self, store: Store, device: str) -> Timing | None:
        """The mean time of the row's first finished cells on a device, as `provenance` names it; None without any."""
        done = (cell.run_id for cell, state in zip(self.cells, self.states, strict=True) if state == "done")
        records = [store.record(run_id) for run_id in islice(done, 100)]  # enough for a mean
        needed = {"draws", "seconds_prepare", "seconds_train", "provenance"}  # which tell its time
        timed = [record for record in records if record.keys() >= needed and record["draws"]]
        timed = [record for record in timed if record["provenance"].get("device", "") == device]
        if not timed:
            return None
        trained = sum(record["seconds_train"] for record in timed)
        prepared = sum(record["seconds_prepare"] for record in timed)
        return Timing(prepared / len(timed), trained / sum(record["draws"] for record in timed))

    def _curve(self, work: Work) -> int:
        return min(self.marks or work.marks, self.draws[1]) * work.evaluation


def rows(planned: Iterable[Planned], store: Store, marks: int | None = None) -> list[CostRow]:
    """The rows of planned cells of a suite with so many `marks`, in order; a cell of several rows counts in each."""
    groups: dict[tuple[str, str, int], list[Planned]] = {}
    for entry in planned:
        groups.setdefault((_key(entry.cell.workload), entry.label, entry.cell.batch_size), []).append(entry)
    rows = []
    for group in groups.values():
        cells = tuple(entry.cell for entry in group)
        states = tuple(store.state(cell.run_id) for cell in cells)
        rows.append(CostRow(group[0].label, group[0].tuning, cells, states, group[0].gradients_per_draw, marks))
    return rows


def _key(spec: Mapping[str, Any]) -> str:
    return json.dumps(spec, sort_keys=True)


def summary(rows: Sequence[CostRow], at_once: int, start: float = 0.0) -> str:
    """The time of all that is to be run here, `at_once` cells at a time, `start` seconds from now on, in one line."""
    waiting = [row for row in rows if row.waiting]
    timed = sum(row.seconds is not None for row in waiting)
    operations = sum(row.operations or 0 for row in waiting)
    counts = f"{sum(row.gradients for row in rows):.1e} gradient evaluations"
    counts += f", {operations:.1e} FLOPs to run" if operations else " to run"
    if not timed:
        return f"{counts}; timed_draws=20 estimates how long they take" if waiting else "nothing to run"
    alone = sum(row.seconds or 0.0 for row in rows)
    total = alone / at_once + start
    begin = f", {duration(start)} of it to start" if start > 0.1 * total else ""  # less is nothing to speak of
    missing = f" without {len(waiting) - timed} rows that were not timed" if timed < len(waiting) else ""
    each = f" ({duration(alone + start)} if it were one)" if at_once > 1 else ""
    return f"{counts}, about {duration(total)} with workers = {at_once}{each}{begin}{missing}"


@cache
def _work_of(workload: str) -> Work | None:
    """The arithmetic for the records of a workload, a `registry.spec` as JSON; needs neither data nor weights.

    None where it cannot be counted: there are no shapes without files, or the model looks at values.
    """
    task: Workload = registry.from_spec("workload", json.loads(workload))
    try:
        outline = task.outline()
        forward, gradient = count(outline, task.loss)
    except (ConfigError, RuntimeError, NotImplementedError):
        return None
    trained = sum(parameter.numel() for parameter in outline.model.parameters() if parameter.requires_grad)
    evaluation = (task.validation + outline.tested) * forward
    return Work(trained, gradient * task.multiplicity, evaluation, task.marks)


def count(outline: Outline, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[int, int]:
    """FLOPs of one record: of the model's output, and of output and gradient together.

    Raises:
        RuntimeError, NotImplementedError: the model cannot be followed without values.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

    def convolution_backward(output: Any, inputs: Any, weight: Any, *rest: Any, out_shape: Any = None) -> int:
        # As many as forward for each gradient that is asked for; torch counts the weight's as if there were one group.
        *_, transposed, _, _, (is_of_inputs, is_of_weight, _) = rest
        return (is_of_inputs + is_of_weight) * conv_flop_count(inputs, weight, output, transposed)

    corrected = {torch.ops.aten.convolution_backward: convolution_backward}
    outline.model.train()
    # transformers looks at values, but for tensors that say they are fake.
    with FakeTensorMode(allow_non_fake_inputs=True), FlopCounterMode(display=False, custom_mapping=corrected) as flops:
        losses = loss(outline.model(outline.record.x), outline.record.y)
        forward = flops.get_total_flops()
        losses.sum().backward()
        return forward, flops.get_total_flops()


@cache
def flops_per_second(device: torch.device) -> float:
    """The rate that training is assumed to reach on a device of this machine: a share of a measured product's.

    On a CPU it is that of one core, as a cell uses one.
    """
    import torch

    clock, threads = time.process_time if device.type == "cpu" else time.perf_counter, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        side = 8192 if device.type == "cuda" else 1024
        a, fastest = torch.rand(side, side, device=device), float("inf")
        for _ in range(4):
            started = clock()
            (a @ a)[0, 0].item()  # waits for the device
            fastest = min(fastest, clock() - started)
        return SHARE * 2 * side**3 / fastest
    finally:
        torch.set_num_threads(threads)
