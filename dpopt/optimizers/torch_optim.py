"""Any optimizer with the interface of `torch.optim` (Paszke et al., "PyTorch: an imperative style, high-performance
deep learning library", NeurIPS 2019) on the private gradient; the packages of Prodigy, D-Adaptation, DoG and
schedule-free optimizers have it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from dpopt.clipping.rules import Abadi
from dpopt.errors import ConfigError, unknown
from dpopt.fields import Arguments, NonNegative, Positive, hints, later
from dpopt.optimizers._installed import EXTRAS, NotInstalled, hint, require
from dpopt.optimizers._split import Split, parameter_of
from dpopt.optimizers.base import Configured, scalar
from dpopt.types import ClipRule, Layout, Oracle, Vector, laid_out


class State(NamedTuple):
    """The wrapped optimizer's state as tensors.

    Attributes:
        theta: the point to be evaluated, shape [d].
        point: where the next gradient is asked for, the wrapped optimizer's own parameter; shape [d].
        eta: the step size that the wrapped optimizer states; 0 before the first step where it has none yet.
        begun: whether it has kept anything yet; until then it is as its constructor makes it. On the CPU.
        numbers: the Python numbers of its `state_dict`, float64, in the order of the dictionary. On the CPU.
        tensors: the tensors of its `state_dict`, in the order of the dictionary.
    """

    theta: Vector
    point: Vector
    eta: Tensor
    begun: Tensor
    numbers: Tensor
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class TorchOptim(Configured):
    r"""One step of a `torch.optim.Optimizer` on the private gradient g_t:

        x_{t+1} = step of the wrapped optimizer from x_t with g_t
        theta_t = (1 - w_t) theta_{t-1} + w_t x_t,   w_t = (1 + gamma)/(t + gamma)    (w_t = 1 without averaging)

    One draw a step. An optimizer that tells training from evaluation (schedule-free ones do, by `train()` and `eval()`)
    gets its gradients where it trains, and theta_t is where it would be evaluated.

    Args:
        optimizer: import path of the class, in an installed package (or a module that is imported already): as
            importing runs a module, none is imported from the current folder, PYTHONPATH or a results folder.
        lr: its `lr`; the authors of Prodigy, D-Adaptation and DoG want 1.
        clip: how one example's gradient is bounded.
        arguments: further arguments of its constructor, none of the name of a field.
        averaging: gamma of polynomial-decay averaging (Shamir and Zhang, ICML 2013), 8 in DoG's paper; part of the
            method, where `average` of `fit` and of a suite's row goes around any optimizer (see `Averaged`).
        step_size: key of its parameter group that holds the step size to report.
        rest: import path of a second class. Where it is given, each parameter is handed over by itself: matrices to
            `optimizer` (the kernel of a convolution as [out, rest], embeddings not), all others to this one. So Muon is
            `optimizer: torch.optim.Muon, rest: torch.optim.AdamW`.
        rest_arguments: of its constructor; its `lr` is the first one's unless it is among them.

    The wrapped object is made anew for each step, from the tensors of the state: whatever it keeps between steps has to
    be a tensor or a number in its `state_dict`, of one structure from the first step on. Without `rest` all parameters
    are one vector, so a method with a rule for each layer (LDoG, LAMB) sees a single layer; with it, a tensor that is
    kept for a parameter has to be of its shape, or the same number for all, which LDoG's are not. Schedule-free
    optimizers, and those that fail on a parameter without entries (Adafactor), work without `rest` alone. On a GPU a
    step waits for the device where the wrapped optimizer reads a value: twice in Prodigy and D-Adaptation, five times
    in DoG, and not in torch.optim's Adam, AdamW and SGD nor in schedule-free ones.

    Raises:
        ConfigError: when it is made: the class cannot be imported, is no optimizer, refuses the arguments, needs more
            than a gradient (a closure; matrices, without `rest`), or keeps something else between steps; or
            `rest_arguments` without `rest`.
    """

    conformance_exceptions: ClassVar[Mapping[str, str]] = {
        "never_waits_for_the_device": "some of the wrapped optimizers read values: Prodigy's, D-Adaptation's, DoG's"
    }

    optimizer: str = "torch.optim.Adam"
    lr: Positive = 1e-2
    clip: ClipRule = Abadi(1.0)
    arguments: Arguments = Arguments()
    averaging: NonNegative | None = None
    step_size: str = "lr"
    rest: str = later("")
    rest_arguments: Arguments = later(Arguments())

    def __post_init__(self) -> None:
        for name in ("arguments", "rest_arguments"):
            object.__setattr__(self, name, Arguments(getattr(self, name), f"TorchOptim.{name}"))
        super().__post_init__()
        if stated := self.arguments.keys() & hints(TorchOptim):
            raise ConfigError("TorchOptim.arguments", sorted(stated), "expected it as the field of that name")
        if self.rest_arguments and not self.rest:
            raise ConfigError("TorchOptim.rest_arguments", self.rest_arguments, "expected none without `rest`")
        _layout(self)

    def init(self, theta: Vector) -> State:
        none = scalar(theta)
        if theta.is_meta:
            return State(theta, theta, none, none.bool(), none, ())
        wrapped = self.wrap(theta)
        eta = scalar(theta, _step_size(wrapped, self.step_size))
        # A step with a gradient of ones shows what is kept: the state has one structure from the start.
        kept = _layout(self).read(_advanced(wrapped, torch.ones_like(theta)))
        if kept is None:
            raise ConfigError("TorchOptim.optimizer", self.optimizer, "what it keeps depends on its parameters")
        numbers, tensors = kept
        zeros = torch.zeros(len(numbers), dtype=torch.float64)
        return State(theta, theta, eta, torch.tensor(False), zeros, tuple(map(torch.zeros_like, tensors)))

    def step(self, state: State, oracle: Oracle) -> State:
        with oracle.draw() as batch:
            gradient = batch.gradient(state.point, self.clip).value
        if gradient.is_meta:
            # Calibration wants to know what is released. That is this one query: the wrapped optimizer has no oracle.
            return state
        wrapped = self.wrap(state.point, oracle.layout)
        if state.begun:
            _layout(self).load(wrapped, (state.numbers.tolist(), state.tensors))
        kept = _layout(self).read(_advanced(wrapped, gradient))
        if kept is None:
            # Prodigy returns at once where its first gradient is zero. Later, or had it moved, going on from `state`
            # would lose something.
            if state.begun or not torch.equal(parameter_of(wrapped), state.point):
                raise RuntimeError(f"{self.optimizer} keeps other things after this step than after its first")
            return state
        numbers, tensors = kept
        eta = scalar(state.eta, _step_size(wrapped, self.step_size))
        point, evaluated = _points(wrapped)
        theta = self._averaged(state.theta, evaluated, oracle)
        return State(theta, point, eta, torch.ones_like(state.begun), state.numbers.new_tensor(numbers), tensors)

    def wrap(self, point: Vector, layout: Layout = ()) -> Optimizer:
        """The wrapped optimizer as its constructor makes it, over a copy of `point`, shape [d]; see `Split`."""
        parameter = nn.Parameter(point.clone())
        make = partial(self._made, "optimizer", {"lr": self.lr, **self.arguments})
        with redirect_stdout(None):  # some print when they are made, which is before every step
            if not self.rest:
                return make([parameter])
            return Split(parameter, layout, make, partial(self._made, "rest", {"lr": self.lr, **self.rest_arguments}))

    def _made(self, field: str, values: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
        """The optimizer whose path is in `field`, over `parameters`."""
        kind = _class(path := getattr(self, field), f"TorchOptim.{field}")
        try:
            return kind(parameters, **values)
        except Exception as error:
            how = "" if self.rest or "2D" not in str(error) else "; with `rest` it is given matrices alone"
            where = "TorchOptim.rest_arguments" if field == "rest" else "TorchOptim.arguments"
            raise ConfigError(where, values, f"{path} refuses them: {error}{how}") from error

    def _averaged(self, average: Vector, point: Vector, oracle: Oracle) -> Vector:
        if self.averaging is None:
            return point
        t = oracle.draws_total - oracle.draws_left
        weight = (1 + self.averaging) / (t + self.averaging)
        return (average * (1 - weight)).add_(point, alpha=weight)


_Kept = tuple[list[float], tuple[Tensor, ...]]
"""The part of an optimizer that lasts from step to step: the numbers and the tensors of its `state_dict`."""


@dataclass(frozen=True)
class _Layout:
    """A `state_dict` as a tree: its structure, and its leaves after a step (tensors and numbers are examples)."""

    leaves: tuple[Any, ...]
    structure: pytree.TreeSpec

    def read(self, optimizer: Optimizer) -> _Kept | None:
        """The numbers and tensors of its `state_dict`; None where that is not of this layout."""
        leaves, structure = pytree.tree_flatten(optimizer.state_dict())
        if structure != self.structure or not all(map(_is_like, leaves, self.leaves)):
            return None
        numbers = [float(leaf) for leaf in leaves if _is_number(leaf)]
        return numbers, tuple(leaf.detach() for leaf in leaves if isinstance(leaf, Tensor))

    def load(self, optimizer: Optimizer, kept: _Kept) -> None:
        """Give `optimizer` back what `read` took from another of its kind; tensors are copied."""
        content = pytree.tree_unflatten(list(self._filled(kept)), self.structure)
        optimizer.load_state_dict(content)
        # Loading casts to the parameter's dtype, and DoG's moves things to the CPU: put them back as they were.
        group, parameter = content["param_groups"][0], parameter_of(optimizer)
        optimizer.param_groups[0].update({key: value for key, value in group.items() if key != "params"})
        if 0 in content["state"]:
            optimizer.state[parameter].update(content["state"][0])

    def _filled(self, kept: _Kept) -> Iterator[Any]:
        numbers, tensors = iter(kept[0]), iter(kept[1])
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                yield next(tensors).clone()
            else:
                yield _number(next(numbers), leaf) if _is_number(leaf) else leaf


@lru_cache
def _layout(configuration: TorchOptim) -> _Layout:
    """The layout of what its optimizer keeps, by two steps on two parameters; raises as `TorchOptim`."""
    parts = [("0.weight", (2, 3), "Linear"), ("0.bias", (2,), "Linear")]
    layout, point = (laid_out(parts), torch.ones(8)) if configuration.rest else ((), torch.ones(2))
    first, second = configuration.wrap(point, layout), configuration.wrap(point, layout)
    try:
        leaves, structure = pytree.tree_flatten(_advanced(first, point).state_dict())
        made = _Layout(tuple(leaves), structure)
        if (kept := made.read(first)) is not None:
            made.load(second, kept)
            kept = made.read(_advanced(second, point))
    except Exception as error:
        field = getattr(first, "stepped", "optimizer")
        reason = f"no step from a gradient alone: {error}"
        raise ConfigError(f"TorchOptim.{field}", getattr(configuration, field), reason) from error
    if kept is None:
        reason = "expected tensors and numbers of one structure in its state_dict"
        raise ConfigError("TorchOptim.optimizer", configuration.optimizer, reason)
    sizes = [key for key, value in first.param_groups[0].items() if key != "params" and _is_scalar(value)]
    if configuration.step_size not in sizes:
        raise unknown("TorchOptim.step_size", configuration.step_size, sizes)
    return made


def _class(path: str, field: str) -> Callable[..., Optimizer]:
    module, _, name = path.rpartition(".")
    try:
        require(module)
        imported = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        top = path.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and top in EXTRAS and error.name in (None, top):
            raise ConfigError(field, path, f"it needs {hint(path)}") from error
        allowed = f"cannot be imported ({error}); expected a path such as torch.optim.Adam, of an installed package"
        how = "" if isinstance(error, NotInstalled) else f" ({hint(path)})"
        raise ConfigError(field, path, f"{allowed}{how}") from error
    if not (isinstance(imported, type) and issubclass(imported, Optimizer)):
        raise ConfigError(field, path, "expected a subclass of torch.optim.Optimizer")
    return imported


def _advanced(optimizer: Any, gradient: Vector) -> Optimizer:
    """`optimizer` after a step with a copy of `gradient`, in its training mode where it has one."""
    if hasattr(optimizer, "train"):
        optimizer.train()
    parameter_of(optimizer).grad = gradient.clone()
    optimizer.step()
    return optimizer


def _points(optimizer: Any) -> tuple[Vector, Vector]:
    """The points at which `optimizer` trains and is evaluated; it is left in the latter mode."""
    training = parameter_of(optimizer).detach()
    if not hasattr(optimizer, "eval"):
        return training, training
    training = training.clone()
    optimizer.eval()
    return training, parameter_of(optimizer).detach()


def _step_size(optimizer: Optimizer, key: str) -> float | Tensor:
    """The number under `key` in the parameter group, or the only entry of a list there; 0 where there is none yet."""
    value = optimizer.param_groups[0].get(key, 0.0)
    value = value[0] if isinstance(value, list) else value
    return value.reshape(()) if isinstance(value, Tensor) else value


def _is_scalar(value: Any) -> bool:
    """True if `value` is one number: in Python, as a tensor, or as the only entry of a list."""
    if isinstance(value, list):
        return len(value) == 1 and _is_scalar(value[0])
    return _is_number(value) or (isinstance(value, Tensor) and value.numel() == 1)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float)


def _is_like(leaf: Any, example: Any) -> bool:
    """True if both are tensors, both numbers, or one and the same constant."""
    kinds = [(isinstance(value, Tensor), _is_number(value)) for value in (leaf, example)]
    return kinds[0] == kinds[1] and (any(kinds[0]) or leaf == example)


def _number(value: float, example: float) -> float:
    """`value` in the type of `example` (bool, int, float), if it is one of its values."""
    return type(example)(value) if value.is_integer() else value
