"""Where cells run. An engine takes cells and reports what becomes of them; the store alone knows what is done.

So engines can be exchanged in the middle of a suite, and several may work on one results folder. What is to follow from
an event (to try again, to give up, to wait) is decided in `execute`, once for all engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from dpopt.errors import ConfigError, unknown
from dpopt.store.runs import Store

if TYPE_CHECKING:
    from dpopt.harness.cell import Cell

OWN = {
    "inline": ("dpopt.harness.engines.inline:InlineEngine", ""),
    "local": ("dpopt.harness.engines.local:LocalEngine", ""),
    "ray": ("dpopt.harness.engines.ray:RayEngine", "ray"),
    "span": ("dpopt.harness.engines.span:SpanEngine", ""),
    "slurm": ("dpopt.harness.engines.slurm:SlurmEngine", "submitit"),
}
"""name -> "module:Class", and the module that it needs from the extra of its name."""
GROUP = "dpopt.engines"
"""The entry points by which another distribution brings an engine."""


@cache
def known() -> dict[str, tuple[str, str]]:
    """All engines, as in `OWN`."""
    return {**OWN, **{point.name: (point.value, "") for point in entry_points(group=GROUP)}}


class Event(NamedTuple):
    """What an engine reports of a cell.

    Attributes:
        run_id: the cell.
        kind: "progress": it runs, and `fraction` is done; "done": it has a record; "held": another process runs it, or
            has finished it; "failed": an error of its own, noted in the store; "died": its worker did; "interrupted":
            it was asked to stop; "blocked": results cannot be written, which no cell can help.
        fraction: part of the cell that is done.
        reason: why it ended as it did.
    """

    run_id: str
    kind: Literal["progress", "done", "held", "failed", "died", "interrupted", "blocked"]
    fraction: float = 1.0
    reason: str = ""


@dataclass(frozen=True)
class Setup:
    """How an engine runs cells; `conf/base/suite.yaml` documents the keys.

    Attributes:
        device, physical_batch, isolate: see `cell.run`.
        workers: cells at a time; None leaves it to the engine.
        memory: bytes that a worker may take; None for no limit.
        grace: seconds that a cell has to write a checkpoint when it is stopped.
        options: what the engine alone understands.
    """

    device: str = "auto"
    physical_batch: int | None = None
    isolate: bool = False
    workers: int | None = None
    memory: int | None = None
    grace: float = 30.0
    options: Mapping[str, Any] = field(default_factory=dict)


class Engine(Protocol):
    """Runs cells in any order. Made from a `Store` and a `Setup`."""

    def submit(self, cell: Cell) -> None:
        """Queue a cell; it is reported once as anything but "progress", unless the engine is closed before."""
        ...

    def poll(self, timeout: float) -> list[Event]:
        """What happened since the last call; waits up to `timeout` seconds for something to happen."""
        ...

    def cancel(self, run_id: str) -> None:
        """Have a cell stop: it writes a checkpoint, or is killed after the grace that it is given."""
        ...

    def close(self) -> None:
        """Stop all cells, each as `cancel` does, and end."""
        ...


def check(name: str, where: str) -> None:
    """Raise `ConfigError` unless there is an engine `name` and what it needs is installed."""
    if name not in known():
        raise unknown(where, name, known())
    needs = known()[name][1]
    if needs and find_spec(needs) is None:
        raise ConfigError(where, name, f"it needs {needs}: pip install 'dpopt[{name}]'")


def create(name: str, store: Store, setup: Setup) -> Engine:
    """The engine `name`, see `known`.

    Raises:
        ConfigError: it cannot be had, or does not understand its options.
    """
    check(name, "engine")
    module, _, attribute = known()[name][0].partition(":")
    return getattr(import_module(module), attribute)(store, setup)


def understood(setup: Setup, known: Mapping[str, Any], engine: str) -> dict[str, Any]:
    """The options in `setup`, with the values in `known` where they are silent.

    Raises:
        ConfigError: an option is none of these.
    """
    for key in setup.options:
        if key not in known:
            raise unknown(f"options of engine {engine}", key, known)
    return {**known, **setup.options}
