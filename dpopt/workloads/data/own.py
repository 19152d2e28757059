"""A user's own records, once and for all: what Hugging Face's `datasets` reads -> `data/NAME.yaml` and its files.

Nothing that is computed from the records becomes a constant of a run: images are normalised by 0.5, and ranges and
values of a table's columns are the user's to state. What the entry does hold is public: the number of records, the
classes, the checksums.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml
from PIL import Image

from dpopt import fields
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Count, Name, Probability
from dpopt.workloads.data import catalogue, checksums, decoding, tables
from dpopt.workloads.data.catalogue import HOW_TO_STATE, UNSTATED, Column, Entry, SplitEntry
from dpopt.workloads.data.reading import MOST_VALUES, Splits, labelled, read, with_test
from dpopt.workloads.data.source import ROWS, open_source, quiet, read_column

__all__ = ["HOW_TO_STATE", "NewDataKeys", "add", "differences"]
FOLDER = Path("data")
"""Where entries and files of one's own lie, in the current folder."""
FROM_THE_RECORDS = ("kind", "inputs", "targets", "splits", "classes", "size")
"""What of an entry the records and the keys of `new data` alone decide."""
TEXTS = ("string", "large_string")
UNSEEN = "normalised by mean 0.5 and std 0.5, which no record has a part in"


@dataclass(frozen=True)
class NewDataKeys:
    """What `new data` takes beside `from=`.

    Args:
        target: the column of the classes.
        inputs: the one column that is the input, of images or texts; by default the only other one there is.
        test: share of the records that becomes the test split where there is none, see `reading.with_test`.
        size: height and width that images are resized to.
        public: whether the ranges and values that are seen in the records are public knowledge.
        ranges, values: of a table's columns, by name.
    """

    target: Name = "label"
    inputs: Name | None = None
    test: Probability | None = None
    size: Count | None = None
    public: bool = False
    ranges: dict[str, tuple[fields.Finite, fields.Finite]] = field(default_factory=dict)
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)


def add(name: str, place: Path, given: Mapping[str, Any]) -> Entry:
    """Write `data/NAME.yaml`, and `data/NAME/SPLIT-00000-of-00001.parquet` for each split.

    Args:
        name: of the data set.
        place: what to read, see `reading.read`.
        given: see `NewDataKeys`.

    Returns:
        The entry.

    Raises:
        ConfigError: the name is taken, a file is in the way, or the records cannot be used.
    """
    options, folder = fields.build(NewDataKeys, given, "new data"), FOLDER / name
    for path in (folder, folder.with_suffix(".yaml")):
        if path.exists():
            raise ConfigError("name", name, f"{path} exists")
    if name in catalogue.names():
        raise ConfigError("name", name, "a data set of that name is known: `dpopt list what=data`")
    with TemporaryDirectory(dir=".", prefix=".dpopt-") as scratch, quiet():
        entry = _made(name, place, options, scratch)
        FOLDER.mkdir(exist_ok=True)
        shutil.move(Path(scratch) / name, folder)
    with folder.with_suffix(".yaml").open("x", encoding="utf-8") as file:
        file.write(_text(entry))
    return catalogue.entry(name)


def differences(name: str, place: Path, given: Mapping[str, Any]) -> list[str]:
    """What of the entry `data/NAME.yaml` would be another if it were made now; arguments and errors as of `add`.

    Columns of which `given` states nothing may say anything.
    """
    options, known = fields.build(NewDataKeys, given, "new data"), catalogue.entry(name)
    with TemporaryDirectory(dir=".", prefix=".dpopt-") as scratch, quiet():
        made = _made(name, place, options, scratch)
    differs = [each for each in FROM_THE_RECORDS if getattr(made, each) != getattr(known, each)]
    stated = [column for column, said in made.columns.items() if said.is_stated]
    return differs + [column for column in stated if made.columns[column] != known.columns.get(column)]


def _made(name: str, place: Path, options: NewDataKeys, scratch: str) -> Entry:
    """The entry with its checksums; its files are written to the folder `name` of `scratch`."""
    classes, splits = labelled(read(place, scratch), options.target, options.values.get(options.target))
    splits, note = with_test(splits, options.test)
    folder = Path(scratch) / name
    folder.mkdir()
    entry = replace(_described(name, splits, classes, options, folder), folder=folder)
    entry = replace(entry, note="; ".join(filter(None, (entry.note, note))))
    return replace(entry, splits={split: _confirmed(entry, split) for split in splits})


def _described(name: str, splits: Splits, classes: tuple[str, ...], options: NewDataKeys, folder: Path) -> Entry:
    """The entry without checksums, the files written to `folder`."""
    kind, chosen = _input(splits["train"].features, options)
    entry: dict[str, Any] = {
        "name": name,
        "kind": kind,
        "targets": options.target,
        "classes": len(classes),
        "class_names": classes,
        "splits": {split: SplitEntry(split, len(records)) for split, records in splits.items()},
        "licence": "none stated",
        "reference": "own data",
    }
    if kind == "image":
        return Entry(inputs=chosen, **entry, **_write_images(splits, chosen, options, folder))
    for split, records in splits.items():
        kept = records.select_columns([chosen, options.target]) if chosen else records
        kept.to_parquet(_file(folder, split))
    return Entry(inputs=chosen, **entry) if chosen else Entry(columns=_columns(splits, options), **entry)


def _input(features: Mapping[str, Any], options: NewDataKeys) -> tuple[str, str]:
    """The kind of the data set, and its one input column, "" for a table."""
    import datasets

    others = [column for column in features if column != options.target]
    pictures = [column for column in others if isinstance(features[column], datasets.Image)]
    alone = next((columns[0] for columns in (pictures, others) if len(columns) == 1), "")
    chosen = options.inputs or ("" if alone in options.values else alone)
    if chosen and chosen not in others:
        raise unknown("inputs", chosen, others)
    is_text = bool(chosen) and _type(features[chosen]) in TEXTS
    kind = "image" if chosen in pictures else "text" if is_text else "table"
    if options.inputs and kind == "table":
        raise ConfigError("inputs", chosen, "expected a column of images or of texts")
    _refuse_unused(kind, options)
    return kind, "" if kind == "table" else chosen


def _type(feature: Any) -> str:
    """As Arrow calls it, for features of plain values."""
    return str(getattr(feature, "dtype", type(feature).__name__))


def _refuse_unused(kind: str, options: NewDataKeys) -> None:
    """Raise `ConfigError` for a key that would change nothing: whoever gives it is mistaken."""
    stated = sorted({*options.ranges, *options.values} - {options.target})
    if kind != "table" and (stated or options.public):
        raise ConfigError("ranges, values, public", stated, f"expected them of a table, and this is one of {kind}")
    if kind != "image" and options.size is not None:
        raise ConfigError("size", options.size, f"expected it of images, and this is a data set of the kind {kind}")


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}-00000-of-00001.parquet"


def _write_images(splits: Splits, column: str, options: NewDataKeys, folder: Path) -> dict[str, Any]:
    """What the entry says of the images."""
    import datasets
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    seen: set[tuple[tuple[int, int], bool]] = set()
    picture = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({column: picture, options.target: pa.int64()})
    for split, records in splits.items():
        encoded = records.cast_column(column, datasets.Image(decode=False))
        with ParquetWriter(_file(folder, split), schema) as writer:
            batch: Any
            for batch in encoded.iter(ROWS):
                stored = [_stored(record, options.size, seen) for record in batch[column]]
                writer.write_table(pa.table({column: stored, options.target: batch[options.target]}, schema))
    sides = {side for size, _ in seen for side in size}
    channels = 1 if all(is_grey for _, is_grey in seen) else 3
    constants = (0.5,) * channels
    return {"size": sides.pop() if len(sides) == 1 else None, "mean": constants, "std": constants, "note": UNSEEN}


def _stored(record: dict[str, Any], size: int | None, seen: set[tuple[tuple[int, int], bool]]) -> dict[str, Any]:
    """The image as it is stored; its size and whether it is grey are added to `seen`."""
    where = record["path"] or "an image"
    try:
        content = Path(where).read_bytes() if record["bytes"] is None else record["bytes"]
        image = Image.open(BytesIO(content))
        image.load()
    except Exception as error:  # whatever is in the file
        raise ConfigError("from", where, f"expected an image ({type(error).__name__}: {error})") from error
    is_grey = image.mode in ("1", "L")
    if size is not None:
        image, coded = decoding.square(image.convert("L" if is_grey else "RGB"), size), BytesIO()
        image.save(coded, "PNG")
        content = coded.getvalue()
    seen.add((image.size, is_grey))
    return {"bytes": content, "path": Path(where).name}


def _columns(splits: Splits, options: NewDataKeys) -> dict[str, Column]:
    """What is stated of the columns of a table."""
    names = [name for name in splits["train"].column_names if name != options.target]
    for given in (options.ranges, options.values):
        for name in given.keys() - {options.target}:
            if name not in names:
                raise unknown("ranges" if given is options.ranges else "values", name, names)
    return {name: _column(splits, name, options) for name in names}


def _column(splits: Splits, name: str, options: NewDataKeys) -> Column:
    kind = _type(splits["train"].features[name])
    is_number = kind.startswith(("int", "uint", "float"))
    if not is_number and kind not in (*TEXTS, "bool"):
        raise ConfigError(name, kind, "expected a column of numbers, texts or truth values: leave it out")
    if name in options.values:
        return Column(values=options.values[name])
    if name in options.ranges:
        if not is_number:
            raise ConfigError(f"ranges.{name}", options.ranges[name], "it is a column of texts: expected `values`")
        return Column(range=options.ranges[name])
    if not options.public:
        return Column(range=UNSTATED) if is_number else Column(values=UNSTATED)
    seen = {value for records in splits.values() for value in records.unique(name)} - {None}
    if is_number:
        finite = [float(value) for value in seen if np.isfinite(value)] or [0.0]
        low, high = min(finite), max(finite)
        return Column(range=(low, high) if low < high else (low - 1, low + 1))  # of one number that all rows have
    if len(seen) > MOST_VALUES:
        raise ConfigError(name, f"{len(seen)} values", f"expected at most {MOST_VALUES} categories: leave it out")
    return Column(values=tuple(sorted(map(str, seen))) or ("",))


def _confirmed(entry: Entry, split: str) -> SplitEntry:
    """A split with its checksums, from the files that were written."""
    source = open_source(entry, split)
    labels = np.array(read_column(source, entry.targets), np.int64)
    if entry.kind == "image":
        inputs = decoding.decode(entry, source, entry.size or 1)[1]  # the checksum is of the pixels before resizing
    elif entry.kind == "text":
        inputs = checksums.of_texts(read_column(source, entry.inputs))
    else:
        inputs = tables.digest(entry, source)
    return replace(entry.part(split), inputs=inputs, targets=checksums.of_arrays([labels]))


def _text(entry: Entry) -> str:
    """The entry as YAML."""
    content = {key: value for key, value in _plain(asdict(entry)).items() if key not in ("name", "folder")}
    splits, style = content.pop("splits"), {"sort_keys": False, "allow_unicode": True, "width": 120}
    flat = yaml.safe_dump(content, default_flow_style=None, **style)  # each list in a line
    return flat + yaml.safe_dump({"splits": splits}, default_flow_style=False, **style)


def _plain(value: Any) -> Any:
    """Plain data without what an entry does not say."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if each not in (None, "", (), {}, 0)}
    return list(value) if isinstance(value, tuple) else value
