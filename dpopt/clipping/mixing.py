"""The look for models in which one record changes what becomes of the others.

Clipping bounds what each row of a batch contributes. That bounds what a record contributes only if no other row depends
on it, and whether that is so cannot be read off a model. So rows are replaced: one by huge numbers, then others by
infinity and by not-a-number, which no mean, maximum or sum over the batch survives. All rows that are left must have
the same losses, bit for bit, and the same norms of gradients. Integers are replaced by the least, the largest and any
others of those that the batch holds at the same place. Targets stay: a loss sees one record at a time (`losses`).

A switch that one kind of record throws need not show so. So records in a batch are compared with the same ones alone
too, made-up ones of all sizes and those of a batch of training, and `joins` looks at operations.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from dpopt.clipping.evaluation import tensors_of
from dpopt.clipping.names import plain
from dpopt.clipping.state import State, same, watching
from dpopt.errors import ConfigError, cut
from dpopt.types import Vector

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
_Find = Callable[[Tensor], tuple[Tensor, ...]]
"""Records x [n, ...] -> what is computed of each: losses [..., n], then whatever else, [n]."""

_EXTREMES = (1e4, math.inf, math.nan)
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-2}
"""The most that numbers of a type may differ that are computed in another order; 0.05 for types with fewer digits."""
_SCALES = (-3.0, 4.0)
"""Powers of ten between which the sizes of made-up records lie."""


class Unsupported(ConfigError):
    """The model does something that the engine `name` cannot follow; `reason` says what, `instead` what to use."""

    def __init__(self, reason: str, name: str = "bookkeeping", instead: str = "") -> None:
        default = "write it with plain tensor operations, not in place" if name == "auto" else "use auto"
        text = f"{instead}: {reason}" if instead else f"it cannot follow the model: {reason}; {default}"
        super().__init__("engine", name, text)
        self.reason = reason

    @classmethod
    def because(cls, error: Exception) -> Unsupported:
        """For an error of the model or of torch, whose messages can be pages."""
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        return cls(cut(text))


@contextmanager
def trial(state: State, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Iterator[None]:
    """The model of `state` to be tried out: afterwards all is as it was, bit for bit, and so are random generators.

    Meanwhile its parameters, its buffers and the tensors among its attributes are copies, those of real numbers of type
    `dtype`, all on `device`.
    """
    tensors = {id(t): (t, t.data, t.grad) for t in _tensors(state.model)}
    cuda = {data.device for _, data, _ in tensors.values() if data.is_cuda}
    with torch.random.fork_rng(list(cuda)), kept_modes(state.model):
        try:
            for tensor, data, _ in tensors.values():
                tensor.grad = None  # its type must be the tensor's
                tensor.data = data.to(device or data.device, dtype if data.is_floating_point() else None, copy=True)
            yield
        finally:
            for tensor, data, grad in tensors.values():
                tensor.grad = None
                tensor.data, tensor.grad = data, grad
            state.put_back(is_refused=False)


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
    for module in model.modules():
        yield from (v for v in vars(module).values() if isinstance(v, Tensor) and v.is_leaf)


@contextmanager
def repeatable(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Iterator[None]:
    """`model` in training mode, or in what comes nearest to that and draws no random numbers in `forward`.

    Modes and random generators are as before afterwards.
    """
    with kept_modes(model), forked(device):
        quieten(model, forward, device)
        yield


def quieten(model: nn.Module, forward: Callable[[], object], device: torch.device) -> Callable[[nn.Module], bool]:
    """Put modules into the modes of `repeatable`; gives which of them are in training mode."""
    for is_on in ((lambda m: True), (lambda m: "Drop" not in type(m).__name__), (lambda m: False)):
        set_modes(model, is_on)
        if not watch_generators(forward, device)[1]:
            break
    return is_on


def set_modes(model: nn.Module, is_on: Callable[[nn.Module], bool]) -> None:
    """Put each module of `model` into training mode where `is_on` says so, else into evaluation mode."""
    for module in model.modules():
        module.training = is_on(module)


@contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Each module of `model` is in the mode in which it was, afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def forked(device: torch.device) -> AbstractContextManager[None]:
    """The random generators of the CPU and of `device` are as before afterwards."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


def watch_generators(call: Callable[[], _T], device: torch.device) -> tuple[_T, bool]:
    """The value of `call()`, and True if it drew random numbers on the CPU or on `device`."""
    before = _random_states(device)
    value = call()
    return value, not all(map(torch.equal, before, _random_states(device)))


def same_randomness(device: torch.device) -> Iterator[None]:
    """Yield for ever, each time with the random generators as they were at the start."""
    cpu, *cuda = _random_states(device)
    while True:
        yield
        torch.set_rng_state(cpu)
        for state in cuda:
            torch.cuda.set_rng_state(state, device)


def in_turn(parts: Sequence[_T], device: torch.device) -> Iterator[_T]:
    """Yield each of `parts`, with the random generators as they were at the first."""
    again = same_randomness(device) if len(parts) > 1 else repeat(None)
    for part, _ in zip(parts, again, strict=False):
        yield part


def _random_states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def must_not_mix(find: _Find, x: Tensor, extremes: bool, source: Tensor | None = None) -> int:
    """Raise `Unsupported` if `find` computes something else of a record where another one is replaced (see `replaced`).

    Its losses for the same records have to be the same bit for bit. Gives the number of records it was tried with: half
    of them, or a quarter, where there is no memory for more.
    """
    try:
        _must_not_mix(find, x, extremes, source)
        return len(x)
    except torch.OutOfMemoryError:
        if len(x) < 4:
            raise
    half = len(x) // 2
    _LOG.info("no memory to look for mixing among %d examples, so among %d", len(x), half)
    return must_not_mix(find, x[:half], extremes, source)


def _must_not_mix(find: _Find, x: Tensor, extremes: bool, source: Tensor | None) -> None:
    expected, last, middle = find(x), len(x) - 1, len(x) // 2
    for places in ({0: 0}, {last: 1, middle: 2}):  # apart, as what is guarded against nan may show only without it
        others = torch.tensor([row not in places for row in range(len(x))], device=x.device)
        seen = find(replaced(x, places, extremes, source))
        if not _agree(seen, expected, others):
            # What lies elsewhere in memory may be summed in another order, and some of a GPU's sums have no order.
            expected, again = (find(x.clone()) for _ in range(2))
            if not _agree(again, expected, others):
                raise Unsupported("it does not give the same losses for the same examples twice")
            if not _agree(seen, expected, others):
                raise Unsupported("what it makes of an example depends on the other examples of the batch")


def company(model: nn.Module, run: Callable[[Tensor], Any], x: Tensor, rows: Iterable[int]) -> str | None:
    """The module of `model` by which a record, one of `rows` of x, is another one in the batch than alone, in words.

    None where `run`, a pass of the model, shows no such record, or draws random numbers: then nothing can be compared.
    """
    together, is_random = watch_generators(lambda: tensors_of(run(x)), x.device)
    for row in () if is_random else rows:
        if _is_apart(together, row, len(x), tensors_of(run(x[row : row + 1]))):
            name = _first_apart(model, run, x, row)
            return f"what {name} makes of an example depends on the others of its batch"
    return None


def _is_apart(together: list[Tensor], row: int, count: int, alone: list[Tensor]) -> bool:
    for whole, one in zip(together, alone, strict=True):
        # What has no row for each record is the same for all.
        has_rows = whole.shape[:1] == (count,) and one.shape[:1] == (1,)
        beside = whole[row : row + 1] if has_rows else whole
        if beside.shape != one.shape or apart(beside, one).any():
            return True
    return False


def apart(a: Tensor, b: Tensor) -> Tensor:
    """The rows of two tensors that differ by more than rounding, bool [n]; of numbers all count as one row."""
    digits = _ROUNDING.get(a.dtype, 0.05)
    a, b = (part.detach().reshape(len(part) if part.dim() else 1, -1).double() for part in (a, b))
    sizes = b.abs().nan_to_num(0.0, 0.0, 0.0).amax(1, keepdim=True) if b.shape[1] else b.new_zeros(len(b), 1)
    is_near = (a - b).abs() <= digits * sizes.clamp(min=1e-9 * float(sizes.max() if len(sizes) else 0.0))
    return ((a.isfinite() | b.isfinite()) & ~is_near).any(1)


def _first_apart(model: nn.Module, run: Callable[[Tensor], Any], x: Tensor, row: int) -> str:
    """The name of the first module of `model` that gives another output for a row of x alone, from the same input."""
    names = {module: f"model.{plain(name)}".rstrip(".") for name, module in model.named_modules()}
    alone = _calls(run, x[row : row + 1])
    for module, whole in _calls(run, x).items():
        pairs = zip(whole, alone.get(module, ([], [])), strict=True)
        is_other = [len(a) == len(b) and _is_apart(a, row, len(x), b) for a, b in pairs]
        if is_other == [False, True]:
            return names.get(module, "model")
    return "model"


def _calls(run: Callable[[Tensor], Any], x: Tensor) -> dict[nn.Module, tuple[list[Tensor], list[Tensor]]]:
    """Inputs and outputs of each module's first call in a pass; inner modules come first."""
    calls: dict[nn.Module, tuple[list[Tensor], list[Tensor]]] = {}

    def note(module: nn.Module, inputs: Any, output: Any) -> None:
        calls.setdefault(module, (tensors_of(inputs), tensors_of(output)))

    with watching(note):
        run(x)
    return calls


def takes_extremes(
    state: State, model: Callable[[Tensor], Any], loss: Callable[[Any, Tensor], Tensor], x: Tensor, y: Tensor
) -> bool:
    """True if `model`, that of `state`, can be run on any real numbers in place of those of the records x, y."""
    # An index out of range would end this process's use of a GPU, so this is tried on the CPU.
    cpu = torch.device("cpu")
    x, y = (part[:1].to(cpu).repeat(len(_EXTREMES), *[1] * (part.dim() - 1)) for part in (x, y))
    strange = replaced(x, {0: 0, 1: 1, 2: 2}, True)
    with torch.no_grad(), trial(state, device=cpu):
        for each in (strange, x):
            with suppress(Exception):  # a model can fail in any way
                loss(model(each), y)
                return each is strange
    return True  # it cannot be run on a CPU at all


def replaced(values: Tensor, places: dict[int, int], extremes: bool, source: Tensor | None = None) -> Tensor:
    """`values` [n, ...] with other rows: `places` says which of three, of `_EXTREMES` or of the rows of `source`."""
    values, source = values.clone(), values if source is None else source
    is_number = extremes and (values.is_floating_point() or values.is_complex())
    if values.numel():
        strange = _EXTREMES if is_number else (source.amin(0), source.amax(0), like(source, 1)[0])
        for row, which in places.items():
            values[row] = strange[which]
    return values


def anything_like(values: Tensor, examples: int) -> Tensor:
    """That many random rows of the shape and type of `values`: normal numbers, or those of `like` if they are whole."""
    if not values.is_floating_point():
        return like(values, examples)
    generator = torch.Generator().manual_seed(0)
    return torch.randn((examples, *values.shape[1:]), generator=generator, dtype=torch.float64).to(values)


def of_all_sizes(values: Tensor, examples: int = 24) -> Tensor:
    """Random rows as `anything_like` makes them, tiny ones and huge ones among them, half of them of one sign."""
    x = anything_like(values, examples)
    if not x.is_floating_point():
        return x
    half = examples // 2
    x[half:] = x[half:].abs()
    # A model may do something for records that are empty, or that are there twice.
    x[0], x[1] = 0, x[2]
    sizes = torch.logspace(*_SCALES, half, dtype=x.dtype, device=x.device).repeat(2)
    order = torch.randperm(examples, generator=torch.Generator().manual_seed(0))
    return (x * sizes.view(-1, *[1] * (x.dim() - 1)))[order.to(x.device)]


def like(values: Tensor, examples: int) -> Tensor:
    """That many random rows that could be rows of `values`; those of `anything_like` where no row is finite."""
    generator, shape = torch.Generator().manual_seed(0), (examples, *values.shape[1:])
    if not values.is_floating_point():
        # From the same column: its table of indices may be smaller than another column's.
        rows = values.gather(0, torch.randint(len(values), shape, generator=generator).to(values.device))
        if examples > 2 and values.numel():  # a model may look for a rare number, of which the largest often is one
            rows[-2:] = torch.stack([values.amin(0), values.amax(0)])
        return rows
    rows = values[values.flatten(1).isfinite().all(1)] if values.dim() > 1 else values[values.isfinite()]
    if not len(rows):
        return anything_like(values, examples)
    share = torch.rand(shape, generator=generator, dtype=torch.float64).to(values)
    return torch.lerp(rows.amin(0), rows.amax(0), share)


def cast(values: Tensor, dtype: torch.dtype | None) -> Tensor:
    """`values` in the type `dtype`, if they are real numbers and it is one."""
    return values.to(dtype) if dtype and values.is_floating_point() else values


def beside(parts: Sequence[Tensor]) -> Vector:
    """A point near the parameters `parts`, with a random step for each in proportion to its spread."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.randn(part.numel(), generator=generator).to(part) for part in parts]
    # In proportion, so that no layer is swamped; 0.01 as a parameter may be the same everywhere.
    scales = [0.01 + 0.1 * part.std(correction=0) for part in parts]
    return torch.cat([p.flatten() + s * step for p, s, step in zip(parts, scales, steps, strict=True)])


def _agree(seen: tuple[Tensor, ...], expected: tuple[Tensor, ...], rows: Tensor) -> bool:
    pairs = [(a[..., rows], b[..., rows]) for a, b in zip(seen, expected, strict=True)]
    # Losses bit for bit; a GPU's backward passes add up in no fixed order, so the rest to rounding.
    return same(*pairs[0]) and all(_close(a, b) for a, b in pairs[1:])


def _close(a: Tensor, b: Tensor) -> bool:
    tolerance = _ROUNDING.get(a.dtype, 0.05)
    largest = float(b.nan_to_num(nan=0.0, posinf=0.0).max()) if len(b) else 0.0
    return torch.allclose(a, b, tolerance, 1e-4 * tolerance * largest, equal_nan=True)
