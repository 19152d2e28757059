"""Data sets of the usual kinds, read into memory as tensors: inputs, by name where they have names, and targets."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
)
from torch.utils.data._utils.collate import default_collate, default_convert

from dpopt.errors import ConfigError, cut, unknown

_TARGETS = ("label", "labels", "target", "y")
"""Names that a target goes by."""
_TARGET, _INPUT = "(target)", "(input)"
"""Stand for a target, and for an input without a name, beside inputs with names."""
_FINITE = 2**22
"""Numbers that are looked at once for NaN and infinity; a mapped file need not fit into memory."""
_KINDS = (
    "expected a pair of arrays (inputs, targets), a mapping or a DataFrame of columns, a Dataset, a DataLoader, "
    "or a Hugging Face Dataset"
)
_FORM = "expected records (input, target), or mappings with names, of numbers and of one shape"


Inputs: TypeAlias = Tensor | dict[str, Tensor]
"""Inputs of all records: one tensor [n, ...], or several by name, each [n, ...]."""


def read(data: Any, where: str, target: str | None = None) -> tuple[Inputs, Tensor]:
    """Inputs and targets [n, ...] of all records; arrays share their memory with `data`, and mapped files stay on disk.

    Errors call the data `where`; `target` names the target where it has a name.

    Raises:
        ConfigError: `data` cannot be read, has no records, does not stack, changes from one reading to the next, has
            numbers that are not finite or masked, its target cannot be named, or indices of pandas differ.
    """
    if isinstance(data, DataLoader):
        data = _dataset(data, where)
    if _is_frame(data) or isinstance(data, Mapping):
        columns = _columns(data)
        if any(hasattr(part, "with_format") for part in columns.values()):
            raise ConfigError(where, list(columns), "these are several data sets: give one of them")
        name = _target(list(columns), where, target)
        _require_one_index(columns.values(), where)
        goal = columns.pop(name)
        return _whole(_tensors(columns, where), _tensor(goal, f"{where}.{name}"), where)
    if (pair := _arrays(data)) is not None:
        if target is not None:
            raise _nameless(target, where)
        inputs, targets = pair
        by_name = inputs if isinstance(inputs, Mapping) else {"": inputs}
        _require_one_index([*by_name.values(), targets], where)
        has_names = isinstance(inputs, Mapping) or _is_frame(inputs)
        return _whole(_tensors(inputs, where) if has_names else _tensor(inputs, where), _tensor(targets, where), where)
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__len__")):
        how = "draws need records that have numbers: give a map-style data set"
        raise ConfigError(where, type(data).__name__, how)
    if isinstance(data, str | Tensor) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ConfigError(where, type(data).__name__, _KINDS)
    if len(data) == 0:
        raise ConfigError(where, type(data).__name__, "it has no records, expected at least 1")
    # A transform of a Hugging Face data set's own is applied to each record.
    is_hugging = hasattr(data, "with_format") and getattr(data, "format", {}).get("type") != "custom"
    return _whole(*(_hugging if is_hugging else _records)(data, where, target), where)


def read_inputs(data: Any, where: str, names: Sequence[str] = ()) -> Inputs:
    """Inputs alone, read as by `read`; a list holds rows. Of columns those called `names`, if any, in their order."""
    if _is_frame(data) or isinstance(data, Mapping):
        columns = {str(name): part for name, part in _columns(data).items()}
        stated: dict[str, list[str]] = {}
        for name in names:
            if name not in columns:  # a value of a column of texts, see `_tensors`
                column, _, value = name.partition("=")
                stated.setdefault(column, []).append(value)
        if absent := [name for name in stated if name not in columns]:
            raise ConfigError(where, list(columns), f"there is no column {', '.join(absent)}")
        for name, values in stated.items():
            columns |= _is_value(columns[name], name, values)
            if count := sum(isinstance(each, str) and each not in values for each in columns[name]):
                warnings.warn(f"{where}: {count} values of {name} were not stated for training", stacklevel=5)
        data = {name: columns[name] for name in names or columns}
        count = len(next(iter(data.values()), ()))
    elif not isinstance(data, list) and not is_array(data):
        return read(data, where)[0]  # a data set, with targets that do not count
    else:
        count = len(data) if getattr(data, "ndim", 1) else 0
    return read((data, torch.zeros(count)), where)[0]


def repeats(data: Any) -> tuple[int, int]:
    """The number of records that are one of those before again, and how often the most frequent one is there."""
    # By place and not by value: two people may have the same values.
    data = data.dataset if isinstance(data, DataLoader) else data
    if not (isinstance(data, list | tuple | Subset | ConcatDataset) or getattr(data, "_indices", None) is not None):
        return 0, 1
    counts = Counter(_origins(data))
    return counts.total() - len(counts), max(counts.values(), default=1)


def _origins(data: Any) -> list[tuple[int, int]]:
    """The data set, and the place in it, that each row of `data` comes from."""
    if isinstance(data, Subset):
        origins = _origins(data.dataset)
        return [origins[int(row)] for row in data.indices]
    if isinstance(data, ConcatDataset):
        return [origin for part in data.datasets for origin in _origins(part)]
    if isinstance(data, list | tuple):
        return [(id(record), 0) for record in data]
    chosen = getattr(data, "_indices", None)  # of a Hugging Face `Dataset` after `select`
    rows = range(len(data)) if chosen is None else chosen.column(0).to_pylist()
    # Two of `TensorDataset` may hold the same tensors.
    return [(id(data.tensors[0] if isinstance(data, TensorDataset) else data), row) for row in rows]


def _dataset(loader: DataLoader[Any], where: str) -> Any:
    collate, sampler, batches = loader.collate_fn, loader.sampler, loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset  # which is refused
    # What a loader does to batches is lost, as draws are batches of their own.
    if collate not in (default_collate, default_convert):
        how = "pad or change records in the data set itself, and give that"
        raise ConfigError(f"{where}.collate_fn", getattr(collate, "__name__", type(collate).__name__), how)
    is_plain = batches is None or type(batches) is BatchSampler
    if isinstance(batches, BatchSampler) and is_plain:
        sampler = batches.sampler  # a loader that takes a sampler of batches has a `sampler` that says nothing
    source: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", loader.dataset))
    # These order or share out the records of a data set, and leave none out for good.
    is_plain_sampler = isinstance(sampler, SequentialSampler | RandomSampler | DistributedSampler)
    is_whole = is_plain_sampler and len(source) == len(cast(Sized, loader.dataset))
    if not (is_whole and is_plain):
        how = "draws are Poisson, and of all records: give the data set, or a `torch.utils.data.Subset` of it"
        raise ConfigError(f"{where}.sampler", type(sampler if is_plain else batches).__name__, how)
    return loader.dataset


def _arrays(data: Any) -> tuple[Any, Any] | None:
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return data.tensors[0], data.tensors[1]
    if not isinstance(data, tuple | list) or len(data) != 2:
        return None
    parts = list(data)
    for at, part in enumerate(parts if isinstance(data, tuple) else ()):
        if _is_frame(part) and len(part.columns) == 1 and not hasattr(part.dtypes.iloc[0], "categories"):
            parts[at] = part.iloc[:, 0]
        elif isinstance(part, list):
            with suppress(TypeError, ValueError, RuntimeError):
                parts[at] = torch.tensor(part)
    inputs, targets = parts
    is_pair = is_array(targets) and (is_array(inputs) or _is_frame(inputs) or isinstance(inputs, Mapping))
    return (inputs, targets) if is_pair else None


def _nameless(target: str, where: str) -> ConfigError:
    return ConfigError("target", target, f"the target of {where} has no name: it is the second of a pair")


def _target(names: list[Any], where: str, target: str | None) -> Any:
    if target is not None:
        if target not in names:
            raise unknown("target", target, names)
        return target
    candidates = [name for name in names if name in _TARGETS]
    if len(candidates) != 1 or len(names) < 2:
        allowed = f"expected inputs and one of {', '.join(_TARGETS)}; give the target's name as `target`"
        raise ConfigError(where, names, allowed)
    return candidates[0]


def _hugging(data: Any, where: str, target: str | None) -> tuple[Inputs, Tensor]:
    names = [str(name) for name in data.format["columns"]]
    name = _target(names, where, target)

    def chunks() -> Iterator[dict[str, Tensor]]:
        # A thousand records at once, as a mapped data set need not fit into memory.
        for chunk in data.with_format("torch", columns=names).iter(1000):
            for column, values in chunk.items():
                if not isinstance(values, Tensor):
                    allowed = "expected numbers of one shape: pad or resize them, or `remove_columns`"
                    raise ConfigError(f"{where}.{column}", type(values).__name__, allowed)
            yield dict(chunk)

    columns = _gathered(chunks(), len(data), where)
    return columns, columns.pop(name)


def _records(data: Any, where: str, target: str | None) -> tuple[Inputs, Tensor]:
    try:
        first = data[0]
        name = _target(list(first), where, target) if isinstance(first, Mapping) else None

        def parts(number: int) -> dict[str, Tensor]:
            record = data[number]
            if isinstance(record, Mapping):
                by_name = {_TARGET if key == name else str(key): value for key, value in record.items()}
            else:
                inputs, goal = record
                by_name = {**(inputs if isinstance(inputs, Mapping) else {_INPUT: inputs}), _TARGET: goal}
            return {key: torch.as_tensor(_unmasked(value, where)) for key, value in by_name.items()}

        rows = ({key: part[None] for key, part in parts(number).items()} for number in range(len(data)))
        columns = _gathered(rows, len(data), where)
        # A data set that changes its records at random would be frozen: it is read once. A few records show it.
        for number in {int(row) for row in torch.linspace(0, len(data) - 1, min(len(data), 16))}:
            for key, part in parts(number).items():
                kept = columns[key][number]
                if part.shape != kept.shape or not bool(((part == kept) | ((part != part) & (kept != kept))).all()):
                    how = "it is not the same when it is read again, and a random change would be frozen"
                    raise ConfigError(where, f"record {number}", f"{how}: give the data set without it")
    except ConfigError:
        raise
    except Exception as error:  # a data set can fail in any way
        raise ConfigError(where, type(data).__name__, f"{_FORM} ({cut(f'{type(error).__name__}: {error}')})") from error
    if name is None and target is not None:
        raise _nameless(target, where)
    targets = columns.pop(_TARGET)
    return columns.pop(_INPUT) if _INPUT in columns else columns, targets


def _gathered(chunks: Iterable[dict[str, Tensor]], count: int, where: str) -> dict[str, Tensor]:
    """The columns [count, ...] of which `chunks` are parts [k, ...], in memory that is taken once."""
    columns: dict[str, Tensor] = {}
    at = 0
    for chunk in chunks:
        if not columns:
            columns = {name: part.new_empty(count, *part.shape[1:]) for name, part in chunk.items()}
        if chunk.keys() != columns.keys():
            raise ConfigError(where, sorted(chunk), f"record {at} has other names than those before: {sorted(columns)}")
        for name, part in chunk.items():
            shapes = list(part.shape[1:]), list(columns[name].shape[1:])
            if shapes[0] != shapes[1]:
                what = "" if name in (_INPUT, _TARGET) else f".{name}"
                allowed = f"expected records of one shape: pad or resize them (from {at} on; before {shapes[1]})"
                raise ConfigError(f"{where}{what}", shapes[0], allowed)
            # A column that begins with whole numbers may go on with real ones.
            columns[name] = columns[name].to(torch.promote_types(columns[name].dtype, part.dtype))
            columns[name][at : at + len(part)] = part
        at += len(next(iter(chunk.values())))
    return columns


def _is_frame(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(data, "to_numpy")


def is_array(part: Any) -> bool:
    """True for a tensor, and for what NumPy takes for an array and has no columns."""
    return isinstance(part, Tensor) or (hasattr(part, "__array__") and not _is_frame(part))


def _require_one_index(parts: Iterable[Any], where: str) -> None:
    indices = [part.index for part in parts if hasattr(getattr(part, "index", None), "equals")]
    for other in indices[1:]:
        # Records are put together by position, which pandas' own operations do not do.
        if not indices[0].equals(other):
            pair = f"indices {list(indices[0][:3])}, ... and {list(other[:3])}, ..."
            how = "the labels in one order, as by `y.loc[X.index]`; or, where positions are right, reset_index on both"
            raise ConfigError(where, pair, f"inputs and targets are paired by position: expected {how}")


def _columns(data: Any) -> dict[Any, Any]:
    return {name: data[name] for name in (data.columns if _is_frame(data) else data)}


def _tensors(columns: Any, where: str) -> dict[str, Tensor]:
    """Columns by name; one of pandas' type `category` is COLUMN=VALUE, 0 or 1, for each text that the type states."""
    tensors: dict[str, Tensor] = {}
    for name, part in _columns(columns).items():
        parts = {f"{name}": part}
        if (values := getattr(getattr(part, "dtype", None), "categories", None)) is not None:
            if "=" in f"{name}" or not all(isinstance(value, str) for value in values):
                allowed = "expected texts as the values of a category, and a name of its column without ="
                raise ConfigError(f"{where}.{name}", list(values), allowed)
            parts = _is_value(part, f"{name}", list(values))
        if twice := sorted(parts.keys() & tensors):
            raise ConfigError(where, twice, "expected names of columns that differ")
        tensors |= {each: _tensor(one, f"{where}.{each}") for each, one in parts.items()}
    return tensors


def _is_value(column: Iterable[Any], name: str, values: Sequence[str]) -> dict[str, Tensor]:
    """COLUMN=VALUE -> bool [n], for each of `values`: the rows that have it. A missing or another value has no row."""
    place = {value: number for number, value in enumerate(values)}
    numbers = torch.tensor([place.get(each, -1) if isinstance(each, str) else -1 for each in column])
    return {f"{name}={value}": numbers == number for value, number in place.items()}


def _tensor(part: Any, where: str) -> Tensor:
    import numpy as np

    part = _unmasked(part, where)
    try:
        with warnings.catch_warnings():  # nothing is written into an array that may not be written
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            if not is_array(part) or isinstance(part, Tensor):
                return torch.as_tensor(part)
            array = np.asarray(part)
            if array.dtype in (np.uint16, np.uint32):  # torch has no arithmetic for them
                array = array.astype(np.int64)
            elif not array.dtype.isnative:
                array = array.astype(array.dtype.newbyteorder("="))
            return torch.as_tensor(array.copy() if any(stride < 0 for stride in array.strides) else array)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = f"an array of {getattr(part, 'dtype', type(part).__name__)}"
        how = f"expected numbers: encode or leave out what is none ({cut(str(error), 150)})"
        is_mixed = getattr(getattr(part, "dtype", None), "kind", None) in ("O", "S", "U")
        if is_mixed and any(isinstance(value, str | bytes) for value in np.ravel(part)):
            more = "state the values of an input by pandas.CategoricalDtype, number the classes of a target"
            kind, how = "texts", f"expected numbers: {more} (`dpopt fit from=FILE` takes both as they are)"
        raise ConfigError(where, kind, how) from error


def _unmasked(part: Any, where: str) -> Any:
    import numpy as np

    # As plain arrays, masked values would count as what lies beneath.
    if isinstance(part, torch.masked.MaskedTensor):
        part, mask = part.get_data(), ~part.get_mask()
    elif isinstance(part, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(part)
    else:
        return part
    if count := int(mask.sum()):
        raise ConfigError(where, f"{count} masked values", "fill them in, or leave their records out")
    return part


def _whole(inputs: Inputs, targets: Tensor, where: str) -> tuple[Inputs, Tensor]:
    """The records as they are, without a graph, after a look at their form and at each number."""
    parts = inputs if isinstance(inputs, dict) else {"inputs": inputs}
    for name, part in {**parts, "targets": targets}.items():
        if part.layout != torch.strided or part.is_quantized or part.is_nested or part.is_meta or not part.ndim:
            shape = "" if part.is_nested else f" {list(part.shape)}"
            shown = f"{part.dtype}{shape}, {part.layout} on {part.device}".replace("torch.", "")
            raise ConfigError(f"{where}, {name}", shown, "expected a dense tensor, one row a record")
    for name, part in parts.items():
        if len(part) != len(targets) or len(part) == 0:
            counts = f"{len(part)} {name}, {len(targets)} targets"
            raise ConfigError(where, counts, "expected as many inputs as targets, at least 1")
    for name, part in {**parts, "targets": targets}.items():
        if (part.is_floating_point() or part.is_complex()) and part.numel():
            # A part at a time, as a mapped file need not fit into memory.
            rows = max(1, _FINITE * len(part) // part.numel())
            bad = sum(int((~chunk.isfinite()).reshape(len(chunk), -1).any(1).sum()) for chunk in part.split(rows))
            if bad:
                how = "expected finite numbers: such a record would teach nothing, so fill or leave out what is missing"
                raise ConfigError(f"{where}, {name}", f"NaN or infinity in {bad} of {len(part)} records", how)
    return pytree.tree_map(Tensor.detach, (inputs, targets))
