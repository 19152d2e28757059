"""Tensors whose values cannot be read, with which an optimizer is traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_DESCRIBING = {
    *("__get__", "__hash__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous"),
    *("is_floating_point", "is_same_size", "is_signed", "ndimension", "nelement", "numel", "result_type", "size"),
    *("stride", "type"),
}
"""Functions that may give something else than tensors, as no value goes into it. Attributes are got by `__get__`."""
_SHAPED_BY_VALUES = {"argwhere", "bincount", "masked_select", "nonzero", "unique", "unique_consecutive"}


class ValueRead(RuntimeError):
    """The value of a tensor that has none was asked for."""


class _Opaque(Tensor):
    """A tensor on the device `meta`, as far as anybody can tell, whose operations give further such tensors.

    An operation that would give a value, or a tensor whose shape depends on one, raises `ValueRead`. PyTorch's own
    tensors on `meta` do the same, but a step takes milliseconds with them (many of their operations are Python
    programs) and the first one imports PyTorch's compiler; this one computes, on the CPU, and keeps the result to
    itself. It stops honest mistakes, not a determined reader; the oracle of a run refuses what was not planned.
    """

    device = property(lambda self: torch.device("meta"))  # type: ignore[assignment]
    is_meta = property(lambda self: True)  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.__name__, kwargs or {}
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            is_shaped = any(isinstance(part, Tensor) and part.dtype == torch.bool for part in index)
        else:
            is_shaped = name in _SHAPED_BY_VALUES or (name == "where" and len(args) == 1)
        if is_shaped:
            raise ValueRead(f"the shape of what `{name}` gives depends on the values of a tensor")
        # A function that writes to a tensor of another kind would carry values out of reach of this class.
        is_augmented = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__")
        is_in_place = name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))
        target = args[0] if is_augmented or is_in_place else kwargs.get("out")
        if isinstance(target, Tensor) and not isinstance(target, _Opaque):
            if target.is_meta:
                return target  # holds nothing, whatever is written to it
            raise ValueRead(f"`{name}` writes to a tensor on {target.device}, where its values can be read")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*_mapped(_computable, args), **{key: _mapped(_computable, v) for key, v in kwargs.items()})
        if name in _DESCRIBING and not isinstance(result, Tensor):
            return result

        def hide(value: Any) -> Any:
            if value is None or isinstance(value, _Opaque):
                return value
            if not isinstance(value, Tensor):
                raise ValueRead(f"`{name}` gives the value of a tensor")
            return opaque(value)

        return _mapped(hide, result)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Opaque(shape={list(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()


def opaque(tensor: Tensor) -> _Opaque:
    """`tensor`, which lies on the CPU, with its values out of reach."""
    return tensor.as_subclass(_Opaque)


def _computable(value: Any) -> Any:
    if isinstance(value, torch.device):
        return torch.device("cpu")
    is_empty = isinstance(value, Tensor) and not isinstance(value, _Opaque) and value.is_meta
    return torch.zeros_like(value, device="cpu") if is_empty else value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_mapped(function, item) for item in value)
    return function(value)
