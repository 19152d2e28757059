"""The largest physical batch: how many examples a step can take before the device's memory is spent."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dpopt.bench.cases import Case
from dpopt.bench.contenders import ENGINES, Step, Task, non_private
from dpopt.bench.measure import use
from dpopt.runs.remote import Remote

KNOWN = 64
"""Examples that are made; a larger batch repeats them, as making so many numbers takes longer than a step."""
PRECISION = 8
"""The batch is found to one part in so many."""


@dataclasses.dataclass(frozen=True)
class Search:
    """One contender, whose largest batch is to be found in a process of its own.

    Args:
        build: case, number of calls -> a step.
        case: the model; the search begins at its batch size.
        most: examples at which the search ends.
        device: whose memory it is.
        seconds: no larger batch is tried once the search has taken so long.
    """

    build: Callable[[Case, int], Step]
    case: Case
    most: int
    device: torch.device
    seconds: float

    def largest(self) -> dict[str, Any]:
        """Keys `batch`, `seconds` of a step of that size, and `end`: what ended the search (memory, most or time).

        Raises:
            RuntimeError: not even a step of one example can be made, for another reason than memory.
        """
        use(self.device)
        good, bad, took, started = 0, 0, 0.0, time.monotonic()
        size = min(self.case.batch_size, self.most)
        while True:
            seconds, error = self._try(size)
            if error is not None and not _is_memory(error):  # as where indices no longer fit in 32 bits
                if not good:
                    raise error
                return {"batch": good, "seconds": took, "end": f"{type(error).__name__}: {error}"[:80]}
            if error is not None:
                bad = size
            else:
                good, took = size, seconds
            if end := self._end(good, bad, started):
                return {"batch": good, "seconds": took, "end": end}
            size = (good + bad) // 2 if bad else min(2 * good, self.most)

    def _end(self, good: int, bad: int, started: float) -> str:
        """Why the search ends; empty while it goes on. `bad` is 0 as long as no size was too large."""
        if good == self.most:
            return "most"
        if bad and bad - good <= max(1, good // PRECISION):
            return "memory"
        return "time" if good and time.monotonic() - started > self.seconds else ""

    def _try(self, size: int) -> tuple[float, RuntimeError | None]:
        """Seconds of a step of that size, or the error that it ended with; frees the memory of both."""
        try:
            return self._seconds(size), None
        except RuntimeError as error:
            return 0.0, error.with_traceback(None)  # whose frames hold the tensors
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _seconds(self, size: int) -> float:
        """Seconds of the second step; the first one takes memory from the system."""
        case = dataclasses.replace(self.case, batch_size=size, data=partial(repeated, self.case.data))
        step = self.build(case, 2)
        step()
        self._wait()
        started = time.perf_counter()
        step()
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _is_memory(error: RuntimeError) -> bool:
    """True if an error says that the device has no more memory, in any of the ways that libraries have."""
    is_told = any(word in str(error) for word in ("out of memory", "ALLOC_FAILED"))
    return isinstance(error, torch.OutOfMemoryError) or is_told


def repeated(data: Callable[[int], tuple[Tensor, Tensor]], n: int) -> tuple[Tensor, Tensor]:
    """The first of n examples of `data`, again and again."""
    rows = torch.arange(n) % min(n, KNOWN)
    x, y = data(min(n, KNOWN))
    return x[rows], y[rows]


def largest(
    engines: Iterable[str], case: Case, subset: str, device: torch.device, most: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """One row for non-private SGD and each of `engines`: the largest batch of each, one after the other.

    Args:
        engines: names of `contenders.ENGINES`.
        case, subset: the model, and which of its parameters are trained.
        device: whose memory it is; on the CPU there is none to be found, and `most` ends the search.
        most: examples at which a search ends.
        seconds: that each search may take.
    """
    builders = {"non_private": non_private} | {name: ENGINES[name] for name in engines}
    for name in builders.keys() & {"bookkeeping", "vmap"}:  # where memory is short, these would divide a batch
        builders[name] = partial(builders[name], is_whole=True)
    for name, build in builders.items():
        search = Search(partial(_built, build, subset, device), case, most, device, seconds)
        with closing(Remote(search)) as remote:
            result, failure = remote.ask("largest", 2 * seconds)
        row = {"case": case.name, "subset": subset, "contender": name, "failure": failure}
        yield row | (result or {"batch": None, "seconds": None, "end": ""})


def _built(build: Callable[..., Step], subset: str, device: torch.device, case: Case, calls: int) -> Step:
    return build(Task(case, subset, device), calls)
