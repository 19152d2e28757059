"""Records as the kernel takes them, inputs of several names in one tensor, and a model that takes them so."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpopt.errors import ConfigError
from dpopt.privacy.sampling import send
from dpopt.training.reading import Read
from dpopt.workloads.base import Split

Transform = Callable[[Tensor], Tensor]
"""Inputs [n, ...] as they are stored -> as the model takes them."""
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
EXACT = 2**53
"""Whole numbers up to it are themselves in float64."""


class _Field(NamedTuple):
    """One input of a record, which the model takes by its name; shape of one record's, type before packing."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def is_real(self) -> bool:
        """True if it is converted to the model's type; bytes are pixels."""
        return self.dtype.is_floating_point or self.dtype == torch.uint8

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The order of a record's inputs in one tensor.

    Attributes:
        dtype: of the model's trained parameters.
        names: of the inputs, in order; none where they are one tensor without a name.
        fields: the inputs, where the model takes them by name; they lie beside each other in x [n, k].
        is_table: whether each input is one number of a row of x [n, k], which the model takes as it is.
    """

    dtype: torch.dtype
    names: tuple[str, ...] = ()
    fields: tuple[_Field, ...] = ()
    is_table: bool = False

    @classmethod
    def of(cls, inputs: Tensor | Mapping[str, Tensor], model: nn.Module, where: str) -> Layout:
        """The layout for a model: inputs by the names in its `forward`, or else a table; else ConfigError."""
        dtype = next((p.dtype for p in model.parameters() if p.requires_grad), torch.float32)
        if isinstance(inputs, Tensor):
            return cls(dtype)
        arguments = inspect.signature(model.forward).parameters.values()
        accepted = [a.name for a in arguments if a.kind in (a.POSITIONAL_OR_KEYWORD, a.KEYWORD_ONLY)]
        names, is_open = tuple(inputs), any(a.kind == a.VAR_KEYWORD for a in arguments)
        # Columns of a table have names that no model asks for: they are one row of numbers.
        if not set(names) & set(accepted) and all(part.ndim == 1 for part in inputs.values()):
            return cls(dtype, names, is_table=True)
        # A single input is what the model takes first, whatever the data call it.
        if len(names) == 1 and (names[0] not in accepted or names[0] == accepted[0]):
            return cls(dtype, names)
        if strange := [name for name in names if name not in accepted and not is_open]:
            allowed = f"expected inputs of the model's forward ({', '.join(accepted)}), one number each, or one input"
            raise ConfigError(f"{where}, inputs", strange, f"{allowed}; leave others out")
        return cls(dtype, names, tuple(_Field(name, tuple(p.shape[1:]), p.dtype) for name, p in inputs.items()))

    def split(self, records: Read, where: str) -> Split:
        """Records as this layout has them; ConfigError if they are not like the training records."""
        y = records.targets
        if y.is_floating_point():
            y = y.to(self.dtype)
        elif y.ndim == 1 and not y.is_complex() and y.dtype != torch.bool:
            y = y.long()  # class numbers
        return Split(self._joined(records.inputs, where), y)

    def _joined(self, inputs: Tensor | dict[str, Tensor], where: str) -> Tensor:
        by_name = inputs if isinstance(inputs, dict) else {"one tensor": inputs}
        if not (self.fields or self.is_table) and len(by_name) == 1:
            return next(iter(by_name.values()))
        if set(by_name) != set(self.names):
            expected = ", ".join(self.names) or "one tensor"
            raise ConfigError(f"{where}, inputs", sorted(by_name), f"expected those of train: {expected}")
        # In the order of training, whatever the order of this mapping is.
        if self.is_table:
            return torch.stack([self._number(by_name[name], f"{where}.{name}") for name in self.names], dim=1)
        return self._packed(by_name, where)

    def _number(self, column: Tensor, where: str) -> Tensor:
        if column.is_complex():
            raise ConfigError(where, described(column), "expected real numbers")
        return column.to(self.dtype)

    def _packed(self, inputs: dict[str, Tensor], where: str) -> Tensor:
        rows = len(next(iter(inputs.values())))
        x = torch.empty(rows, sum(field.size for field in self.fields), dtype=self._packed_type)
        for field, part in zip(self.fields, x.split([f.size for f in self.fields], dim=1), strict=True):
            values = inputs.pop(field.name)  # its memory is free from here on
            self._check(field, values, where)
            part.copy_(values.reshape(rows, -1))
        return x

    def _check(self, field: _Field, values: Tensor, where: str) -> None:
        other = _Field(field.name, tuple(values.shape[1:]), values.dtype)
        if other.shape != field.shape or other.is_real != field.is_real or values.is_complex():
            shown = f"{values.dtype} {list(values.shape)}".removeprefix("torch.")
            allowed = f"expected {'real' if field.is_real else 'whole'} numbers of shape {[len(values), *field.shape]}"
            raise ConfigError(f"{where}.{field.name}", shown, allowed)
        # float64 holds whole numbers exactly up to 2^53 only.
        is_beside_real = self._packed_type == torch.float64 and not field.is_real and values.numel() > 0
        if is_beside_real and max(int(values.max()), -int(values.min())) > EXACT:
            raise ConfigError(f"{where}.{field.name}", described(values), f"beside real numbers at most {EXACT}")

    @property
    def _packed_type(self) -> torch.dtype:
        kinds = {field.is_real for field in self.fields}
        return torch.float64 if len(kinds) > 1 else self.dtype if True in kinds else torch.int64

    def whole(self, x: Tensor) -> list[Tensor]:
        """The parts of x [n, ...] that are whole numbers: what a model may look something up by."""
        if not self.fields:
            return [x] if x.dtype in WHOLE else []
        parts = x.split([field.size for field in self.fields], dim=1)
        return [part for field, part in zip(self.fields, parts, strict=True) if not field.is_real]

    def unpacked(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The fields of packed records x [n, k] by name, the real ones in the type `dtype`."""
        parts = x.split([field.size for field in self.fields], dim=1)
        pairs = zip(self.fields, parts, strict=True)
        return {f.name: p.reshape(len(x), *f.shape).to(dtype if f.is_real else f.dtype) for f, p in pairs}

    def converted(self, x: Any) -> Any:
        """Inputs as the model takes them: real numbers and bytes in its own type."""
        # Whole numbers other than bytes may be tokens or categories, which a model looks up.
        is_plain = isinstance(x, Tensor) and not self.fields
        return x.to(self.dtype) if is_plain and (x.is_floating_point() or x.dtype == torch.uint8) else x


class Adapter(nn.Module):
    """A model that takes inputs by name, or gives `logits`, as one that maps a tensor to a tensor."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__()
        self.model, self._layout = model, layout
        # Of a module's own parameter, since engines replace the tensors meanwhile.
        owners = (
            (m, name) for m in model.modules() for name, p in m.named_parameters(recurse=False) if p.requires_grad
        )
        self._of = next(owners, None)
        self.training = model.training

    def forward(self, x: Tensor) -> Any:
        if not self._layout.fields:
            return scores(self.model(x))
        # The type is asked for anew: engines compute in another one for a while.
        dtype = getattr(*self._of).dtype if self._of else x.dtype
        return scores(self.model(**self._layout.unpacked(x, dtype)))


def scores(output: Any) -> Any:
    """The `logits` of an output that has them, as those of Hugging Face models; any other output as it is."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


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

    Of classes one each, the rare ones first; else the least and the largest, of each column.
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
