"""A user's own records, once and for all: what Hugging Face's `datasets` reads -> `data/NAME.yaml` and its files.

Nothing that is computed from the records becomes a constant of a run: images are normalised by 0.5, and ranges and
values of a table's columns are the user's to state. The entry holds what is public: the number of records, the
classes, the checksums.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml
from PIL import Image

from dpopt import files
from dpopt.bars import watched
from dpopt.errors import ConfigError, unknown
from dpopt.workloads.data import catalogue, records
from dpopt.workloads.data.catalogue import UNSTATED, Column, Entry, SplitEntry
from dpopt.workloads.data.source import ROWS, open_source, quiet, read_column
from dpopt.workloads.data_keys import DataKeys

if TYPE_CHECKING:
    from datasets import Dataset

FOLDER = Path("data")
"""Entries and files of one's own lie here, in the current folder."""
_PUBLIC = "# Public with this file: the SHA-256 of the records tell whether a guess at all of them is right.\n"
_TEXTS = ("string", "large_string")
_MOST_VALUES = 1000
"""Classes, or categories of a column; more of them are something else."""

Splits = dict[str, "Dataset"]


@contextmanager
def imported(name: str, keys: DataKeys) -> Iterator[Entry]:
    """The entry of the records at `keys.from_`, NAME@VERSION, whose copies are in a folder for their owner alone.

    At the end the folder is gone, and so is the cache of what is computed meanwhile, which is in it. ConfigError leaves
    everything as it was.
    """
    before = os.environ.get("DPOPT_CACHE")
    with TemporaryDirectory(dir=".", prefix=".dpopt-") as scratch:  # of mode 0700
        with quiet():
            entry = _import(name, keys, scratch)
        os.environ["DPOPT_CACHE"] = str(Path(scratch, "cache").resolve())
        version = catalogue.remember(entry)
        try:
            yield entry
        finally:
            del catalogue.REMEMBERED[version]
            os.environ.pop("DPOPT_CACHE") if before is None else os.environ.update(DPOPT_CACHE=before)


def check_free(name: str) -> None:
    """Raise `ConfigError` where a data set NAME, or a file in its place, is there."""
    for path in (FOLDER / name, FOLDER / f"{name}.yaml"):
        if path.exists():
            raise ConfigError("name", name, f"{path} exists: remove data/{name}.yaml and data/{name}/ to make it anew")
    if name in catalogue.entries():
        raise ConfigError("name", name, "a data set of that name is known: `dpopt list what=data`")


def keep(entry: Entry) -> Entry:
    """Move the Parquet files of an entry that was `imported` to `data/NAME/`, and write `data/NAME.yaml`."""
    assert entry.folder
    FOLDER.mkdir(exist_ok=True)
    # Written before the folder is moved, so that nothing but the two names can fail.
    file = entry.folder.with_suffix(".yaml")
    content, style = entry.content(), {"sort_keys": False, "allow_unicode": True, "width": 120}
    splits = yaml.safe_dump({"splits": content.pop("splits")}, default_flow_style=False, **style)
    flat = yaml.safe_dump(content, default_flow_style=None, **style)  # each list in a line
    file.write_text(flat + _PUBLIC + splits, encoding="utf-8")
    shutil.move(entry.folder, FOLDER / entry.name)
    shutil.move(file, FOLDER / file.name)
    return catalogue.entry(entry.name)


def _import(name: str, keys: DataKeys, scratch: str) -> Entry:
    from pyarrow import parquet

    target = keys.target or "label"
    options = replace(keys, target=target)
    classes, splits = _labelled(_read(keys, scratch), target, keys.values.get(target))
    splits, note = _with_test(splits, options)
    kind, chosen = _input(splits["train"].features, options)
    folder = Path(scratch) / name
    folder.mkdir(mode=0o700)
    content: dict[str, Any] = {"inputs": chosen}
    if kind == "image":
        content |= _write_images(splits, chosen, options, folder)
        unseen = "normalised by mean 0.5 and std 0.5, which no record has a part in"
        note = "; ".join(filter(None, (unseen, note)))
    elif kind == "table":
        # In one piece: of rows that were selected, each is one of its own, for which all else takes minutes.
        arrow: dict[str, Any] = {split: rows.with_format("arrow")[:] for split, rows in splits.items()}
        tables = {split: rows.combine_chunks() for split, rows in arrow.items()}
        content["columns"] = _columns(splits["train"].features, tables.values(), options)
        for split, rows in tables.items():
            parquet.write_table(rows, _file(folder, split))
    else:
        for split, rows in splits.items():
            rows.select_columns([chosen, target]).to_parquet(_file(folder, split))
    entry = Entry(
        name=name,
        kind=kind,
        unit=options.unit or "",
        targets=target,
        classes=len(classes),
        class_names=classes,
        splits={split: SplitEntry(split, len(rows)) for split, rows in splits.items()},
        licence="none stated",
        reference="own data",
        note=note,
        folder=folder,
        **content,
    )
    for file in folder.iterdir():
        file.chmod(0o600)
    # Checksums are of the files as they are read back, so that they hold for whoever reads them later.
    parts = {}
    for split in splits:
        source = open_source(entry, split)
        labels = np.array(read_column(source, entry.targets), np.int64)
        if kind == "image":
            inputs = records.decode(entry, source, entry.size or 1)[1]  # of the pixels before resizing
        elif kind == "text":
            inputs = records.of_texts(read_column(source, entry.inputs))
        else:
            inputs = records.of_columns(entry, source)
        parts[split] = replace(entry.part(split), inputs=inputs, targets=records.of_arrays([labels]))
    return replace(entry, splits=parts)


def _read(keys: DataKeys, scratch: str) -> Splits:
    """The splits at `keys.from_`, `train` among them, without the columns that are to be dropped."""
    import datasets
    import pandas as pd

    if (place := keys.from_) is None:
        raise ConfigError("from", None, "expected from=PATH: a folder of images, a CSV file, or a saved `Dataset`")
    if not place.exists():
        raise ConfigError("from", str(place), "there is nothing")
    try:
        if (place / "dataset_dict.json").exists() or (place / "state.json").exists():
            loaded: Any = datasets.load_from_disk(str(place))
        elif place.is_dir():
            # Folders are splits where one of them is called `train`, and classes otherwise. Files are named, as
            # `datasets` would take any with "test" in its name for one of the test split.
            inner = sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
            places = {path.name: path for path in inner} if (place / "train").is_dir() else {"train": place}
            images = {split: f"{glob.escape(str(path))}/*/*" for split, path in places.items()}
            loaded = datasets.load_dataset("imagefolder", data_files=images, cache_dir=scratch, drop_labels=False)
        else:
            loaded = datasets.Dataset.from_pandas(pd.read_csv(files.regular(place)), preserve_index=False)
    except Exception as error:  # the libraries raise many kinds, none of them for a user to read
        allowed = f"expected CLASS/IMAGE or train/CLASS/IMAGE and test/CLASS/IMAGE, CSV, or save_to_disk's: {error}"
        raise ConfigError("from", str(place), allowed) from error
    splits = {"train": loaded} if isinstance(loaded, datasets.Dataset) else {str(key): loaded[key] for key in loaded}
    if "train" not in splits:
        raise ConfigError("from", str(place), f"expected a split `train`, and there are {', '.join(splits)}")
    dropped, names = list(keys.drop or ()), splits["train"].column_names
    for key, name in [*(("drop", name) for name in dropped), *(("unit", name) for name in [keys.unit] if name)]:
        if name not in names:
            raise unknown(key, name, names)
    if not set(names) - {*dropped, keys.unit, keys.target or "label"}:
        raise ConfigError("from", str(place), f"expected an input beside the target, and the columns are {names}")
    return {split: rows.remove_columns(dropped) for split, rows in splits.items()}


def _labelled(splits: Splits, target: str, stated: tuple[str, ...] | None) -> tuple[tuple[str, ...], Splits]:
    import datasets

    first = splits["train"]
    if target not in first.column_names:
        raise unknown("target", target, first.column_names)
    feature = first.features[target]
    if isinstance(feature, datasets.ClassLabel):
        classes, numbers = tuple(feature.names), {number: number for number in range(len(feature.names))}
    else:
        seen = {value for rows in splits.values() for value in rows.unique(target)}
        if not stated:
            if None in seen or any(isinstance(value, float) and not value.is_integer() for value in seen):
                raise ConfigError(f"target {target}", list(seen)[:5], "expected a class for each record")
            if len(seen) > _MOST_VALUES:
                allowed = f"expected at most {_MOST_VALUES:,} classes"
                raise ConfigError(f"target {target}", f"{len(seen)} values", allowed)
        classes = stated or tuple(str(value) for value in sorted(seen))
        numbers = {value: classes.index(str(value)) for value in seen if str(value) in classes}
    if len(classes) < 2:
        raise ConfigError(f"target {target}", list(classes), "expected at least two classes")
    numbered = {}
    for split, rows in splits.items():
        values = rows[target][:]
        for row, value in enumerate(values):
            if value not in numbers:
                raise ConfigError(f"{split}[{row}].{target}", value, "expected one of the classes")
        labels: Any = [numbers[value] for value in values]
        numbered[split] = rows.remove_columns(target).add_column(target, labels)  # type: ignore[call-arg]
    return classes, numbered


def _with_test(splits: Splits, options: DataKeys) -> tuple[Splits, str]:
    share, train = options.test or 0.2, splits["train"]
    if "test" in splits:
        if options.test is not None:
            raise ConfigError("test", share, "there is a test split already")
        owners = [set(rows[options.unit][:]) for rows in splits.values()] if options.unit else []
        if shared := sum(map(len, owners)) - len(set().union(*owners)):
            how = "they have rows in more than one split: expected all rows of a person in one"
            raise ConfigError(f"unit {options.unit}", f"{shared} persons", how)
        return splits, ""
    # The row number alone decides, or whose row it is, so the same file gives the same split everywhere.
    whose = train[options.unit][:] if options.unit else range(len(train))
    digests = (hashlib.sha256(str(each).encode()).digest() for each in whose)
    is_test = np.array([int.from_bytes(digest[:8], "big") / 2**64 < share for digest in digests], bool)
    if is_test.all() or not is_test.any():
        raise ConfigError("test", share, f"of {len(train)} records {is_test.sum()} would be for tests")
    parts = {"train": train.select(np.flatnonzero(~is_test)), "test": train.select(np.flatnonzero(is_test))}
    by = options.unit or "row number"
    return {**splits, **parts}, f"test records are those of whose {by} the SHA-256 begins below {share:g}"


def _input(features: Mapping[str, Any], options: DataKeys) -> tuple[Any, str]:
    import datasets

    others = [column for column in features if column not in (options.target, options.unit)]
    pictures = [column for column in others if isinstance(features[column], datasets.Image)]
    alone = next((columns[0] for columns in (pictures, others) if len(columns) == 1), "")
    chosen = options.inputs or ("" if alone in options.values else alone)
    if chosen and chosen not in others:
        raise unknown("inputs", chosen, others)
    is_text = bool(chosen) and _type(features[chosen]) in _TEXTS
    kind = "image" if chosen in pictures else "text" if is_text else "table"
    # A key that would change nothing is refused: whoever gives it is mistaken.
    if options.inputs and kind == "table":
        raise ConfigError("inputs", chosen, "expected a column of images or of texts")
    stated = sorted({*options.ranges, *options.values} - {options.target})
    if kind != "table" and (stated or options.public):
        raise ConfigError("ranges, values, public", stated, f"expected them of a table, and this is one of {kind}")
    if kind != "table" and options.unit:
        raise ConfigError("unit", options.unit, f"expected it of a table, and this is one of {kind}")
    if kind != "image" and options.size is not None:
        raise ConfigError("size", options.size, f"expected it of images, and this is a data set of the kind {kind}")
    return kind, "" if kind == "table" else chosen


def _type(feature: Any) -> str:
    return str(getattr(feature, "dtype", type(feature).__name__))  # as Arrow calls it


def _file(folder: Path, split: str) -> Path:
    return folder / f"{split}-00000-of-00001.parquet"


def _write_images(splits: Splits, column: str, options: DataKeys, folder: Path) -> dict[str, Any]:
    import datasets
    import pyarrow as pa
    from pyarrow.parquet import ParquetWriter

    sides: set[int] = set()
    channels = 1
    picture = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    schema = pa.schema({column: picture, options.target: pa.int64()})
    for split, rows in splits.items():
        encoded = rows.cast_column(column, datasets.Image(decode=False))
        with ParquetWriter(_file(folder, split), schema) as writer:
            batch: Any
            for batch in encoded.iter(ROWS):
                stored = []
                for record in batch[column]:
                    where = record["path"] or "an image"
                    try:
                        content = records.encoded(record)
                        image = Image.open(BytesIO(content))
                        image.load()
                    except Exception as error:  # whatever is in the file
                        allowed = f"expected an image ({type(error).__name__}: {error})"
                        raise ConfigError("from", where, allowed) from error
                    is_grey = image.mode in ("1", "L")
                    if options.size is not None:
                        image = records.square(image.convert("L" if is_grey else "RGB"), options.size)
                        coded = BytesIO()
                        image.save(coded, "PNG")  # without loss, unlike what most cameras write
                        content = coded.getvalue()
                    sides |= {*image.size}
                    channels = channels if is_grey else 3
                    stored.append({"bytes": content, "path": Path(where).name})
                writer.write_table(pa.table({column: stored, options.target: batch[options.target]}, schema))
    constants = (0.5,) * channels
    return {"size": sides.pop() if len(sides) == 1 else None, "mean": constants, "std": constants}


def _columns(features: Mapping[str, Any], tables: Collection[Any], options: DataKeys) -> dict[str, Column]:
    names = [name for name in features if name not in (options.target, options.unit)]
    for key in ("ranges", "values"):
        for name in getattr(options, key).keys() - {options.target}:
            if name not in names:
                raise unknown(key, name, names)
    columns: dict[str, Column] = {}
    for name in watched(names, len(names), "reading columns"):
        kind = _type(features[name])
        is_number = kind.startswith(("int", "uint", "float"))
        if not is_number and kind not in (*_TEXTS, "bool"):
            raise ConfigError(name, kind, "expected a column of numbers, texts or truth values: leave it out")
        if name in options.values:
            stated = options.values[name]
            # Rows hold True where a user writes true.
            columns[name] = Column(values=tuple(map(str.capitalize, stated)) if kind == "bool" else stated)
        elif name in options.ranges and not is_number:
            raise ConfigError(f"ranges.{name}", options.ranges[name], "it is a column of texts: expected `values`")
        elif name in options.ranges:
            columns[name] = Column(range=options.ranges[name])
        elif options.public:
            # The user says that whatever the records show is public.
            seen = {value for rows in tables for value in rows[name].unique().to_pylist()} - {None}
            if is_number:
                finite = [float(value) for value in seen if np.isfinite(value)] or [0.0]
                low, high = min(finite), max(finite)  # one number where all rows have the same
                columns[name] = Column(range=(low, high) if low < high else (low - 1, low + 1))
            elif len(seen) > _MOST_VALUES:
                allowed = f"expected at most {_MOST_VALUES} categories: leave it out"
                raise ConfigError(name, f"{len(seen)} values", allowed)
            else:
                columns[name] = Column(values=tuple(sorted(map(str, seen))) or ("",))
        else:
            columns[name] = Column(range=UNSTATED) if is_number else Column(values=UNSTATED)
    return columns
