"""The imitated GPU: where tensors lie, what the host waits for, and that values are the CPU's."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from devices import Card, Imitated
from torch import nn

from imitation import ignore, imitated_cuda, values

ON_CPU = {"host": torch.arange(5.0), "number": torch.tensor(2.0), "index": torch.tensor([0, 2])}
"""What the operations below find on the CPU; `x` and `mask`, of shape [5], are on the device."""

QUIET = {
    "number of Python's": lambda x, mask: 1 - 2 * x**2 + 0.5**x,
    "filled": lambda x, mask: x.new_full((), 2.0, dtype=torch.float64),
    "made there": lambda x, mask: torch.zeros(3, device="cuda") + torch.ones(3, device=x.device),
    "like it": lambda x, mask: torch.zeros_like(x) + x.new_zeros(5),
    "ones of a host tensor's shape": lambda x, mask: torch.ones_like(ON_CPU["host"], device="cuda") * x,
    "chosen": lambda x, mask: torch.where(mask, x, 0.0),
    "masked fill": lambda x, mask: x.masked_fill(mask, 3.0),
    "assigned": lambda x, mask: x.clone().__setitem__(0, 3.0),
    "assigned by a mask": lambda x, mask: x.clone().__setitem__(mask, 3.0),
    "indexed there": lambda x, mask: x[torch.arange(2, device="cuda")],
    "sliced": lambda x, mask: x[1:3].clamp(min=x[0]).clamp(max=2.0),
    "reduced": lambda x, mask: torch.linalg.vector_norm(x) + x.sum() + x.max() + x.isfinite().all(),
    "cast": lambda x, mask: x.double().float().bool(),
    "sent": lambda x, mask: ON_CPU["host"].pin_memory().to("cuda", non_blocking=True),
    "copied": lambda x, mask: x.clone().copy_(ON_CPU["host"], non_blocking=True),
    "where it is": lambda x, mask: x.to("cuda").to(x.device).cuda(),
    "random": lambda x, mask: torch.randn(5, device="cuda") + torch.rand_like(x),
    "its own generator": lambda x, mask: torch.randn(
        5, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    ),
    "dropout": lambda x, mask: F.dropout(x),
    "repeated": lambda x, mask: x.repeat_interleave(2),
    "sorted": lambda x, mask: x.sort().values.cumsum(0),
    "lists of tensors": lambda x, mask: torch._foreach_mul([x, x], 2.0),
    "product": lambda x, mask: torch.matmul(x.view(1, 5), x.view(5, 1), out=x.new_empty(1, 1)),
}
"""Operations for which the host does not wait."""

WAITING = {
    "item": (lambda x, mask: x[0].item(), "_local_scalar_dense"),
    "float": (lambda x, mask: float(x[0]), "_local_scalar_dense"),
    "bool": (lambda x, mask: bool(mask[0]), "_local_scalar_dense"),
    "index of a list": (lambda x, mask: [0, 1][mask.long()[0]], "_local_scalar_dense"),
    "bounds of two kinds": (lambda x, mask: x.clamp(min=x[0], max=2.0), "_local_scalar_dense"),
    "factor of a sum": (lambda x, mask: torch.add(x, x, alpha=x[0]), "_local_scalar_dense"),
    "list": (lambda x, mask: x.tolist(), "_to_copy to the CPU"),
    "cpu": (lambda x, mask: x.cpu(), "_to_copy to the CPU"),
    "to the CPU": (lambda x, mask: x.to("cpu"), "_to_copy to the CPU"),
    "to another's device": (lambda x, mask: x.to(ON_CPU["host"]), "_to_copy to the CPU"),
    "copied back": (lambda x, mask: torch.empty(5).copy_(x), "copy_ to the CPU"),
    "nonzero": (lambda x, mask: x.nonzero(), "nonzero"),
    "where": (lambda x, mask: torch.where(mask), "nonzero"),
    "mask": (lambda x, mask: x[mask], "index"),
    "assigned by a mask": (lambda x, mask: x.clone().__setitem__(mask, x[:3]), "index_put_"),
    "equal": (lambda x, mask: torch.equal(x, x), "equal"),
    "near": (lambda x, mask: torch.allclose(x, x), "allclose"),
    "blocking copy": (lambda x, mask: ON_CPU["host"].to("cuda"), "_to_copy from the CPU"),
    "by its method": (lambda x, mask: ON_CPU["host"].cuda(), "_to_copy from the CPU"),
    "blocking copy in place": (lambda x, mask: x.clone().copy_(ON_CPU["host"]), "copy_ from the CPU"),
    "one entry": (lambda x, mask: x.clone().__setitem__(0, ON_CPU["number"]), "copy_ from the CPU"),
    "new_tensor": (lambda x, mask: x.new_tensor([1.0, 2.0]), "_to_copy from the CPU"),
    "tensor": (lambda x, mask: torch.tensor([1.0], device="cuda"), "_to_copy from the CPU"),
    "as_tensor": (lambda x, mask: torch.as_tensor(np.ones(2), device=x.device), "_to_copy from the CPU"),
    "moved module": (lambda x, mask: nn.Linear(2, 2).to("cuda"), "_to_copy from the CPU"),
    "synchronize": (lambda x, mask: torch.cuda.synchronize(), "torch.cuda.synchronize"),
}
"""Operations for which the host waits, and what says so; PyTorch's debug mode knows of all but the last on a card."""

WAITING_OUT_OF_SIGHT = {
    "inverse": (lambda x, mask: torch.linalg.inv(torch.eye(2, device="cuda")), "_linalg_check_errors"),
    "unique": (lambda x, mask: x.unique(), "_unique2"),
    "selected": (lambda x, mask: torch.masked_select(x, mask), "masked_select"),
    "counted": (lambda x, mask: torch.bincount(x.long()), "bincount"),
    "repeated": (lambda x, mask: x.repeat_interleave(x.long()), "repeat_interleave"),
    "drawn": (lambda x, mask: torch.multinomial(x, 2), "multinomial"),
}
"""The same, of libraries beneath PyTorch, whose waiting its debug mode may not see."""

BY_VALUE = {
    "product": (lambda x, mask: x * ON_CPU["number"], "mul"),
    "made on its own": (lambda x, mask: x * torch.scalar_tensor(2.0), "mul"),
    "in place": (lambda x, mask: x.clone().add_(ON_CPU["number"]), "add_"),
    "bound": (lambda x, mask: x.clamp(min=ON_CPU["number"]), "clamp"),
    "choice": (lambda x, mask: torch.where(mask, ON_CPU["number"], x), "where"),
    "fill": (lambda x, mask: x.clone().fill_(ON_CPU["number"]), "fill_"),
    "index": (lambda x, mask: x[ON_CPU["index"]], "index"),
    "index of a list": (lambda x, mask: x[[0, 2]], "index"),
}
"""Operations that take something from the CPU along."""

MIXED = {
    "sum": (lambda x, mask: x + ON_CPU["host"], "add"),
    "one number of shape [1]": (lambda x, mask: x + torch.ones(1), "add"),
    "in place on the CPU": (lambda x, mask: torch.zeros(()).add_(x[0]), "add_"),
    "choice": (lambda x, mask: torch.where(mask, x, ON_CPU["host"]), "where"),
    "stack": (lambda x, mask: torch.stack([x[0], ON_CPU["number"]]), "stack"),
    "cat": (lambda x, mask: torch.cat([x, torch.ones(1)]), "cat"),
    "product": (lambda x, mask: ON_CPU["host"] @ x, "dot"),
    "rows of the CPU's": (lambda x, mask: ON_CPU["host"][x.long()], "index"),
    "rows that are assigned": (lambda x, mask: x.clone().index_put_((mask.long(),), ON_CPU["host"]), "index_put_"),
    "layer": (lambda x, mask: nn.Linear(5, 2)(x), "addmm|mv|addmv"),
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


@pytest.mark.parametrize("name", BY_VALUE)
def test_operations_that_take_something_from_the_cpu(name):
    function, operation = BY_VALUE[name]
    with imitated_cuda(ignore):
        assert function(*there()).is_cuda
    with imitated_cuda(), pytest.raises(AssertionError, match=f"aten::{operation} takes a tensor on the CPU beside"):
        function(*there())


@pytest.mark.parametrize("name", MIXED)
def test_operations_on_two_devices_are_refused(name):
    function, operation = MIXED[name]
    with (
        imitated_cuda(ignore),
        pytest.raises(AssertionError, match=f"aten::({operation}) takes tensors on the GPU and"),
    ):
        function(*there())


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


def test_a_tensor_says_that_it_is_there():
    with imitated_cuda(ignore):
        x, _ = there()
        assert x.device == torch.device("cuda", 0) == torch.zeros(1, device="cuda:0").device
        assert (x.is_cuda, x.is_cpu, x.is_meta, x.get_device()) == (True, False, False, 0)
        assert x.to("cuda") is x.cuda() is x.to(x.device) is x
        assert torch.device("cuda").type == "cuda"
        assert x.cpu().device == torch.zeros(1).device == torch.device("cpu")
        assert (torch.cuda.current_device(), torch.cuda.device_count()) == (0, 1)
        assert torch.cuda.mem_get_info()[0] > 0
        for make in (x.numpy, lambda: np.asarray(x)):
            with pytest.raises(AssertionError, match=r"Tensor\.numpy is called on cuda:0"):
                make()


def test_values_share_memory_and_nothing_else_outlives_the_device():
    with imitated_cuda():
        x, mask = there()
        tree = {"x": x, "rest": [mask, 3, torch.ones(2)]}
    found = values(tree)
    assert found["x"].tolist() == [1, 2, 3, 4, 5]
    assert [type(leaf) for leaf in found["rest"]] == [torch.Tensor, int, torch.Tensor]
    assert values(x).data_ptr() == found["x"].data_ptr()
    with pytest.raises(RuntimeError, match="imitated device that is gone"):
        x + 1
    swaps = torch.__future__.get_swap_module_params_on_conversion
    before = [torch.Generator, torch.cuda.current_device, swaps()]
    with pytest.raises(ZeroDivisionError), imitated_cuda():
        raise ZeroDivisionError
    assert before == [torch.Generator, torch.cuda.current_device, swaps()]


def test_views_and_changes_in_place_reach_the_same_memory():
    with imitated_cuda():
        x = torch.zeros(6, device="cuda")
        version = x._version
        x.view(2, 3)[1].add_(1)
        first, second = x.split([2, 4])
        torch.add(first, 5.0, out=first)
        second.copy_(second + x[:4])
        assert x._version > version
        assert first._base is x
    assert values(x).tolist() == [5, 5, 5, 6, 1, 2]


def test_random_numbers_are_the_devices_own():
    torch.manual_seed(3)
    host = torch.get_rng_state()
    with imitated_cuda():
        torch.cuda.manual_seed(1)
        state = torch.cuda.get_rng_state()
        x = torch.ones(100, device="cuda")
        first = [F.dropout(x), torch.randn(3, device="cuda"), torch.empty(3, device="cuda").uniform_()]
        assert not torch.equal(values(first[0]), values(F.dropout(x)))
        torch.cuda.set_rng_state(state)
        again = [F.dropout(x), torch.randn(3, device="cuda"), torch.empty(3, device="cuda").uniform_()]
        torch.cuda.default_generators[0].set_state(state)
        third = F.dropout(x)
    assert all(map(torch.equal, values(first), values(again)))
    assert torch.equal(values(first[0]), values(third))
    assert torch.equal(host, torch.get_rng_state())


def network(seed=0):
    torch.manual_seed(seed)
    convolutions = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten()
    return nn.Sequential(*convolutions, nn.Linear(36, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def gradients(model, x, y):
    loss = F.cross_entropy(model(x), y)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


def test_a_backward_pass_gives_the_values_of_the_cpu():
    x, y = torch.randn(5, 1, 8, 8), torch.randint(3, (5,))
    expected = gradients(network(), x, y)
    cuda = Imitated()
    with cuda.there():
        model, inputs = network().to("cuda"), (x.cuda(), y.cuda())
        with cuda.never_waiting():
            found = gradients(model, *inputs)
    assert all(map(torch.equal, values(found), expected))


def test_a_moved_module_keeps_its_parameters_and_what_shares_them():
    with imitated_cuda(ignore):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = weight = model[0].weight
        model.to("cuda")
        assert model[0].weight is model[1].weight is weight
        assert isinstance(weight, nn.Parameter)
        assert weight.requires_grad
        copied = copy.deepcopy(model)
        assert copied[0].weight is copied[1].weight is not weight
        assert isinstance(copied[0].weight, nn.Parameter)
        other = torch.ones(9, device="cuda")
        copied[0].weight.data = other.view(3, 3)
        other.mul_(2)
    assert values(copied[1].weight).eq(2).all()
    assert not values(weight).eq(2).any()


def test_a_parameters_data_may_go_to_the_other_device_and_come_back():
    with imitated_cuda(ignore):
        model = nn.Linear(2, 2).to("cuda")
        weight, data = model.weight, model.weight.data
        weight.data = data.to("cpu", torch.float64, copy=True)
        assert model.weight is weight
        assert (weight.device.type, weight.dtype, weight.requires_grad) == ("cpu", torch.float64, True)
        assert type(weight) is nn.Parameter
        weight.data = data
        assert (weight.is_cuda, weight.dtype, weight.requires_grad) == (True, torch.float32, True)
        assert weight.data_ptr() == data.data_ptr()
        model(torch.ones(1, 2, device="cuda")).sum().backward()
        assert weight.grad.is_cuda
