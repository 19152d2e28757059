"""The rules of the imitated GPU must be able to fail: each is shown an optimizer that breaks it."""

import unittest
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from dpopt.optimizers.dp_sgd import DPSGD
from imitation import never_waits_for_the_device, same_on_an_imitated_gpu

LOOKS = {
    "item": (lambda value: value[0].item(), "the host waits for the device .aten::_local_scalar_dense"),
    "scalar": (lambda value: value * torch.tensor(2.0), "aten::mul takes a tensor on the CPU beside"),
}


@dataclass(frozen=True)
class Looks(DPSGD):
    """Needs a value on the host, by the means that `how` names; not in calibration."""

    how: str = "item"

    def direction(self, state, gradient):
        if not gradient.value.is_meta:
            LOOKS[self.how][0](gradient.value)
        return gradient.value, state


@dataclass(frozen=True)
class Excepted(Looks):
    conformance_exceptions: ClassVar = {"never_waits_for_the_device": "it looks on purpose"}


@dataclass(frozen=True)
class Mixes(DPSGD):
    """Takes a tensor that was left on the CPU."""

    def direction(self, state, gradient):
        return gradient.value * (torch.ones(1) if gradient.value.is_cuda else 1.0), state


@dataclass(frozen=True)
class OtherOnGPUs(DPSGD):
    def direction(self, state, gradient):
        return gradient.value * (2.0 if gradient.value.is_cuda else 1.0), state


@pytest.mark.parametrize("how", LOOKS)
def test_a_look_is_caught(how):
    with pytest.raises(AssertionError, match=LOOKS[how][1]):
        never_waits_for_the_device(Looks(how=how))


def test_a_look_may_be_excepted_with_a_reason():
    with pytest.raises(unittest.SkipTest, match="on purpose"):
        never_waits_for_the_device(Excepted())


def test_tensors_of_two_devices_are_caught():
    with pytest.raises(AssertionError, match="aten::mul takes tensors on the GPU and on the CPU"):
        same_on_an_imitated_gpu(Mixes())


def test_another_end_is_caught():
    with pytest.raises(AssertionError, match="an imitated GPU and the CPU differ in leaf 0"):
        same_on_an_imitated_gpu(OtherOnGPUs())
