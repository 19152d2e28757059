"""A GPU that is not there: what runs in `imitated_cuda` finds the device `cuda` on a machine without one.

Values are computed on the CPU, so a run goes on to its end, backward passes included, and can be compared. What is
known of a device is where each tensor lies and which operations make the host wait; kernels, speed and memory are not.

PyTorch's `FakeTensorMode` has no values: it ends at the first `.item()`, cannot go backward on a device, and lets pass
copies to the host and blocking copies from there, which are waited for just as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Never
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

from imitation.waiting import Call, notices

Notice = Callable[[str], None]
"""Called with a sentence that names the operation."""

MEMORY = 2**33
"""Bytes that the device says are free."""

_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")
_UNDERLYING = torch.device("meta")
"""Where the tensors lie as far as PyTorch's own code can tell: there it has a backward pass without a driver."""
_DATA: Any = Tensor.data
_TO = Tensor.to


def refuse(notice: str) -> None:
    """Raise `AssertionError`."""
    raise AssertionError(notice)


def ignore(notice: str) -> None:
    """Do nothing."""


@contextmanager
def imitated_cuda(on_host: Notice = refuse) -> Iterator[None]:
    """While it is entered there is one GPU. Of what is made there, only `values` can be looked at afterwards.

    Args:
        on_host: called where the host waits for the device, or where an operation takes a number from the CPU.

    Raises:
        AssertionError: within it, for tensors on two devices in one operation.
    """
    generator = torch.Generator()
    with ExitStack() as entered:
        for owner, replaced in _replaced(generator, on_host).items():
            for name, value in replaced.items():
                entered.enter_context(mock.patch.object(owner, name, value))
        # A module that is moved keeps its parameters, and so its shared ones, though they become of another class.
        entered.callback(
            torch.__future__.set_swap_module_params_on_conversion,
            torch.__future__.get_swap_module_params_on_conversion(),
        )
        torch.__future__.set_swap_module_params_on_conversion(True)
        entered.enter_context(_Operations(generator, on_host))
        yield


def values(tree: Any) -> Any:
    """`tree` with plain tensors in place of those on an imitated device; they share memory."""
    return pytree.tree_map(lambda leaf: leaf.held if isinstance(leaf, _OnDevice) else leaf, tree)


class _OnDevice(Tensor):
    """A tensor that says it is on the device.

    Attributes:
        held: a plain tensor with its values.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    held: Tensor

    @staticmethod
    def __new__(cls: type[_OnDevice], held: Tensor) -> _OnDevice:
        layout = {"strides": held.stride(), "storage_offset": held.storage_offset()}
        make = Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, held.size(), dtype=held.dtype, device=_UNDERLYING, **layout)

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.alias.default:  # `as_subclass` turns all modes off
            return _OnDevice(args[0].held)
        raise RuntimeError(f"{func} on an imitated device that is gone")

    device = property(lambda self: _CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def tolist(self) -> list[Any]:
        return self.cpu().tolist()

    def numpy(self, *args: Any, **kwargs: Any) -> Never:  # type: ignore[override]
        raise AssertionError(f"Tensor.numpy is called on {_CUDA}: it needs a tensor on the CPU")

    __array__ = numpy  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = self.detach().clone().requires_grad_(self.requires_grad)
        copy._is_param = getattr(self, "_is_param", False)  # type: ignore[attr-defined]
        memo[id(self)] = copy
        return copy

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.held} on {_CUDA}"


class _Generator(torch.Generator):
    """A generator of random numbers for any device; all are the CPU's."""

    def __new__(cls, device: torch.device | str = "cpu") -> _Generator:
        return super().__new__(cls)


class _Operations(TorchDispatchMode):
    """Computes operations on the CPU and knows on which device each result lies."""

    def __init__(self, generator: torch.Generator, on_host: Notice) -> None:
        super().__init__()
        # PyTorch takes it for its own such mode, and looks for no driver where something is made on a device.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]
        self._generator, self._on_host = generator, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = _call(func, args, kwargs or {})
        for notice in notices(call):
            self._on_host(notice)
        computed = self._computed(call)
        result = pytree.tree_map(_placed, computed) if call.is_result_there else computed
        if _is_of_numbers(call) and isinstance(result, Tensor):
            result._is_number = True  # type: ignore[attr-defined]
        is_aliased = call.there and call.is_result_there
        return return_and_correct_aliasing(func, args, call.kwargs, result) if is_aliased else result

    def _computed(self, call: Call) -> Any:
        if call.name == "is_pinned":
            return False
        if call.name == "_pin_memory":  # nothing but a driver can
            return call.args[0].clone()
        kwargs = {key: value for key, value in call.kwargs.items() if key != "pin_memory"}
        args, kwargs = values((call.args, kwargs | ({"device": _CPU} if kwargs.get("device") else {})))
        is_random = torch.Tag.nondeterministic_seeded in call.func.tags and kwargs.get("generator") is None
        with _as_default(self._generator) if call.is_result_there and is_random else nullcontext():
            return call.func(*args, **kwargs)


def _replaced(generator: torch.Generator, on_host: Notice) -> dict[Any, dict[str, Any]]:
    """What needs a driver, and what stands in for it."""
    cuda = {
        "current_device": lambda: 0,
        "default_generators": (generator,),
        "device_count": lambda: 1,
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "manual_seed": generator.manual_seed,
        "manual_seed_all": generator.manual_seed,
        "mem_get_info": lambda device=None: (MEMORY, MEMORY),
        "set_rng_state": lambda state, device="cuda": generator.set_state(state),
        "synchronize": lambda device=None: on_host("the host waits for the device (torch.cuda.synchronize)"),
    }
    tensor = {"cuda": _cuda, "data": property(_DATA.__get__, _set_data), "new_tensor": _new_tensor, "to": _to}
    made = {name: partial(_copied, getattr(torch, name)) for name in ("as_tensor", "asarray", "tensor")}
    return {torch.cuda: cuda, Tensor: tensor, torch: {"Generator": _Generator, **made}}


def _underlying(value: Any) -> Any:
    """The device as PyTorch's own code sees it in place of `cuda`; anything else as it is."""
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return _UNDERLYING if is_device and torch.device(value).type == "cuda" else value


def _set_data(tensor: Tensor, value: Tensor) -> None:
    """`tensor.data = value`, which may lie on another device."""
    if isinstance(tensor, _OnDevice) != isinstance(value, _OnDevice):
        value, is_trained = value.detach(), tensor.requires_grad
        is_parameter = isinstance(tensor, nn.Parameter)
        value = nn.Parameter(value, is_trained) if is_parameter else value.requires_grad_(is_trained)
        torch.utils.swap_tensors(tensor, value)
        return
    _DATA.__set__(tensor, value)
    if isinstance(tensor, _OnDevice):
        tensor.held = value.held  # type: ignore[attr-defined]


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    args, kwargs = pytree.tree_map(_underlying, (args, kwargs))
    return _TO(tensor, *args, **kwargs)


def _cuda(tensor: Tensor, device: Any = None, non_blocking: bool = False, **kwargs: Any) -> Tensor:
    return _to(tensor, _CUDA, non_blocking=non_blocking, **kwargs)


def _copied(make: Any, *args: Any, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    """What `make` makes of Python's numbers, on a device: left to itself, it would make the copy out of sight."""
    made = make(*args, **kwargs)
    made = made if device is None else _to(made, device)
    return made.requires_grad_() if requires_grad else made


def _new_tensor(like: Tensor, data: Any, **kwargs: Any) -> Tensor:
    return torch.tensor(data, **{"dtype": like.dtype, "device": like.device, **kwargs})


def _placed(value: Any) -> Any:
    return _OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, _OnDevice) else value


def _call(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    numbers = [tensor for tensor in tensors if getattr(tensor, "_is_number", False)]
    there = [tensor for tensor in tensors if isinstance(tensor, _OnDevice)]
    on_cpu = [
        tensor for tensor in tensors if not (isinstance(tensor, _OnDevice) or getattr(tensor, "_is_number", False))
    ]
    return Call(func, args, kwargs, there, on_cpu, numbers, _is_result_there(func, args, kwargs, bool(there)))


def _is_result_there(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], is_any_there: bool) -> bool:
    if kwargs.get("device") is not None:
        return kwargs["device"].type in (_CUDA.type, _UNDERLYING.type)
    if func._schema.is_mutable and isinstance(written := kwargs.get("out", args[0]), Tensor):
        return isinstance(written, _OnDevice)
    return is_any_there


def _is_of_numbers(call: Call) -> bool:
    """Whether PyTorch makes a tensor of a number of Python's, to write it there, or under `torch.func.vmap`."""
    is_made_there = call.name == "scalar_tensor" and call.is_result_there
    is_of_numbers = not (call.there or call.on_cpu or call.numbers) and call.kwargs.get("device") is None
    return is_made_there or (is_of_numbers and call.name != "scalar_tensor")


@contextmanager
def _as_default(generator: torch.Generator) -> Iterator[None]:
    """`generator` in place of the CPU's own, for operations that cannot be given one."""
    own = torch.get_rng_state()
    torch.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(torch.get_rng_state())
        torch.set_rng_state(own)
