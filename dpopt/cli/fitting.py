"""`dpopt fit`: a private model of a data file, a known data set or a registered workload, without a line of Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dpopt import fields, registry
from dpopt.cli.console import OUT
from dpopt.cli.new import check_name, data, given_data, small_workload
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Bound, Decay, Factor, Name, Positive, Probability

if TYPE_CHECKING:
    from dpopt.workloads.base import Workload

OF_FILE, OF_COLUMNS = ("from", "target", "inputs", "test", "size", "public"), ("ranges", "values")
"""Keys that `dpopt new data` understands, and those that it takes for each column."""


@dataclass(frozen=True)
class FitKeys:
    """The other keys of `dpopt fit`; `conf/base/fit.yaml` documents them."""

    workload: Name | None
    data: Name | None
    options: dict[str, Any]
    to: Path
    optimizer: str
    fields: dict[str, Any]
    epsilon: Bound
    delta: Probability | None
    epochs: Positive | None
    batch_size: Factor | None
    accountant: str
    average: Decay
    device: str
    checkpoint: Path | None


def fit(overrides: Sequence[str]) -> None:
    """Train a model privately, print what may be said of its privacy, and write all of it to the folder to=FOLDER.

    Beside workload=NAME and data=NAME, from=PATH takes a CSV file, a folder of images or a saved `Dataset`. It becomes
    a data set of the file's name, as by `dpopt new data`, whose keys target=COLUMN, inputs=COLUMN, test=0.2, size=64,
    ranges.COLUMN=[0,100], values.COLUMN=[a,b] and public=true mean the same here; afterwards it is data=NAME, or from=
    the same file again.
    `dpopt.load` reads what is written.
    """
    import torch

    from dpopt import configurations, training
    from dpopt.configurations import first_key
    from dpopt.privacy import accountants
    from dpopt.sizes import default_delta
    from dpopt.training.saved import check_new
    from dpopt.workloads.base import Workload

    known = [*configurations.keys("fit"), *OF_FILE]
    for key in map(first_key, overrides):
        if key not in (*known, *OF_COLUMNS):
            raise unknown("override", key, known)
    of_file = [override for override in overrides if first_key(override) in (*OF_FILE, *OF_COLUMNS)]
    given = configurations.command("fit", [override for override in overrides if override not in of_file])
    none: dict[str, Any] = {key: {} for key in ("fields", "options") if given[key] is None}
    asked = fields.build(FitKeys, given | none, "fit")
    check_new(asked.to, "to")
    optimizer = registry.make("optimizer", asked.optimizer, asked.fields)
    accountants.check(asked.delta or 0.5, asked.accountant)
    training.resolve_device(asked.device)
    workload = _workload(asked, of_file)
    train, test = workload.load()
    is_augmented = type(workload).augment is not Workload.augment
    torch.manual_seed(0)  # a run that goes on from its checkpoint begins with the same model
    result = training.fit(
        workload.model(),
        workload.loss,
        train,
        optimizer=optimizer,
        epsilon=asked.epsilon,
        delta=asked.delta or default_delta(len(train.x)),
        epochs=asked.epochs or workload.epochs,
        batch_size=asked.batch_size or min(workload.batch_size, len(train.x)),
        accountant=asked.accountant,
        device=asked.device,
        test=test,
        transform=workload.transform,
        augment=workload.augment if is_augmented else None,
        multiplicity=workload.multiplicity,
        average=asked.average,
        checkpoint=asked.checkpoint,
    )
    OUT.print(str(result.statement()))
    OUT.print(", ".join(f"{key} = {value:.4g}" for key, value in result.record.items() if key.startswith("test_")))
    OUT.print(f"written to {result.save(asked.to)}/")


def _workload(asked: FitKeys, of_file: list[str]) -> Workload:
    """What is trained on what.

    Raises:
        ConfigError: it is not said, or said twice; or see `dpopt new data`.
    """
    from dpopt.workloads.data import entry

    places = [key for key, value in (("workload", asked.workload), ("data", asked.data), ("from", of_file)) if value]
    if len(places) != 1:
        raise ConfigError("fit", places, "expected one of workload=NAME, data=NAME and from=PATH")
    if asked.workload:
        return registry.make("workload", asked.workload, asked.options)
    content = yaml.safe_load(small_workload(entry(asked.data or _added(of_file))))
    return registry.make("workload", content.pop("name"), content | asked.options)


def _added(of_file: list[str]) -> str:
    """The name of the data set that a file has become, now or before."""
    path = next((fields.path(word[5:], "from") for word in of_file if word.startswith("from=")), None)
    if path is None:
        raise ConfigError("from", None, "expected from=PATH: a CSV file, a folder of images, or a saved `Dataset`")
    from dpopt.workloads.data import own

    name = path.stem
    check_name(name)
    file = own.FOLDER / f"{name}.yaml"
    if not file.exists():
        data(name, *of_file)
    elif differs := own.differences(name, path, {k: v for k, v in given_data(of_file).items() if k != "from"}):
        what = f"it or a key has changed since {file} was made ({', '.join(differs)})"
        how = f"say data={name} for what it was, or move {file} and {file.with_suffix('')}/ away to read it again"
        raise ConfigError("from", str(path), f"{what}: {how}")
    return name
