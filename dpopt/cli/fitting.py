"""`dpopt fit` and `dpopt predict`: a private model of a file, a data set or a workload, without a line of Python."""

from __future__ import annotations

import csv
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpopt import registry
from dpopt.cli.console import OUT, complain
from dpopt.cli.listing import print_notes
from dpopt.cli.new import add_data, check_name, small_workload
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Decay, Factor, Few, Name, Positive, Probability, key
from dpopt.workloads.data_keys import DataKeys

if TYPE_CHECKING:
    from dpopt.workloads.base import Workload


@dataclass(frozen=True, kw_only=True)
class Fit(DataKeys):
    """Train a model privately, print its privacy statement, and write all of it to the folder to=FOLDER.

    A file from=PATH becomes a data set of the file's name, as by `dpopt new data`, whose keys mean the same here;
    afterwards it is data=NAME, or from= the same file again. `dpopt predict` and `dpopt.load` read the folder.
    """

    workload: Name | None = key("records, model and loss, as `dpopt list what=workloads` shows; or ...", None)
    data: Name | None = key("... a data set, as `dpopt list what=data` shows, with a small model; or from=", None)
    options: dict[str, Any] = key("options.FIELD=VALUE: of the workload; of a table `hidden`, 0 for no layer", {})
    to: Path = key("folder for weights, record, ledger, statement and model card; it must not exist")
    optimizer: Name | None = key("as `dpopt list what=optimizers` shows; adadp_equilibrium by default", None)
    fields: dict[str, Any] = key("fields.lr=0.1: hyperparameters of the optimizer", {})
    epsilon: Bound = key("the target; inf trains without noise")
    delta: Probability | None = key("N^-1.1 by default", None)
    epochs: Positive | None = key("the workload's by default", None)
    batch_size: Factor | None = key("the workload's by default, at most N", None)
    unit_rows: Few = key("rows of one person (unit=COLUMN) that count at most", 4)
    accountant: str = key("of the statement: pld, rdp, prv or autodp", "pld")
    average: Decay | None = key("0.99: an average of the parameters on the way; 0.95 without optimizer=", None)
    tuned: Name | None = key("a sentence: what was chosen by looking at these data; none for nothing", None)
    keep: bool = key("false: remove the copies of the records that from= makes", True)
    device: str = key("auto, cpu, cuda or cuda:0", "auto")
    checkpoint: Path | None = key("folder from which a run that was stopped goes on", None)

    def __call__(self) -> None:
        from dpopt.workloads.data import own

        name = self.from_.stem if self.from_ else ""
        try:
            self._train()
        finally:
            if not self.keep and own.is_as_written(name):
                own.remove(name)
        if name and (own.FOLDER / name).exists():
            places = ", ".join(f"{place}/" for place in own.copies(name))
            OUT.print(f"copies of the records, for you alone to read: {places}; keep=false removes them")

    def _train(self) -> None:
        import torch

        from dpopt import training
        from dpopt.privacy import accountants
        from dpopt.training.saved import check_new, load
        from dpopt.workloads import data
        from dpopt.workloads.base import Workload

        check_new(self.to, "to")
        if (self.fields and not self.optimizer) or not (self.keep or self.from_):
            raise ConfigError(
                "fit", [*self.fields], "expected fields.NAME with optimizer=NAME, and keep with from=PATH"
            )
        optimizer = registry.make("optimizer", self.optimizer, self.fields) if self.optimizer else None
        accountants.check(self.delta or 0.5, self.accountant)
        training.resolve_device(self.device)
        workload = _workload(self)
        name = getattr(workload, "data", "")
        train, test = workload.load()
        owners = data.units(name, "train") if name and data.entry(name).unit else None
        people = len(train.x) if owners is None else len(set(owners))
        is_augmented = type(workload).augment is not Workload.augment
        torch.manual_seed(0)  # a run that goes on from its checkpoint begins with the same model
        print_notes([self.optimizer] if self.optimizer else [])
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: complain("warning", str(message))
            result = training.fit(
                workload.model(),
                workload.loss,
                train,
                optimizer=optimizer,
                epsilon=self.epsilon,
                delta=self.delta,
                epochs=self.epochs or workload.epochs,
                batch_size=self.batch_size or min(workload.batch_size, people),
                accountant=self.accountant,
                device=self.device,
                unit=owners,
                unit_rows=self.unit_rows,
                test=test,
                transform=workload.transform,
                augment=workload.augment if is_augmented else None,
                multiplicity=workload.multiplicity,
                average=self.average,
                checkpoint=self.checkpoint,
            )
        record = result.record
        record["defaults"] += [key for key in ("epochs", "batch_size") if getattr(self, key) is None]
        record["data"] = name.partition("@")[0]  # without the version, which follows from the records
        tuned = None if self.tuned is None else [] if self.tuned == "none" else [self.tuned]
        folder = replace(result, workload=workload).save(self.to, tuned=tuned)
        OUT.print(str(load(folder).statement()))
        OUT.print(
            f"{type(workload).__name__}, {record['dimension']:,} trained parameters, average {record['average']:g}"
        )
        OUT.print(", ".join(f"{key} = {value:.4g}" for key, value in record.items() if key.startswith("test_")))
        OUT.print(f"written to {folder}/, where private/ is to be kept back; next: dpopt predict model={folder}")


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Write what a model of `dpopt fit` predicts for new records: the class and the probability of each class."""

    model: Path = key("the folder that `dpopt fit` wrote")
    from_: Path = key("a CSV file with the columns of the training data, an image, or a folder of images")
    to: Path = key("the CSV file to write; it must not exist")

    def __call__(self) -> None:
        from dpopt.training.saved import load
        from dpopt.workloads.data import entry
        from dpopt.workloads.data.source import files_of

        if self.to.exists():
            raise ConfigError("to", str(self.to), "it exists, and nothing is overwritten: give another name")
        result = load(self.model)
        if not (name := getattr(result.workload, "data", "")):
            raise ConfigError("model", str(self.model), "expected a model of `dpopt fit` on a table, texts or images")
        classes, probabilities = result.predict(self.from_), result.predict_proba(self.from_)
        which = files_of(self.from_) if entry(name).kind == "image" else range(len(classes))
        names = result.class_names or range(probabilities.shape[1])
        with self.to.open("x", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["record", "prediction", *(f"p_{each}" for each in names)])
            for record, each, values in zip(which, classes, probabilities, strict=True):
                rows.writerow([record, each, *(f"{value:.6g}" for value in values)])
        OUT.print(f"{len(classes)} predictions written to {self.to}")


def _workload(asked: Fit) -> Workload:
    from dpopt.workloads.data import entry
    from dpopt.workloads.data.own import FOLDER, differences, is_as_written

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
        differs = differences(name, asked) if file.exists() else []
        what = f"it or a key has changed since {file} was made ({', '.join(differs)})"
        if differs and not is_as_written(name):
            # Training on the old copy would be silent, and reading the file again would change published checksums.
            how = f"say data={name} for what it was, or move {file} and {file.with_suffix('')}/ away to read it again"
            raise ConfigError("from", str(asked.from_), f"{what}: {how}")
        if differs:
            OUT.print(f"{what}: it is made again")
        if differs or not file.exists():
            add_data(name, asked, is_for_fit=True)
    content = small_workload(entry(name))
    return registry.make("workload", content.pop("name"), content | asked.options)
