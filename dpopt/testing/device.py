"""A GPU that is not there: what runs in `imitated_cuda` finds the device `cuda` on a machine without one.

Values are computed on the CPU, so a run goes on to its end, backward passes included, and can be compared. What is
known of a device is where each tensor lies and which operations make the host wait; kernels, speed and memory are not.

PyTorch's `FakeTensorMode` has no values: it ends at the first `.item()`, cannot go backward on a device, and lets pass
copies to the host and blocking copies from there, which are waited for just as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Never
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

Notice = Callable[[str], None]
"""Called with a sentence that names the operation."""

MEMORY = 2**33
"""Bytes that the device says are free."""

_CUDA, _CPU = torch.device("cuda", 0), torch.device("cpu")
_UNDERLYING = torch.device("meta")
"""Where the tensors lie as far as PyTorch's own code can tell: there it has a backward pass without a driver."""
_TAGGED = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""PyTorch's tags of operations whose results, or whose results' shapes, have to be on the host."""
_WAITING = frozenset(
    {"_linalg_check_errors", "embedding_renorm_", "histc", "linalg_eig", "linalg_eigvals", "multinomial"}
)
"""Operations of aten without such a tag that wait for a GPU all the same."""
_INDEXING = frozenset({"_index_put_impl_", "_unsafe_index", "_unsafe_index_put", "index", "index_put", "index_put_"})
"""Operations that wait where an index is a mask; they take indices from the CPU, which they copy."""
_BY_VALUE = frozenset({"fill", "fill_", "index_fill", "index_fill_", "masked_fill", "masked_fill_"})
"""Operations that take a number from the CPU, as the elementwise ones do."""

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
"""Functions that make a tensor of Python's numbers on the CPU and copy it."""


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
        entered.enter_context(_Functions())
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
        raise RuntimeError(f"{func} on an imitated device that is gone")

    device = property(lambda self: _CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: _OnDevice) -> None:
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def get_device(self) -> int:
        return 0

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def new_tensor(self, data: Any, **kwargs: Any) -> Tensor:  # type: ignore[override]
        return _copied(torch.tensor, (data,), **{"dtype": self.dtype, "device": _CUDA, **kwargs})

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


class _Functions(TorchFunctionMode):
    """Lets PyTorch's functions be called with the device `cuda`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.device:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_underlying, (args, kwargs))
        if func in _FROM_DATA and kwargs.get("device") is not None:
            return _copied(func, args, **kwargs)
        if func is Tensor.cuda:
            return args[0].to(_UNDERLYING, non_blocking=kwargs.get("non_blocking", False))
        return func(*args, **kwargs)


class _Operations(TorchDispatchMode):
    """Computes operations on the CPU and knows on which device each result lies."""

    def __init__(self, generator: torch.Generator, on_host: Notice) -> None:
        super().__init__()
        # PyTorch takes it for its own such mode and looks for no driver where `_Functions` did not see the device.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE  # type: ignore[attr-defined]
        self._generator, self._on_host = generator, on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_there = _is_result_there(func, args, kwargs, tensors)
        self._examine(func, args, kwargs, tensors, is_there)
        computed = self._computed(func, args, kwargs, is_there)
        result = pytree.tree_map(_placed, computed) if is_there else computed
        if not tensors and (is_there if _name(func) == "scalar_tensor" else kwargs.get("device") is None):
            return _marked(result)
        is_aliased = is_there and any(isinstance(tensor, _OnDevice) for tensor in tensors)
        return return_and_correct_aliasing(func, args, kwargs, result) if is_aliased else result

    def _examine(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        is_result_there: bool,
    ) -> None:
        name, are_there = _name(func), [isinstance(tensor, _OnDevice) for tensor in tensors]
        if tensors and name in ("_to_copy", "copy_"):
            source = tensors[name == "copy_"]
            self._examine_copy(name, isinstance(source, _OnDevice), is_result_there, _is_blocking(name, args, kwargs))
        elif any(are_there):
            if _waits(func, args):
                self._on_host(f"the host waits for the device (aten::{name})")
            on_cpu = [tensor for tensor in tensors if not isinstance(tensor, _OnDevice) and not _is_marked(tensor)]
            if on_cpu:
                self._examine_mixture(func, args, on_cpu, is_result_there)

    def _examine_copy(self, name: str, is_source_there: bool, is_target_there: bool, is_blocking: bool) -> None:
        if is_source_there and not is_target_there:
            self._on_host(f"the host waits for the device (aten::{name} to the CPU)")
        elif is_target_there and not is_source_there and is_blocking:
            self._on_host(f"the host waits for the device (aten::{name} from the CPU that is not `non_blocking`)")

    def _examine_mixture(self, func: Any, args: Sequence[Any], on_cpu: Sequence[Tensor], is_result_there: bool) -> None:
        name = _name(func)
        by_value = torch.Tag.pointwise in func.tags or name in _BY_VALUE or name.startswith("_foreach")
        are_numbers = by_value and is_result_there and not any(tensor.dim() for tensor in on_cpu)
        are_indices = name in _INDEXING and {*map(id, on_cpu)} <= {*map(id, args[1])}
        if not (are_numbers or are_indices):
            raise AssertionError(f"aten::{name} takes tensors on {_CUDA} and on the CPU")
        self._on_host(f"aten::{name} takes a tensor on the CPU beside those on {_CUDA}")

    def _computed(self, func: Any, args: Any, kwargs: Mapping[str, Any], is_result_there: bool) -> Any:
        if _name(func) == "is_pinned":
            return False
        if _name(func) == "_pin_memory":  # nothing but a driver can
            return args[0].clone()
        args, plain = values((args, {key: value for key, value in kwargs.items() if key != "pin_memory"}))
        if plain.get("device") is not None:
            plain["device"] = _CPU
        if is_result_there and torch.Tag.nondeterministic_seeded in func.tags and plain.get("generator") is None:
            with _as_default(self._generator):
                return func(*args, **plain)
        return func(*args, **plain)


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
    return {torch.cuda: cuda, torch: {"Generator": _Generator}}


def _underlying(value: Any) -> Any:
    """The device as PyTorch's own code sees it in place of `cuda`; anything else as it is."""
    is_device = isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] == "cuda")
    return _UNDERLYING if is_device and torch.device(value).type == "cuda" else value


def _copied(func: Any, args: Sequence[Any], device: torch.device, requires_grad: bool = False, **kwargs: Any) -> Tensor:
    """What one of `_FROM_DATA` makes on a device: left to itself, it would make the copy out of sight."""
    made = func(*args, **kwargs).to(device)
    return made.requires_grad_() if requires_grad else made


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def _placed(value: Any) -> Any:
    return _OnDevice(value) if isinstance(value, Tensor) and not isinstance(value, _OnDevice) else value


def _marked(value: Any) -> Any:
    """What PyTorch makes of a number of Python's on its own, to write it somewhere or under `torch.func.vmap`."""
    if isinstance(value, Tensor):
        value._is_number = True  # type: ignore[attr-defined]
    return value


def _is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, "_is_number", False)


def _is_result_there(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """Whether the operation gives tensors on the device."""
    if kwargs.get("device") is not None:
        return kwargs["device"].type in (_CUDA.type, _UNDERLYING.type)
    if func._schema.is_mutable and isinstance(written := kwargs.get("out", args[0]), Tensor):
        return isinstance(written, _OnDevice)
    return any(isinstance(tensor, _OnDevice) for tensor in tensors)


def _is_blocking(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    is_third = name == "copy_" and len(args) > 2
    return not (args[2] if is_third else kwargs.get("non_blocking", False))


def _waits(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operation on tensors of a GPU makes the host wait."""
    if _name(func) in _INDEXING:
        is_filled = len(args) > 2 and _is_marked(args[2])  # where a mask says so, without an index
        return not is_filled and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
    return _name(func) in _WAITING or not _TAGGED.isdisjoint(func.tags)


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
