"""`dpopt fit`: a private model of a data file, a known data set or a registered workload, without a line of Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpopt import registry
from dpopt.cli.console import OUT
from dpopt.cli.new import add_data, check_name, small_workload
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Decay, Factor, Name, Positive, Probability, key
from dpopt.workloads.data_keys import DataKeys

if TYPE_CHECKING:
    from dpopt.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class Fit(DataKeys):
    """Train a model privately, print its privacy statement, and write all of it to the folder to=FOLDER.

    A file from=PATH becomes a data set of the file's name, as by `dpopt new data`, whose keys mean the same here;
    afterwards it is data=NAME, or from= the same file again. `dpopt.load` reads the folder.
    """

    workload: Name | None = key("records, model and loss, as `dpopt list what=workloads` shows; or ...", None)
    data: Name | None = key("... a data set, as `dpopt list what=data` shows, with a small model; or from=", None)
    options: dict[str, Any] = key("options.FIELD=VALUE: of the workload; of a table `hidden`, 0 for no layer", {})
    to: Path = key("folder for weights, record, ledger, statement and model card; it must not exist")
    optimizer: str = key("its name, as `dpopt list what=optimizers` shows")
    fields: dict[str, Any] = key("fields.lr=0.1: hyperparameters of the optimizer", {})
    epsilon: Bound = key("the target; inf trains without noise")
    delta: Probability | None = key("N^-1.1 by default", None)
    epochs: Positive | None = key("the workload's by default", None)
    batch_size: Factor | None = key("the workload's by default, at most N", None)
    accountant: str = key("of the statement: pld, rdp, prv or autodp", "pld")
    average: Decay = key("0.99: an average of the parameters on the way; it costs no privacy", 0.0)
    device: str = key("auto, cpu, cuda or cuda:0", "auto")
    checkpoint: Path | None = key("folder from which a run that was stopped goes on", None)

    def __call__(self) -> None:
        import torch

        from dpopt import training
        from dpopt.privacy import accountants
        from dpopt.privacy.ledger import default_delta
        from dpopt.training.saved import check_new
        from dpopt.workloads.base import Workload

        check_new(self.to, "to")
        optimizer = registry.make("optimizer", self.optimizer, self.fields)
        accountants.check(self.delta or 0.5, self.accountant)
        training.resolve_device(self.device)
        workload = _workload(self)
        train, test = workload.load()
        is_augmented = type(workload).augment is not Workload.augment
        torch.manual_seed(0)  # a run that goes on from its checkpoint begins with the same model
        result = training.fit(
            workload.model(),
            workload.loss,
            train,
            optimizer=optimizer,
            epsilon=self.epsilon,
            delta=self.delta or default_delta(len(train.x)),
            epochs=self.epochs or workload.epochs,
            batch_size=self.batch_size or min(workload.batch_size, len(train.x)),
            accountant=self.accountant,
            device=self.device,
            test=test,
            transform=workload.transform,
            augment=workload.augment if is_augmented else None,
            multiplicity=workload.multiplicity,
            average=self.average,
            checkpoint=self.checkpoint,
        )
        OUT.print(str(result.statement()))
        OUT.print(", ".join(f"{key} = {value:.4g}" for key, value in result.record.items() if key.startswith("test_")))
        OUT.print(f"written to {result.save(self.to)}/")


def _workload(asked: Fit) -> Workload:
    from dpopt.workloads.data import entry
    from dpopt.workloads.data.own import FOLDER, differences

    places = {"workload": asked.workload, "data": asked.data, "from": asked.of_file}
    chosen = [name for name, value in places.items() if value]
    if len(chosen) != 1:
        raise ConfigError("fit", chosen, "expected one of workload=NAME, data=NAME and from=PATH")
    if asked.workload:
        return registry.make("workload", asked.workload, asked.options)
    name = asked.data
    if not name:
        if asked.from_ is None:  # keys of a file, but no file
            raise ConfigError("from", None, "expected from=PATH: a CSV file, a folder of images, or a saved `Dataset`")
        name = asked.from_.stem
        check_name(name)
        file = FOLDER / f"{name}.yaml"
        if not file.exists():
            add_data(name, asked)
        elif differs := differences(name, asked):
            # Training on the old copy would be silent, and reading the file again would change published checksums.
            what = f"it or a key has changed since {file} was made ({', '.join(differs)})"
            how = f"say data={name} for what it was, or move {file} and {file.with_suffix('')}/ away to read it again"
            raise ConfigError("from", str(asked.from_), f"{what}: {how}")
    content = small_workload(entry(name))
    return registry.make("workload", content.pop("name"), content | asked.options)
