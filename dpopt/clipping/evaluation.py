"""A model's outputs for records, in one of three ways; in meaning each is one record at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

Way = Literal["batch", "vmap", "loop"]
"""One pass over a batch, where no record changes what becomes of another; else by `torch.func.vmap`, or one by one."""


def outputs(model: Callable[[Tensor], Any], x: Tensor, way: Way) -> Any:
    """What `model` makes of records x [n, ...]: a tensor, or a structure of tensors, with n rows each."""
    if way == "batch":
        return model(x)
    if way == "loop":
        return pytree.tree_map(lambda *parts: torch.cat(parts), *(model(each) for each in x.split(1)))

    return vmap(partial(of_one, model), randomness="different")(x)


def of_one(model: Callable[[Tensor], Any], record: Tensor) -> Any:
    """What `model` makes of one record, [...]."""
    return pytree.tree_map(lambda part: part.squeeze(0), model(record.unsqueeze(0)))


def mapped(change: Callable[[Tensor], Any], value: Any) -> Any:
    """Outputs with `change` made to each tensor in their structure, which may be of any classes."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        new = copy.copy(value)
        new.update((key, mapped(change, item)) for key, item in value.items())
        return new
    attributes = [*getattr(value, "__dict__", ()), *getattr(value, "__slots__", ())]
    if attributes:
        new = copy.copy(value)
        for name in attributes:  # past the `__setattr__` of a frozen dataclass
            object.__setattr__(new, name, mapped(change, getattr(value, name)))
        return new
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in the structure of outputs, in order."""
    parts: list[Tensor] = []
    mapped(parts.append, value)
    return parts
