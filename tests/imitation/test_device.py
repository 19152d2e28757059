"""The imitated GPU: where tensors lie, what the host waits for, and that values are the CPU's."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from devices import Card

from imitation import ignore, imitated_cuda

ON_CPU = {"host": torch.arange(5.0), "number": torch.tensor(2.0), "index": torch.tensor([0, 2])}
"""What the operations below find on the CPU; `x` and `mask`, of shape [5], are on the device."""

QUIET = {
    "number of Python's": lambda x, mask: 1 - 2 * x**2 + 0.5**x,
    "filled": lambda x, mask: x.new_full((), 2.0, dtype=torch.float64),
    "made there": lambda x, mask: torch.zeros(3, device="cuda") + torch.ones(3, device=x.device),
    "chosen": lambda x, mask: torch.where(mask, x, 0.0),
    "assigned by a mask": lambda x, mask: x.clone().__setitem__(mask, 3.0),
    "indexed there": lambda x, mask: x[torch.arange(2, device="cuda")],
    "reduced": lambda x, mask: torch.linalg.vector_norm(x) + x.sum() + x.max() + x.isfinite().all(),
    "sent": lambda x, mask: ON_CPU["host"].pin_memory().to("cuda", non_blocking=True),
    "dropout": lambda x, mask: F.dropout(x),
    "repeated": lambda x, mask: x.repeat_interleave(2),
    "lists of tensors": lambda x, mask: torch._foreach_mul([x, x], 2.0),
}
"""Operations for which the host does not wait."""

WAITING = {
    "item": (lambda x, mask: x[0].item(), "_local_scalar_dense"),
    "bounds of two kinds": (lambda x, mask: x.clamp(min=x[0], max=2.0), "_local_scalar_dense"),
    "factor of a sum": (lambda x, mask: torch.add(x, x, alpha=x[0]), "_local_scalar_dense"),
    "list": (lambda x, mask: x.tolist(), "_to_copy to the CPU"),
    "copied back": (lambda x, mask: torch.empty(5).copy_(x), "copy_ to the CPU"),
    "nonzero": (lambda x, mask: x.nonzero(), "nonzero"),
    "mask": (lambda x, mask: x[mask], "index"),
    "equal": (lambda x, mask: torch.equal(x, x), "equal"),
    "blocking copy": (lambda x, mask: ON_CPU["host"].to("cuda"), "_to_copy from the CPU"),
    "one entry": (lambda x, mask: x.clone().__setitem__(0, ON_CPU["number"]), "copy_ from the CPU"),
    "new_tensor": (lambda x, mask: x.new_tensor([1.0, 2.0]), "_to_copy from the CPU"),
    "tensor": (lambda x, mask: torch.tensor([1.0], device="cuda"), "_to_copy from the CPU"),
    "synchronize": (lambda x, mask: torch.cuda.synchronize(), "torch.cuda.synchronize"),
}
"""Operations for which the host waits, and what says so; PyTorch's debug mode knows of all but the last on a card."""

WAITING_OUT_OF_SIGHT = {
    "inverse": (lambda x, mask: torch.linalg.inv(torch.eye(2, device="cuda")), "_linalg_check_errors"),
    "repeated": (lambda x, mask: x.repeat_interleave(x.long()), "repeat_interleave"),
    "drawn": (lambda x, mask: torch.multinomial(x, 2), "multinomial"),
}
"""The same, of libraries beneath PyTorch, whose waiting its debug mode may not see."""

BY_VALUE = {
    "product": (lambda x, mask: x * ON_CPU["number"], "mul"),
    "choice": (lambda x, mask: torch.where(mask, ON_CPU["number"], x), "where"),
    "fill": (lambda x, mask: x.clone().fill_(ON_CPU["number"]), "fill_"),
    "index": (lambda x, mask: x[ON_CPU["index"]], "index"),
}
"""Operations that take something from the CPU along."""

MIXED = {
    "in place on the CPU": (lambda x, mask: torch.zeros(()).add_(x[0]), "add_"),
    "host in a choice": (lambda x, mask: torch.where(mask, x, ON_CPU["host"]), "where"),
    "stack": (lambda x, mask: torch.stack([x[0], ON_CPU["number"]]), "stack"),
    "dot": (lambda x, mask: ON_CPU["host"] @ x, "dot"),
    "rows that are assigned": (lambda x, mask: x.clone().index_put_((mask.long(),), ON_CPU["host"]), "index_put_"),
}
"""Operations on tensors of two devices."""


def there():
    return torch.arange(1.0, 6.0, device="cuda"), torch.arange(5, device="cuda") > 1


@pytest.mark.parametrize("name", QUIET)
def test_operations_that_do_not_wait(name):
    with imitated_cuda():
        QUIET[name](*there())


@pytest.mark.parametrize("name", WAITING | WAITING_OUT_OF_SIGHT)
def test_operations_that_wait(name):
    function, operation = (WAITING | WAITING_OUT_OF_SIGHT)[name]
    seen = []
    with imitated_cuda(seen.append):
        x, mask = there()
        function(x, mask)
    assert any(operation in notice and "the host waits for the device" in notice for notice in seen), seen
    with imitated_cuda(), pytest.raises(AssertionError, match=f"the host waits for the device .*{operation}"):
        function(*there())


@pytest.mark.parametrize("name", BY_VALUE | MIXED)
def test_operations_on_both_devices(name):
    """One number, or indices, may come from the CPU, which is said; nothing else may."""
    function, operation = (BY_VALUE | MIXED)[name]
    reason = "takes a tensor on the CPU beside" if name in BY_VALUE else "takes tensors on the GPU and"
    with imitated_cuda(), pytest.raises(AssertionError, match=f"aten::{operation} {reason}"):
        function(*there())
    with imitated_cuda(ignore), nullcontext() if name in BY_VALUE else pytest.raises(AssertionError):
        assert function(*there()).is_cuda


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUIET)
def test_on_a_card_they_do_not_wait_either(name):
    inputs = there()
    QUIET[name](*inputs)  # what is set up with the first call may wait
    with Card().never_waiting():
        QUIET[name](*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in WAITING if name != "synchronize"])
def test_on_a_card_they_wait_too(name):
    inputs = there()
    with Card().never_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        WAITING[name][0](*inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MIXED)
def test_on_a_card_they_are_refused_too(name):
    with pytest.raises((RuntimeError, IndexError)):
        MIXED[name][0](*there())
