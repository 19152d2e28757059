"""GPUs that tests run on: an imitated one anywhere, and the one that is there with `-m gpu`."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
from imitation import imitated_cuda
from torch.utils import _pytree as pytree


class Imitated:
    """A GPU of `imitated_cuda`."""

    name = "imitated"
    _may_wait = True

    def there(self):
        """A context in which there is the device `cuda`."""
        return imitated_cuda(self._notice)

    @contextmanager
    def never_waiting(self):
        """A context inside of the other, in which an error is raised where the host waits for the device."""
        self._may_wait = False
        try:
            yield
        finally:
            self._may_wait = True

    def _notice(self, notice):
        if not self._may_wait:
            raise AssertionError(notice)


class Card:
    """The GPU that there is; PyTorch's own debug mode tells where the host waits."""

    name = "card"

    def there(self):
        return nullcontext()

    @contextmanager
    def never_waiting(self):
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


def to(device, tree):
    """`tree` with its tensors on `device`; on an imitated GPU only while there is one."""
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, tree)


ON_CUDA = pytest.mark.parametrize(
    "cuda", [Imitated(), pytest.param(Card(), marks=pytest.mark.gpu)], ids=lambda c: c.name
)
