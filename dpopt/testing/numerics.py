"""Rules that make a run repeatable, resumable, precise and quick."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
import unittest
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from dpopt import registry
from dpopt.clipping.flat import clip_factors, scaled
from dpopt.privacy.data import sums
from dpopt.privacy.oracle import AnyKind, BaseOracle
from dpopt.privacy.queries import Asked, Gradient, Space
from dpopt.testing.configuration import entries_of
from dpopt.testing.task import DRAWS, Recording, Task, pairs, require_near, require_same, tensors
from dpopt.types import Optimizer, Vector, laid_out

_GOAL, _TARGET_DRAWS = 0.1, 120
"""A target counts as minimised at this share of its first value, reached within so many draws."""
_BACK = 0.1
"""The share of its fall by which a loss may be above its least in the end."""
_FACTORS = (1.0, 10.0, 3.0, 30.0, 0.3, 0.1, 100.0, 0.03, 0.01)
"""The learning rates that are tried on a target, as multiples of the optimizer's own."""
_PRECISION, _STATE_PRECISION = 1e-5, 1e-2
"""The allowed distance of theta, and of the rest of a state, from the same in float64 or on another device, as a share
of the way. Values that follow from theta's distance, such as DoG's step size, inherit its rounding many times over."""
DEVICE = "cuda"


def is_pure(optimizer: Optimizer) -> None:
    """`init` and `step` change nothing in place, keep dtype, shape and device, and use no global random numbers."""
    recording = Task().record(optimizer)
    oracle, inputs = recording.oracle(), [recording.start, *recording.tensors]
    # On from where the recording left them: a step that seeds them would leave them there again.
    for draw in (random.random, np.random.random, lambda: torch.rand(1)):
        draw()
    before, generators = [tensor.clone() for tensor in inputs], _generators()
    state = optimizer.init(recording.start)
    assert state._fields[0] == "theta", "the state's first field is not `theta`"
    assert torch.equal(state.theta, recording.start), "the state does not start at theta"
    while oracle.draws_left:
        state = _pure_step(optimizer, state, oracle)
    assert all(map(torch.equal, before, inputs)), "theta, as given to `init`, or a release is changed in place"
    assert generators == _generators(), "a global random generator is used"


def resumes_bit_for_bit(optimizer: Optimizer, device: str = "cpu") -> None:
    """Half the draws, saved, loaded into a new optimizer, then the rest: the same state as without the stop."""
    task = Task(device=device)
    recording = task.record(optimizer)
    first = task.oracle(recording.plan)
    # Half of the draws: for a method of two draws a step, a number that a step can end at.
    half = task.run(optimizer, first, until=DRAWS // 2)
    # A new object: a counter that is kept outside of the state is lost here, as it is in another process.
    copy: Any = dataclasses.replace(optimizer)  # type: ignore[type-var]
    # As a checkpoint is: through bytes, by a reader that takes nothing but tensors.
    (leaves, structure), file = pytree.tree_flatten(half), io.BytesIO()
    torch.save(leaves, file)
    file.seek(0)
    loaded = pytree.tree_unflatten(torch.load(file, weights_only=True), structure)
    resumed = task.run(copy, task.oracle(recording.plan, ledger=first.ledger), loaded)
    require_same(resumed, recording.final, "a run that was stopped ends elsewhere")


def works_without_noise(optimizer: Optimizer) -> None:
    """Each of four functions falls to a tenth in 120 draws, at some learning rate unless it is parameter-free."""
    # A method that claims to need no learning rate has to work as it is.
    is_free = any(
        entry.family == "parameter-free" and registry.create(entry.name) == optimizer for entry in entries_of(optimizer)
    )
    one: Any = optimizer
    is_fixed = is_free or not hasattr(one, "lr")
    candidates = [one] if is_fixed else [dataclasses.replace(one, lr=factor * one.lr) for factor in _FACTORS]
    for name in TARGETS:
        values = chain.from_iterable(_way(candidate, name) for candidate in candidates)
        # The way ends at the goal, as all that follows is time.
        is_reached = any(value <= _GOAL for value in values)
        assert is_reached, f"{name} never falls to {_GOAL} of its first value in {_TARGET_DRAWS} draws"


def ends_near_its_best(optimizer: Optimizer) -> None:
    """Without noise, at a hundredth of its learning rate, a function ends within a tenth of its fall of its least."""
    one: Any = optimizer
    # With small steps nothing overshoots.
    careful = dataclasses.replace(one, lr=one.lr / 100) if hasattr(one, "lr") else one
    way = list(_way(careful, "a quadratic"))
    least, last = min(way), way[-1]
    assert last - least <= _BACK * (1 - least), (
        f"a quadratic falls to {least:.6g} of its first value and ends at {last:.6g}"
    )


def agrees_in_float64(optimizer: Optimizer) -> None:
    """The same releases in float32 and in float64 lead to nearly the same end, and vectors keep the type of theta."""
    recording = Task().record(optimizer)
    # Vectors of a second type would hide a loss of digits, which the ends might not show.
    with OneType(torch.float64, recording.plan.dimension):
        double = recording.replay(optimizer, Tensor.double)
    with OneType(torch.float32, recording.plan.dimension):
        single = recording.replay(optimizer)
    require_near_states(single, double, recording, "float32 and float64")


def same_on_cuda(optimizer: Optimizer) -> None:
    """The same releases on a GPU lead to the same end as on the CPU."""
    if not torch.cuda.is_available():
        raise unittest.SkipTest("there is no GPU")
    recording = Task().record(optimizer)
    there = recording.replay(optimizer, lambda value: value.to(DEVICE, non_blocking=True))
    require_near_states(there, recording.final, recording, "GPU and CPU")


def require_near_states(state: Any, expected: Any, recording: Recording, who: str) -> None:
    """Raise `AssertionError` unless the finite leaves of two states that a run has ended in agree but for rounding."""
    for number, (leaf, other) in enumerate(pairs(state, expected)):
        # Between whole numbers, or infinities, there is no distance that rounding explains.
        if not (other.is_floating_point() and other.isfinite().all()):
            continue
        start, tolerance = (torch.zeros_like(other), _STATE_PRECISION) if number else (recording.start, _PRECISION)
        require_near(leaf, other, start, tolerance, f"{who} differ in leaf {number} of the state")


def _pure_step(optimizer: Optimizer, state: Any, oracle: Any) -> Any:
    before = [leaf.clone() for leaf in tensors(state)]
    after = optimizer.step(state, oracle)
    assert all(map(torch.equal, before, tensors(state))), "`step` changes its state in place"
    for old, new in pairs(state, after):
        kinds = [(tensor.dtype, tensor.shape, tensor.device) for tensor in (old, new)]
        assert kinds[0] == kinds[1], f"`step` makes {kinds[1]} of {kinds[0]}"
        # A graph would grow with every step and keep all earlier states in memory.
        assert not new.requires_grad, "the state keeps an autograd graph"
    return after


def _generators() -> list[Any]:
    # Not the GPU's: asking for them would start a driver.
    return [torch.get_rng_state().tolist(), random.getstate(), pickle.dumps(np.random.get_state())]


def _way(optimizer: Optimizer, name: str) -> Iterator[float]:
    """The values of a target, as shares of the first, at the start and after each step."""
    oracle = Exact(name, _TARGET_DRAWS)
    state = optimizer.init(oracle.start)
    first = float(oracle.objective(state.theta))
    yield 1.0
    while oracle.draws_left:
        state = optimizer.step(state, oracle)
        yield float(oracle.objective(state.theta)) / first


class OneType(TorchDispatchMode):
    """Refuses operations that make a vector, of `dimension` numbers or more, of another floating type than `dtype`."""

    def __init__(self, dtype: torch.dtype, dimension: int) -> None:
        super().__init__()
        self._dtype, self._dimension = dtype, dimension

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            is_vector = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel() >= self._dimension
            is_other = is_vector and leaf.dtype != self._dtype
            assert not is_other, f"aten::{func.overloadpacket.__name__} makes a vector {leaf.dtype} in {self._dtype}"
        return result


def _quadratic(theta: Vector) -> Tensor:
    """|theta - (1, -1, 1, -1, ...)|^2 / 2."""
    return (theta - _signs(theta)).square().sum() / 2


def _ill_conditioned(theta: Vector) -> Tensor:
    """A quadratic whose curvatures go from 0.01 to 1."""
    return (torch.logspace(-2, 0, len(theta)) * (theta - _signs(theta)).square()).sum() / 2


def _matrix_regression(theta: Vector) -> Tensor:
    """|X W - Y|^2 / 2n for W [4, 3] and n = 6 rows of X, with Y = X W for the W of ones and minus ones."""
    x = torch.cos(torch.arange(24.0).square()).view(6, 4)
    return (x @ (theta - _signs(theta)).view(4, 3)).square().sum() / 12


def _mixed_shapes(theta: Vector) -> Tensor:
    """A sum for a scalar s, a vector b [3] and a matrix W [4, 3] in one vector, of curvatures 3, 1/3 and W's above."""
    scalar, vector, _ = (theta - _signs(theta)).tensor_split([1, 4])
    return 1.5 * scalar.square().sum() + vector.square().sum() / 6 + _matrix_regression(theta[4:])


class Exact(BaseOracle):
    """Answers with a target's own gradients and values, clipped as those of the only record, and adds no noise.

    Args:
        name: of the target.
        draws: that can be taken.

    Attributes:
        objective: the target.
        start: the vector of zeros.
    """

    def __init__(self, name: str, draws: int) -> None:
        self.objective, shapes = TARGETS[name]
        parts = laid_out((f"{number}.weight", shape, "") for number, shape in enumerate(shapes))
        self.start = torch.zeros(parts[-1].slice.stop)
        space = Space(len(self.start), self.start.dtype, self.start.device, layout=parts)
        super().__init__(space=space, rate=1.0, expected_batch=1.0, draws=draws, noise=AnyKind(0.0))
        self._norm = torch.full((1,), torch.nan)

    def _sum(self, asked: Asked, records: Any) -> Tensor:
        query, counts = asked.query, torch.ones(1, dtype=torch.bool)
        if not isinstance(query, Gradient):
            values = [self.objective(theta) for theta in query.probed]
            losses = torch.stack(values).double().unsqueeze(1) if values else torch.zeros(0, 1, dtype=torch.float64)
            return sums(asked, losses, self._norm, counts)
        gradient = torch.stack([weight * self._slope(theta) for weight, theta in query.points]).sum(dim=0)
        gradient = scaled(gradient, query.frame)
        # A query of counts refers to the last gradient.
        self._norm = gradient.norm().view(1)
        return (clip_factors(query.clip, self._norm, counts) * gradient).nan_to_num()

    def _slope(self, theta: Vector) -> Vector:
        with torch.enable_grad():
            point = theta.detach().requires_grad_()
            return torch.autograd.grad(self.objective(point), point)[0]


def _signs(like: Tensor) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(len(like), device=like.device) % 2).to(like.dtype)


TARGETS = {
    "a quadratic": (_quadratic, [(10,)]),
    "an ill-conditioned quadratic": (_ill_conditioned, [(10,)]),
    "a matrix regression": (_matrix_regression, [(4, 3)]),
    "a sum over mixed shapes": (_mixed_shapes, [(), (3,), (4, 3)]),
}
"""Functions of a vector [d] whose least value is 0, and the shapes in it; the start is zero."""
