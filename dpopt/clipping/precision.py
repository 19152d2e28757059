"""Products that keep all digits of their type: what norms and clipped sums are computed with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

EXACT = ("none", "ieee")
"""Values of `fp32_precision` under which float32 is multiplied as float32."""

_HAS_PRECISIONS = hasattr(torch.backends.cuda.matmul, "fp32_precision")
"""True if this torch (2.9 and later) has one setting for each backend and operation."""


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Multiply float32 as float32, whatever autocast or the settings for TF32 and bfloat16 say outside.

    An example's norm and its share of the clipped sum come from different products of the same numbers. With the ten
    or seven bits that TF32 and bfloat16 keep, the two differ, and the noise is scaled to the norm. cuDNN's convolutions
    use TF32 by default. The model's own passes are left as they are.
    """
    with ExitStack() as stack:
        if torch.is_autocast_enabled(device.type):
            stack.enter_context(torch.autocast(device.type, enabled=False))
        for owner, name, value in _reduced():
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _reduced() -> list[tuple[Any, str, Any]]:
    """The settings that allow fewer digits now, each as (owner, name, value that does not)."""
    backends: Any = torch.backends
    if not _HAS_PRECISIONS:
        owners = [backends.cuda.matmul, backends.cudnn]
        return [(owner, "allow_tf32", False) for owner in owners if owner.allow_tf32]
    owners = [backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul, backends.mkldnn.conv]
    return [(owner, "fp32_precision", "ieee") for owner in owners if owner.fp32_precision not in EXACT]
