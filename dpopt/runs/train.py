"""Train one cell: from its checkpoint if it left one, to its record."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpopt import training
from dpopt.cells import Cell, finite, plain
from dpopt.privacy.calibration import score_noise
from dpopt.privacy.isolation import Isolated
from dpopt.privacy.sampling import derive
from dpopt.privacy.selection import selection_rule
from dpopt.runs import stopping
from dpopt.runs.prepare import Prepared, prepare
from dpopt.store.bits import packed
from dpopt.store.leases import Lease
from dpopt.store.provenance import provenance
from dpopt.store.runs import Store
from dpopt.training import checkpoint
from dpopt.training.checkpoint import Elapsed, Reached
from dpopt.types import Vector
from dpopt.workloads.base import Workload

CHECKPOINT_SECONDS = 60.0
"""The least time between two checkpoints."""


class Interrupted(Exception):
    """The cell was asked to stop; its checkpoint is written."""


def train(
    cell: Cell,
    store: Store,
    lease: Lease,
    *,
    device: str = "auto",
    physical_batch: int | None = None,
    marks: int | None = None,
    isolate: bool = False,
    stop: Callable[[], bool] = stopping.is_asked,
) -> dict[str, Any]:
    """Train a cell under its lease, from its checkpoint if it left one, and store its record, which is returned.

    Seeds go by axis: initial weights, split and draws depend on (workload, seed), draws also on the number within a
    search, so that optimizers are compared on the same ones; the noise depends on the whole cell but for its average.
    On the CPU a cell uses one thread, so that its numbers do not depend on how many cells run beside it.

    Args:
        cell: the run.
        store: where its files go.
        lease: of this process, for this cell. It is checked before every write, after the content was made, which may
            take minutes: whoever has lost it writes nothing more.
        device, physical_batch: see `training.resolve_device`; see `DataOracle`, None leaves it to the clipping engine.
        marks: entries of the curve; None for as many as the workload has.
        isolate: run the optimizer in a process of its own, see `privacy.isolation`; the numbers are the same.
        stop: asked after every step; by default whether this process has been asked to stop.

    Raises:
        ConfigError: the cell belongs to another revision of the kernel, or cannot be run here.
        Held: another process has taken over the lease.
        Interrupted: `stop` said so.
    """
    run_id, started, place = cell.run_id, time.perf_counter(), training.resolve_device(device)
    _forget_peak(place)
    ready = prepare(cell, device=device, physical_batch=physical_batch, isolate=isolate, store=store)
    oracle, state = ready.oracle, ready.state
    lease.check()
    store.begin(run_id, cell.content())
    lease.check()
    store.restart_curve(run_id, ready.curve)

    def mark() -> None:
        entry = ready.observe(state)
        lease.check()
        store.append_curve(run_id, entry)
        ready.curve.append(entry)

    begin, taken, stepping = Elapsed.now(), oracle.draws_taken, 0.0
    saved = since = begin.wall
    for state, is_mark in training.steps(ready.stepper, oracle, ready.state, marks or ready.workload.marks):
        is_stopped = stop() and oracle.draws_left > 0
        is_due = is_stopped or (time.perf_counter() - saved >= CHECKPOINT_SECONDS and oracle.processes.is_first)
        if not (is_mark or is_due):
            continue
        stepping += finished_at(state.theta) - since
        lease.check()  # before work that would be in vain
        if is_mark:
            mark()
        if is_due:
            reached = Reached(state, oracle.ledger, ready.elapsed.since(begin), ready.curve)
            watched = {"diagnostics": ready.diagnostics.state()} if ready.diagnostics else {}
            content = checkpoint.dump(reached, run_id=run_id, **watched)
            lease.check()
            store.save_checkpoint(run_id, content)
            saved = time.perf_counter()
        if is_stopped:
            raise Interrupted
        since = finished_at(state.theta)
    if not ready.curve:  # a run without draws passes no mark
        mark()

    content, trained = _record(ready, state), ready.elapsed.since(begin)
    record = {
        **content,
        **ready.unused.record,
        "seconds_prepare": begin.wall - started,
        "seconds_train": trained.wall,
        "seconds_cpu": trained.cpu,
        "seconds_draw": stepping / max(1, oracle.draws_taken - taken),
        "peak_memory": peak_memory(ready.engine.theta.device),
        **({"isolated": True} if isinstance(ready.optimizer, Isolated) else {}),
        **({"processes": oracle.processes.size} if oracle.processes.size > 1 else {}),
        "provenance": provenance(place),
    }
    lease.check()
    store.finish(run_id, record, oracle.ledger.to_json())
    return record


def _record(ready: Prepared, state: Any) -> dict[str, Any]:
    """The part of a record that does not depend on where and how fast the cell ran."""
    cell, oracle, of, final = ready.cell, ready.oracle, ready.workload, ready.curve[-1]
    # Epsilon is stated for the plan; it holds for the run if the run left the plan's ledger.
    if oracle.ledger != ready.plan.ledger:
        raise RuntimeError(f"the run left {oracle.ledger}, the plan holds {ready.plan.ledger}")
    spent = training.summary(ready.plan, state, cell.epsilon, ready.examples)
    validation = ready.watched.get("validation")
    scores: dict[str, Any] = {}
    right: dict[str, str] = {}
    if spent["status"] == "done" and oracle.processes.is_first:
        test = ready.watched["test"]
        predict = training.predictor(ready.engine, ready.model, state.theta, of.transform, of.evaluation_batch)
        if of.score == "accuracy":
            predict = cache(predict)  # the report asks for the same outputs, which take a pass over all test records
            right = _right(of, of.metric(predict(test.x), test.y).numpy(force=True))
        scores = of.report(predict, test)
    return {
        "schema": 1,
        "run_id": cell.run_id,
        "cell": cell.content(),
        **plain(spent),
        **({"tested": len(ready.watched["test"].x)} if "test" in ready.watched else {}),
        **_charge(ready, final, len(validation.x) if validation else 0),
        **{key: value for key, value in final.items() if key not in ("draw", "epoch", "diagnostics")},
        **({} if of.score == "accuracy" else {"score": of.score}),
        **right,
        **({"evaluation": ready.engine.way} if ready.engine.way != "batch" else {}),
        **({"put_back": changed} if (changed := getattr(ready.engine.state, "changed", [])) else {}),
        **({"scores": finite(scores)} if scores else {}),
        **({"diagnostics": finite(ready.diagnostics.summary())} if ready.diagnostics else {}),
    }


def _right(of: Workload, scores: NDArray[np.float64]) -> dict[str, str]:
    """Which test records are right, where `scores` says so and the records are public."""
    return {"right": packed(scores == 1)} if of.is_public and np.isin(scores, (0, 1)).all() else {}


def _charge(ready: Prepared, final: dict[str, Any], examples: int) -> dict[str, Any]:
    """The epsilon of the search that the cell is a run of, and the score that the search may release of this run.

    A score is a share of `examples` validation records, which one record changes by one; their number is public.
    """
    cell = ready.cell
    if cell.selection is None:
        return {}
    if cell.untrained:  # that there were no runs was drawn by a search that could have spent its target
        return {"epsilon_total": plain(cell.epsilon)}
    rule = selection_rule(cell.selection)
    content = {"epsilon_total": plain(rule.epsilon(ready.oracle.ledger, cell.delta, cell.accountant))}
    noise = score_noise(rule, cell.epsilon, cell.delta, cell.accountant)
    if not noise or not examples:
        return content
    std = noise / examples
    normal = np.random.default_rng(derive("score", cell.run_id)).standard_normal()
    value = final[f"validation_{ready.workload.score}"] + std * normal
    return content | {"released_score": {"value": value, "std": std, "noise": noise}}


def finished_at(theta: Vector) -> float:
    """The time when the device has computed all that it was asked to."""
    if theta.is_cuda:
        torch.cuda.synchronize(theta.device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process held at once since `_forget_peak`, or that the GPU's allocator did."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        try:
            import resource
        except ImportError:  # Windows has none
            return 0
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_peak(device: torch.device) -> None:
    """Begin anew: a worker runs cell after cell. Where the system cannot forget, it is the peak of all of them."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
