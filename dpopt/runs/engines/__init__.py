"""Where cells run; the names are those of `suites.engines`."""

from __future__ import annotations

from importlib import import_module

from dpopt.runs.engines.base import Attempt, Engine, Event, Setup
from dpopt.store.runs import Store
from dpopt.suites.engines import brought, check

__all__ = ["Attempt", "Engine", "Event", "Setup", "create"]

MODULES = {
    "inline": ("dpopt.runs.engines.inline", "InlineEngine"),
    "local": ("dpopt.runs.engines.local", "LocalEngine"),
    "ray": ("dpopt.runs.engines.ray", "RayEngine"),
    "span": ("dpopt.runs.engines.span", "SpanEngine"),
    "slurm": ("dpopt.runs.engines.slurm", "SlurmEngine"),
}


def create(name: str, store: Store, setup: Setup) -> Engine:
    """The engine `name`.

    Raises:
        ConfigError: it cannot be had, or does not understand its options.
    """
    check(name, "engine")
    if name in brought():
        return brought()[name].load()(store, setup)
    module, attribute = MODULES[name]
    return getattr(import_module(module), attribute)(store, setup)
