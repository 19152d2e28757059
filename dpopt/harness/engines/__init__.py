"""Where cells run. An engine takes cells and reports what becomes of them; the store alone knows what is done.

So engines can be exchanged in the middle of a suite, and several may work on one results folder. What follows from an
event (to try again, to give up, to wait) is decided in `execute`; queue, cancelling and grace are those of
`base.Engine`. The file of an engine says how a cell is started, stopped and killed.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from dpopt.errors import ConfigError, unknown
from dpopt.harness.engines.base import Attempt, Engine, Event, Setup
from dpopt.store.runs import Store

__all__ = ["GROUP", "OWN", "Attempt", "Engine", "Event", "Setup", "check", "create", "known"]

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
