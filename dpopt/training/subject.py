"""A model, its loss and its records in the one form that the kernel works with: one tensor in, one tensor out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dpopt.clipping import Loss, mixing
from dpopt.clipping.flat import AsWritten
from dpopt.clipping.layers import frozen_statistics
from dpopt.clipping.names import Wrapper, class_name, plain
from dpopt.clipping.state import State
from dpopt.errors import ConfigError
from dpopt.privacy.distributed import digest
from dpopt.privacy.sampling import send
from dpopt.training.reading import Inputs
from dpopt.workloads.base import Split

Transform = Callable[[Tensor], Tensor]
"""Inputs [n, ...] as they are stored -> as the model takes them."""
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EXACT = 2**53
"""Whole numbers up to it are themselves in float64."""


@dataclass(frozen=True)
class Layout:
    """The order of a record's inputs in one tensor.

    Where the model takes `fields` by name, they lie beside each other in x [n, k]; of a table each input is one number
    of a row of x [n, k], which the model takes as it is.
    """

    dtype: torch.dtype  # of the model's trained parameters
    names: tuple[str, ...] = ()  # of the inputs, in order; none where they are one tensor without a name
    fields: Mapping[str, Tensor] = field(default_factory=dict)  # one record's, of no value but with its shape and type
    is_table: bool = False

    @classmethod
    def of(cls, inputs: Inputs, model: nn.Module, where: str) -> Layout:
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
        return cls(dtype, names, {name: torch.empty_like(p[0], device="meta") for name, p in inputs.items()})

    def split(self, inputs: Inputs, y: Tensor, where: str) -> Split:
        """Records as this layout has them; ConfigError if they are not like the training records."""
        if y.is_floating_point():
            y = y.to(self.dtype)
        elif y.ndim == 1 and not y.is_complex() and y.dtype != torch.bool:
            y = y.long()  # class numbers
        parts = inputs if isinstance(inputs, dict) else {"one tensor": inputs}
        if not (self.fields or self.is_table) and len(parts) == 1:
            return Split(next(iter(parts.values())), y)
        if set(parts) != set(self.names):
            expected = ", ".join(self.names) or "one tensor"
            raise ConfigError(f"{where}, inputs", sorted(parts), f"expected those of train: {expected}")
        # In the order of training, whatever the order of this mapping is.
        if self.is_table:
            for name, column in parts.items():
                if column.is_complex():
                    raise ConfigError(f"{where}.{name}", described(column), "expected real numbers")
            return Split(torch.stack([parts[name].to(self.dtype) for name in self.names], dim=1), y)
        kinds = set(map(_is_real, self.fields.values()))
        dtype = torch.float64 if len(kinds) > 1 else self.dtype if True in kinds else torch.int64
        x = torch.empty(len(y), sum(one.numel() for one in self.fields.values()), dtype=dtype)
        for (name, one), place in zip(self.fields.items(), self._parts(x), strict=True):
            values = parts.pop(name)  # its memory is free from here on
            if values.shape[1:] != one.shape or _is_real(values) != _is_real(one) or values.is_complex():
                seen = f"{values.dtype} {list(values.shape)}".removeprefix("torch.")
                allowed = f"{'real' if _is_real(one) else 'whole'} numbers of shape {[len(values), *one.shape]}"
                raise ConfigError(f"{where}.{name}", seen, f"expected {allowed}")
            # Beside real numbers, whole ones are stored as float64, which is exact up to 2^53 only.
            is_beside_real = dtype == torch.float64 and not _is_real(one) and values.numel() > 0
            if is_beside_real and max(int(values.max()), -int(values.min())) > _EXACT:
                allowed = f"beside real numbers at most {_EXACT}"
                raise ConfigError(f"{where}.{name}", described(values), allowed)
            place.copy_(values.reshape(len(y), -1))
        return Split(x, y)

    def _parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.split([one.numel() for one in self.fields.values()], dim=1)

    def whole(self, x: Tensor) -> list[Tensor]:
        """The parts of x [n, ...] that are whole numbers: what a model may look something up by."""
        if not self.fields:
            return [x] if x.dtype in WHOLE else []
        return [p for one, p in zip(self.fields.values(), self._parts(x), strict=True) if not _is_real(one)]

    def unpacked(self, x: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """The fields of packed records x [n, k] by name, the real ones in the type `dtype`."""
        pairs = zip(self.fields.items(), self._parts(x), strict=True)
        return {k: p.reshape(len(x), *f.shape).to(dtype if _is_real(f) else f.dtype) for (k, f), p in pairs}

    def converted(self, x: Any) -> Any:
        """Inputs as the model takes them: real numbers and bytes in its own type."""
        # Whole numbers other than bytes may be tokens or categories, which a model looks up.
        is_plain = isinstance(x, Tensor) and not self.fields
        return x.to(self.dtype) if is_plain and (x.is_floating_point() or x.dtype == torch.uint8) else x


class Adapter(Wrapper):
    """A model that takes inputs by name, or gives `logits`, as one that maps a tensor to a tensor."""

    def __init__(self, model: nn.Module, layout: Layout) -> None:
        super().__init__(model)
        self._layout = layout
        # Of a module's own parameter, since engines replace the tensors meanwhile.
        owners = (
            (m, name) for m in model.modules() for name, p in m.named_parameters(recurse=False) if p.requires_grad
        )
        self._of = next(owners, None)

    def forward(self, x: Tensor) -> Any:
        if not self._layout.fields:
            return scores(self._orig_mod(x))
        # The type is asked for anew: engines compute in another one for a while.
        dtype = getattr(*self._of).dtype if self._of else x.dtype
        return scores(self._orig_mod(**self._layout.unpacked(x, dtype)))


@dataclass(frozen=True)
class Subject:
    """A model on `device` that maps one tensor to one tensor, and records to train and (by name) to evaluate it on."""

    model: nn.Module
    loss: Loss
    train: Split
    held_out: dict[str, Split]
    transform: Transform
    layout: Layout
    device: torch.device
    state: State  # of the model, the loss and the transform, as it was before any of them was run
    metric: Loss | None = None
    classes: int = 0  # of a classifier, whose outputs are a score for each class

    @property
    def name(self) -> str:
        return class_name(self.model)

    @property
    def first(self) -> Split:
        """The first records as the model sees them; the same ones each time."""
        with mixing.forked(self.device):
            # A random transform must not make two looks differ.
            torch.manual_seed(0)
            return sample(self.train, self.transform, self.device)

    @cached_property
    def records(self) -> list[str]:
        """All training records as digests, the same whatever type they are stored in."""
        # In parts, as a copy of all in float64 might not fit into memory.
        parts = zip(*(part.split(10_000) for part in self.train), strict=True)
        return [digest(self.layout.converted(x), y.double()) for x, y in parts]

    def identity(self) -> dict[str, Any]:
        """Digests of what is trained and of all records, as plain data."""
        splits = {"train": self.train, **self.held_out}
        digests = {name: self.records if name == "train" else digest(*split) for name, split in splits.items()}
        trained = [(plain(name), p) for name, p in self.model.named_parameters() if p.requires_grad]
        start = "model." if isinstance(self.model, Adapter) else ""  # as in the checkpoints of earlier versions
        return {
            "parameters": [[start + name, list(p.shape), str(p.dtype)] for name, p in trained],
            **{name: [digests[name], [list(part.shape) for part in split]] for name, split in splits.items()},
        }


def _is_real(values: Tensor) -> bool:
    """True if they are converted to the model's type; bytes are pixels."""
    return values.is_floating_point() or values.dtype == torch.uint8


def scores(output: Any) -> Any:
    """The `logits` of an output that has them, as those of Hugging Face models; any other output as it is."""
    return output if isinstance(output, Tensor) else getattr(output, "logits", output)


def placed(split: Split, device: torch.device) -> Split:
    """`split` on `device`; on a GPU only if it takes at most half of what is free, else each batch is sent over."""
    is_small = device.type != "cuda" or sum(part.nbytes for part in split) <= torch.cuda.mem_get_info(device)[0] / 2
    return Split(*(part.to(device) for part in split)) if is_small else split


def sample(split: Split, transform: Transform, device: torch.device, count: int = 3) -> Split:
    """Some records of `split` as the model sees them, the first ones first: what a clipping engine is tried on."""
    x, y = telling(split, [split.x] if split.x.dtype in (torch.int32, torch.int64) else [], device, count)
    return Split(transform(x), y)


def telling(split: Split, whole: list[Tensor], device: torch.device, count: int = 3) -> Split:
    """The first `count` records, those with extreme numbers in `whole` [n, ...], and some with unlike targets."""
    rows = list(range(min(count, len(split.y))))
    for part in whole:
        # A model may do otherwise for a rare number, of which the largest often is one, or have no row for it.
        if part.numel():
            rows += [int(at) // part[0].numel() for at in (part.flatten().argmin(), part.flatten().argmax())]
    chosen = torch.tensor(list(dict.fromkeys([*rows, *_unlike(split.y)])))
    return Split(*(send(part[chosen.to(part.device)], device) for part in split))


def _unlike(y: Tensor, most: int = 16) -> list[int]:
    """Rows of targets y [n, ...]: of classes one each, the rare ones first; else the ends of each column."""
    if not y.numel():
        return []
    columns = (torch.view_as_real(y) if y.is_complex() else y).reshape(len(y), -1)[:, :most].cpu()
    if y.ndim == 1 and not y.is_complex():
        values, place, counts = columns[:, 0].unique(return_inverse=True, return_counts=True)
        rows = torch.full_like(counts, len(y)).scatter_reduce_(0, place, torch.arange(len(y)), "amin")
        return rows[[0, len(values) - 1, *counts.argsort(stable=True).tolist()][:most]].tolist()
    return [*columns.double().argmax(0).tolist(), *columns.double().argmin(0).tolist()]


def described(x: Any) -> str:
    """The type, the shape and, of whole numbers, the range of a tensor; the class of anything else."""
    if not isinstance(x, Tensor):
        return type(x).__name__
    kind = f"{x.dtype} {list(x.shape)}".removeprefix("torch.")
    return f"{kind} from {int(x.min())} to {int(x.max())}" if x.dtype in WHOLE and x.numel() else kind


@contextmanager
def unchanged(model: nn.Module, is_training: bool, state: State | None = None) -> Iterator[None]:
    """`model` in one mode and as it is written, to be looked at: afterwards it is as it was, and so are generators.

    `state` is the model's, where it was noted before.
    """
    # They stay in evaluation mode, as a clipping engine leaves them.
    frozen = frozen_statistics(model)
    with mixing.trial(state or State(model)), AsWritten():
        model.train(is_training)
        for module in frozen:
            module.training = False
        yield
