"""Which operations of PyTorch make the host wait for a GPU, and which may take tensors of two devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

TAGGED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's tags of operations whose results, or whose results' shapes, have to be on the host."""
WAITING = frozenset(
    {"_linalg_check_errors", "embedding_renorm_", "histc", "linalg_eig", "linalg_eigvals", "multinomial"}
)
"""Operations without such a tag that wait all the same."""
INDEXING = frozenset({"_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"})
"""Operations that wait where an index is a mask; they take indices from the CPU, which they copy."""
BY_VALUE = frozenset({"fill", "fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_"})
"""Operations that take a number from the CPU, as the elementwise ones do."""
COPIES = frozenset({"_to_copy", "copy_"})


class Call(NamedTuple):
    """An operation of aten that is about to be computed.

    Attributes:
        there: its tensors on the device.
        on_cpu: its tensors on the CPU but for `numbers`.
        numbers: tensors that PyTorch makes of Python's numbers on its own.
        is_result_there: whether what it gives, or writes to, is on the device.
    """

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    there: Sequence[Tensor]
    on_cpu: Sequence[Tensor]
    numbers: Sequence[Tensor]
    is_result_there: bool

    @property
    def name(self) -> str:
        """Without its overload."""
        return self.func.overloadpacket.__name__


def notices(call: Call) -> Iterator[str]:
    """A sentence for each reason why the host waits, or for a number that is taken from the CPU.

    Raises:
        AssertionError: tensors of two devices, where a GPU does not take them.
    """
    if call.name in COPIES:
        yield from _of_copy(call)
    elif call.there:
        if _waits(call):
            yield f"the host waits for the device (aten::{call.name})"
        if call.on_cpu:
            if not _takes_both(call):
                raise AssertionError(f"aten::{call.name} takes tensors on the GPU and on the CPU")
            yield f"aten::{call.name} takes a tensor on the CPU beside those on the GPU"


def _of_copy(call: Call) -> Iterator[str]:
    if call.there and not call.is_result_there:
        yield f"the host waits for the device (aten::{call.name} to the CPU)"
    elif call.on_cpu and call.is_result_there and not _is_non_blocking(call):
        yield f"the host waits for the device (aten::{call.name} from the CPU that is not `non_blocking`)"


def _is_non_blocking(call: Call) -> bool:
    is_third = call.name == "copy_" and len(call.args) > 2
    return call.args[2] if is_third else call.kwargs.get("non_blocking", False)


def _waits(call: Call) -> bool:
    if call.name not in INDEXING:
        return call.name in WAITING or not TAGGED.isdisjoint(call.func.tags)
    if len(call.args) > 2 and any(call.args[2] is number for number in call.numbers):
        return False  # a number is written where the mask says, without an index
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in call.args[1])


def _takes_both(call: Call) -> bool:
    if call.name in INDEXING:
        return {*map(id, call.on_cpu)} <= {*map(id, call.args[1])}
    by_value = torch.Tag.pointwise in call.func.tags or call.name in BY_VALUE or call.name.startswith("_foreach")
    return by_value and call.is_result_there and not any(tensor.dim() for tensor in call.on_cpu)
