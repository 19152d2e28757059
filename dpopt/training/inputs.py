"""On which device records are kept, and what a few of them look like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dpopt.privacy.sampling import send
from dpopt.workloads.base import Split

Transform = Callable[[Tensor], Tensor]
"""Inputs [n, ...] as they are stored -> as the model takes them."""


WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def placed(split: Split, device: torch.device) -> Split:
    """`split` on `device`; on a GPU only if it takes at most half of what is free, else each batch is sent over."""
    is_small = device.type != "cuda" or sum(part.nbytes for part in split) <= torch.cuda.mem_get_info(device)[0] / 2
    return Split(*(part.to(device) for part in split)) if is_small else split


def sample(split: Split, transform: Transform, device: torch.device, count: int = 3) -> Split:
    """Some records of `split` as the model sees them, the first ones first: what a clipping engine is tried on."""
    chosen = telling(split.y, count)
    x, y = (send(part[chosen.to(part.device)], device) for part in split)
    return Split(transform(x), y)


def telling(y: Tensor, count: int = 3, most: int = 16) -> Tensor:
    """Rows of the first `count` records, and of up to `most` others with targets [n, ...] unlike each other.

    Of class numbers one of each class, the rare ones first; of real numbers the least and the largest; of targets with
    several numbers, such as labels, the least and the largest of each column.
    """
    first = list(range(min(count, len(y))))
    if not y.numel():
        return torch.tensor(first, dtype=torch.int64)
    columns = (torch.view_as_real(y) if y.is_complex() else y).reshape(len(y), -1)[:, :most].cpu()
    if y.ndim == 1 and not y.is_complex():
        values, place, counts = columns[:, 0].unique(return_inverse=True, return_counts=True)
        rows = torch.full_like(counts, len(y)).scatter_reduce_(0, place, torch.arange(len(y)), "amin")
        others = rows[[0, len(values) - 1, *counts.argsort(stable=True).tolist()][:most]].tolist()
    else:
        others = [*columns.double().argmax(0).tolist(), *columns.double().argmin(0).tolist()]
    return torch.tensor(list(dict.fromkeys([*first, *others]))[: count + most], dtype=torch.int64)


def described(x: Tensor) -> str:
    """The type, the shape and, of whole numbers, the range of a tensor."""
    kind = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    return f"{kind} from {int(x.min())} to {int(x.max())}" if x.dtype in WHOLE and x.numel() else kind
