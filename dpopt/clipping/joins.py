"""The look for operations that join the records of a batch, which needs no luck with the records' values.

A pass is run on five records and on seven, and torch's operations are noted. A dimension that grows in proportion is
the batch's. Records are joined by an operation that sums, sorts or takes away that dimension, or makes a second one, as
`any`, `mean(0)`, `sort(0)`, `x[:1]` and `x @ x.T` do. What is computed of its result is joined too. A model is refused
whose outputs are: it may do for other records what it does not show for these.

Not seen: values that Python reads. For these there are the looks of `mixing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from dpopt.clipping.names import plain
from dpopt.clipping.state import watching

SIZES = (5, 7)
"""Records of the two passes: no size that is rounded down from one is in proportion to one from the other."""
_APART = ("cat", "stack")
"""Operations along a dimension that leave each row what it is; so do all views."""
_WITHIN = ("conv", "pool", "layer_norm", "group_norm")
"""Operations that leave the rows of the first dimension apart, and those of others not."""


class _Call(NamedTuple):
    """An operation, and the shapes of the tensors in its arguments and its results."""

    name: str
    taken: list[torch.Size]
    given: list[torch.Size]


class _Calls(TorchDispatchMode):
    """Notes the operations of a pass; beside those of another pass, `before`, which results join records.

    Attributes:
        calls: the operations in order.
        joined: tensors that depend on joined records -> the operation that joined them, and its module.
        is_alike: False if the two passes run other operations.
    """

    def __init__(self, before: Sequence[_Call] | None, path: list[str]) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.joined = WeakTensorKeyDictionary()
        self.is_alike = True
        self._before, self._path = before, path

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The compiler of torch is not imported, which would take seconds, and time in each pass from then on."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        taken, given = _tensors((args, kwargs)), _tensors(result)
        call = _Call(func._overloadpacket.__name__, _shapes(taken), _shapes(given))
        if self._before is not None and self.is_alike:
            self._compare(func, (args, kwargs or {}), call, taken, given)
        self.calls.append(call)
        return result

    def _compare(
        self, func: Any, asked: tuple[Any, Any], call: _Call, taken: list[Tensor], given: list[Tensor]
    ) -> None:
        number = len(self.calls)
        before = self._before[number] if self._before and number < len(self._before) else None
        if before is None or before.name != call.name or len(before.taken) != len(call.taken):
            self.is_alike = False
            return
        origin = next(filter(None, map(self._origin, taken)), None)
        growing = [_growing(*pair) for pair in zip(before.taken, call.taken, strict=True)]
        is_along = any(growing) and _reaches(func, *asked, growing[0])
        most = max(map(len, growing), default=0)
        for tensor, *shapes in zip(given, before.given, call.given, strict=False):
            grows = _growing(*shapes)
            is_new = "new_" not in call.name and ((most and not grows) or is_along or len(grows) > max(1, most))
            if is_new or origin:
                self.joined[tensor] = origin or (call.name, self._path[-1])
        # What is written in place depends on all that the operation took.
        for tensor in taken if origin and func._schema.is_mutable else ():
            self.joined[tensor] = origin
            if tensor._base is not None:
                self.joined[tensor._base] = origin

    def _origin(self, tensor: Tensor) -> tuple[str, str] | None:
        base = tensor._base
        return self.joined.get(tensor) or (None if base is None else self.joined.get(base))

    def of_outputs(self, output: Any) -> tuple[str, str] | None:
        """Operation and module by which records are joined in `output`; None where they are not."""
        return next(filter(None, map(self._origin, _tensors(output))), None)


def joined(model: nn.Module, run: Callable[[Tensor], Any], x: Tensor) -> str | None:
    """The operation that joins records in what `run`, a pass of `model`, makes of x [7, ...]; None where none is seen.

    None too where the passes run other operations: a model that looks at values or at the number of records.
    """
    few, many = SIZES
    with torch.no_grad(), _path(model) as path:
        noted = _Calls(None, path)
        with noted:
            run(x[:few].clone())
        noted = _Calls(noted.calls, path)
        with noted:
            output = run(x[:many].clone())
    seen = noted.of_outputs(output) if noted.is_alike else None
    return f"torch's {seen[0]} in {seen[1]}" if seen else None


@contextmanager
def _path(model: nn.Module) -> Iterator[list[str]]:
    """The name of the module that is running is the last one of a list."""
    path = ["model"]
    names = {module: f"model.{plain(name)}".rstrip(".") for name, module in model.named_modules()}
    with watching(lambda *_: path.__delitem__(-1), lambda module, _: path.append(names.get(module, path[-1]))):
        yield path


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _shapes(tensors: list[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _growing(small: torch.Size, large: torch.Size) -> list[int]:
    """The dimensions that are the batch's."""
    if len(small) != len(large):
        return []
    few, many = SIZES
    return [at for at, (a, b) in enumerate(zip(small, large, strict=True)) if a != b and a * many == b * few]


def _reaches(func: Any, args: Any, kwargs: Any, growing: list[int]) -> bool:
    """True if the operation goes along a dimension of its first tensor that is the batch's, and is no view."""
    schema, name = func._schema, func._overloadpacket.__name__
    is_view = any(each.alias_info and not each.alias_info.is_write for each in schema.returns)
    if is_view or name in _APART:
        return False
    first = next(iter(_tensors(args)), None)
    rank = 0 if first is None else first.dim()
    if any(kind in name for kind in _WITHIN):
        return any(at > 0 for at in growing)
    if "attention" in name:
        return any(at >= rank - 2 for at in growing)
    if name.removeprefix("_unsafe_").startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
        # Rows by index; each by its own number is what a text's last token is taken by.
        return any(at < len(args[1]) and not _counts(args[1][at]) for at in growing)
    for number, argument in enumerate(schema.arguments):
        if argument.name in ("dim", "dims"):
            value = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            dims = value if isinstance(value, list | tuple) else [value]
            return any(isinstance(dim, int) and dim % max(rank, 1) in growing for dim in dims)
    return False


def _counts(index: Tensor | None) -> bool:
    """True if each row stays where it is: no index, or 0, 1, 2 and so on along one of its dimensions."""
    if index is None:
        return True
    steps = [torch.arange(size, device=index.device) for size in index.shape]
    along = [step.view(-1, *[1] * (index.dim() - 1 - at)).expand_as(index) for at, step in enumerate(steps)]
    return any(torch.equal(index, each) for each in along)
