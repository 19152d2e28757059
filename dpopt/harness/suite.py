"""What a suite's file may say, and the suites that are at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dpopt import configurations, fields, registry
from dpopt._paths import at_hand
from dpopt.configurations import OPEN_KEYS
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Amount, Bound, Count, Factor, Few, FewOrNone, Name, Natural, Positive, Probability, Several
from dpopt.harness import engines
from dpopt.store.runs import Failure

if TYPE_CHECKING:
    from dpopt.harness.cell import Cell

DEFAULTS = "suite"
"""The file that every suite's file begins with; it holds all keys with their defaults."""


@dataclass(frozen=True)
class Setting:
    """How one row of a suite is made; all fields are optional in the file.

    Args:
        name: registered optimizer; by default the label itself.
        fields: hyperparameters that differ from the defaults.
        tuning: "self" (needs none), "fixed" (set by hand), or a search over `grid`: "grid" (every point once), "random"
            (`runs` points drawn at random), "private" (as many as `selection` draws) or "linear_scaling" (two searches
            of `runs` points at small epsilons, see `tuning.linear_scaling`); by default "grid" where a grid is known.
        grid: field -> values to search, for a search alone; by default the optimizer's own grid.
        selection: how the search is charged; where it is, the suite's epsilon is that of the whole search. "composed"
            (all runs one after the other) or "simulated" ({rule: simulated, share: 0.85}) for "grid" and "random",
            {rule: logarithmic | geometric | poisson, runs: mean} for "private".
        runs: how many points "random" draws, or each of the searches of "linear_scaling".
        average: decay of the weights in an average of the parameters, around the optimizer, see `Averaged`; 0 for none.
        epsilon, epochs, batch_size, clip, seeds, refine: replace the suite's.
        widen: as the suite's, which is for rows that search.
    """

    name: str
    fields: dict[str, Any]
    tuning: Literal["self", "fixed", "grid", "random", "private", "linear_scaling"]
    grid: dict[str, Any]
    selection: dict[str, Any] | None = None
    runs: Count | None = None
    epsilon: Several[Bound] | None = None
    epochs: Several[Positive] | None = None
    batch_size: Several[Count] | None = None
    clip: Several[Bound] | None = None
    seeds: Several[Natural] | None = None
    refine: FewOrNone = 0
    widen: FewOrNone = 0
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
        epsilon: target -> what the paper states for runs with the same noise, by a looser accountant for instance.
    """

    paper: str
    workloads: tuple[dict[str, Any], ...]
    methods: dict[str, str]
    epsilon: dict[Positive, Positive] = field(default_factory=dict)

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

    name: Name
    optimizers: Several[str]
    workloads: Several[Any]
    epsilon: Several[Bound]
    seeds: Several[Natural]
    accountant: str
    engine: str
    retries: FewOrNone
    grace: Amount
    device: str
    isolate: bool
    scale_down: Factor
    refine: FewOrNone
    widen: FewOrNone
    diagnostics: bool
    results: Name
    plots: Name
    description: str = ""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    delta: Probability | None = None
    batch_size: Several[Count] | None = None
    epochs: dict[Bound, Positive] | Several[Positive] | None = None
    clip: Several[Bound] | None = None
    workers: Few | None = None
    physical_batch: Count | None = None
    timeout: Amount | None = None
    memory: Amount | None = None
    max_hours: Amount | None = None
    options: dict[str, Any] = field(default_factory=dict)
    retry_on: Several[Failure] = ()
    log: Several[Literal["tensorboard", "wandb"]] = ()
    published: Published | None = None

    def __post_init__(self) -> None:
        if self.name in (".", ".."):
            raise ConfigError("suite.name", self.name, "expected the name of a folder for its tables")
        if self.epochs == {}:
            raise ConfigError(f"{self.name}.epochs", {}, "expected a number for each epsilon")
        for label in dict.fromkeys((*self.optimizers, *self.settings)):  # one that is not selected must make sense too
            self._check_name(label)

    def _check_name(self, label: str) -> None:
        """Raise `ConfigError` where no registered optimizer belongs to a label."""
        known, others = registry.optimizers(), {*self.optimizers, *self.settings} - {label}
        name = self.settings.get(label, {}).get("name")
        if name is not None:
            if name not in known:
                raise unknown(f"{self.name}.settings.{label}.name", name, known)
        elif label not in known and label in self.optimizers:
            raise unknown(f"{self.name}.optimizers", label, {*known, *self.settings} - {label})
        elif label not in known:
            problem = "no label of the suite, and no registered optimizer"
            raise unknown(f"{self.name}.settings", label, others, problem)

    def cells(self) -> list[Cell]:
        """The cells that the suite consists of, each once, without those that follow from the outcome of others.

        Raises:
            ConfigError: anything in the suite that cannot be used.
        """
        from dpopt.harness.plan import plan

        return list({entry.cell.run_id: entry.cell for entry in plan(self)}.values())


AS_NULL: dict[str, Any] = {"physical_batch": "auto", "retry_on": []}
"""What says the same as null: the default of the key's field."""


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
    name = fields.convert(content.get("name"), Name, "suite.name", {})
    if name == DEFAULTS:
        raise ConfigError("suite.name", name, "expected another name: the defaults of all suites have this one")
    said = {str(key): configurations.plain(value, str(key)) for key, value in content.items() if key != "name"}
    return _of_file(Path(f"{name}.yaml"), overrides, given, {"defaults": [DEFAULTS, "_self_"], **said})


def _of_file(
    path: Path, overrides: Sequence[str], given: Mapping[str, Any], instead: Mapping[str, Any] | None = None
) -> Suite:
    known = configurations.keys(DEFAULTS)
    content = configurations.composed(path, overrides, known, instead)
    if missing := sorted(set(known) - content.keys()):
        raise ConfigError(str(path), missing, "keys are missing: begin the file with `defaults: [suite, _self_]`")
    content |= _given(given, content, known)
    if any(isinstance(label, Mapping) for label in fields.listed(content["optimizers"])):
        allowed = "expected names; put what differs from the defaults into `settings`"
        raise ConfigError(f"{path.stem}.optimizers", content["optimizers"], allowed)
    said = {key: value for key, value in content.items() if value is not None and value != AS_NULL.get(key)}
    suite = fields.build(Suite, {"name": path.stem, **said}, path.stem)
    engines.check(suite.engine, f"{path.stem}.engine")
    return suite


def _given(given: Mapping[str, Any], content: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """What the caller says of some keys, as the file would say it; `OPEN_KEYS` are added to."""
    found = {}
    for key, value in given.items():
        if key not in known:
            raise unknown("load_suite", key, known)
        value = configurations.plain(value, key)
        configurations.check_values(value, key)
        found[key] = {**(content[key] or {}), **value} if key in OPEN_KEYS and isinstance(value, dict) else value
    return found
