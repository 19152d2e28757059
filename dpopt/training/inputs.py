"""What records may look like: any of the usual kinds of data set, as two tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpopt.errors import ConfigError, cut
from dpopt.privacy.sampling import send
from dpopt.workloads.base import Split

Transform = Callable[[Tensor], Tensor]
"""Inputs [n, ...] as they are stored -> as the model takes them."""


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def as_split(data: Any, where: str, device: torch.device) -> Split:
    """Inputs and targets as two tensors on `device`.

    Args:
        data: a pair of tensors or arrays, a Hugging Face `Dataset` with two columns, or whatever has a length and gives
            (input, target) for a number, such as a `torch.utils.data.Dataset`.
        where: how errors name it.
        device: see `placed`.

    Raises:
        ConfigError: `data` is none of these, is empty, does not stack, or has no values.
    """
    if isinstance(data, tuple | list) and len(data) == 2 and all(isinstance(p, Tensor | np.ndarray) for p in data):
        x, y = (_tensor(part, where) for part in data)
    elif hasattr(data, "column_names") and hasattr(data, "with_format"):
        x, y = _columns(data, where)
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, str | Tensor):
        x, y = _stack(data, where)
    else:
        raise ConfigError(where, type(data).__name__, "expected a Dataset, a Hugging Face Dataset or a pair of tensors")
    for part, of in ((x, "inputs"), (y, "targets")):
        if part.layout != torch.strided or part.is_quantized or part.is_nested or part.is_meta or not part.ndim:
            raise ConfigError(f"{where}, {of}", _described(part), "expected a dense tensor, one row a record")
    if len(x) != len(y) or len(x) == 0:
        raise ConfigError(where, f"{len(x)} inputs, {len(y)} targets", "expected as many inputs as targets, at least 1")
    return placed(Split(x.detach(), y.detach()), device)


def placed(split: Split, device: torch.device) -> Split:
    """`split` on `device`; on a GPU only if it takes at most half of what is free, else each batch is sent over."""
    is_small = device.type != "cuda" or sum(part.nbytes for part in split) <= torch.cuda.mem_get_info(device)[0] / 2
    return Split(*(part.to(device) for part in split)) if is_small else split


def sample(split: Split, transform: Transform, device: torch.device, count: int = 3) -> Split:
    """The first records of `split` as the model sees them: what a clipping engine is tried on."""
    x, y = (send(part[:count], device) for part in split)
    return Split(transform(x), y)


def as_float(x: Tensor) -> Tensor:
    """Bytes (pixels, as they are stored) as floats; anything else as it is."""
    return x.float() if x.dtype == torch.uint8 else x


def described(x: Tensor) -> str:
    """The type, the shape and, of whole numbers, the range of a tensor."""
    kind = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    return f"{kind} from {int(x.min())} to {int(x.max())}" if x.dtype in WHOLE and x.numel() else kind


def _described(x: Tensor) -> str:
    shape = "" if x.is_nested else f" {list(x.shape)}"
    return f"{x.dtype}{shape}, {x.layout} on {x.device}".replace("torch.", "")


def _tensor(part: Any, where: str) -> Tensor:
    try:
        return torch.as_tensor(part)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(where, f"an array of {getattr(part, 'dtype', '?')}", f"is no tensor ({error})") from error


def _columns(data: Any, where: str) -> tuple[Tensor, Tensor]:
    names = list(data.column_names)
    targets = [name for name in names if name in ("label", "labels", "target", "y")]
    if len(targets) != 1 or len(names) != 2:
        allowed = "expected two columns, one of them named label, labels, target or y (use `select_columns`)"
        raise ConfigError(f"{where}.column_names", names, allowed)
    inputs = next(name for name in names if name not in targets)
    columns = data.with_format("torch")[:]
    for name in (inputs, targets[0]):
        if not isinstance(columns[name], Tensor):
            allowed = "expected numbers of one shape: pad or resize them"
            raise ConfigError(f"{where}.{name}", type(columns[name]).__name__, allowed)
    return columns[inputs], columns[targets[0]]


def _stack(data: Any, where: str) -> tuple[Tensor, Tensor]:
    try:
        pairs = [(torch.as_tensor(x), torch.as_tensor(y)) for x, y in (data[i] for i in range(len(data)))]
        return torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    except Exception as error:  # a data set can fail in any way
        reason = cut(f"{type(error).__name__}: {error}")
        raise ConfigError(
            where, type(data).__name__, f"expected (input, target) pairs of one shape ({reason})"
        ) from error
