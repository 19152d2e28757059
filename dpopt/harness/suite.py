"""Suite files: Hydra reads the YAML and the command line's overrides, this module says what they may hold."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Fraction
from dpopt.harness import enclosed, engines

BASE = Path(str(resources.files("dpopt") / "conf" / "base"))
"""Defaults that suites and commands start from."""
OPEN_KEYS = ("settings", "fields", "published", "options")
"""Keys below which an override may add what the file does not name."""


@dataclass(frozen=True)
class Setting:
    """How one row of a suite is made; all fields are optional in the file.

    Args:
        name: registered optimizer; by default the label itself.
        fields: hyperparameters that differ from the defaults.
        tuning: "self" (needs none), "fixed" (set by hand), or a search over `grid`: "grid" (every point once), "random"
            (`runs` points drawn at random), "private" (as many as `selection` draws) or "linear_scaling" (two searches
            of `runs` points at small epsilons, see `tuning.linear_scaling`); by default "grid" where a grid is known.
        grid: field -> values to search; by default the optimizer's own grid.
        selection: how the search is charged; where it is, the suite's epsilon is that of the whole search. "composed"
            (all runs one after the other) or "simulated" ({rule: simulated, share: 0.85}) for "grid" and "random",
            {rule: logarithmic | geometric | poisson, runs: mean} for "private".
        runs: how many points "random" draws, or each of the searches of "linear_scaling".
        epsilon, epochs, batch_size, clip, seeds, refine: replace the suite's.
    """

    name: str
    fields: dict[str, Any]
    tuning: Literal["self", "fixed", "grid", "random", "private", "linear_scaling"]
    grid: dict[str, Any]
    selection: dict[str, Any] | None = None
    runs: fields.Count | None = None
    epsilon: tuple[float, ...] | None = None
    epochs: tuple[float, ...] | None = None
    batch_size: tuple[int, ...] | None = None
    clip: tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None
    refine: fields.Natural = 0


@dataclass(frozen=True)
class Published:
    """What a paper calls the rows of a suite, for `dpopt table compare=published`.

    Args:
        paper: the file `benchmarks/published/PAPER.csv`.
        workloads: {name: ..., field: value, is: [data set, model, subset]}: workloads of the suite that have this name
            and these fields, and what the paper calls them; instead of a name, {field: {value: name}} has one for each
            value of a field.
        methods: label -> the paper's method.
    """

    paper: str
    workloads: tuple[dict[str, Any], ...]
    methods: dict[str, str]

    def __post_init__(self) -> None:
        for entry in self.workloads:
            called = entry.get("is")
            if (
                "name" not in entry
                or not isinstance(called, list)
                or len(called) != 3
                or not all(map(_is_name, called))
            ):
                allowed = "expected {name: ..., field: value, is: [data set, model, subset]}"
                raise ConfigError("published.workloads", entry, allowed)


def _is_name(item: Any) -> bool:
    """Whether `item` is a name or {field: {value: name}}."""
    if isinstance(item, str):
        return True
    return isinstance(item, dict) and len(item) == 1 and all(isinstance(names, dict) for names in item.values())


@dataclass(frozen=True)
class Suite:
    """The axes of a matrix and how to run it; see `conf/base/suite.yaml` for every key.

    Attributes:
        epochs: an axis of its own, or the number for each target epsilon.
    """

    name: str
    description: str
    workloads: tuple[Any, ...]
    optimizers: tuple[str, ...]
    settings: dict[str, Any]
    epsilon: tuple[float, ...]
    delta: float | None
    accountant: str
    batch_size: tuple[int, ...] | None
    epochs: tuple[float, ...] | dict[float, float] | None
    clip: tuple[float, ...] | None
    seeds: tuple[int, ...]
    engine: str
    workers: int | None
    device: str
    physical_batch: int | None
    isolate: bool
    lot: int
    timeout: float | None
    retries: int
    retry_on: tuple[Literal["failed", "died", "timeout"], ...]
    grace: float
    memory: float | None
    max_hours: float | None
    options: dict[str, Any]
    dry_run: float
    diagnostics: bool
    refine: int
    log: tuple[str, ...]
    results: str
    plots: str
    published: Published | None


def compose_config(folder: Path, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The YAML file `name` in `folder` with Hydra overrides applied, as plain data.

    Raises:
        ConfigError: the file or an override cannot be used; names the key and the nearest known one. So where they
            would take something from the environment or from other folders, see `enclosed`.
    """
    known = known_keys(folder, name)
    prepared = [_prepare(override, known) for override in overrides]
    GlobalHydra.instance().clear()
    try:
        enclosed.check_files(folder, name)
        # Hydra takes every folder beside a file for a group of files; `results` and `plots` must not become such.
        with TemporaryDirectory() as alone:
            for file in (*BASE.glob("*.yaml"), *folder.glob("*.yaml")):
                shutil.copy(file, alone)
            with initialize_config_dir(alone, version_base="1.3"):
                config = compose(name, prepared)
                enclosed.check_values(OmegaConf.to_container(config), f"{name}.yaml")
                content = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise ConfigError(str(folder / f"{name}.yaml"), list(overrides), reason) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}.yaml", content, "expected a mapping")
    for key in content:
        if key not in known:
            raise unknown(f"{name}.yaml", key, known)
    return {str(key): value for key, value in content.items()}


def known_keys(folder: Path, name: str) -> list[str]:
    """The keys that `name` may hold: a suite's for a suite, its own for a command's defaults."""
    source = BASE / (f"{name}.yaml" if folder == BASE else "suite.yaml")
    return [str(key) for key in OmegaConf.to_container(OmegaConf.load(source))]  # type: ignore[union-attr]


def first_key(override: str) -> str:
    """The top-level key that an override such as `+settings.fiber.tuning=fixed` is about."""
    return override.partition("=")[0].lstrip("+~").split(".")[0]


def _prepare(override: str, known: Sequence[str]) -> str:
    key, equals, _ = override.partition("=")
    first = first_key(override)
    if not equals and not key.startswith("~"):
        raise ConfigError("override", override, "expected key=value")
    if first not in known:
        raise unknown("override", first, known)
    return f"++{override.lstrip('+')}" if first in OPEN_KEYS and not key.startswith("~") else override


def suite_files() -> dict[str, Path]:
    """The suites at hand: `benchmarks/*.yaml` of the current folder, then of the source tree that dpopt lies in."""
    found = {}
    for folder in (BASE.parents[2] / "benchmarks", Path("benchmarks")):
        found.update({file.stem: file for file in folder.glob("*.yaml")})
    return dict(sorted(found.items()))


def load_suite(name: str, overrides: Sequence[str] = ()) -> Suite:
    """The suite `name` (or a path to a YAML file) with overrides such as `seeds=[0]` or `optimizers=[fiber]`.

    Raises:
        ConfigError: no such suite, or something in it cannot be used.
    """
    files = suite_files()
    path = Path(name) if name.endswith(".yaml") else files.get(name)
    if path is None or not path.is_file():
        raise unknown("suite", name, files)
    content = compose_config(path.parent, path.stem, overrides)
    if missing := sorted(set(known_keys(path.parent, path.stem)) - content.keys()):
        raise ConfigError(str(path), missing, "keys are missing: begin the file with `defaults: [suite, _self_]`")
    axes = ("workloads", "optimizers", "epsilon", "batch_size", "clip", "seeds")
    for axis in axes:
        content[axis] = _axis(content[axis])
    where = path.stem
    return Suite(
        name=path.stem,
        description=str(content["description"]),
        workloads=_nonempty(content["workloads"], f"{where}.workloads"),
        optimizers=_labels(content["optimizers"], f"{where}.optimizers"),
        settings=_mapping(content["settings"] or {}, f"{where}.settings"),
        epsilon=_numbers(content["epsilon"], Bound, f"{where}.epsilon"),
        delta=fields.convert(content["delta"], Fraction | None, f"{where}.delta", {}),
        accountant=fields.convert(content["accountant"], str, f"{where}.accountant", {}),
        batch_size=_optional(content["batch_size"], fields.Count, f"{where}.batch_size"),
        epochs=_epochs(content["epochs"], f"{where}.epochs"),
        clip=_optional(content["clip"], Bound, f"{where}.clip"),
        seeds=_numbers(content["seeds"], int, f"{where}.seeds"),
        engine=_engine(content["engine"], f"{where}.engine"),
        workers=fields.convert(content["workers"], fields.Count | None, f"{where}.workers", {}),
        device=fields.convert(content["device"], str, f"{where}.device", {}),
        physical_batch=_auto(content["physical_batch"], fields.Count, f"{where}.physical_batch"),
        isolate=fields.convert(content["isolate"], bool, f"{where}.isolate", {}),
        timeout=fields.convert(content["timeout"], fields.Positive | None, f"{where}.timeout", {}),
        lot=fields.convert(content["lot"], fields.Count, f"{where}.lot", {}),
        retries=fields.convert(content["retries"], fields.Natural, f"{where}.retries", {}),
        retry_on=_kinds(content["retry_on"], f"{where}.retry_on"),
        grace=fields.convert(content["grace"], fields.Positive, f"{where}.grace", {}),
        memory=fields.convert(content["memory"], fields.Positive | None, f"{where}.memory", {}),
        max_hours=fields.convert(content["max_hours"], fields.Positive | None, f"{where}.max_hours", {}),
        options=_options(content["options"], f"{where}.options"),
        dry_run=fields.convert(content["dry_run"], fields.Factor, f"{where}.dry_run", {}),
        diagnostics=fields.convert(content["diagnostics"], bool, f"{where}.diagnostics", {}),
        refine=fields.convert(content["refine"], fields.Natural, f"{where}.refine", {}),
        log=_optional(_axis(content["log"]), Literal["tensorboard", "wandb"], f"{where}.log") or (),
        results=fields.convert(content["results"], str, f"{where}.results", {}),
        plots=fields.convert(content["plots"], str, f"{where}.plots", {}),
        published=_published(content["published"], f"{where}.published"),
    )


def axis(value: Any, hint: Any, where: str) -> tuple[Any, ...] | None:
    """The values of an axis, converted; None for none.

    Raises:
        ConfigError: an empty axis, a value that cannot be used, or one that is repeated.
    """
    return _optional(_axis(value), hint, where)


def _axis(value: Any) -> tuple[Any, ...] | None:
    """A scalar counts as an axis of one value."""
    return tuple(value) if isinstance(value, list) else None if value is None else (value,)


def _nonempty(values: tuple[Any, ...] | None, where: str) -> tuple[Any, ...]:
    if not values:
        raise ConfigError(where, values, "expected at least one value")
    return values


def _numbers(values: tuple[Any, ...] | None, hint: Any, where: str) -> tuple[Any, ...]:
    numbers = tuple(fields.convert(v, hint, f"{where}[{i}]", {}) for i, v in enumerate(_nonempty(values, where)))
    if len(set(numbers)) < len(numbers):
        raise ConfigError(where, list(numbers), "a value is repeated")
    return numbers


def _optional(values: tuple[Any, ...] | None, hint: Any, where: str) -> tuple[Any, ...] | None:
    return None if values is None else _numbers(values, hint, where)


def _published(value: Any, where: str) -> Published | None:
    if value is None:
        return None
    names = {field.name for field in dataclasses.fields(Published)}
    if not isinstance(value, dict) or value.keys() != names:
        raise ConfigError(where, value, f"expected a mapping with the keys {', '.join(sorted(names))}")
    return fields.build(Published, value, where)


def _epochs(value: Any, where: str) -> tuple[float, ...] | dict[float, float] | None:
    if not isinstance(value, dict):
        return axis(value, fields.Positive, where)
    epsilons = _numbers(tuple(value), Bound, where)
    numbers = (fields.convert(number, fields.Positive, where, {}) for number in value.values())
    return dict(zip(epsilons, numbers, strict=True))


def _auto(value: Any, hint: Any, where: str) -> Any:
    """None for "auto"."""
    return None if value == "auto" else fields.convert(value, hint, where, {})


def _engine(value: Any, where: str) -> str:
    engines.check(name := fields.convert(value, str, where, {}), where)
    return name


def _kinds(value: Any, where: str) -> tuple[Any, ...]:
    kinds = Literal["failed", "died", "timeout"]
    return tuple(fields.convert(kind, kinds, where, {}) for kind in _axis(value) or ())


def _options(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise ConfigError(where, value, "expected key: value, as the engine understands them")
    return {str(key): given for key, given in (value or {}).items()}


def _labels(values: tuple[Any, ...] | None, where: str) -> tuple[str, ...]:
    for value in _nonempty(values, where):
        if not isinstance(value, str):
            raise ConfigError(where, value, "expected names; put what differs from the defaults into `settings`")
    return tuple(values or ())


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise ConfigError(where, value, "expected label -> {name, fields, tuning, grid, selection, runs, epsilon, ...}")
    return value
