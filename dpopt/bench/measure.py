"""Times and peak memory of contenders, measured side by side.

Absolute times on a shared machine say little, so contenders take turns, and the ratio within one run is reported. Each
lives in a process of its own, as in one process a step's page faults depend on what others have freed before.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from dpopt.bench.contenders import Contender, Step
from dpopt.runs.remote import Remote

WARM_UP = 2
"""Calls before the timed ones."""
SLOW, SLOW_ROUNDS = 20, 3
"""A contender that takes this many times its baseline's time makes only this many rounds."""
SHORT = 0.1
"""A call that takes fewer seconds is made twice and the second is timed: in a training loop, caches are warm."""
REST = 0.02
"""Seconds of rest after a turn: OpenMP's threads spin for some milliseconds, on the next contender's cores."""
_REPEATS = 3
"""Calls that are timed together on a GPU: in training, one step is launched while another computes."""
_MARK = "dpopt::measured"


@dataclass
class Measurement:
    """The cost of one contender."""

    seconds: list[float] = field(default_factory=list)
    """Per draw, one for each round."""
    memory: int | None = None
    failure: str = ""
    """The reason why the rest is missing."""


class TimedContender:
    """A contender in its own process: after `warm_up` it can be asked `rounds` times for `seconds`."""

    _step: Step

    def __init__(self, build: Callable[[int], Step], rounds: int, device: torch.device) -> None:
        self._build, self._device = build, device
        self._calls = WARM_UP + rounds * (1 + _REPEATS if device.type == "cuda" else 2)

    def warm_up(self) -> None:
        use(self._device)
        self._step = self._build(self._calls)
        for _ in range(WARM_UP):
            self._step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()

    def seconds(self) -> float:
        gc.collect()  # now, or it comes within a step that is timed
        if self._device.type != "cuda":
            first = self._timed()
            seconds = self._timed() if first < SHORT else first
            time.sleep(REST)
            return seconds
        # By the device's own clock: a call returns before the device has done its work.
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._step()  # gets the memory again
        begin.record()
        for _ in range(_REPEATS):
            self._step()
        end.record()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # the next contender needs what this process's allocator holds
        return begin.elapsed_time(end) / 1e3 / _REPEATS

    def memory(self) -> int:
        """The most bytes that tensors hold at once in a second call, with all that setting up and the first left.

        It comes last, because it frees what the timed calls held. On a GPU this is the caching allocator's own count,
        on the CPU the sum over the events of torch's allocator, working memory inside of operators included. What NumPy
        allocates (the blocks in which CPU noise is made, less than a megabyte) is not in it.
        """
        del self._step
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated(self._device)  # what others in this process hold is not counted
            step = self._build(2)
            step()
            torch.cuda.reset_peak_memory_stats(self._device)
            step()
            return torch.cuda.max_memory_allocated(self._device) - before
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's library writes to stderr when it starts
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            step = self._build(2)
            step()
            with record_function(_MARK):
                step()
        events: list[Any] = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
        start = next(event.start_ns() for event in events if event.name() == _MARK)
        changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
        live = np.cumsum([0] + [change for _, change in changes])  # entry i: before event i
        return int(live[np.searchsorted([at for at, _ in changes], start) :].max())

    def _timed(self) -> float:
        started = time.perf_counter()
        self._step()
        return time.perf_counter() - started


def use(device: torch.device) -> None:
    """Make `device` the one that events and the allocator's functions are about."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def measure(
    group: Sequence[Contender],
    rounds: int,
    device: torch.device,
    advance: Callable[[str], None] = lambda name: None,
    limit: float | None = None,
) -> dict[str, Measurement]:
    """Measure every contender of `group`, in `rounds` interleaved rounds; one that fails stops none of the others.

    One that takes more than `limit` seconds for its first calls, or for a turn, has failed. `advance` is called with
    the contender's name after each piece of work. On a GPU all hold their models at the same time.
    """
    results = {contender.name: Measurement() for contender in group}
    with ExitStack() as stack:
        remotes = {c.name: stack.enter_context(closing(Remote(TimedContender(c.build, rounds, device)))) for c in group}
        for name, result in results.items():
            _, result.failure = remotes[name].ask("warm_up", limit)
            advance(name)
        for number in range(rounds):
            for contender in group:
                result, baseline = results[contender.name], results[contender.baseline].seconds
                # A slow one's ratio is certain after few rounds, and all others would wait for it.
                has_enough = number >= SLOW_ROUNDS and baseline and result.seconds[-1:] > [SLOW * baseline[-1]]
                if not result.failure and not has_enough:
                    seconds, result.failure = remotes[contender.name].ask("seconds", limit)
                    if not result.failure:
                        result.seconds.append(seconds / contender.draws)
                advance(contender.name)
        for name, result in results.items():
            if not result.failure:
                result.memory, result.failure = remotes[name].ask("memory", limit)
            advance(name)
    return results


def ratios(group: Sequence[Contender], results: dict[str, Measurement]) -> list[dict[str, Any]]:
    """One row for each contender: ratios of medians, quartiles of the single rounds' ratios; None where one failed."""
    rows = []
    for contender in group:
        result, baseline = results[contender.name], results[contender.baseline]
        row: dict[str, Any] = {
            "contender": contender.name,
            "baseline": contender.baseline,
            "draws_per_call": contender.draws,
            "rounds": len(result.seconds),
            **dict.fromkeys(("seconds", "time_ratio", "time_ratio_low", "time_ratio_high")),
            "memory": result.memory,
            "memory_ratio": None,
            "failure": result.failure,
        }
        if result.seconds and not result.failure:
            row["seconds"] = float(np.median(result.seconds))
        if row["seconds"] and baseline.seconds and not baseline.failure:
            row["time_ratio"] = row["seconds"] / float(np.median(baseline.seconds))
            # Quartiles of the rounds' ratios: two neighbours in time saw the same machine.
            each = [mine / other for mine, other in zip(result.seconds, baseline.seconds, strict=False)]
            row["time_ratio_low"], row["time_ratio_high"] = map(float, np.quantile(each, [0.25, 0.75]))
        if result.memory and baseline.memory and not result.failure:
            row["memory_ratio"] = result.memory / baseline.memory
        rows.append(row)
    return rows
