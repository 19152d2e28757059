"""Suite files: Hydra reads the YAML and the command line's overrides, this module says what they may hold."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Literal

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from dpopt import documents, fields
from dpopt._paths import at_hand, shipped
from dpopt.errors import ConfigError, cut, unknown
from dpopt.fields import Bound, Few, FewOrNone, Name, Probability, several
from dpopt.harness import enclosed, engines

if TYPE_CHECKING:
    from dpopt.harness.cell import Cell

BASE = Path(str(resources.files("dpopt") / "conf" / "base"))
"""Defaults that suites and commands start from."""
NUMBER = re.compile(r"[\w.+-]+")
"""What may be a number in an override."""
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
        average: decay of the weights in an average of the parameters, around the optimizer, see `Averaged`; 0 for none.
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
    refine: FewOrNone = 0
    average: fields.Decay = 0.0


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
    timeout: float | None
    retries: int
    retry_on: tuple[Literal["failed", "died", "timeout"], ...]
    grace: float
    memory: float | None
    max_hours: float | None
    options: dict[str, Any]
    scale_down: float
    diagnostics: bool
    refine: int
    log: tuple[str, ...]
    results: str
    plots: str
    published: Published | None

    def cells(self) -> list[Cell]:
        """The cells that the suite consists of, each once, without those that follow from the outcome of others.

        Raises:
            ConfigError: anything in the suite that cannot be used.
        """
        from dpopt.harness.plan import plan

        return list({entry.cell.run_id: entry.cell for entry in plan(self)}.values())


def compose_config(
    folder: Path, name: str, overrides: Sequence[str], given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The YAML file `name` in `folder` with Hydra overrides applied, as plain data.

    Args:
        folder, name: of the file.
        overrides: such as "seeds=[0]".
        given: key -> value, in the place of what the file says; `OPEN_KEYS` are added to.

    Raises:
        ConfigError: the file or an override cannot be used; names the key and the nearest known one. So where they
            would take something from the environment or from other folders, see `enclosed`.
    """
    known = known_keys(folder, name)
    documents.check(folder / f"{name}.yaml")
    prepared = [_prepare(override, known) for override in overrides]
    # Hydra takes every folder beside a file for a group of files; `results` and `plots` must not become such.
    with TemporaryDirectory() as alone:
        for file in (*BASE.glob("*.yaml"), *shipped("benchmarks").glob("*.yaml"), *folder.glob("*.yaml")):
            shutil.copy(file, alone)
        try:
            enclosed.check_files(folder, name)
            content = _composed(alone, name, prepared)
        except ConfigError:
            raise
        except Exception as error:  # whatever the parsers stumble over, the file or an override is at fault
            reason = " ".join(f"{error} {error.__cause__ or ''}".split())
            raise ConfigError(str(folder / f"{name}.yaml"), list(overrides), cut(reason)) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{name}.yaml", content, "expected a mapping")
    for key in content:
        if key not in known:
            raise unknown(f"{name}.yaml", key, known)
    return {str(key): value for key, value in content.items()} | _given(given or {}, content, known)


def _given(given: Mapping[str, Any], content: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """What the caller says of some keys, as the file would say it."""
    found = {}
    for key, value in given.items():
        if key not in known:
            raise unknown("load_suite", key, known)
        value = _plain(value, key)
        enclosed.check_values(value, key)
        found[key] = {**(content[key] or {}), **value} if key in OPEN_KEYS and isinstance(value, dict) else value
    return found


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part, where) for key, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [_plain(part, where) for part in value]
    if value is None or isinstance(value, str | bool | int | float):
        return value
    raise ConfigError(where, value, "expected what a suite's file can hold: numbers, texts, lists and mappings")


def _composed(folder: str, name: str, overrides: Sequence[str]) -> Any:
    GlobalHydra.instance().clear()
    with initialize_config_dir(folder, version_base="1.3"):
        config = compose(name, list(overrides))
    enclosed.check_values(OmegaConf.to_container(config), f"{name}.yaml")
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


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
    for number in filter(fields.overflows, NUMBER.findall(override)):
        raise ConfigError(first, number, "too large; infinity is `inf`")
    return f"++{override.lstrip('+')}" if first in OPEN_KEYS and not key.startswith("~") else override


def suite_files() -> dict[str, Path]:
    """The suites at hand: those that come with dpopt, and in their place `benchmarks/*.yaml` of the current folder."""
    return at_hand("benchmarks", "*.yaml")


def load_suite(suite: str | Path | Mapping[str, Any], overrides: Sequence[str] = (), **given: Any) -> Suite:
    """A suite, with some of its keys replaced.

        load_suite("quickstart", epsilon=[1, 3])
        load_suite({"name": "mine", "workloads": ["digits_mlp"], "optimizers": ["fiber", "adadp"], "epsilon": 3})

    Args:
        suite: a name that `dpopt list` shows, a path to a YAML file, or the content of one, with its name.
        overrides: as on the command line, such as "seeds=[0]" or "settings.fiber.fields.lr=1e-3".
        given: key -> value.

    Raises:
        ConfigError: no such suite, or something in it cannot be used.
    """
    if isinstance(suite, Mapping):
        return _of_mapping(suite, overrides, given)
    files, name = suite_files(), fields.convert(str(suite), str, "suite", {})
    path = Path(name) if name.endswith(".yaml") else files.get(name)
    if path is None or not path.is_file():
        raise unknown("suite", name, files)
    return _of_file(path, overrides, given)


def _of_mapping(content: Mapping[str, Any], overrides: Sequence[str], given: Mapping[str, Any]) -> Suite:
    name = fields.convert(content.get("name", "suite"), fields.Name, "suite.name", {})
    with TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.yaml")
        said = {str(key): _plain(value, str(key)) for key, value in content.items() if key != "name"}
        path.write_text(yaml.safe_dump({"defaults": ["suite", "_self_"], **said}, allow_unicode=True), "utf-8")
        return _of_file(path, overrides, given)


def _of_file(path: Path, overrides: Sequence[str], given: Mapping[str, Any]) -> Suite:
    content = compose_config(path.parent, path.stem, overrides, given)
    if missing := sorted(set(known_keys(path.parent, path.stem)) - content.keys()):
        raise ConfigError(str(path), missing, "keys are missing: begin the file with `defaults: [suite, _self_]`")
    where = path.stem

    def of(key: str, hint: Any) -> Any:
        return fields.convert(content[key], hint, f"{where}.{key}", {})

    return Suite(
        name=where,
        description=str(content["description"]),
        workloads=_listed(content["workloads"], f"{where}.workloads"),
        optimizers=_labels(content["optimizers"], f"{where}.optimizers"),
        settings=_mapping(content["settings"] or {}, f"{where}.settings"),
        epsilon=several(content["epsilon"], Bound, f"{where}.epsilon"),
        delta=of("delta", Probability | None),
        accountant=of("accountant", str),
        batch_size=axis(content["batch_size"], fields.Count, f"{where}.batch_size"),
        epochs=_epochs(content["epochs"], f"{where}.epochs"),
        clip=axis(content["clip"], Bound, f"{where}.clip"),
        seeds=several(content["seeds"], fields.Natural, f"{where}.seeds"),
        engine=_engine(content["engine"], f"{where}.engine"),
        workers=of("workers", Few | None),
        device=of("device", str),
        physical_batch=None if content["physical_batch"] == "auto" else of("physical_batch", fields.Count),
        isolate=of("isolate", bool),
        timeout=of("timeout", fields.Amount | None),
        retries=of("retries", FewOrNone),
        retry_on=_kinds(content["retry_on"], f"{where}.retry_on"),
        grace=of("grace", fields.Amount),
        memory=of("memory", fields.Amount | None),
        max_hours=of("max_hours", fields.Amount | None),
        options=_options(content["options"], f"{where}.options"),
        scale_down=of("scale_down", fields.Factor),
        diagnostics=of("diagnostics", bool),
        refine=of("refine", FewOrNone),
        log=axis(content["log"], Literal["tensorboard", "wandb"], f"{where}.log") or (),
        results=of("results", Name),
        plots=of("plots", Name),
        published=_published(content["published"], f"{where}.published"),
    )


def axis(value: Any, hint: Any, where: str) -> tuple[Any, ...] | None:
    """The values of an axis, see `fields.several`; None for none."""
    return None if value is None else several(value, hint, where)


def _listed(value: Any, where: str) -> tuple[Any, ...]:
    """The entries of a list, or the one entry."""
    values = tuple(value) if isinstance(value, list) else (value,)
    if not values or None in values:
        raise ConfigError(where, value, "expected at least one value")
    return values


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
    epsilons = several(list(value), Bound, where)
    numbers = (fields.convert(number, fields.Positive, where, {}) for number in value.values())
    return dict(zip(epsilons, numbers, strict=True))


def _engine(value: Any, where: str) -> str:
    engines.check(name := fields.convert(value, str, where, {}), where)
    return name


def _kinds(value: Any, where: str) -> tuple[Any, ...]:
    kinds = Literal["failed", "died", "timeout"]
    return () if value in (None, []) else several(value, kinds, where)


def _options(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise ConfigError(where, value, "expected key: value, as the engine understands them")
    return {str(key): given for key, given in (value or {}).items()}


def _labels(value: Any, where: str) -> tuple[str, ...]:
    for label in _listed(value, where):
        if not isinstance(label, str):
            raise ConfigError(where, label, "expected names; put what differs from the defaults into `settings`")
    return several(value, str, where)


def _mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(v, dict) for v in value.values()):
        raise ConfigError(where, value, "expected label -> {name, fields, tuning, grid, selection, runs, epsilon, ...}")
    return value
