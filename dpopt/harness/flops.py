"""Floating-point operations: what a workload's records take, and how many a device does in a second.

Products of matrices, convolutions and attention are counted as `torch.utils.flop_counter` does: a multiplication and an
addition are two. What else a private step does is left out: norms, noise, the optimizer, losses that it probes.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from dpopt import registry
from dpopt.errors import ConfigError, unknown
from dpopt.workloads.base import Outline, Workload

PEAKS = {
    **{"t4": 8.1e12, "v100": 15.7e12, "titan_rtx": 16.3e12, "a100": 19.5e12, "l4": 30.3e12},
    **{"h100": 67e12, "h200": 67e12, "rtx_4090": 82.6e12},
}
"""FLOPs a second of float32 arithmetic without tensor cores, as the makers state them; training here is in float32."""
SHARE_OF_PEAK = 0.4
"""The share of it that private training is assumed to reach."""
SHARE_OF_PRODUCTS = 0.5
"""The share of the rate of large matrix products that private training is assumed to reach."""
SIDES = {"cpu": 1024, "cuda": 8192}
"""The side of the matrices whose product tells the rate of a device."""


@dataclass(frozen=True)
class Work:
    """What one record takes.

    Attributes:
        dimension: trained parameters.
        gradient: FLOPs of output and gradient of the trained parameters, for all views of the record.
        evaluation: FLOPs of one entry of the curve, which looks at all validation and test records.
        marks: entries of a curve.
    """

    dimension: int
    gradient: int
    evaluation: int
    marks: int


@dataclass(frozen=True)
class Rate:
    """How fast a device is.

    Attributes:
        flops: a second.
        basis: what the number rests on, for people.
        device: where it is not this machine's, words of its name.
    """

    flops: float
    basis: str
    device: str = ""

    def is_of(self, device: str) -> bool:
        """Whether `device`, as `provenance` names it, is the one."""
        return set(self.device.split("_")) <= set(re.split(r"[\s_-]+", device.lower()))


@cache
def work_of(workload: str) -> Work | None:
    """What the records of a workload take, from the shapes of its model; neither data nor weights are needed.

    Args:
        workload: as `registry.spec` describes it, as JSON.

    Returns:
        None where it cannot be counted: there are no shapes without files, or the model looks at values.
    """
    made: Workload = registry.from_spec("workload", json.loads(workload))
    try:
        outline = made.outline()
        forward, gradient = count(outline, made.loss)
    except (ConfigError, RuntimeError, NotImplementedError):
        return None
    trained = sum(parameter.numel() for parameter in outline.model.parameters() if parameter.requires_grad)
    evaluation = (made.validation + outline.tested) * forward
    return Work(trained, gradient * made.multiplicity, evaluation, made.marks)


def count(outline: Outline, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> tuple[int, int]:
    """FLOPs of one record: of the model's output, and of output and gradient together.

    Raises:
        RuntimeError, NotImplementedError: the model cannot be followed without values.
    """
    try:
        return _counted(outline, loss, nullcontext())
    except (RuntimeError, NotImplementedError):  # transformers looks at values, but for tensors that say they are fake
        return _counted(outline, loss, FakeTensorMode(allow_non_fake_inputs=True))


def _counted(
    outline: Outline, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], mode: AbstractContextManager[object]
) -> tuple[int, int]:
    outline.model.train()
    with mode, FlopCounterMode(display=False, custom_mapping=CORRECTED) as counter:
        losses = loss(outline.model(outline.record.x), outline.record.y)
        forward = counter.get_total_flops()
        losses.sum().backward()
        return forward, counter.get_total_flops()


def _convolution_backward(
    output: list[int], inputs: list[int], weight: list[int], *rest: Any, out_shape: Any = None
) -> int:
    """As many as forward for each gradient that is asked for; torch counts the weight's as if there were one group."""
    *_, transposed, _, _, (is_of_inputs, is_of_weight, _) = rest
    return (is_of_inputs + is_of_weight) * conv_flop_count(inputs, weight, output, transposed)


CORRECTED = {torch.ops.aten.convolution_backward: _convolution_backward}
"""Operations that `torch.utils.flop_counter` miscounts."""


def rate(value: str | float | None, device: torch.device) -> Rate:
    """How fast the device is that `value` names.

    Args:
        value: a key of `PEAKS`, FLOPs a second, or None, which measures `device`.
        device: of this machine.

    Raises:
        ConfigError: neither a number above 0 nor a device that is known.
    """
    if value is None:
        core = " on one core" if device.type == "cpu" else ""
        found = SHARE_OF_PRODUCTS * measured(device)
        return Rate(found, f"{found:.1e} a second, {SHARE_OF_PRODUCTS:.0%} of a product of matrices here{core}")
    if isinstance(value, str) and value in PEAKS:
        found = SHARE_OF_PEAK * PEAKS[value]
        return Rate(found, f"{found:.1e} a second, assumed: {SHARE_OF_PEAK:.0%} of its float32 peak", value)
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise unknown("flops", value, PEAKS) from None
    if not 0 < found < float("inf"):
        raise ConfigError("flops", value, f"expected FLOPs a second, or a device: {', '.join(PEAKS)}")
    return Rate(found, f"{found:.1e} a second, as given")


@cache
def measured(device: torch.device) -> float:
    """FLOPs a second of float32 products of large matrices; on a CPU those of one core, as a cell uses one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.rand(SIDES[device.type], SIDES[device.type], device=device)
        return 2 * len(a) ** 3 / min(_seconds(a) for _ in range(4))
    finally:
        torch.set_num_threads(threads)


def _seconds(a: torch.Tensor) -> float:
    """That a product takes, on a core of its own or on the device."""
    clock = time.perf_counter if a.is_cuda else time.process_time
    started = clock()
    (a @ a)[0, 0].item()  # waits for the device
    return clock() - started
