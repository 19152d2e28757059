"""The sources of records: Parquet files in a local folder, or the hub. Both are read as batches of Arrow columns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpopt.errors import ConfigError, Missing
from dpopt.fields import data_root, listed
from dpopt.workloads.data.catalogue import Entry, entry

ROWS = 256
"""Records of one batch: a few hundred decoded images fit in memory whatever their size."""


@dataclass(frozen=True)
class Source:
    """The records of one split, not yet read.

    `read` gives the values of a column in batches of at most `ROWS`; an image is {"bytes": ..., "path": ...}.
    """

    name: str  # of data set and split, for errors
    columns: tuple[str, ...]  # that a record has
    records: int  # their number
    read: Callable[[str], Iterator[list[Any]]]

    def values(self, column: str) -> list[Any]:
        """All values of a column."""
        return [value for batch in self.read(column) for value in batch]


def open_source(dataset: Entry, split: str) -> Source:
    """The records of a split: from local files, see `files`, else from the hub (or what was loaded from it)."""
    local, name, expected = files(dataset, split), f"{dataset.name}.{split}", dataset.part(split).records
    source = _hub(dataset, split, name) if local is None else _local(dataset, local, name)
    if not set(dataset.read) <= set(source.columns):
        raise ConfigError(name, list(source.columns), f"expected the columns {' and '.join(dataset.read)}")
    if source.records != expected:
        raise ConfigError(name, source.records, f"expected {expected} records")
    return source


def files_of(places: Any) -> list[Path]:
    """The image files that a path, or a list of paths, names: of a folder those at any depth, sorted."""
    from PIL import Image

    endings, paths = Image.registered_extensions(), [Path(each) for each in listed(places)]
    inner = [path for place in paths for path in (sorted(place.rglob("*")) if place.is_dir() else [place])]
    if pictures := [path for path in inner if path.suffix.lower() in endings and path.is_file()]:
        return pictures
    raise ConfigError("from", str(places), "expected an image, or a folder of images")


def read_column(source: Source, column: str) -> list[Any]:
    """All values of a column; `ConfigError` where one is missing."""
    values = source.values(column)
    if None in values:
        raise ConfigError(f"{source.name}[{values.index(None)}]", None, f"the value of {column} is missing")
    return values


def files(dataset: Entry, split: str) -> list[Path] | None:
    """The split's files, beside the entry or in `$DPOPT_DATA`, or None where the hub is asked; `Missing` for none."""
    root, pattern = data_root(), f"{dataset.part(split).source}-*.parquet"
    for place in filter(None, (dataset.folder, root / dataset.name if root else None)):
        if held := sorted(place.glob(pattern)):
            return held
    how = _how_to_get(dataset)
    if root:  # whoever sets it wants no other source: the hub is not asked in its place
        raise Missing("DPOPT_DATA", str(root), f"expected {dataset.name}/{pattern} in it; {how}", "data", dataset.name)
    if dataset.hub is None:
        raise Missing("DPOPT_DATA", None, how, "data", dataset.name)
    return None


def missing(name: str) -> list[Missing]:
    """The data set and how to get it where it is not on this machine, else nothing; cheap, asks no hub."""
    dataset = entry(name)
    try:
        if None not in [files(dataset, split) for split in dataset.splits]:
            return []
    except Missing as error:
        return [error]
    from datasets import config

    if any(Path(config.HF_DATASETS_CACHE).glob(str(dataset.hub).replace("/", "___"))):  # loaded from the hub before
        return []
    source = str(dataset.hub) if is_online() else ""
    return [Missing("data", dataset.name, _how_to_get(dataset), "data", dataset.name, source)]


def is_online() -> bool:
    """True if files that are not on this machine may be loaded from the hub: yes, unless HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def kept_file(hub: str, name: str) -> Path | None:
    """The file `name` of the hub's model `hub` where it was loaded before; asks no hub."""
    from huggingface_hub import try_to_load_from_cache

    path = try_to_load_from_cache(hub, name)
    return Path(path) if isinstance(path, str) else None


def _how_to_get(dataset: Entry) -> str:
    how = f"set DPOPT_DATA to a folder that holds {dataset.name}/SPLIT-*.parquet"
    how = f"put SPLIT-*.parquet into {dataset.folder}, or {how}" if dataset.folder else how
    return f"{how}, or unset it and go online once to load {dataset.hub} from the hub" if dataset.hub else how


def identity(dataset: Entry, split: str) -> list[Any]:
    """Plain JSON data that tell one copy of a split from another where no checksum is known."""
    local = files(dataset, split)
    if local is None:  # `datasets` derives it from the revision that it loaded
        return [dataset.hub, dataset.config, _load(dataset, split)._fingerprint]
    if local[0].parent == dataset.folder:  # with the times, as another folder's files may have the same names and sizes
        return [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in local]
    return [[file.name, file.stat().st_size] for file in local]


def _local(dataset: Entry, local: list[Path], name: str) -> Source:
    from pyarrow.parquet import ParquetFile

    folder = str(local[0].parent)
    with _readable(dataset, folder):
        parts = [ParquetFile(file) for file in local]

    def read(column: str) -> Iterator[list[Any]]:
        with _readable(dataset, folder):
            for part in parts:
                for batch in part.iter_batches(ROWS, columns=[column]):
                    yield batch.column(0).to_pylist()

    records = sum(part.metadata.num_rows for part in parts)
    return Source(name, tuple(parts[0].schema_arrow.names), records, read)


def _hub(dataset: Entry, split: str, name: str) -> Source:
    records = _load(dataset, split)

    def read(column: str) -> Iterator[list[Any]]:
        with _readable(dataset, str(dataset.hub)):
            for batch in records.select_columns(column).with_format("arrow").iter(ROWS):
                yield batch.column(0).to_pylist()

    return Source(name, tuple(records.column_names), len(records), read)


def _load(dataset: Entry, split: str) -> Any:
    import datasets

    source, name = dataset.part(split).source, str(dataset.hub)
    with _readable(dataset, name), quiet():
        return datasets.load_dataset(name, dataset.config, split=source, revision=dataset.revision)


@contextmanager
def _readable(dataset: Entry, where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the libraries raise many kinds, none of them for a user to read
        raise ConfigError(dataset.name, where, f"cannot be loaded ({error}); {_how_to_get(dataset)}") from error


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars of `datasets` where nobody watches."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not are_progress_bars_disabled() and not sys.stderr.isatty()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()
