"""The names of what can run a suite's cells; `runs.run_suite` has the code behind them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from dpopt.errors import ConfigError, unknown

BUILT_IN = {"inline": "", "local": "", "span": "", "ray": "ray", "slurm": "submitit"}
"""Name -> the module that it needs from the extra of its name."""
GROUP = "dpopt.launchers"
"""The entry points by which another distribution brings a launcher."""


def brought() -> dict[str, EntryPoint]:
    """Launchers of other distributions, by name."""
    return {point.name: point for point in entry_points(group=GROUP)}


def check(name: str, where: str) -> None:
    """Raise `ConfigError` unless there is an engine `name` and what it needs is installed."""
    if name in brought():
        return
    if name not in BUILT_IN:
        raise unknown(where, name, {**BUILT_IN, **brought()})
    if BUILT_IN[name] and find_spec(BUILT_IN[name]) is None:
        raise ConfigError(where, name, f"it needs {BUILT_IN[name]}: pip install 'dpopt[{name}]'")
