"""The catalogue of data sets: one YAML file says where it is, what it holds and how to check it.

`./data/NAME.yaml` of the current folder, then those of other distributions, then `conf/data/NAME.yaml` of dpopt's own,
whose names nobody else can give.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

from dpopt import documents, fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Count, Finite, NonNegative, Positive

Kind = Literal["image", "text", "pairs", "table"]
_KINDS = {"image": "a data set of images", "text": "a data set of texts", "table": "a table", "pairs": "pairs of texts"}
"""Kind -> name of such a data set in errors."""
UNSTATED = "???"
"""Stands where a range or values are still to be stated."""
HOW_TO_STATE = "`range: [0, 100]` for numbers, `values: [a, b]` for categories; dpopt makes no private estimate of them"
_DECIDES = ("kind", "inputs", "targets", "splits", "classes", "size", "mean", "std", "columns")
"""Fields of an entry that decide the numbers that a model is given."""
REMEMBERED: dict[str, Entry] = {}
"""NAME@VERSION -> entries that are in no file: of saved models, and of records that are read for one command."""


@dataclass(frozen=True)
class SplitEntry:
    """One split of a data set.

    Attributes:
        source: the hub's name of the split, with which local files begin.
        records: how many records it has.
        inputs: SHA-256 over the inputs in row order, "" where it is not known: of images the decoded pixels as uint8,
            rows before columns before channels; of texts see `records.of_texts`, of tables `records.of_columns`.
        targets: the same over the targets: labels as little-endian int64, or texts.
    """

    source: str
    records: Count
    inputs: str = ""
    targets: str = ""

    def __post_init__(self) -> None:
        if bool(self.inputs) != bool(self.targets):
            raise ConfigError(f"{self.source}.targets", self.targets, "expected checksums of both or of none")


@dataclass(frozen=True)
class Column:
    """An input column of a table. What it says is public: a run takes neither from the records that it trains on.

    Attributes:
        range: of a column of numbers, smallest and largest; numbers outside count as the nearer end.
        values: of a column of categories, as texts; others count as one further category.
    """

    range: tuple[Finite, Finite] | Literal["???"] | None = None
    values: tuple[str, ...] | Literal["???"] | None = None

    def __post_init__(self) -> None:
        if (self.range is None) == (self.values is None):
            raise ConfigError("column", asdict(self), "expected `range` (of numbers) or `values` (of categories)")
        if isinstance(self.range, tuple) and self.range[0] >= self.range[1]:
            raise ConfigError("column.range", self.range, "expected the smallest number and then the largest")
        if isinstance(self.values, tuple) and len(set(self.values)) < len(self.values):
            raise ConfigError("column.values", self.values, "a value is repeated")

    @property
    def is_stated(self) -> bool:
        """True if its range or its values are."""
        return UNSTATED not in (self.range, self.values)


@dataclass(frozen=True)
class Entry:
    """A data set, as `NAME.yaml` describes it.

    Attributes:
        name: the data set's name, also of its folder in `$DPOPT_DATA`.
        kind: images, texts or rows of a table with labels, or pairs of texts (source, target).
        targets: the column of the targets.
        splits: "train", "test" and perhaps others -> what is in them; which of the hub's splits stands for which.
        licence: as the authors or the hub's card say.
        reference: whom to cite.
        inputs: the column of the inputs; empty for a table.
        unit: of a table, the column that says whose row it is, which is no input; empty where there is none.
        columns: of a table, the input columns by name.
        hub, config, revision: arguments of `datasets.load_dataset`; no `hub` where only a local folder can give it.
        classes: number of classes; 0 for pairs.
        class_names: names of the classes in label order; empty where the hub's features are the source of them.
        size: height and width of all images; None where they vary, and for other kinds.
        mean, std: by which pixels in [0, 1] are usually normalised, one value for each channel, and 0.5 where nothing
            is usual. Public constants of the literature, which no run computes from the records that it trains on.
        note: what a reader should know, such as what could not be checked.
        origin: what brings the entry where dpopt does not: a file, or the name of a distribution.
        folder: of an entry of the current folder, where its files may lie.
    """

    name: str
    kind: Kind
    targets: str
    splits: dict[str, SplitEntry]
    licence: str
    reference: str
    inputs: str = ""
    unit: str = ""
    columns: dict[str, Column] = field(default_factory=dict)
    hub: str | None = None
    config: str | None = None
    revision: str | None = None
    classes: int = 0
    class_names: tuple[str, ...] = ()
    size: Count | None = None
    mean: tuple[NonNegative, ...] = ()
    std: tuple[Positive, ...] = ()
    note: str = ""
    origin: str = ""
    folder: Path | None = None

    def __post_init__(self) -> None:
        if (self.kind == "table") != bool(self.columns) or bool(self.columns) == bool(self.inputs):
            raise ConfigError(f"{self.name}.columns", list(self.columns), "expected those of a table, or else `inputs`")
        allowed = (1, 3) if self.kind == "image" else (0,)
        if len(self.mean) not in allowed or len(self.std) != len(self.mean):
            numbers = " or ".join(map(str, allowed))
            raise ConfigError(f"{self.name}.mean", self.mean, f"expected {numbers} values, and as many of std")
        if (self.classes < 2) != (self.kind == "pairs") or len(self.class_names) not in (0, self.classes):
            raise ConfigError(f"{self.name}.classes", self.classes, "expected the number of classes and of their names")
        for needed in ("train", "test"):
            self.part(needed)

    @property
    def channels(self) -> int:
        """Colour channels of an image: 1 or 3."""
        return len(self.mean)

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that are read."""
        return (*(self.columns or (self.inputs,)), self.targets)

    @property
    def width(self) -> int:
        """Inputs of a model that a row of a table becomes; `ConfigError` where some range or values are not stated."""
        if unstated := {name: column for name, column in self.columns.items() if not column.is_stated}:
            keys = [f"ranges.{n}=[0,100]" if each.range else f"values.{n}=[a,b]" for n, each in unstated.items()]
            whose = "" if self.unit else "unit=NAME says whose row it is, "
            others = f"{whose}drop='[NAME]' leaves a column out, public=true says that what the file shows is public"
            how = f"in {self.origin}, {HOW_TO_STATE}" if self.origin else f"{shlex.join(keys)}; {others}"
            allowed = f"say what is public of each, whatever the records are, {how}"
            raise ConfigError(f"{self.name}.columns", list(unstated), allowed)
        return sum(len(column.values) + 1 if column.values else 2 for column in self.columns.values())

    @property
    def version(self) -> str:
        """Eight hexadecimal digits that follow from what the entry says of its records."""
        # Licence, reference and note may be corrected without making another data set of it.
        decides = {key: value for key, value in asdict(self).items() if key in _DECIDES}
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:8]

    def content(self) -> dict[str, Any]:
        """The entry as its file holds it, as plain data."""
        return {key: value for key, value in _plain(asdict(self)).items() if key not in ("name", "folder", "origin")}

    def part(self, split: str) -> SplitEntry:
        """The split that dpopt calls `split`; `ConfigError` where there is none."""
        if split not in self.splits:
            raise unknown(f"{self.name}.split", split, self.splits)
        return self.splits[split]


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in (None, "", (), {}, 0)}
    return list(value) if isinstance(value, tuple) else value


def entry(name: str) -> Entry:
    """The entry of the data set `name`, or of NAME@VERSION as `pinned` gives it, unless that has changed."""
    plain, _, version = str(name).partition("@")
    if name in REMEMBERED:
        return REMEMBERED[name]
    if plain not in entries():
        raise unknown("data", name, entries())
    dataset = entries()[plain]
    if version and version != dataset.version:
        raise ConfigError("data", name, f"{dataset.origin or 'its entry'} is another by now: {plain}@{dataset.version}")
    return dataset


def of_content(name: str, content: Mapping[str, Any]) -> Entry:
    """The entry of a saved model, which does not say how many records there were."""
    splits = {split: {"source": split, "records": fields.LARGEST} for split in ("train", "test")}
    return _parse(name, {**content, "splits": splits})


def remember(dataset: Entry) -> str:
    """NAME@VERSION, under which `entry` gives this data set from now on."""
    name = f"{dataset.name}@{dataset.version}"
    REMEMBERED[name] = dataset
    return name


def pinned(name: str, kind: Kind) -> str:
    """The name of a data set of that kind in what identifies a run: of one of the current folder with its version.

    A name there means other records in another folder, or after its file was changed; that is another workload.
    """
    dataset = entry(name)
    if dataset.kind != kind:
        raise ConfigError("workload.data", name, f"expected {_KINDS[kind]}, and it is one of {dataset.kind}")
    return f"{dataset.name}@{dataset.version}" if dataset.folder else name


def entries() -> dict[str, Entry]:
    """All data sets by name, sorted.

    A YAML file in `./data` is one of them where it has the key `splits`. Another distribution brings one by an entry
    point `NAME = package` of the group "dpopt.data": `NAME.yaml` there.
    """
    # Looked for at each call: the current folder may be another one by now.
    files = sorted(Path("data").resolve().glob("*.yaml"))
    return _with_own(tuple((file, file.stat().st_mtime_ns) for file in files)) if files else _installed()


@cache
def _with_own(files: tuple[tuple[Path, int], ...]) -> dict[str, Entry]:
    # The times are a part of the arguments so that a file which has changed is read again.
    every = dict(_installed())
    for file in (file for file, _ in files if b"\nsplits:" in b"\n" + file.read_bytes()):
        origin = f"{file.parent.name}/{file.name}"
        every[file.stem] = _parse(file.stem, documents.mapping(file), origin, file.with_suffix(""))
    return dict(sorted(every.items()))


@cache
def _installed() -> dict[str, Entry]:
    every = {name: _parse(name, documents.mapping(file)) for name, file in _shipped().items()}
    for point in entry_points(group="dpopt.data"):
        origin = point.dist.name if point.dist else point.value
        file = resources.files(point.value).joinpath(f"{point.name}.yaml")
        every[point.name] = _parse(point.name, documents.mapping(file), origin)
    return dict(sorted(every.items()))


@cache
def _shipped() -> dict[str, Traversable]:
    files = resources.files("dpopt").joinpath("conf", "data").iterdir()
    return {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}


def _parse(name: str, content: Mapping[str, Any], origin: str = "", folder: Path | None = None) -> Entry:
    if origin and name in _shipped():  # or a shipped suite would mean other records here
        raise ConfigError("data", name, f"it is the name of a data set of dpopt's: give that of {origin} another one")
    built, where = {}, origin if folder else name
    for key, kind in (("splits", SplitEntry), ("columns", Column)):
        parts = fields.convert(content.get(key, {}), dict[str, dict[str, Any]], f"{where}.{key}", {})
        built[key] = {each: fields.build(kind, value, f"{where}.{key}.{each}") for each, value in parts.items()}
    places = {"name": name, "origin": origin, "folder": folder}
    if taken := places.keys() & content:
        raise ConfigError(where, sorted(taken), "not for a file to say")
    return fields.build(Entry, {**content, **built, **places}, where)
