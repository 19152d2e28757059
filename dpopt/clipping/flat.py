"""The engines' interface, the trained parameters as one flat vector, and clipping by norms."""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from dpopt.clipping import evaluation, layers, mixing
from dpopt.clipping.evaluation import Way, tensors_of
from dpopt.clipping.losses import Loss, by_record
from dpopt.clipping.mixing import Unsupported, in_turn, same_randomness, watch_generators
from dpopt.clipping.names import plain
from dpopt.clipping.rules import Bounded, ByGroup, factors
from dpopt.clipping.state import State
from dpopt.errors import ConfigError
from dpopt.types import ClipRule, Layout, Number, Vector, laid_out

_LOG = logging.getLogger(__name__)
_COMPARED = 3
"""Records of a batch whose gradients are compared with autograd's."""
_ALONE = 16
"""Records of a batch that are run alone where `vmap` does not show the same outputs."""
_GROSS = 0.05
"""The largest relative error there, also in bfloat16; `verify` compares to more digits."""

WeightedPoints: TypeAlias = Sequence[tuple[Number, Vector]]


class Clipped(NamedTuple):
    """An engine's answer for one physical batch of n examples.

    Attributes:
        total: the clipped sum, shape [d]; a new tensor, the caller's to change.
        losses: at each of the k points, shape [k, n].
        norms: L2 norms of the combined and scaled gradients, before clipping, shape [n].
    """

    total: Tensor
    losses: Tensor
    norms: Tensor


class ClippingEngine(Protocol):
    """An engine as the data oracle and runs use it.

    Attributes:
        dimension: number d of trained parameters, which are one flat vector in the order of `named_parameters`.
        layout: their names in the user's model and shapes; empty where there is no model.
        way: how `outputs` runs the model.
        state: to be entered around whatever is run with the model, such as a loss of its outputs.
    """

    dimension: int
    layout: Layout = ()
    way: Way = "batch"
    state: Any = nullcontext()

    @property
    def theta(self) -> Vector:
        """A copy of the model's trained parameters, shape [d]."""
        ...

    def load(self, theta: Vector) -> None:
        """Write `theta`, shape [d], into the model."""
        ...

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        """The model's outputs for `x` at `theta`, in the model's present mode (train or eval), without gradients."""
        ...

    def physical_batch(self, expected: float) -> int:
        """Examples per call: enough for almost every draw of `expected` examples, as far as memory allows."""
        ...

    def examine(self, x: Tensor, y: Tensor) -> None:
        """Look at a batch before it is charged; raises ConfigError for what cannot be trained privately."""

    def is_to_be_examined(self, examples: int) -> bool:
        """True if `examine` would look at a batch of so many examples."""
        return False

    def clipped_sum(
        self, points: WeightedPoints, x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule, scale: Vector | None = None
    ) -> Tensor:
        """The sum of `clipped` alone, shape [d]."""
        return self.clipped(points, x, y, mask, clip, scale).total

    def clipped(
        self, points: WeightedPoints, x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule, scale: Vector | None = None
    ) -> Clipped:
        """sum_i mask_i clip(s * sum_k w_k grad f_i(theta_k)), with the losses and norms of the same passes.

        The points are combined and scaled per example before clipping, so the sensitivity is `clip`'s whatever the
        weights. An example whose combined gradient is not finite contributes zero. All points see the same dropout.

        Args:
            points: pairs (w_k, theta_k), theta_k of shape [d].
            x, y: one physical batch, shapes [n, ...].
            mask: which rows count, bool [n].
            clip: the clip rule.
            scale: the factor s >= 0 of each coordinate, shape [d]; by default 1. In shape [2, d] its second row is a
                shift a, and what is clipped is s * (sum_k w_k grad f_i(theta_k) - a).
        """
        ...

    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """The losses [k, n] of all examples at all points, with one dropout; no meaning where `mask` is false."""
        ...


class Delegate(ClippingEngine):
    """An engine in front of another one, which holds the parameters; a subclass sums and looks at losses."""

    def __init__(self, engine: ClippingEngine) -> None:
        self._engine, self.dimension, self.layout = engine, engine.dimension, engine.layout
        self.way, self.state = engine.way, engine.state

    @property
    def theta(self) -> Vector:
        return self._engine.theta

    def load(self, theta: Vector) -> None:
        self._engine.load(theta)

    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        return self._engine.outputs(theta, x)

    def physical_batch(self, expected: float) -> int:
        return self._engine.physical_batch(expected)


@dataclass(frozen=True)
class PerExample:
    """Losses [k, n] and norms [n] as in `Clipped`, and each parameter's squared norms, [n]; None if it is unused.

    `weighted_sum` takes weights [n] for each parameter to sum_i weights_i gradient_i, and is to be called once.
    """

    losses: Tensor
    norms: Tensor
    squares: Sequence[Tensor | None]
    weighted_sum: Callable[[Sequence[Tensor]], Vector]

    def factors(self, clip: ClipRule, groups: Sequence[int] | None, mask: Tensor) -> list[Tensor]:
        """The factor of each example's gradient, shape [n], for each parameter; see `clip_factors`."""
        if groups is None:
            return [clip_factors(clip, self.norms, mask)] * len(self.squares)
        mask, least = mask & self.norms.isfinite(), _limits(self.norms.dtype)[1]
        squares = self.norms.new_zeros(max(groups) + 1, len(self.norms))
        for number, square in zip(groups, self.squares, strict=True):
            squares[number] += 0 if square is None else square
        # The rule sees g_k / s, of which it leaves the sensitivity S at most, so that s S is left of g_k.
        norms = squares.sqrt().clamp(min=least) * len(squares) ** 0.5
        each = [clip_factors(clip, norm, mask) for norm in norms]
        return [each[number] for number in groups]


class FlatModel(ClippingEngine):
    """A model whose trained parameters (those with `requires_grad`) are read and written as one vector.

    The first batch of two examples or more is examined as training runs it, and so is each that is at least twice as
    large as those examined before: its first gradients are compared with autograd's, and no record may change what the
    model makes of others (see `mixing`).

    Attributes:
        must_show_gradients: where all gradients are zero, nothing shows that the engine follows the model.
        sees_batches: runs the model on a whole batch, and draws the random numbers that a plain pass over it draws.
        hint: what is likely to be wrong where autograd has other gradients.
        state: what the model and the loss keep in Python, which each pass leaves as it was.
        trained: the trained parameters, by their names in the user's model.
        example_bytes: what a pass keeps of an example, found out by verification; 0 before.
    """

    name: str
    must_show_gradients = True
    sees_batches = False
    hint = ""

    def __init__(self, model: nn.Module, loss: Loss, state: State | None = None) -> None:
        self.model, self.loss = model, by_record(loss)
        self.state: State = state or State(model, loss=None if self.loss.is_trusted else self.loss.function)
        self.trained = {plain(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._shapes = [p.shape for p in self.trained.values()]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.dimension = sum(self._sizes)
        self.layout = layout_of(model)
        # Every place that holds a trained parameter, by its name, and the parameter's number. A module that is there
        # twice is one place: `functional_call` does not restore the second.
        numbers = {id(p): number for number, p in enumerate(self.trained.values())}
        self._places = {
            f"{prefix}.{name}" if prefix else name: numbers[id(p)]
            for prefix, module in model.named_modules()
            for name, p in module._parameters.items()
            if id(p) in numbers
        }
        self._frozen = layers.frozen_statistics(model)
        self.example_bytes = 0
        self._examined = self._evaluated = 1
        self._takes_extremes: bool | None = None

    @property
    def theta(self) -> Vector:
        return torch.cat([p.detach().flatten() for p in self.trained.values()])

    def load(self, theta: Vector) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.trained.values(), self.split(theta), strict=True):
                parameter.copy_(value)
        torch.clear_autocast_cache()  # an autocast around all of it keeps what it made of the old values

    def physical_batch(self, expected: float) -> int:
        # Three standard deviations of a Poisson draw, so that nearly every draw is one call.
        needed = math.ceil(expected + 3 * math.sqrt(expected))
        return max(1, min(needed, self._most_examples()))

    @torch.no_grad()
    def outputs(self, theta: Vector, x: Tensor) -> Tensor:
        # In the parameters' own type, as `predict` has it.
        with self.running(), self.exact():
            if self.sees_batches and not self.model.training and len(x) >= 2 * self._evaluated:
                self._evaluated = len(x)
                self._examine_outputs(theta, x)
            return self._outputs(theta.detach(), x.detach())

    def _examine_outputs(self, theta: Vector, x: Tensor) -> None:
        """Go alone if a record's outputs depend on a batch of evaluation, as `must_be_alone` finds it in training."""
        if self.way != "batch":
            return
        with suppress(Exception), self.at(theta):  # what cannot be looked at is run as it is, and fails there
            reason = None if self.are_mapped(theta, x) else mixing.company(self.model, self.output, x, _spaced(x))
            if reason:
                self.go_alone(x, reason)

    def are_mapped(self, theta: Vector, x: Tensor) -> bool:
        """True if `vmap` gives the outputs of the batch x, so that no record depends on it."""
        with suppress(Exception):  # it cannot follow every model
            with self.state:
                mapped = evaluation.outputs(partial(self.call, self.split(theta.clone())), x, "vmap")
            pairs = zip(tensors_of(self.output(x)), tensors_of(mapped), strict=True)
            return not any(bool(mixing.apart(*pair).any()) for pair in pairs)
        return False

    def go_alone(self, x: Tensor, reason: str) -> None:
        """From now on, make outputs one record at a time."""
        if self.way == "batch":
            self.way = "vmap"
            try:
                self._outputs(self.theta, x[:2])
            except Exception:  # it cannot follow every model
                self.way = "loop"
            _LOG.warning("in evaluation mode %s: outputs are computed one record at a time, as in predict", reason)

    def _outputs(self, theta: Vector, x: Tensor) -> Any:
        if self.way == "vmap":
            with self.state:
                return evaluation.outputs(partial(self.call, self.split(theta.clone())), x, self.way)
        with self.at(theta):
            return evaluation.outputs(self.output, x, self.way)

    @torch.no_grad()
    def losses(self, points: Sequence[Vector], x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if not len(x):
            return points[0].new_zeros(len(points), 0)
        x, y = x.detach(), y.detach()
        with self.running():
            each = []
            for theta in in_turn(points, x.device):
                with self.state:
                    each.append(self._losses(theta.detach(), x, y))
            return torch.stack(each)

    @torch.no_grad()
    def clipped(
        self, points: WeightedPoints, x: Tensor, y: Tensor, mask: Tensor, clip: ClipRule, scale: Vector | None = None
    ) -> Clipped:
        x, y = x.detach(), y.detach()
        # An infinite scale of no records would not be zero, which is what a draw of no records sums to.
        scale = None if scale is None else scale.detach().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        if not x.shape[0]:
            theta = points[0][1].detach()
            return Clipped(torch.zeros_like(theta), theta.new_zeros(len(points), 0), theta.new_zeros(0))
        if self.is_to_be_examined(x.shape[0]):
            self.examine(x, y)
        each = self.per_example([(float(weight), theta.detach()) for weight, theta in points], x, y, scale)
        own = clip.groups if isinstance(clip, Bounded) else None
        groups = clip.partition(self.layout) if isinstance(clip, ByGroup) else own
        factors = each.factors(clip, groups, mask)
        with self.running():
            return Clipped(each.weighted_sum(factors), each.losses, each.norms)

    @torch.no_grad()
    def examine(self, x: Tensor, y: Tensor) -> None:
        if not self.is_to_be_examined(len(x)):
            return
        with self.running():
            layers.refuse_unsafe(self.model)
        try:
            extremes = self.takes_extremes(x, y)
            with mixing.trial(self.state), self.loss.fixed_numbers():
                # Beside the present parameters no initial zero hides a dependence.
                self.load(mixing.beside(self.split(self.theta)))
                self.compare_in_training(x[:_COMPARED], y[:_COMPARED])
                self.must_not_mix(self.losses_and_norms, x, y, extremes)
                if self.sees_batches:
                    self.must_be_alone(x, y)
                self.state.must_keep_buffers()
        except Unsupported as error:
            raise Unsupported(error.reason, self.name) from error
        self._examined = len(x)

    def is_to_be_examined(self, examples: int) -> bool:
        return examples >= 2 * self._examined

    def compare_in_training(self, x: Tensor, y: Tensor) -> None:
        """Raise `Unsupported` if autograd has other gradients of x, y in the model's types, modes and autocast."""
        again = same_randomness(x.device)
        next(again)
        parts = [(x, y)] if self.sees_batches else list(zip(x.split(1), y.split(1), strict=True))
        with self.running(), torch.enable_grad():
            rows, is_random = watch_generators(lambda: [row for part in parts for row in self._plain(*part)], x.device)
        alone = torch.stack(rows)
        next(again)
        # Other random numbers than a plain pass draws: there is nothing to compare.
        if is_random and not self.sees_batches:
            return
        ours = self.per_example([(1.0, self.theta)], x, y)
        norms = alone.norm(dim=1)
        is_finite = norms.isfinite()  # the others contribute nothing
        weights = is_finite.to(norms)
        off = ours.weighted_sum([weights] * len(self._sizes)) - weights @ torch.where(is_finite[:, None], alone, 0.0)
        # Norms that are sums of large terms are rounded up, and say how far such sums may be off.
        slack = 16 * torch.finfo(norms.dtype).eps
        if not bool((norms - ours.norms <= _GROSS * norms + slack)[is_finite].all()):
            raise Unsupported("in training the gradient norms of a batch are not those that autograd finds" + self.hint)
        if not bool(off.norm() <= _GROSS * ours.norms[is_finite].sum() + slack):
            raise Unsupported("in training the gradients of a batch are not those that autograd finds" + self.hint)

    def must_be_alone(self, x: Tensor, y: Tensor) -> None:
        """Raise `Unsupported` if a record's outputs, or gradient norm, in the batch are not those of it alone.

        All outputs are compared with those under `vmap`. Where these differ, some records decide, each run alone.
        """
        quiet = mixing.repeatable(self.model, lambda: self.outputs(self.theta, x[:2]), x.device)
        with self.exact(), quiet, self.running():
            if self.are_mapped(self.theta, x):
                return
            # In float64 no rounding hides a dependence, nor looks like one.
            for dtype in (torch.float64, None):
                try:
                    with mixing.trial(self.state, dtype):
                        self._some_must_be_alone(mixing.cast(x, dtype), mixing.cast(y, dtype))
                    return
                except ConfigError:
                    raise
                except Exception:
                    if dtype is None:
                        raise

    def _some_must_be_alone(self, x: Tensor, y: Tensor) -> None:
        rows = _spaced(x)
        if reason := mixing.company(self.model, self.output, x, rows):
            raise Unsupported(reason)
        few = rows[:: max(1, len(rows) // _COMPARED)]
        norms = self.losses_and_norms(x, y)[1][few]
        alone = torch.cat([self.losses_and_norms(x[i : i + 1], y[i : i + 1])[1] for i in few])
        if mixing.apart(norms, alone).any():
            raise Unsupported("the gradient norm of an example depends on the others of its batch")

    def _plain(self, x: Tensor, y: Tensor) -> list[Vector]:
        """The gradient of each loss by plain autograd."""
        with self.state:
            return [gradient(loss, list(self.trained.values())) for loss in self.loss(self.run(x), y)]

    def must_not_mix(
        self, find: Callable[[Tensor, Tensor], tuple[Tensor, ...]], x: Tensor, y: Tensor, extremes: bool
    ) -> int:
        """`mixing.must_not_mix` for records x and targets y, which are repeated where there are more records."""
        again, ends = same_randomness(x.device), set[bytes]()

        def run(x: Tensor) -> tuple[Tensor, ...]:
            next(again)
            values = find(x, y[torch.arange(len(x), device=y.device) % len(y)])
            ends.add(torch.get_rng_state().numpy().tobytes())
            return values

        try:
            return mixing.must_not_mix(run, x, extremes)
        except Unsupported as error:
            if len(ends) > 1:  # as RReLU, which draws a number for each negative input
                raise Unsupported("how many random numbers it draws depends on the records' values") from error
            raise

    def losses_and_norms(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        each = self.per_example([(1.0, self.theta)], x, y)
        return each.losses[0], each.norms

    def takes_extremes(self, x: Tensor, y: Tensor) -> bool:
        """True if the model and the loss accept records unlike x, y, see `mixing.takes_extremes`."""
        if self._takes_extremes is None:
            with self.running():
                self._takes_extremes = mixing.takes_extremes(self.state, self.model, self.loss, x, y)
        return self._takes_extremes

    def per_example(self, points: WeightedPoints, x: Tensor, y: Tensor, scale: Vector | None = None) -> PerExample:
        """Losses and gradients of at least one example; arguments as in `clipped`."""
        scale, shift = (scale, None) if scale is None or scale.dim() == 1 else scale
        with self.running():
            return self._per_example(points, x, y, scale, shift)

    @contextmanager
    def exact(self) -> Iterator[None]:
        """While this is entered, everything is computed in the parameters' own type."""
        yield

    @contextmanager
    def running(self) -> Iterator[None]:
        """To be entered around every pass: layers that are to stay in evaluation mode are, and nothing is compiled."""
        # `model.train()` of a caller must not let them take statistics of a batch.
        for module in self._frozen:
            module.training = False
        with AsWritten():
            yield

    @contextmanager
    def at(self, theta: Vector) -> Iterator[None]:
        """One pass, in which the model's trained parameters are views into a copy of `theta`."""
        kept = [p.data for p in self.trained.values()]
        # What a layer sees, of which norms and sum are made, may be a view of it (a latent array), and a model may
        # write into it. Nobody else holds it, so that it is gone when the sum is made.
        own = theta.detach().clone()
        try:
            for parameter, part in zip(self.trained.values(), self.split(own), strict=True):
                parameter.data = part
            with self.state:
                yield
        finally:
            for parameter, data in zip(self.trained.values(), kept, strict=True):
                parameter.data = data

    def call(self, parts: Sequence[Tensor], x: Tensor) -> Any:
        """The model's outputs where `parts` are its trained parameters, by `torch.func`, within a pass."""
        parameters = {name: parts[number] for name, number in self._places.items()}
        return functional_call(self.model, parameters, (x,), tie_weights=False)

    def split(self, theta: Vector) -> list[Tensor]:
        parts = torch.split_with_sizes(theta, self._sizes)
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def _most_examples(self) -> int:
        raise NotImplementedError

    def output(self, x: Tensor) -> Any:
        """The model's outputs for records x, by one plain pass."""
        with self.state:
            return self.run(x)

    def run(self, x: Tensor) -> Any:
        """The same within a pass."""
        return self.model(x)

    def _losses(self, theta: Vector, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self._outputs(theta, x), y)

    def _per_example(
        self, points: WeightedPoints, x: Tensor, y: Tensor, scale: Vector | None, shift: Vector | None
    ) -> PerExample:
        raise NotImplementedError


def layout_of(model: nn.Module) -> Layout:
    """The layout of a model's trained parameters, by their names in the user's model; it needs no values."""
    modules = {
        plain(name): "Embedding" if isinstance(module, nn.Embedding) else type(module).__name__
        for name, module in model.named_modules()
    }
    trained = ((plain(name), p.shape) for name, p in model.named_parameters() if p.requires_grad)
    return laid_out((name, shape, modules[name.rpartition(".")[0]]) for name, shape in trained)


def _spaced(x: Tensor) -> list[int]:
    """Some rows, evenly spaced, as the first ones of a sorted batch can all be of one kind."""
    return torch.linspace(0, len(x) - 1, _ALONE).long().unique().tolist()


class AsWritten:
    """While it is entered, modules run as they are written, whatever torch has compiled or fused, and repeatably."""

    # Both settings are the process's: the first of two threads must not restore them for the other.
    _lock, _entered, _restore = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with AsWritten._lock:
            if not AsWritten._entered:
                self._set()
            AsWritten._entered += 1

    def __exit__(self, *exception: object) -> None:
        with AsWritten._lock:
            AsWritten._entered -= 1
            if not AsWritten._entered:
                AsWritten._restore.close()

    def _set(self) -> None:
        # Fused attention makes nested tensors, which `vmap` cannot follow.
        if torch.backends.mha.get_fastpath_enabled():
            torch.backends.mha.set_fastpath_enabled(False)
            AsWritten._restore.callback(torch.backends.mha.set_fastpath_enabled, True)
        # Some of cuDNN's convolutions add in any order: the same query would not have the same answer, bit for bit.
        if not torch.backends.cudnn.deterministic:
            torch.backends.cudnn.deterministic = True
            AsWritten._restore.callback(setattr, torch.backends.cudnn, "deterministic", False)
        # A compiled model keeps the hooks of its first pass, and would not show the layers of later ones.
        if "torch._dynamo" in sys.modules:  # without it nothing is compiled, and importing it takes seconds
            AsWritten._restore.enter_context(torch.compiler.set_stance("force_eager"))


def gradients(loss: Tensor, parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of `loss` by plain autograd; None for a parameter that it does not use. The graph is kept."""
    kept = [p.grad for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        if loss.requires_grad:
            # By `backward`: `torch.autograd.grad` does not see parameters inside a reentrant checkpoint.
            loss.backward(retain_graph=True)
        return [p.grad for p in parameters]
    finally:
        for p, grad in zip(parameters, kept, strict=True):
            p.grad = grad


def gradient(loss: Tensor, parameters: Sequence[Tensor]) -> Vector:
    """`gradients` as one vector [d], with zeros for a parameter that is not used."""
    pairs = zip(gradients(loss, parameters), parameters, strict=True)
    return torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs])


def scaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    """Combined gradients [..., d] as they are clipped; `scale` as in `ClippingEngine.clipped`."""
    if scale is None:
        return gradient
    return gradient * scale if scale.dim() == 1 else (gradient - scale[1]) * scale[0]


def clip_factors(clip: ClipRule, norm: Tensor, mask: Tensor) -> Tensor:
    """The factor of each example's gradient, shape [n]; zero where it is masked out or not finite."""
    # Whatever the rule says, no example contributes more than the sensitivity that the noise is scaled to; an infinite
    # norm makes that 0, one that is not a number makes it none. Squares of a norm below `least` may have been too small
    # for the type, so it may be longer than it seems; a factor below `tiny` has few digits, and may be too large.
    tiny, least = _limits(norm.dtype)
    factor = torch.minimum(factors(clip, norm), clip.sensitivity / norm.clamp(min=least))
    return F.threshold(factor.nan_to_num_(nan=0.0), tiny, 0.0).mul_(mask)


@cache
def _limits(dtype: torch.dtype) -> tuple[float, float]:
    number = torch.finfo(dtype)
    return number.tiny, number.tiny**0.5 / number.eps


def must_be_sanitized(norm: Tensor) -> bool:
    """True if rows that are not finite may have to hold zeros before they are summed, as 0 * nan is nan."""
    return norm.is_cuda or not math.isfinite(norm.sum())  # a GPU is not waited for


def free_memory(device: torch.device) -> int:
    """Bytes that one physical batch may take. On the CPU a constant, so that results do not depend on the machine."""
    return torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else 2**30


class FullPrecision:
    """While it is entered, float32 is multiplied as float32, whatever autocast or settings for TF32 and bfloat16 say.

    An example's norm and its share of the clipped sum come from different products of the same numbers. With the ten
    or seven bits that TF32 and bfloat16 keep, the two differ, and the noise is scaled to the norm. cuDNN's convolutions
    use TF32 by default. The model's own passes are left as they are.

    It looks at the settings when it is made, which takes longer than most layers; it may be entered more than once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, (owners, name, exact) = device.type, _precisions(device.type)
        self._reduced = [owner for owner in owners if getattr(owner, name) not in exact]
        self._entered: list[ExitStack | None] = []

    def __enter__(self) -> None:
        is_autocast = torch.is_autocast_enabled(self._device)
        self._entered.append(self._set(is_autocast) if self._reduced or is_autocast else None)

    def __exit__(self, *exception: object) -> None:
        if stack := self._entered.pop():
            stack.close()

    def _set(self, is_autocast: bool) -> ExitStack:
        stack, (_, name, exact) = ExitStack(), _precisions(self._device)
        if is_autocast:
            stack.enter_context(torch.autocast(self._device, enabled=False))
        for owner in self._reduced:
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, exact[0])
        return stack


@cache
def _precisions(device: str) -> tuple[list[Any], str, tuple[Any, ...]]:
    """Where torch keeps how a device multiplies float32, the name of the setting, its values that keep all digits."""
    backends: Any = torch.backends
    cuda = [] if device == "cpu" else [backends.cuda.matmul, backends.cudnn]
    if not hasattr(backends.cuda.matmul, "fp32_precision"):  # before torch 2.9
        return cuda, "allow_tf32", (False,)
    owners = [backends.cuda.matmul, backends.cudnn.conv] if cuda else [backends.mkldnn.matmul, backends.mkldnn.conv]
    return owners, "fp32_precision", ("ieee", "none")
