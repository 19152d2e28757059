"""Records as users have them, a folder of images, CSV or a saved `datasets.Dataset` -> splits with class numbers."""

from __future__ import annotations

import glob
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpopt.errors import ConfigError, unknown

if TYPE_CHECKING:
    from datasets import Dataset

Splits = dict[str, "Dataset"]
TEST_SHARE = 0.2
MOST_VALUES = 1000
"""Classes, or categories of a column; more of them are something else."""


def read(place: Path, scratch: str) -> Splits:
    """The splits that there are, `train` among them.

    Args:
        place: a folder of images (CLASS/IMAGE, or SPLIT/CLASS/IMAGE with a split `train`), a CSV file, or what
            `datasets.Dataset.save_to_disk` has written.
        scratch: a folder for what `datasets` writes for itself.

    Raises:
        ConfigError: there are none.
    """
    if not place.exists():
        raise ConfigError("from", str(place), "there is nothing")
    try:
        splits = _saved(place) if _is_saved(place) else _images(place, scratch) if place.is_dir() else _csv(place)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise many kinds, none of them for a user to read
        allowed = f"expected CLASS/IMAGE or train/CLASS/IMAGE and test/CLASS/IMAGE, CSV, or save_to_disk's: {error}"
        raise ConfigError("from", str(place), allowed) from error
    if "train" not in splits:
        raise ConfigError("from", str(place), f"expected a split `train`, and there are {', '.join(splits)}")
    return splits


def _is_saved(place: Path) -> bool:
    return any((place / name).exists() for name in ("dataset_dict.json", "state.json"))


def _saved(place: Path) -> Splits:
    import datasets

    found = datasets.load_from_disk(str(place))
    return {"train": found} if isinstance(found, datasets.Dataset) else {str(split): found[split] for split in found}


def _csv(place: Path) -> Splits:
    import datasets
    import pandas as pd

    return {"train": datasets.Dataset.from_pandas(pd.read_csv(place), preserve_index=False)}


def _images(place: Path, scratch: str) -> Splits:
    """Folders are splits where one of them is called `train`, and classes otherwise."""
    import datasets

    # Without explicit files, `datasets` takes any file with "test" in its name for one of the test split.
    inner = sorted(path for path in place.iterdir() if path.is_dir() and not path.name.startswith("."))
    places = {path.name: path for path in inner} if (place / "train").is_dir() else {"train": place}
    files = {split: f"{glob.escape(str(path))}/*/*" for split, path in places.items()}
    found = datasets.load_dataset("imagefolder", data_files=files, cache_dir=scratch, drop_labels=False)
    return {str(split): found[split] for split in found}


def with_test(splits: Splits, share: float | None) -> tuple[Splits, str]:
    """The splits with one for tests, and what a reader should know of it.

    Args:
        splits: see `read`.
        share: of the training records that become the test split where there is none; None for `TEST_SHARE`.

    Raises:
        ConfigError: a share that is not needed, or that leaves a split empty.
    """
    if "test" in splits:
        if share is not None:
            raise ConfigError("test", share, "there is a test split already")
        return splits, ""
    share, train = share or TEST_SHARE, splits["train"]
    is_test = np.array([_place(row) < share for row in range(len(train))], bool)
    if is_test.all() or not is_test.any():
        raise ConfigError("test", share, f"of {len(train)} records {is_test.sum()} would be for tests")
    parts = {"train": train.select(np.flatnonzero(~is_test)), "test": train.select(np.flatnonzero(is_test))}
    return {**splits, **parts}, f"test records are those of whose row number the SHA-256 begins below {share:g}"


def _place(row: int) -> float:
    """A number in [0, 1) that is the same for this row number everywhere."""
    return int.from_bytes(hashlib.sha256(str(row).encode()).digest()[:8], "big") / 2**64


def labelled(splits: Splits, target: str, stated: tuple[str, ...] | None) -> tuple[tuple[str, ...], Splits]:
    """The classes in order, and the splits with class numbers in the column `target`.

    Args:
        splits: see `read`.
        target: the column of the classes.
        stated: the classes; None for those that the records have.

    Raises:
        ConfigError: no such column, one class only, or records without a class.
    """
    import datasets

    first = splits["train"]
    if target not in first.column_names:
        raise unknown("target", target, first.column_names)
    feature = first.features[target]
    if isinstance(feature, datasets.ClassLabel):
        classes, numbers = tuple(feature.names), {number: number for number in range(len(feature.names))}
    else:
        seen = {value for records in splits.values() for value in records.unique(target)}
        classes = stated or _classes(seen, target)
        numbers = {value: classes.index(str(value)) for value in seen if str(value) in classes}
    if len(classes) < 2:
        raise ConfigError(f"target {target}", list(classes), "expected at least two classes")
    return classes, {split: _numbered(split, records, target, numbers) for split, records in splits.items()}


def _numbered(split: str, records: Dataset, target: str, numbers: dict[Any, int]) -> Dataset:
    found = records[target][:]
    for row, value in enumerate(found):
        if value not in numbers:
            raise ConfigError(f"{split}[{row}].{target}", value, "expected one of the classes")
    return records.remove_columns(target).add_column(target, [numbers[value] for value in found])  # type: ignore[call-arg]


def _classes(seen: set[Any], target: str) -> tuple[str, ...]:
    """The names of the classes that the records have, in order."""
    if None in seen or any(isinstance(value, float) and not value.is_integer() for value in seen):
        raise ConfigError(f"target {target}", list(seen)[:5], "expected a class for each record")
    if len(seen) > MOST_VALUES:
        raise ConfigError(f"target {target}", f"{len(seen)} values", f"expected at most {MOST_VALUES:,} classes")
    return tuple(str(value) for value in sorted(seen))
