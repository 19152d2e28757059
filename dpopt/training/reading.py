"""Data sets of the usual kinds, read into memory as tensors: inputs, by name where they have names, and targets."""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import suppress
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
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

TARGETS = ("label", "labels", "target", "y")
"""Names that a target goes by."""
TARGET, INPUT = "(target)", "(input)"
"""What stands for a target, and for an input without a name, beside inputs with names."""
CHUNK = 1000
"""Records of a Hugging Face data set that are read at once."""
FINITE = 2**22
"""Numbers that are looked at once whether they are finite; a mapped file need not fit into memory."""
REPEATED = 16
"""Records that are read again, to find out whether they are the same."""
PLAIN_SAMPLERS = (SequentialSampler, RandomSampler, DistributedSampler)
"""Samplers that order or share out the records of a data set, and leave none out for good."""
KINDS = (
    "expected a pair of arrays (inputs, targets), a mapping or a DataFrame of columns, a Dataset, a DataLoader, "
    "or a Hugging Face Dataset"
)
FORM = "expected records (input, target), or mappings with names, of numbers and of one shape"


class Read(NamedTuple):
    """All records.

    Attributes:
        inputs: one tensor [n, ...], or several by name, each [n, ...].
        targets: [n, ...].
    """

    inputs: Tensor | dict[str, Tensor]
    targets: Tensor


def read(data: Any, where: str, target: str | None = None) -> Read:
    """The records of `data`; arrays share their memory with what is given, mapped files stay on disk.

    Args:
        data: see `fit`.
        where: how errors name it.
        target: the name of the target where inputs and target have names; by default the one that is in `TARGETS`.

    Raises:
        ConfigError: `data` is of no kind that is known, has no records, does not stack, changes from one reading to the
            next, has numbers that are not finite, its target cannot be told, or pandas objects have different indices.
    """
    if isinstance(data, DataLoader):
        data = _dataset(data, where)
    return _whole(_read(data, where, target), where)


def _read(data: Any, where: str, target: str | None) -> Read:
    if _is_frame(data) or isinstance(data, Mapping):
        return _columns(data, where, target)
    if type(data) is TensorDataset and len(data.tensors) == 2:
        return _pair(*data.tensors, where, target)
    if isinstance(data, tuple) and len(data) == 2:
        data = tuple(map(_listed, data))
    if isinstance(data, tuple | list) and len(data) == 2 and _is_array(data[1]):
        _require_one_index([*(data[0].values() if isinstance(data[0], Mapping) else data[:1]), data[1]], where)
        if isinstance(data[0], Mapping) or _is_frame(data[0]):
            return _pair(_tensors(data[0], where), _tensor(data[1], where), where, target)
        if _is_array(data[0]):
            return _pair(_tensor(data[0], where), _tensor(data[1], where), where, target)
    if isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__len__")):
        raise ConfigError(where, type(data).__name__, "draws need records that have numbers: give a map-style data set")
    if isinstance(data, str | Tensor) or not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ConfigError(where, type(data).__name__, KINDS)
    if len(data) == 0:
        raise ConfigError(where, type(data).__name__, "it has no records, expected at least 1")
    if hasattr(data, "with_format") and getattr(data, "format", {}).get("type") != "custom":
        return _hugging(data, where, target)
    return _records(data, where, target)  # a transform of its own is applied to each record


def _listed(part: Any) -> Any:
    """A list of numbers as an array, and a table of one column as this column; anything else as it is."""
    if _is_frame(part) and len(part.columns) == 1:
        return part.iloc[:, 0]
    if isinstance(part, list):
        with suppress(TypeError, ValueError, RuntimeError):
            return torch.tensor(part)
    return part


def repeats(data: Any) -> tuple[int, int]:
    """How many records of `data` are one of the records before again, and how often the most frequent one is there.

    Records are the same where they are the same place of the same data set, not where their values are equal: two
    people may have the same values.
    """
    data = data.dataset if isinstance(data, DataLoader) else data
    if not (isinstance(data, list | Subset | ConcatDataset) or getattr(data, "_indices", None) is not None):
        return 0, 1
    counts = Counter(_origin(data, row) for row in range(len(data)))
    return len(data) - len(counts), max(counts.values(), default=1)


def _origin(data: Any, row: int) -> tuple[int, int]:
    """The data set, and the place in it, that row `row` of `data` comes from."""
    while isinstance(data, Subset | ConcatDataset):
        if isinstance(data, Subset):
            data, row = data.dataset, int(data.indices[row])
        else:
            part = bisect_right(data.cumulative_sizes, row % len(data))
            before = data.cumulative_sizes[part - 1] if part else 0
            data, row = data.datasets[part], row % len(data) - before
    row %= len(cast(Sized, data))
    if isinstance(data, list):
        return id(data[row]), 0
    chosen = getattr(data, "_indices", None)  # of a Hugging Face `Dataset` after `select`
    return id(data), int(chosen.column(0)[row].as_py()) if chosen is not None else row


def _dataset(loader: DataLoader[Any], where: str) -> Any:
    """The data set of a loader, which is read as it is: draws are Poisson, and made anew.

    Raises:
        ConfigError: the loader changes what its data set holds, or leaves records out.
    """
    collate, sampler = loader.collate_fn, loader.sampler
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset  # which is refused
    if collate not in (default_collate, default_convert):
        how = "pad or change records in the data set itself, and give that"
        raise ConfigError(f"{where}.collate_fn", getattr(collate, "__name__", type(collate).__name__), how)
    own = loader.batch_sampler
    if type(own) is BatchSampler:
        sampler = own.sampler  # of a loader that is given one, `sampler` says nothing
    source: Any = getattr(sampler, "data_source", getattr(sampler, "dataset", loader.dataset))
    is_whole = isinstance(sampler, PLAIN_SAMPLERS) and len(source) == len(cast(Sized, loader.dataset))
    if not is_whole or (own is not None and type(own) is not BatchSampler):
        how = "draws are Poisson, and of all records: give the data set, or a `torch.utils.data.Subset` of it"
        raise ConfigError(f"{where}.sampler", type(sampler if type(own) is BatchSampler else own).__name__, how)
    return loader.dataset


def _pair(inputs: Tensor | dict[str, Tensor], targets: Tensor, where: str, target: str | None) -> Read:
    if target is not None:
        raise ConfigError("target", target, f"the target of {where} has no name: it is the second of a pair")
    return Read(inputs, targets)


def _columns(data: Any, where: str, target: str | None) -> Read:
    if any(hasattr(data[name], "with_format") for name in data):
        raise ConfigError(where, list(data), "these are several data sets: give one of them")
    name = _target(list(data), where, target)
    _require_one_index([data[name] for name in data], where)
    columns = _tensors(data, where)
    return Read(columns, columns.pop(str(name)))


def _target(names: list[Any], where: str, target: str | None) -> Any:
    """Which of `names` is the target's."""
    if target is not None:
        if target not in names:
            raise unknown("target", target, names)
        return target
    found = [name for name in names if name in TARGETS]
    if len(found) != 1 or len(names) < 2:
        allowed = f"expected inputs and one of {', '.join(TARGETS)}; give the target's name as `target`"
        raise ConfigError(where, names, allowed)
    return found[0]


def _hugging(data: Any, where: str, target: str | None) -> Read:
    names = [str(name) for name in data.format["columns"]]  # those that its format shows
    name = _target(names, where, target)
    columns = _gathered(_chunks(data.with_format("torch", columns=names), where), len(data), where)
    return Read(columns, columns.pop(name))


def _chunks(data: Any, where: str) -> Iterator[dict[str, Tensor]]:
    for chunk in data.iter(CHUNK):
        for name, values in chunk.items():
            if not isinstance(values, Tensor):
                allowed = "expected numbers of one shape: pad or resize them, or `remove_columns`"
                raise ConfigError(f"{where}.{name}", type(values).__name__, allowed)
        yield dict(chunk)


def _records(data: Any, where: str, target: str | None) -> Read:
    """What a map-style data set gives, record by record."""
    try:
        first = data[0]
        name = _target(list(first), where, target) if isinstance(first, Mapping) else None

        def flat(number: int) -> dict[str, Tensor]:
            parts = _parts(data[number], name)
            return {key: torch.as_tensor(_unmasked(part, where)) for key, part in parts.items()}

        rows = ({key: part[None] for key, part in flat(number).items()} for number in range(len(data)))
        columns = _gathered(rows, len(data), where)
        _must_repeat(columns, flat, where)
    except ConfigError:
        raise
    except Exception as error:  # a data set can fail in any way
        reason = cut(f"{type(error).__name__}: {error}")
        raise ConfigError(where, type(data).__name__, f"{FORM} ({reason})") from error
    targets = columns.pop(TARGET)
    inputs = columns.pop(INPUT) if INPUT in columns else columns
    return Read(inputs, targets) if name is not None else _pair(inputs, targets, where, target)


def _parts(record: Any, target: Any) -> dict[str, Any]:
    """A record's inputs and its target, by name."""
    if isinstance(record, Mapping):
        return {TARGET if key == target else str(key): value for key, value in record.items()}
    given, goal = record
    return {**(given if isinstance(given, Mapping) else {INPUT: given}), TARGET: goal}


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
                what = "" if name in (INPUT, TARGET) else f".{name}"
                allowed = f"expected records of one shape: pad or resize them (from {at} on; before {shapes[1]})"
                raise ConfigError(f"{where}{what}", shapes[0], allowed)
            columns[name] = columns[name].to(torch.promote_types(columns[name].dtype, part.dtype))
            columns[name][at : at + len(part)] = part
        at += len(next(iter(chunk.values())))
    return columns


def _must_repeat(columns: Mapping[str, Tensor], again: Callable[[int], dict[str, Tensor]], where: str) -> None:
    """Raise `ConfigError` for a data set that changes its records at random: what is read once would be frozen."""
    count = len(columns[TARGET])
    for number in {int(row) for row in torch.linspace(0, count - 1, min(count, REPEATED))}:
        for name, part in again(number).items():
            kept = columns[name][number]
            if part.shape != kept.shape or not bool(((part == kept) | ((part != part) & (kept != kept))).all()):
                how = (
                    "it is not the same when it is read again, and records are read once: a random change would be"
                    " frozen. Give the data set without it"
                )
                raise ConfigError(where, f"record {number}", how)


def _is_frame(data: Any) -> bool:
    """Whether it is a table of pandas, or one like it."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy")


def _require_one_index(parts: Iterable[Any], where: str) -> None:
    """Raise `ConfigError` for pandas objects of different indices: records are put together by position."""
    indices = [part.index for part in parts if hasattr(getattr(part, "index", None), "equals")]
    for other in indices[1:]:
        if not indices[0].equals(other):
            given = f"indices {list(indices[0][:3])}, ... and {list(other[:3])}, ..."
            how = "the labels in one order, as by `y.loc[X.index]`; or, where positions are right, reset_index on both"
            raise ConfigError(where, given, f"inputs and targets are paired by position: expected {how}")


def _is_array(part: Any) -> bool:
    return isinstance(part, Tensor) or (hasattr(part, "__array__") and not _is_frame(part))


def _tensors(columns: Any, where: str) -> dict[str, Tensor]:
    return {str(name): _tensor(columns[name], f"{where}.{name}") for name in columns}


def _tensor(part: Any, where: str) -> Tensor:
    part = _unmasked(part, where)
    try:
        with warnings.catch_warnings():  # nothing is written into an array that may not be written
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.as_tensor(part if isinstance(part, Tensor) or not _is_array(part) else _array(part))
    except (TypeError, ValueError, RuntimeError) as error:
        kind = getattr(part, "dtype", type(part).__name__)
        raise ConfigError(
            where, f"an array of {kind}", f"expected numbers: encode or leave out what is none ({cut(str(error), 150)})"
        ) from error


def _unmasked(part: Any, where: str) -> Any:
    """`part`, unless it is an array with masked values: as plain arrays they would count as what lies beneath."""
    import numpy as np

    if isinstance(part, torch.masked.MaskedTensor):
        part, mask = part.get_data(), ~part.get_mask()
    elif isinstance(part, np.ma.MaskedArray):
        mask = np.ma.getmaskarray(part)
    else:
        return part
    if count := int(mask.sum()):
        raise ConfigError(where, f"{count} masked values", "fill them in, or leave their records out")
    return part


def _array(part: Any) -> Any:
    import numpy as np

    array = np.asarray(part)
    if array.dtype in (np.uint16, np.uint32):  # torch has no arithmetic for them
        return array.astype(np.int64)
    if not array.dtype.isnative:
        return array.astype(array.dtype.newbyteorder("="))
    return array.copy() if any(stride < 0 for stride in array.strides) else array


def _whole(found: Read, where: str) -> Read:
    """`found`, if it holds dense tensors of finite numbers with as many rows each."""
    inputs = found.inputs if isinstance(found.inputs, dict) else {"inputs": found.inputs}
    for name, part in {**inputs, "targets": found.targets}.items():
        if part.layout != torch.strided or part.is_quantized or part.is_nested or part.is_meta or not part.ndim:
            shape = "" if part.is_nested else f" {list(part.shape)}"
            shown = f"{part.dtype}{shape}, {part.layout} on {part.device}".replace("torch.", "")
            raise ConfigError(f"{where}, {name}", shown, "expected a dense tensor, one row a record")
    for name, part in inputs.items():
        if len(part) != len(found.targets) or len(part) == 0:
            counts = f"{len(part)} {name}, {len(found.targets)} targets"
            raise ConfigError(where, counts, "expected as many inputs as targets, at least 1")
    for name, part in {**inputs, "targets": found.targets}.items():
        if bad := _unfinite(part):
            allowed = "expected finite numbers: such a record would teach nothing, so fill or leave out what is missing"
            raise ConfigError(f"{where}, {name}", f"NaN or infinity in {bad} of {len(part)} records", allowed)
    if isinstance(found.inputs, dict):
        return Read({name: part.detach() for name, part in inputs.items()}, found.targets.detach())
    return Read(found.inputs.detach(), found.targets.detach())


def _unfinite(part: Tensor) -> int:
    """How many rows of `part` [n, ...] hold a number that is not finite."""
    if not (part.is_floating_point() or part.is_complex()) or not part.numel():
        return 0
    rows = max(1, FINITE * len(part) // part.numel())
    return sum(int((~chunk.isfinite()).reshape(len(chunk), -1).any(1).sum()) for chunk in part.split(rows))
