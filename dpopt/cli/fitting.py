"""`dpopt fit` and `dpopt predict`: a private model of a file, a data set or a workload, without a line of Python."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpopt import markup, registry
from dpopt.cli.console import OUT, complain
from dpopt.cli.listing import print_notes
from dpopt.cli.new import check_name, small_workload
from dpopt.errors import ConfigError
from dpopt.fields import Bound, Decay, Factor, Few, Name, Positive, Probability, key
from dpopt.workloads.data_keys import DataKeys

if TYPE_CHECKING:
    from dpopt.workloads.base import Workload

_AS_THEY_ARE = ("epsilon", "delta", "accountant", "device", "unit_rows", "average", "checkpoint")
"""Keys that are arguments of `dpopt.fit`."""


@dataclass(frozen=True, kw_only=True)
class Fit(DataKeys):
    """Train a model privately, print its privacy statement, and write all of it to the folder to=FOLDER.

    A file from=PATH is read as by `dpopt new data`, whose keys mean the same here. The copies of the records that this
    takes are gone at the end, or become the data set of the file's name by keep=true. `dpopt predict` and `dpopt.load`
    read the folder, and need no records.
    """

    workload: Name | None = key("records, model and loss, as `dpopt list what=workloads` shows; or ...", None)
    data: Name | None = key("... a data set, as `dpopt list what=data` shows, with a small model; or from=", None)
    options: dict[str, Any] = key("options.FIELD=VALUE: of the workload; of a table `hidden`, 0 for no layer", {})
    to: Path = key("folder for weights, record, ledger, statement and model card; it must not exist")
    optimizer: Name | None = key("as `dpopt list what=optimizers` shows; adadp_equilibrium, clip=automatic", None)
    fields: dict[str, Any] = key("fields.lr=0.1: hyperparameters of the optimizer", {})
    epsilon: Bound = key("the target; inf trains without noise")
    delta: Probability | None = key("N^-1.1 by default", None)
    epochs: Positive | None = key("the workload's by default", None)
    batch_size: Factor | None = key("the workload's by default, at most N", None)
    unit_rows: Few | None = key("rows of one person (unit=COLUMN) that count at most; 4 by default", None)
    accountant: str = key("of the statement: pld, rdp, prv or autodp", "pld")
    average: Decay | None = key("0.99: an average of the parameters on the way; 0.95 without optimizer=", None)
    tuned: Name | None = key("a sentence: what was chosen by looking at these data; none for nothing", None)
    keep: bool = key("true: keep the records that from= reads as a data set, as `dpopt new data` does", False)
    device: str = key("auto, cpu, cuda or cuda:0", "auto")
    checkpoint: Path | None = key("folder from which a run that was stopped goes on", None)

    def __call__(self) -> None:
        from dpopt import training
        from dpopt.privacy import accountants
        from dpopt.training.saved import check_new
        from dpopt.workloads.data import own

        check_new(self.to, "to")
        if self.fields and not self.optimizer:
            raise ConfigError("fields", self.fields, "expected them with optimizer=NAME, whose they are")
        places = {"workload": self.workload, "data": self.data, "from": self.of_file}
        if len(chosen := [name for name, value in places.items() if value]) != 1:
            raise ConfigError("fit", chosen, "expected one of workload=NAME, data=NAME and from=PATH")
        if (self.of_file or self.keep) and not self.from_:
            raise ConfigError("from", None, "expected from=PATH: a CSV file, a folder of images, or a saved `Dataset`")
        optimizer = registry.make("optimizer", self.optimizer, self.fields) if self.optimizer else None
        accountants.check_claim(self.delta or 0.5, self.accountant)
        training.resolve_device(self.device)
        if self.workload:
            return self._train(registry.make("workload", self.workload, self.options), optimizer)
        if not self.from_:
            return self._train(self._model_of(str(self.data)), optimizer)
        name = self.from_.stem
        check_name(name)
        if self.keep:
            own.check_free(name)
        with own.imported(name, self) as records:
            self._train(self._model_of(f"{name}@{records.version}"), optimizer)
            if self.keep:
                own.keep(records)
                OUT.print(f"kept for you alone to read: data={name}, a copy of the records in {own.FOLDER / name}/")

    def _model_of(self, name: str) -> Workload:
        content = small_workload(name)
        return registry.make("workload", content.pop("name"), content | self.options)

    def _train(self, workload: Workload, optimizer: Any) -> None:
        import torch

        from dpopt import training
        from dpopt.training.persons import rows_of
        from dpopt.workloads import data
        from dpopt.workloads.base import Workload

        name = getattr(workload, "data", "")
        train, test = workload.load()
        owners = data.owners(name, "train") if name and data.entry(name).unit else None
        count = len(train.x) if owners is None else len(rows_of(owners))
        is_augmented = type(workload).augment is not Workload.augment
        torch.manual_seed(0)  # a run that goes on from its checkpoint begins with the same model
        print_notes([self.optimizer] if self.optimizer else [])
        with _printed_warnings():
            result = training.fit(
                workload.model(),
                workload.loss,
                train,
                optimizer=optimizer,
                epochs=self.epochs or workload.epochs,
                batch_size=self.batch_size or min(workload.batch_size, count),
                unit=owners,
                unit_name=None if owners is None else data.entry(name).unit,
                test=test,
                transform=workload.transform,
                augment=workload.augment if is_augmented else None,
                multiplicity=workload.multiplicity,
                **{name: getattr(self, name) for name in _AS_THEY_ARE},
            )
        record = result.record
        unset = {name for name in ("epochs", "batch_size") if getattr(self, name) is None}  # the workload's were taken
        record["defaults"] = sorted(unset | {*record["defaults"]})
        if name:
            record["data"] = name.partition("@")[0]  # without the version, which follows from the records
            record["classes"] = list(data.entry(name).class_names) or record["classes"]
        tuned = None if self.tuned is None else [] if self.tuned == "none" else [self.tuned]
        folder = replace(result, workload=workload).save(self.to, tuned=tuned)
        OUT.print((folder / "statement.txt").read_text("utf-8").rstrip(), soft_wrap=not OUT.is_terminal)
        average = f"average {record['average']:g}"
        OUT.print(f"{type(workload).__name__}, {record['dimension']:,} trained parameters, {average}")
        OUT.print(", ".join(f"{key} = {value:.4g}" for key, value in record.items() if key.startswith("test_")))
        OUT.print(f"written to {folder}/, where private.json is to be kept back; next: dpopt predict model={folder}")


@contextmanager
def _printed_warnings() -> Iterator[None]:
    """Warnings are printed as errors are, without the line of code."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: complain("warning", str(message))
        yield


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
        with _printed_warnings():
            probabilities = result.predict_proba(self.from_)  # once, as it may take minutes
        names = [markup.csv(f"{each}") for each in result.record["classes"]]
        which = files_of(self.from_) if entry(name).kind == "image" else range(len(probabilities))
        with self.to.open("x", newline="", encoding="utf-8") as file:
            rows = csv.writer(file)
            rows.writerow(["record", "prediction", *(f"p_{each}" for each in names)])
            for record, each in zip(which, probabilities, strict=True):
                rows.writerow([markup.csv(f"{record}"), names[each.argmax()], *(f"{value:.6g}" for value in each)])
        OUT.print(f"{len(probabilities)} predictions written to {self.to}")
