"""Several processes that train one model together: each sums over its part of a draw, an all-reduce adds up the parts.

A sum of clipped values does not depend on who computed which of them, so that neither what is released nor what it
costs changes with the number of processes. All of them hold all records, agree on the rows of a draw without
communication (they are a function of seed and draw), and go through the same optimizer, which sees the same releases
everywhere. The noise is drawn once, by process 0, and travels in its part of the sum: a query costs one all-reduce of
what it releases, and a draw with one gradient is one flat vector of d numbers.

What the processes send each other is not private, as it is not within one process. The network between them has to be
trusted like their memory.

A process that is refused before the first draw says so to the others, which are refused as well. One that fails later
has to end: then its connections close, and the others fail instead of waiting until the process group's timeout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from dpopt.errors import ConfigError
from dpopt.privacy.sampling import derive


class Left(RuntimeError):
    """Another process of the group has ended while this one waited for it."""


@dataclass(frozen=True)
class Processes:
    """The processes of one run, this one is number `rank` of them; all have to call its methods, with several."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_group(cls) -> Processes:
        """Those of `torch.distributed`'s default process group; this one alone where there is none."""
        is_grouped = dist.is_available() and dist.is_initialized()
        return cls(dist.get_rank(), dist.get_world_size()) if is_grouped else ALONE

    @property
    def is_first(self) -> bool:
        """True in the process that draws noise, writes files and shows progress."""
        return self.rank == 0

    def part(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The part of `rows`, shape [n], that this process has; all parts are nearly equally long."""
        return np.array_split(rows, self.size)[self.rank] if self.size > 1 else rows

    def add_up(self, total: Tensor) -> None:
        """Replace `total` by its sum over all processes, in place."""
        # Each number is added up once and sent around, so that all have the same bits. `training` makes sure of it.
        if self.size > 1:
            with _watching():
                dist.all_reduce(total)

    def gather(self, value: Any) -> list[Any]:
        """`value` of each process, in the order of their ranks."""
        values = [value]
        if self.size > 1:
            values = [None] * self.size
            with _watching():
                dist.all_gather_object(values, value)
        return values

    @contextmanager
    def together(self) -> Iterator[Callable[[], None]]:
        """A block that all processes pass or none does; ConfigError where another process was refused.

        Yields a function to be called where the block has done what may be refused: it waits for the others.
        """
        is_settled = False

        def settle() -> None:
            nonlocal is_settled
            is_settled = True
            for rank, reason in enumerate(self.gather("")):
                if reason:
                    raise ConfigError("processes", f"process {rank}", f"it was refused: {reason}")

        try:
            yield settle
        except Exception as error:
            if not is_settled:
                self.gather(str(error) or type(error).__name__)
            raise

    def agree(self, device: torch.device, **parts: object) -> None:
        """Refuse processes that would not make the same run, or cannot add up their sums on `device`.

        The `parts`, plain JSON data, have to be equal in all of them; only hashes are sent and shown. ConfigError in
        every process names the first part that differs.
        """
        everyone = self.gather({name: f"{derive(part):032x}"[:12] for name, part in parts.items()})
        for name in parts:
            values = [hashes.get(name) for hashes in everyone]
            if len(set(values)) > 1:
                raise ConfigError(f"processes.{name}", values, "expected the same in every process (these are hashes)")
        try:
            self.add_up(torch.zeros(1, device=device))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ConfigError("device", str(device), f"the process group cannot add up there: {reason}") from error


ALONE = Processes()


@contextmanager
def _watching() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Left(str(error)) from error


def digest(*tensors: Tensor) -> str:
    """SHA-256 over the bytes of all `tensors`, in hex."""
    content = hashlib.sha256()
    for tensor in tensors:
        content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
