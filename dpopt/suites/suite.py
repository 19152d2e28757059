"""Suites: the files at hand, and one of them with some of its keys replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dpopt import configurations, fields
from dpopt._paths import at_hand
from dpopt.cells import Cell
from dpopt.configurations import OPEN_KEYS
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Name
from dpopt.suites.schema import Keys

_DEFAULTS = "suite"
"""The file that every suite's file begins with; it holds all keys with their defaults."""


class Suite(Keys):
    """A matrix of runs: its axes and how to run it; see `conf/base/suite.yaml` for every key."""

    def cells(self) -> list[Cell]:
        """The cells that the suite consists of, each once, without those that follow from the outcome of others.

        Raises:
            ConfigError: anything in the suite that cannot be used.
        """
        from dpopt.suites.plan import plan

        return list({entry.cell.run_id: entry.cell for entry in plan(self)}.values())


_AS_NULL: dict[str, Any] = {"physical_batch": "auto", "retry_on": []}
"""Values that say the same as null: the default of the key's field."""
_ENGINES = {"inline": "", "local": "", "span": "", "ray": "ray", "slurm": "submitit"}
"""Name -> the module that it needs from the extra of its name. `runs.run_suite` has the code behind the names."""


def suite_files() -> dict[str, Path]:
    """The suites at hand: those that come with dpopt, and in their place `benchmarks/*.yaml` of the current folder."""
    return at_hand("benchmarks", "*.yaml")


def load_suite(suite: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), **values: Any) -> Suite:
    """A suite, with some of its keys replaced.

        load_suite("quickstart", epsilon=[1, 3])
        load_suite({"name": "mine", "workloads": ["digits_mlp"], "optimizers": ["fiber", "adadp"], "epsilon": 3})

    Args:
        suite: a name that `dpopt list suites` shows, a path to a YAML file, or the content of one, with its name.
        overrides: as on the command line, such as "seeds=[0]" or "settings.fiber.fields.kappa=0.5".
        values: key -> value; a mapping such as `settings` is joined with the suite's, as by an override.

    Raises:
        ConfigError: no such suite, or something in it cannot be used.
    """
    names, instead = configurations.keys(_DEFAULTS), None
    if isinstance(suite, Mapping):
        name = fields.convert(suite.get("name"), Name, "suite.name", {})
        if name == _DEFAULTS:
            raise ConfigError("suite.name", name, "expected another name: the defaults of all suites have this one")
        stated = {str(key): configurations.plain(value, str(key)) for key, value in suite.items() if key != "name"}
        path, instead = Path(f"{name}.yaml"), {"defaults": [_DEFAULTS, "_self_"], **stated}
    else:
        files, name = suite_files(), fields.convert(str(suite), str, "suite", {})
        at = fields.path(name, "suite") if name.endswith(".yaml") else files.get(name)
        if at is None or not at.is_file():
            raise unknown("suite", name, files, "there is no such suite")
        path = at
    content = configurations.composed(path, overrides, names, instead)
    if missing := sorted(set(names) - content.keys()):
        raise ConfigError(str(path), missing, "keys are missing: begin the file with `defaults: [suite, _self_]`")
    for key, value in values.items():
        if key not in names:
            raise unknown("load_suite", key, names)
        value = configurations.plain(value, key)
        configurations.check_values(value, key)
        is_added = key in OPEN_KEYS and isinstance(value, dict)
        content[key] = configurations.joined(content[key] or {}, value) if is_added else value
    if any(isinstance(label, Mapping) for label in fields.listed(content["optimizers"])):
        allowed = "expected names; put what differs from the defaults into `settings`"
        raise ConfigError(f"{path.stem}.optimizers", content["optimizers"], allowed)
    stated = {key: value for key, value in content.items() if value is not None and value != _AS_NULL.get(key)}
    built = fields.build(Suite, {"name": path.stem, **stated}, path.stem)
    check_engine(built.engine, f"{path.stem}.engine")
    return built


def other_engines() -> dict[str, EntryPoint]:
    """Launchers of other distributions, by name: entry points of the group "dpopt.launchers"."""
    return {point.name: point for point in entry_points(group="dpopt.launchers")}


def check_engine(name: str, where: str) -> None:
    """Raise `ConfigError` unless there is an engine `name` and what it needs is installed."""
    others = other_engines()
    if name not in (*_ENGINES, *others):
        raise unknown(where, name, {**_ENGINES, **others})
    if name not in others and _ENGINES[name] and find_spec(_ENGINES[name]) is None:
        raise ConfigError(where, name, f"it needs {_ENGINES[name]}: pip install 'dpopt[{name}]'")
