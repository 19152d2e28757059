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
    """The first records of `split` as the model sees them: what a clipping engine is tried on."""
    x, y = (send(part[:count], device) for part in split)
    return Split(transform(x), y)


def described(x: Tensor) -> str:
    """The type, the shape and, of whole numbers, the range of a tensor."""
    kind = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    return f"{kind} from {int(x.min())} to {int(x.max())}" if x.dtype in WHOLE and x.numel() else kind
