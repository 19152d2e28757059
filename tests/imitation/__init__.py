"""A GPU that is imitated, with values, and what optimizers, engines and oracles are held to on it."""

from imitation.device import ignore, imitated_cuda, refuse, values
from imitation.rules import RULES, never_waits_for_the_device, same_on_an_imitated_gpu

__all__ = [
    "RULES",
    "ignore",
    "imitated_cuda",
    "never_waits_for_the_device",
    "refuse",
    "same_on_an_imitated_gpu",
    "values",
]
