"""A trained model in a folder of its own, with all that says what it is: to keep, to publish, to load again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from html import escape
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dpopt import fields, files, registry
from dpopt.cells import mapped
from dpopt.clipping import evaluation
from dpopt.clipping.names import plain
from dpopt.clipping.state import State
from dpopt.errors import ConfigError, Missing, shown
from dpopt.files import Damaged
from dpopt.privacy import accountants
from dpopt.privacy.ledger import Ledger, Unit
from dpopt.training.reading import is_array, read_inputs
from dpopt.training.record import Record
from dpopt.training.statement import Statement
from dpopt.training.subject import Adapter, Layout, Transform, unchanged
from dpopt.training.trial import refused
from dpopt.workloads.base import EVALUATION_BATCH, Workload
from dpopt.workloads.data import catalogue

_WEIGHTS, _MODEL, _RECORD, _LEDGER = "model.safetensors", "model.json", "record.json", "ledger.json"
_STATEMENT, _STATEMENT_DATA, _CARD, _SUMS = "statement.txt", "statement.json", "README.md", "checksums.json"
_CHECKED = (_WEIGHTS, _MODEL, _RECORD, _LEDGER, _STATEMENT, _STATEMENT_DATA)
"""Files whose checksums are noted; the card is to be edited."""
_PRIVATE = "private.json"
"""Scores, times and curve, under a seal of their own: a score is one of few numbers, which a checksum would tell."""
_NOT_COVERED = ("test_", "train_seconds")
"""Beginnings of the keys of a record whose values no epsilon covers: they are for `_PRIVATE`."""
_NOT_FINITE = {repr(value): value for value in (math.inf, -math.inf, math.nan)}
"""The texts that stand for numbers which JSON does not know."""
_SAME = 0.01
"""Tolerance of a ledger's epsilon, relative to the record's: other versions of an accountant may round otherwise."""
_MOST_DISTINCT = 256
"""Distinct draws that `load` asks an accountant about; `pld` takes a seventh of a second for each. A run has one for
each set of kinds that it releases together: of 83,000 published runs none has more than two."""


@dataclass(frozen=True)
class FitResult:
    """The outcome of `fit`.

    Attributes:
        model: the trained model; the object that was passed in.
        record: what the run did, as plain data: privacy, sizes, metrics, times.
        ledger: every draw that was planned, with its noise, as all are charged; those of earlier runs, `spent`, are
            the first.
        curve: one entry per evaluation: draws taken, learning rate where the optimizer finds one, metrics.
        transform: of `fit`.
        workload: that gave model and records, where it was no model of a user's.
    """

    model: nn.Module
    record: dict[str, Any]
    ledger: Ledger
    curve: list[dict[str, Any]]
    transform: Transform | None = None
    workload: Workload | None = None

    def __repr__(self) -> str:
        names = [name for name in self.record if name in ("status", "epsilon", "delta", "draws") or "test_" in name]
        return f"FitResult({', '.join(f'{name}={self.record[name]!r}' for name in names)})"

    def _repr_html_(self) -> str:
        statement = self.statement()._repr_html_()
        return f"<p>{escape(repr(self))}</p><details><summary>Privacy statement</summary>{statement}</details>"

    def statement(self, *, tuned: Sequence[str] | None = None) -> Statement:
        """The privacy statement of the run; `str` gives the text. See `Statement.of`."""
        return Statement.of(self.record, self.ledger, tuned)

    def epsilon_at(self, draw: int) -> float:
        """The epsilon of the first `draw` draws, and of earlier runs; each costs up to a second.

        It is what a run of this length would have spent, `draw` being fixed before it.

        Raises:
            ConfigError: `draw` is no whole number from 0 to the number of planned draws.
        """
        planned = self.record.get("draws_planned", self.record["draws"])
        if not isinstance(draw, Integral) or not 0 <= draw <= planned:
            raise ConfigError("draw", draw, f"expected a whole number from 0 to {planned}, the planned draws")
        earlier = len(self.ledger) - planned
        taken = self.ledger.first(earlier + draw)
        return accountants.epsilon(taken, self.record["delta"], self.record["accountant"])

    def predict(self, x: Any) -> Any:
        """The class of each new record [n], by name where classes have names; of another task the outputs [n, ...].

        Args:
            x: inputs as in training: an array, columns by name (others do not count), a data set; of a workload also a
                data frame, a CSV file, an image or a folder of images.

        Raises:
            ConfigError: the records cannot be read, are not like the training records, or have no finite outputs.
        """
        outputs, classes = self._outputs(x).numpy(), self.record["classes"]
        return np.array(classes)[outputs.argmax(1)] if classes else outputs

    def predict_proba(self, x: Any) -> Any:
        """The softmax of the outputs, float64 [n, classes], which is a probability where the loss is cross-entropy.

        The columns are in the order of `record["classes"]`; `x` and errors as of `predict`.
        """
        if not self.record["classes"]:
            raise ConfigError("predict_proba", 0, "there are no classes: use predict")
        return self._outputs(x).double().softmax(dim=1).numpy()

    def _outputs(self, x: Any) -> Tensor:
        """The outputs [n, ...], in evaluation mode, for records that are prepared as the training records were."""
        model, workload = self.model, self.workload
        if not isinstance(model, nn.Module):
            raise ConfigError("model", model, "there are no weights to predict with: load with a model")
        change = workload.transform if workload else self.transform
        if self.record["transform"] and not change:
            raise ConfigError("transform", None, f"give `dpopt.load` the {self.record['transform']} of the training")
        inputs = read_inputs(workload.read(x) if workload and not is_array(x) else x, "x", self.record["inputs"])
        layout = Layout.of(inputs, model, "x")
        count = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs)
        rows = layout.split(inputs, torch.zeros(count), "x").x
        adapter, device = Adapter(model, layout), next((p.device for p in model.parameters()), rows.device)
        batches = rows.split(workload.evaluation_batch if workload else EVALUATION_BATCH)
        state, way = State(model), self.record.get("evaluation", "batch")
        parts = []
        with unchanged(model, False, state), torch.no_grad(), refused("x", type(x).__name__, "predicting"):
            for part in batches:
                # As the run's own scores were made: what a record is depends on no other one.
                with state:
                    rows = part.to(device)
                    inputs = layout.converted(change(rows.clone()) if change else rows)
                    parts.append(evaluation.outputs(adapter, inputs, way).cpu())
        if not (outputs := torch.cat(parts)).isfinite().all():
            raise ConfigError("x", type(x).__name__, "the model's outputs for some of these records are not finite")
        if (classes := self.record["classes"]) and outputs.shape[1:] != (len(classes),):
            shape = list(outputs.shape[1:])
            raise ConfigError("record.classes", classes, f"of each record the model has outputs of shape {shape}")
        return outputs

    def save(self, folder: str | os.PathLike[str], *, tuned: Sequence[str] | None = None) -> Path:
        """Write weights, record, ledger, privacy statement and a model card to a new folder, for `dpopt.load`.

        The folder is there as a whole or not at all. A seed that was given is left out: whoever has it can take the
        noise away. What no epsilon covers, curve, scores and times, is in `private.json`, to be kept back.

        Args:
            folder: where to; it must not exist.
            tuned: see `Statement.of`; it is kept in the record.

        Raises:
            ConfigError: the folder exists or cannot be written, or the model has more state than tensors.
        """
        folder = fields.path(folder, "folder")
        if not isinstance(self.model, nn.Module):
            # A result that was loaded without a model is no run to save again.
            raise ConfigError("model", self.model, "there are no weights to save: load with a model")
        record = {**self.record, "seed": None}
        if tuned is not None:
            record["tuned"] = [tuned] if isinstance(tuned, str) else list(tuned)
        # Written beside and renamed, so that a folder of this name is always whole.
        partial = _beside(folder)
        try:
            name = folder.name.encode("utf-8", "replace").decode()
            _write(replace(self, record=record), partial, name)
            partial.rename(folder)  # fails where there is one since, unless it is empty
        except OSError as error:
            raise _unwritable(folder, "folder", error) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return folder


def check_new(folder: Path, key: str) -> None:
    """Raise `ConfigError`, which names `key`, where `FitResult.save` could not write to a folder, before training."""
    _beside(folder, key).rmdir()


def load(
    folder: str | os.PathLike[str], model: nn.Module | None = None, *, transform: Transform | None = None
) -> FitResult:
    """The result that `FitResult.save` wrote. Its files must be unchanged, and epsilon is computed from the ledger.

    Args:
        folder: the folder.
        model: of the same architecture; it is filled in place, on its device, its mode stays. Without one, a model of
            `dpopt fit` is built as it was; else the result's `model` is None, and all else is there.
        transform: that `fit` was given; needed for predictions alone.

    Returns:
        The result; without `private.json` its curve is empty, and its record has no scores.

    Raises:
        ConfigError: the folder holds no saved run, or the model has other tensors; it is then as it was.
        Damaged: a file was changed, or holds something else than `save` writes; the record has another unit, epsilon or
            number of draws than the ledger, other weights, or another number of classes than the workload; or more than
            256 draws of the ledger differ.
        Missing: a package or weights that the model needs are not on this machine.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise ConfigError("model", model, "expected a torch.nn.Module of the architecture that was saved")
    folder = fields.path(folder, "folder")
    weights_sha256 = _check(folder)
    with _written(folder / _RECORD) as path:
        record = _decoded(files.read(path))
        said = Record.of(record)
        record |= {name: value for name, value in vars(said).items() if name in record}
    with _written(folder / _LEDGER) as path:
        ledger = Ledger.of(files.read(path), Unit.stated(record))
        _compare(said, ledger, weights_sha256)
    curve = []
    with _written(folder / _PRIVATE) as path:
        if path.exists():
            private = _decoded(files.unsealed(files.content(path, math.inf), path))
            record, curve = record | private["scores"] | record, private["curve"]  # no score replaces an entry
    with _written(folder / _MODEL) as path:
        content, workload = files.read(path), None
        if spec := content["workload"]:
            if data := content["data"]:
                spec["data"] = catalogue.remember(catalogue.of_content(spec["data"], data))
            workload = registry.from_spec("workload", spec)
            if workload.classes not in (0, len(said.classes)):
                raise ConfigError("record.classes", said.classes, f"the workload has {shown(workload.classes)}")
            if model is None:
                with torch.random.fork_rng(devices=[]):  # weights that are made only to be overwritten
                    model = workload.unfilled()
    if model is not None:
        _fill(model, folder / _WEIGHTS)
    return FitResult(cast(nn.Module, model), record, ledger, curve, transform, workload)


def _beside(folder: Path, key: str = "folder") -> Path:
    try:
        if folder.exists():
            raise ConfigError(key, str(folder), "it exists, and nothing is overwritten: give another name")
        partial = folder.with_name(f".writing-{secrets.token_hex(8)}-{folder.name}")
        partial.mkdir(parents=True)
    except OSError as error:
        raise _unwritable(folder, key, error) from error
    return partial


def _unwritable(folder: Path, key: str, error: Exception) -> ConfigError:
    return ConfigError(key, str(folder), f"cannot be written: {getattr(error, 'strerror', error)}")


def _write(result: FitResult, folder: Path, name: str) -> None:
    from safetensors.torch import save_model

    with refused("model", type(result.model).__name__, "saving its tensors"):
        try:
            # All that safetensors asks of a model is its state, which has plain names here.
            plain: Any = SimpleNamespace(state_dict=lambda: _state(result.model))
            save_model(plain, str(folder / _WEIGHTS))
        except Exception as error:
            if "os error" in str(error):  # safetensors writes the file itself, and has a kind of error of its own
                raise _unwritable(folder.with_name(name), "folder", error) from error
            raise
    (folder / _WEIGHTS).chmod(0o644)  # as the files beside it; safetensors writes for the owner alone
    result.record["weights_sha256"] = _sha256(folder / _WEIGHTS)
    statement = result.statement()
    private = {key: value for key, value in result.record.items() if key.startswith(_NOT_COVERED)}
    files.write(folder / _RECORD, _encoded({k: v for k, v in result.record.items() if k not in private}))
    # As a text, since a mapping is written in the order of its keys, and that of columns decides their places.
    files.write(folder / _MODEL, json.dumps(_of_workload(result.workload), indent=1) + "\n")
    files.write(folder / _LEDGER, result.ledger.to_json())
    files.write(folder / _STATEMENT, f"{statement}\n")
    files.write(folder / _STATEMENT_DATA, _encoded(statement.to_dict()))
    files.write(folder / _CARD, _card(result, statement, name))
    _seal(folder)
    warning = "No epsilon covers these scores and times. Do not hand them on."
    content = _encoded({"_": warning, "scores": private, "curve": result.curve})
    files.write(folder / _PRIVATE, files.sealed(content), mode=0o600)


def _of_workload(workload: Workload | None) -> dict[str, Any]:
    """All that a model elsewhere is built from; of the data what is public."""
    content: dict[str, Any] = {"schema": 1, "workload": None, "data": None}
    if workload:
        target = f"{type(workload).__module__}:{type(workload).__qualname__}"
        # Of several names of the class the one that sets least: all of its fields are written down here.
        names = [name for name, each in registry.entries("workload").items() if each.target == target]
        least = min(names, key=lambda name: len(registry.entry("workload", name).fields))
        content["workload"] = registry.spec("workload", least, workload)
    if name := getattr(workload, "data", ""):
        content["data"] = catalogue.entry(name).content()
        del content["data"]["splits"]  # numbers and checksums of rows
        content["workload"]["data"] = name.partition("@")[0]
    return content


def _seal(folder: Path) -> None:
    sums = {each: {"sha256": _sha256(folder / each)} for each in _CHECKED}
    files.write(folder / _SUMS, {"schema": 1, "files": sums})


def _sha256(path: Path) -> str:
    return hashlib.sha256(files.content(path, math.inf)).hexdigest()


def _card(result: FitResult, statement: Statement, name: str) -> str:
    tags = "\ntags:\n- differential-privacy" if statement.private else ""
    data, kind = getattr(result.workload, "data", ""), type(result.workload or result.model)
    example = "photos" if data and catalogue.entry(data).kind == "image" else "new.csv"
    load = f'result = dpopt.load("{name}")\nprint(result.predict("{example}"))'
    if result.workload is None:
        load = f'model = ...  # of the same architecture\nresult = dpopt.load("{name}", model)'
    return "\n".join(
        [
            f"---\nlibrary_name: dpopt{tags}\n---\n\n# {name}\n",
            f"A `{kind.__module__}.{kind.__qualname__}` that was trained with `dpopt.fit`.\n",
            f"## Privacy\n\n```text\n{statement}\n```\n",
            "Before the folder is handed on, take away `private.json`: scores and times there are without noise.\n",
            f"## Use\n\n```python\nimport dpopt\n\n{load}\nprint(result.statement())\n```\n",
        ]
    )


@contextmanager
def _written(path: Path) -> Iterator[Path]:
    """Inside, every error of reading what `FitResult.save` has written to `path` is `Damaged`."""
    try:
        yield path
    except (Missing, Damaged):  # what the content names can be brought
        raise
    except FileNotFoundError:
        raise Damaged(f"{path}: gone since it was saved") from None
    except Exception as error:
        raise Damaged(f"{path}: {error if isinstance(error, ConfigError) else shown(error)}") from error


def _check(folder: Path) -> str:
    """The SHA-256 of the weights, after all files were seen to have theirs."""
    if not (folder / _SUMS).exists():
        raise ConfigError("folder", str(folder), f"holds no saved run: no {_SUMS}")
    with _written(folder / _SUMS) as path:
        noted = files.read(path)["files"]
    for name in _CHECKED:
        with _written(folder / name) as path:
            if _sha256(path) != noted[name]["sha256"]:
                raise Damaged(f"{path}: changed since it was saved")
    return noted[_WEIGHTS]["sha256"]


def _compare(record: Record, ledger: Ledger, weights_sha256: str) -> None:
    """Raise `ConfigError` where a record says of its run what ledger and weights do not."""
    if (distinct := len(ledger.counts())) > _MOST_DISTINCT:
        raise ConfigError("ledger", distinct, f"expected at most {_MOST_DISTINCT} draws that differ")
    # The record could state less than its ledger spends; the ledger is believed.
    spent = accountants.epsilon(ledger, record.delta, record.accountant)
    for name, stated, result in (
        ("unit", record.unit, ledger.unit.kind),
        ("weights_sha256", record.weights_sha256 or weights_sha256, weights_sha256),
        ("draws", record.draws_before + (record.draws_planned or record.draws), len(ledger)),
        ("epsilon", record.epsilon, record.epsilon if math.isclose(spent, record.epsilon, rel_tol=_SAME) else spent),
    ):
        if stated != result:
            raise ConfigError(f"record.{name}", stated, f"by ledger and weights it is {shown(result)}")


def _fill(model: nn.Module, path: Path) -> None:
    from safetensors import safe_open

    current = _state(model)
    with _written(path), safe_open(path, "pt") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        shared: dict[str, str] = file.metadata() or {}
        stored |= {name: stored[kept] for name, kept in shared.items()}  # tied tensors are stored once
    # All are compared before any is loaded: a refused model is as it was.
    for name in sorted(current.keys() | stored.keys()):
        expected, here = _form(stored.get(name)), _form(current.get(name))
        if expected != here:
            raise ConfigError(f"model.{name}", here, f"the saved model has {expected}")
    # Tied parameters share memory here; in the file they must have been one tensor too.
    places: dict[Any, str] = {}
    for name, value in current.items():
        first = places.setdefault((value.device, value.data_ptr(), value.shape), name)
        if not torch.equal(stored[first], stored[name]):
            raise ConfigError(f"model.{name}", f"shared with {first}", "the saved model has two tensors here")
    wrapped = {name: stored[plain(name)] for name in model.state_dict()}
    model.load_state_dict(wrapped, strict=False)  # Opacus' layers have names that torch's check does not know


def _state(model: nn.Module) -> dict[str, Tensor]:
    return {plain(name): value for name, value in model.state_dict().items()}


def _form(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}".removeprefix("torch.") if isinstance(value, Tensor) else "no tensor"


def _encoded(value: Any) -> Any:
    # JSON has no infinity and no NaN, and other readers refuse Python's.
    return mapped(value, lambda each: repr(each) if isinstance(each, float) and not math.isfinite(each) else each)


def _decoded(value: Any) -> Any:
    return mapped(value, lambda each: _NOT_FINITE.get(each, each) if isinstance(each, str) else each)
