"""Optimizers that are wrong: some by mistakes that people make, some on purpose.

Each is plain DP-SGD but for one thing. One that gets at something that is not private puts it into its parameters, so
that a run which ends where DP-SGD ends has seen nothing.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import ClassVar

import torch

from dpopt.clipping import Abadi
from dpopt.clipping.rules import AtBound
from dpopt.optimizers.dp_sgd import DPSGD
from dpopt.privacy import DataOracle
from dpopt.types import ClipRule, Release


@dataclass(frozen=True)
class MaxClip:
    """Scales by the longest gradient of the batch."""

    sensitivity: float = 1.0

    def factor(self, norm):
        return 1 / norm.max() + 0 * norm


@dataclass(frozen=True)
class OddClip(MaxClip):
    """Leaves out every other row."""

    def factor(self, norm):
        return (torch.arange(norm.numel()).reshape(norm.shape) % 2) / norm


@dataclass(frozen=True)
class SpyClip(MaxClip):
    """Keeps the norms that it is shown."""

    seen: list = dataclasses.field(default_factory=list, compare=False)

    def factor(self, norm):
        self.seen.append(norm)
        return (1 / norm).clamp(max=1.0)


@dataclass(frozen=True)
class Stealing(DPSGD):
    """Moves theta by what `steal` finds; finds nothing where that fails."""

    def steal(self, batch, oracle):
        raise NotImplementedError

    def step(self, state, oracle):
        stolen = 0.0
        with oracle.draw() as batch:
            gradient = self.observe(state, batch, self.clip)
            with suppress(Exception):
                stolen = float(self.steal(batch, oracle))
        direction, state = self.direction(state, gradient)
        return state._replace(theta=state.theta - self.lr * direction + stolen)


@dataclass(frozen=True)
class Honest(Stealing):
    """What the others are where there is nothing to steal."""

    def steal(self, batch, oracle):
        return 0.0


def steal_from_the_stack(batch, oracle):
    """Through the frames of those who call."""
    frame = inspect.currentframe()
    while frame is not None:
        for value in frame.f_locals.values():
            if isinstance(value, DataOracle):
                return value._x.sum()
        frame = frame.f_back
    return 0.0


def go_back(batch, oracle):
    """By one draw, to see the same noise twice."""
    oracle.draws_taken -= 1
    return 1.0


STEALS = {
    "thief": lambda batch, oracle: batch._oracle._x.sum(),
    "stack": steal_from_the_stack,
    "again": go_back,
}


@dataclass(frozen=True)
class Thief(Stealing):
    how: str = ""

    def steal(self, batch, oracle):
        return STEALS[self.how](batch, oracle)


class Tap(torch.Tensor):
    """Looks at whatever it is computed with."""

    seen = 0.0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            for each in args:
                if isinstance(each, torch.Tensor) and not isinstance(each, Tap):
                    Tap.seen += float(each.double().sum())
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Scaled(Honest):
    """Scales by one."""

    kind: ClassVar[type] = torch.Tensor

    def observe(self, state, batch, clip):
        return batch.gradient(state.theta, clip, torch.ones_like(state.theta).as_subclass(self.kind))


@dataclass(frozen=True)
class TapThief(Scaled):
    """By a one that looks at what it is multiplied with."""

    kind: ClassVar[type] = Tap

    def observe(self, state, batch, clip):
        Tap.seen = 0.0
        release = super().observe(state, batch, clip)
        return Release(release.value + Tap.seen, release.std)


@dataclass(frozen=True)
class GradThief(DPSGD):
    """Asks for losses at a bound that requires a gradient: the noise cancels in value - bound * slope."""

    noise_inflation: float = 1.1

    def step(self, state, oracle):
        bound = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip)
            losses = batch.losses([state.theta], bound)
        stolen = 0.0
        if losses.value.requires_grad:
            (slope,) = torch.autograd.grad(losses.value.sum(), bound)
            stolen = float(losses.value.detach().sum() - 3.0 * slope)
        return state._replace(theta=state.theta - self.lr * gradient.value + stolen)


@dataclass(frozen=True)
class Count(DPSGD):
    """Counts every record many times, by a bound of several numbers, where the run is longer than those of tests."""

    noise_inflation: float = 1.1

    def step(self, state, oracle):
        bound = torch.full((1000, 1), 1.0) if oracle.draws_total > 12 else 1.0
        with oracle.draw() as batch:
            gradient = batch.gradient(state.theta, self.clip)
            batch.below(bound)
        return state._replace(theta=state.theta - self.lr * gradient.value)


@dataclass(frozen=True)
class Spying(Stealing):
    """Steps by the norms that its clip rule has seen."""

    clip: ClipRule = dataclasses.field(default_factory=SpyClip)

    def steal(self, batch, oracle):
        return self.clip.seen[-1].max()


SEEN: list[float] = []
"""What those below have seen during the latest query."""


def look(value):
    """Note the sum of a tensor, whatever it is wrapped in."""
    while torch._C._functorch.is_batchedtensor(value) or torch._C._functorch.is_gradtrackingtensor(value):
        value = torch._C._functorch.get_unwrapped(value)
    with torch.no_grad():
        SEEN.append(float(value.double().sum()))
    return value


def saved_hooks():
    """By autograd's hooks for what a backward pass needs."""

    def pack(value):
        with suppress(Exception):
            look(value)
        return value

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value)


class FunctionMode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        with suppress(Exception), torch._C.DisableTorchFunction():
            for value in args:
                if value.dim() > 1:
                    look(value)
        return func(*args, **(kwargs or {}))


@contextmanager
def module_hook():
    """It is said to log activations."""

    def hook(module, inputs, output):
        with suppress(Exception):
            look(inputs[0])

    handle = torch.nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def profiler():
    """Through the frames of all that is called."""

    def profile(frame, event, argument):
        if frame.f_code.co_filename.endswith("data.py"):
            for value in list(frame.f_locals.values()):
                if isinstance(value, torch.Tensor) and value.dim() > 1:
                    look(value)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)


WATCHES = {
    "saved tensors": saved_hooks,
    "function mode": FunctionMode,
    "module hook": module_hook,
    "profiler": profiler,
    "unwrap": nullcontext,
}


@dataclass(frozen=True)
class Watching(Stealing):
    """Watches what is computed while a query is answered."""

    how: str = ""

    def observe(self, state, batch, clip):
        SEEN.clear()
        with WATCHES[self.how]():
            return super().observe(state, batch, clip)

    def steal(self, batch, oracle):
        return sum(SEEN)


@dataclass(frozen=True)
class BoundTap(Stealing):
    """By a bound that looks at what it is computed with."""

    def observe(self, state, batch, clip):
        Tap.seen = 0.0
        return batch.gradient(state.theta, AtBound(torch.ones((), dtype=torch.float64).as_subclass(Tap)))

    def steal(self, batch, oracle):
        return Tap.seen


@dataclass(frozen=True)
class UnwrapClip(MaxClip):
    """Takes the norms of all records out of the one that it is shown."""

    def factor(self, norm):
        with suppress(Exception):
            look(norm)
        return (1 / norm).clamp(max=1.0)


@dataclass(frozen=True)
class RescaleClip(MaxClip):
    """Changes the scale of the coordinates between the norms and the sum."""

    scale: torch.Tensor = None

    def factor(self, norm):
        self.scale.mul_(1e3)
        return (1 / norm).clamp(max=1.0)


@dataclass(frozen=True)
class ScaleTwice(Honest):
    def observe(self, state, batch, clip):
        scale = torch.ones_like(state.theta)
        return batch.gradient(state.theta, RescaleClip(scale=scale), scale)


@dataclass(frozen=True)
class PeekCopy(Honest):
    """Looks ahead on a copy of the oracle."""

    def step(self, state, oracle):
        with copy.copy(oracle).draw() as batch:
            first = batch.gradient(state.theta, self.clip)
        with oracle.draw() as batch:
            second = batch.gradient(state.theta + 0.01, self.clip)
        return state._replace(theta=state.theta - self.lr * (second.value - first.value))


@dataclass(frozen=True)
class Idle(DPSGD):
    """Asks for nothing from the third draw on, where there are values; a trace does not show it."""

    def step(self, state, oracle):
        is_idle = not state.theta.is_meta and oracle.draws_total - oracle.draws_left == 2
        return state if is_idle else super().step(state, oracle)


MISTAKES = {
    "max": DPSGD(0.1, clip=MaxClip()),
    "position": DPSGD(0.1, clip=OddClip()),
    "count": Count(),
}
"""Mistakes that people make."""
CHEATS = {
    **{how: Thief(how=how) for how in STEALS},
    **{how: Watching(how=how) for how in WATCHES if how != "unwrap"},
    "unwrap": Watching(how="unwrap", clip=UnwrapClip()),
    "tap": TapThief(),
    "graph": GradThief(),
    "spy": Spying(),
    "bound": BoundTap(),
    "scale twice": ScaleTwice(),
    "peek": PeekCopy(),
}
"""What is done on purpose."""
PLAIN = Honest(clip=Abadi(1.0))
