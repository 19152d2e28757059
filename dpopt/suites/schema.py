"""The keys of a suite's file, with their types."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dpopt import fields, registry
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Amount, Bound, Count, Few, FewOrNone, Name, Natural, Positive, Probability, Several
from dpopt.store.runs import Failure


@dataclass(frozen=True)
class Setting:
    """One row of a suite; all fields are optional in the file.

    Args:
        name: registered optimizer; by default the label itself.
        display: the row's name in tables and figures; no part of what is run. By default the optimizer's own with what
            the label adds, such as "DP-Adam, composed" for dp_adam_composed.
        fields: hyperparameters that differ from the defaults.
        tuning: "self" (needs none), "public" (a constant that anyone can have, such as a default; see `chosen_on`),
            "fixed" (set by hand), or a search over `grid`: "grid" (every point once), "random"
            (`runs` points drawn at random), "private" (as many as `selection` draws) or "linear_scaling" (two searches
            of `runs` points at small epsilons, see `searches.linear_scaling`); by default "grid" where a grid is known.
        grid: field -> values to search, for a search alone; by default the optimizer's own grid.
        selection: how the search is charged; where it is, the suite's epsilon is that of the whole search. "composed"
            (all runs one after the other) or "simulated" ({rule: simulated, share: 0.85}) for "grid" and "random",
            {rule: logarithmic | geometric | poisson, runs: mean} for "private".
        chosen_on: constants of the row that were chosen on data, such as {average 0.95: [digits MLP]}: the tasks as
            figures name them, none of a constant from elsewhere. The optimizer's own are added. "public" needs one.
        runs: how many points "random" draws, or each of the searches of "linear_scaling".
        average: decay of the weights in an average of the parameters, around the optimizer, see `Averaged`; 0 for none.
        epsilon, epochs, batch_size, clip, seeds: replace the suite's.
        widen: as the suite's, which is for rows that search.
    """

    name: str
    fields: dict[str, Any]
    tuning: Literal["self", "public", "fixed", "grid", "random", "private", "linear_scaling"]
    grid: dict[str, Any]
    selection: dict[str, Any] | None = None
    display: str = ""
    chosen_on: dict[str, list[str]] = field(default_factory=dict)
    runs: Count | None = None
    epsilon: Several[Bound] | None = None
    epochs: Several[Positive] | None = None
    batch_size: Several[Count] | None = None
    clip: Several[Bound] | None = None
    seeds: Several[Natural] | None = None
    widen: FewOrNone = 0
    average: fields.Decay = 0.0


@dataclass(frozen=True)
class Published:
    """A paper's names for the rows of a suite, for `dpopt table compare=published`.

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
        def is_name(item: Any) -> bool:  # or {field: {value: name}}
            is_choice = isinstance(item, dict) and len(item) == 1 and isinstance(next(iter(item.values())), dict)
            return is_choice or isinstance(item, str)

        for entry in self.workloads:
            called = entry.get("is")
            is_called = isinstance(called, list) and len(called) == 3 and all(map(is_name, called))
            if "name" not in entry or not is_called:
                allowed = "expected {name: ..., field: value, is: [data set, model, subset]}"
                raise ConfigError("published.workloads", entry, allowed)


@dataclass(frozen=True)
class Keys:
    """The keys of a suite; `conf/base/suite.yaml` explains each."""

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
    widen: FewOrNone
    diagnostics: bool
    results: Path
    plots: Path
    description: str = ""
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    delta: Probability | None = None
    batch_size: Several[Count] | None = None
    epochs: dict[Bound, Positive] | Several[Positive] | None = None  # an axis, or the number for each target epsilon
    clip: Several[Bound] | None = None
    workers: Few | None = None
    physical_batch: Count | None = None
    marks: Few | None = None
    timeout: Amount | None = None
    memory: Amount | None = None
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

    @property
    def presented(self) -> dict[str, Any]:
        """Keys that change tables and figures alone, if they are stated: names of rows, and the paper's."""
        display = {label: str(of["display"]) for label, of in self.settings.items() if of.get("display")}
        stated = {"display": display, "published": self.published and asdict(self.published)}
        return {key: value for key, value in stated.items() if value}

    @property
    def how(self) -> dict[str, Any]:
        """The keys that `runs.train.train` takes, which are no part of what a cell is."""
        return {key: getattr(self, key) for key in ("device", "physical_batch", "marks", "isolate")}

    def _check_name(self, label: str) -> None:
        """Raise `ConfigError` where no registered optimizer belongs to a label."""
        registered, others = registry.optimizers(), {*self.optimizers, *self.settings} - {label}
        name = self.settings.get(label, {}).get("name")
        if name is not None:
            if name not in registered:
                raise unknown(f"{self.name}.settings.{label}.name", name, registered)
        elif label not in registered and label in self.optimizers:
            raise unknown(f"{self.name}.optimizers", label, {*registered, *self.settings} - {label})
        elif label not in registered:
            problem = "no label of the suite, and no registered optimizer"
            raise unknown(f"{self.name}.settings", label, others, problem)
