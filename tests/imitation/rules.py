"""What an optimizer is held to on an imitated GPU."""

import unittest

from dpopt.testing.numerics import require_near_states
from dpopt.testing.task import Task
from imitation.device import ignore, imitated_cuda, values


def on_device(value):
    return value.to("cuda", non_blocking=True)


def never_waits_for_the_device(optimizer):
    """No step needs a tensor's value on the host: none waits for a GPU, and steps can be compiled and captured.

    Calibration refuses most that do, as their tensors have no values there. This finds one that asks for `is_meta`, and
    transfers: a tensor made of Python's numbers is copied to the device, which is waited for.
    """
    reason = getattr(optimizer, "conformance_exceptions", {}).get("never_waits_for_the_device")
    if reason:
        raise unittest.SkipTest(reason)
    recording = Task().record(optimizer)
    with imitated_cuda():
        recording.replay(optimizer, on_device)


def same_on_an_imitated_gpu(optimizer):
    """The same releases on an imitated GPU lead to the same end as on the CPU."""
    recording = Task().record(optimizer)
    with imitated_cuda(ignore):
        final = recording.replay(optimizer, on_device)
    require_near_states(values(final), recording.final, recording, "an imitated GPU and the CPU")


RULES = never_waits_for_the_device, same_on_an_imitated_gpu
