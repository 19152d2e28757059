"""The Python state that a model and its loss can reach: noted before a pass, and put back after it.

What a pass leaves in an attribute, a container, a closure or a global was made of the records of one draw, without
noise, and the next draw would be computed with it. So each pass begins with the state that was there before the first
one. What is changed between two passes stays.

Not seen: the insides of what is not written in Python (iterators, files, data of threads, generators of random
numbers), large tensors that are changed through their `data`, large arrays, containers of more than `_MOST_ITEMS`.
"""

from __future__ import annotations

import dis
import logging
import sys
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from operator import is_
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dpopt.errors import ConfigError

_LOG = logging.getLogger(__name__)
_MOST_ITEMS = 2**14
"""A container of more is its own affair, as a data set is."""
_MOST_OBJECTS = 2**17
"""After so many objects no further ones are noted."""
_LARGEST_COPY = 2**20
"""A tensor of more numbers has no copy: it cannot be put back, so that a change of it is refused."""
_LARGEST_LOOK = 2**14
"""A tensor of more numbers is compared by its version, which a change through `data` leaves as it is."""
_OPAQUE = frozenset(
    {"logging", "threading", "_thread", "multiprocessing", "concurrent", "asyncio", "ctypes", "io", "_io", "builtins"}
    | {"typing", "inspect", "rich", "unittest"}
)
"""Packages whose objects are compared by identity alone."""
_LIBRARIES = sys.stdlib_module_names | frozenset(
    {"torch", "torchvision", "dpopt", "opacus", "timm", "transformers", "peft", "numpy", "scipy", "pandas", "sklearn"}
    | {"pyarrow", "datasets", "matplotlib", "PIL", "sympy", "mpmath", "networkx", "rich", "hypothesis", "pytest"}
)
"""Packages whose code keeps nothing of records in classes, functions and globals."""
_STORES = (dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"])
_PLAIN = frozenset({str, bytes, bool, int, float, complex, type(None)})
_WRAPPERS = (MethodType, BuiltinMethodType, staticmethod, classmethod, property, partial)
_WRAPPED = ("__func__", "__self__", "fget", "func", "args", "keywords")
"""Attributes by which these hold what they wrap."""
_CONTAINERS = (dict, list, deque, set, tuple, frozenset)
_CACHE = type(cache(len))
_ABSENT: Any = object()


class _Change(NamedTuple):
    """What a pass has changed, and if it must not."""

    name: str
    must_not_be: bool = False


class _Names:
    """Values by name, such as attributes: `read` gives them all, `write` and `delete` change one."""

    def __init__(
        self, name: str, read: Callable[[], Mapping[Any, Any]], write: Callable[..., None], delete: Callable[..., None]
    ) -> None:
        self.name, self._read, self._write, self._delete = name, read, write, delete
        self._noted = dict(read())
        self._keys, self._values = tuple(self._noted), tuple(self._noted.values())

    def differing(self) -> list[Any]:
        live, noted = self._read(), self._noted
        # Each pass comes here for each place: no further call, and no comparison of values.
        if len(live) == len(noted) and all(map(is_, live.values(), self._values)) and all(map(is_, live, self._keys)):
            return []
        names = [key for key in {**noted, **live} if not (key == "training" and "_parameters" in noted)]
        changed = [key for key in names if not _is_equal(live.get(key, _ABSENT), noted.get(key, _ABSENT))]
        # In a dictionary another order is another state too.
        return changed or ([] if [*live] == [*noted] or not isinstance(live, dict) else [*noted])

    def put_back(self) -> Iterator[_Change]:
        names = self.differing()
        for key in names:
            if key in self._read():
                self._delete(key)
        for key in names:
            if key in self._noted:
                self._write(key, self._noted[key])
            is_buffer = self.name.endswith("._buffers") and key in self._noted
            yield _Change(f"{self.name}.{key}", is_buffer)


class _Items:
    """Values in order: `read` gives them, `write` replaces all."""

    def __init__(self, name: str, read: Callable[[], Any], write: Callable[[list[Any]], None]) -> None:
        self.name, self._read, self._write = name, read, write
        self._noted = list(read())

    def differing(self) -> bool:
        live, noted = self._read(), self._noted
        if len(live) != len(noted):
            return True
        return not (all(map(is_, live, noted)) or all(map(_is_equal, live, noted)))

    def put_back(self) -> Iterator[_Change]:
        if self.differing():
            self._write(self._noted)
            yield _Change(self.name)


class _Numbers:
    """The numbers of a tensor. Those of a buffer must stay, and so must those that are too many for a copy."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name, self._tensor, self._version = name, tensor, tensor._version
        # Frozen parameters may be most of a large model.
        most = _LARGEST_LOOK if isinstance(tensor, nn.Parameter) else _LARGEST_COPY
        is_small = tensor.layout == torch.strided and tensor.numel() <= most
        self._noted = tensor.detach().clone() if is_small else None
        # A device is not waited for.
        self._is_looked_at = is_small and tensor.device.type == "cpu" and tensor.numel() <= _LARGEST_LOOK
        self.must_stay = self._noted is None or isinstance(tensor, nn.Parameter) or "._buffers." in name

    def differing(self) -> bool:
        return self._tensor._version != self._version or (self._is_looked_at and not self.has_values())

    def has_values(self) -> bool:
        """True if the numbers are those that were noted, as far as there is a copy."""
        return self._noted is None or same(self._tensor.detach(), self._noted.to(self._tensor))

    def put_back(self) -> Iterator[_Change]:
        if not self.differing():
            return
        is_other = self._noted is None or not self.has_values()
        if is_other:
            yield _Change(self.name, self.must_stay)
        if is_other and self._noted is not None:
            with torch.no_grad():
                self._tensor.copy_(self._noted)
        self._version = self._tensor._version


class State:
    """The state of a model, and of the functions that are run with it; `with state:` is one pass.

    After a pass everything is as it was before it. The first time that something was not, the log names it.

    Args:
        model: named `model` in messages.
        functions: the loss and others that see records, by their names in messages.

    Attributes:
        changed: names of what passes have changed, the first one first.

    Raises:
        ConfigError: at the end of a pass that changed a buffer, or something too large to be put back.
    """

    def __init__(self, model: nn.Module, **functions: Any) -> None:
        self.model = model
        self.changed: list[str] = []
        self._roots = {"model": model, **functions}
        self._depth = 0
        self._note()

    def __enter__(self) -> None:
        # A callback may have changed something between two passes: from now on it is so.
        if not self._depth:
            if not self._is_same():
                self._note()
            self._modes = [module.training for module in self._modules]
        self._depth += 1

    def __exit__(self, kind: object, *error: object) -> None:
        self._depth -= 1
        # Modes are not among the places, as whoever runs the model sets them.
        if [module.training for module in self._modules] != self._modes:
            for module, mode in zip(self._modules, self._modes, strict=True):
                module.training = mode
            self._say(["model.training"])
        self.put_back(is_refused=kind is None)

    def put_back(self, *, is_refused: bool = True) -> None:
        """Make everything as it was noted; see `State` for what is refused, if `is_refused`."""
        if self._is_same():
            return
        changes: list[_Change] = []
        for place in self._places:
            try:
                changes += place.put_back()
            except Exception:  # an object can fail in any way when it is changed
                changes.append(_Change(place.name, must_not_be=True))
        for name, container in zip(self._names_of_empty, self._empty, strict=True):
            if container:
                container.clear()
                changes.append(_Change(name))
        self._say([change.name for change in changes])
        if is_refused:
            self._refuse([change.name for change in changes if change.must_not_be])

    def must_keep_buffers(self) -> None:
        """Raise `ConfigError` for a buffer whose numbers are others, however they were changed."""
        numbers = [each for each in self._places if isinstance(each, _Numbers)]
        self._refuse([each.name for each in numbers if each.must_stay and not each.has_values()])

    def _refuse(self, names: list[str]) -> None:
        if names:
            hint = "it changes while the model runs, by what nothing bounds; put its layer in evaluation mode"
            raise ConfigError(_shown(names[0]), "buffer", hint)

    def _say(self, names: list[str]) -> None:
        new = [name for name in dict.fromkeys(map(_shown, names)) if name not in self.changed]
        self.changed += new
        if new:
            _LOG.warning("%s: put back after each pass, which changed it: it may tell of records", ", ".join(new))

    def _is_same(self) -> bool:
        if any(self._empty):
            return False
        return not any([place.differing() for place in self._places])  # noqa: C419 - a generator takes longer

    def _note(self) -> None:
        self._places: list[_Names | _Items | _Numbers] = []
        self._empty: list[Any] = []
        self._names_of_empty: list[str] = []
        self._modules = [*self.model.modules()]
        waiting = [*reversed(self._roots.items())]
        seen: dict[int, Any] = {}  # with the objects, so that no later one has the number of one that is gone
        while waiting and len(seen) < _MOST_OBJECTS:
            name, value = waiting.pop()
            if type(value) not in _PLAIN and id(value) not in seen:
                seen[id(value)] = value
                with suppress(Exception):  # an object can fail in any way when it is looked at
                    waiting += self._note_one(name, value)

    def _note_one(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Note one object; gives what it holds, by name."""
        if isinstance(value, Tensor):
            if type(value) in (Tensor, nn.Parameter):  # what another kind of tensor holds is itself
                yield name, vars(value)
            is_trained = isinstance(value, nn.Parameter) and value.requires_grad  # the optimizer changes those
            if not is_trained and not value.is_inference() and not value.is_meta:
                self._places.append(_Numbers(name, value))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and not value.dtype.hasobject and value.size <= _LARGEST_LOOK:
                self._places.append(_Items(name, lambda: [value.tobytes()], partial(_fill, value)))
        elif isinstance(value, _CACHE):
            value.cache_clear()
            self._places.append(_Items(name, lambda: [value.cache_info().misses], lambda _: value.cache_clear()))
            yield name, value.__wrapped__
        elif isinstance(value, _CONTAINERS):
            yield from self._note_container(name, value)
        elif isinstance(value, FunctionType):
            yield from self._note_function(name, value)
        elif isinstance(value, _WRAPPERS):
            yield from [(name, getattr(value, part, None)) for part in _WRAPPED]
        elif isinstance(value, type):
            yield from self._note_class(value)
        elif isinstance(value, ModuleType):
            if value.__name__.partition(".")[0] not in _LIBRARIES:
                yield from self._note_globals(name, vars(value), [each for each in vars(value) if each[:2] != "__"])
        elif isinstance(value, nn.Module | CellType) or not (
            _package(type(value)) in _OPAQUE or type(value).__module__.startswith("torch._")
        ):
            yield from self._note_object(name, value)

    def _note_container(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        if len(value) > _MOST_ITEMS:
            return
        is_fixed = isinstance(value, tuple | frozenset)
        if not value and not is_fixed:
            self._empty.append(value)
            self._names_of_empty.append(name)
        elif isinstance(value, dict):
            # A subclass may show other values than it holds, and refuse to be changed.
            kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict
            read = (lambda: value) if type(value) in (dict, OrderedDict) else (lambda: dict(kind.items(value)))
            self._places.append(_Names(name, read, partial(kind.__setitem__, value), partial(kind.__delitem__, value)))
        elif not is_fixed:
            self._places.append(_Items(name, lambda: value, partial(_refill, value)))
        pairs = dict.items(value) if isinstance(value, dict) else enumerate(value)
        yield from [(f"{name}.{key}", each) for key, each in pairs]

    def _note_object(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._places.append(_Names(name, lambda: attributes, attributes.__setitem__, attributes.__delitem__))
            yield from [(f"{name}.{key}", each) for key, each in attributes.items()]
        if slots := _slots(type(value)):
            read = partial(_filled, slots, value)
            write, delete = (partial(_set, slots, value, method) for method in ("__set__", "__delete__"))
            self._places.append(_Names(name, read, write, delete))
            yield from [(f"{name}.{key}", each) for key, each in read().items()]
        yield name, type(value)

    def _note_class(self, kind: type) -> Iterator[tuple[str, Any]]:
        for each in kind.__mro__:
            if _package(each) not in _LIBRARIES:
                self._places.append(
                    _Names(each.__name__, partial(vars, each), partial(setattr, each), partial(delattr, each))
                )
                yield from [(f"{each.__name__}.{key}", value) for key, value in vars(each).items()]

    def _note_function(self, name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
        if _package(function) in _LIBRARIES:
            return
        held = (function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function))
        yield from [(name, part) for part in held]
        names, stored = _globals_of(function.__code__)
        around = function.__globals__
        yield from self._note_globals("globals", around, stored)
        for key in sorted(names & around.keys()):
            value = around[key]
            is_own = _package(value if hasattr(value, "__module__") else type(value)) not in _LIBRARIES
            if is_own or isinstance(value, (*_CONTAINERS, Tensor, np.ndarray, SimpleNamespace, ModuleType)):
                yield key, value

    def _note_globals(self, name: str, around: dict[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Any]]:
        """Note what some names of a file stand for."""

        def read() -> dict[str, Any]:
            return {each: around[each] for each in names if each in around}

        if names:
            self._places.append(_Names(name, read, around.__setitem__, around.__delitem__))
        yield from [(f"{name}.{each}", value) for each, value in read().items()]


@contextmanager
def watching(
    after: Callable[[nn.Module, Any, Any], None], before: Callable[[nn.Module, Any], None] | None = None
) -> Iterator[None]:
    """Call `after` and `before` with each module, its inputs and its output, whenever a module is called."""
    # Hooks of all modules, as those of one are part of its state.
    hooks = [register_module_forward_hook(after, always_call=True)]
    if before:
        hooks.append(register_module_forward_pre_hook(before))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.compile warns of them
            yield
    finally:
        for hook in hooks:
            hook.remove()


def same(a: Tensor, b: Tensor) -> bool:
    """True if the two are equal, and not-a-number at the same places."""
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all()))


def _shown(name: str) -> str:
    """A place's name as code has it."""
    return name.replace("._modules.", ".").replace("._buffers.", ".").replace("._parameters.", ".")


def _is_equal(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _PLAIN and a == b)


def _package(code: Any) -> str:
    return (getattr(code, "__module__", None) or "").partition(".")[0]


def _slots(kind: type) -> dict[str, Any]:
    """The attributes of a class's objects that are in no dictionary, by name."""
    if kind is CellType:
        return {"cell_contents": vars(kind)["cell_contents"]}
    every = [each for base in kind.__mro__ for each in vars(base).values()]
    return {each.__name__: each for each in every if isinstance(each, MemberDescriptorType)}


def _filled(slots: dict[str, Any], owner: Any) -> dict[str, Any]:
    values = {}
    for name, slot in slots.items():
        with suppress(AttributeError, ValueError):  # it is empty
            values[name] = slot.__get__(owner)
    return values


def _set(slots: dict[str, Any], owner: Any, method: str, name: str, *value: Any) -> None:
    getattr(slots[name], method)(owner, *value)


def _refill(container: Any, items: list[Any]) -> None:
    container.clear()
    (container.update if isinstance(container, set) else container.extend)(items)


def _fill(array: Any, items: list[bytes]) -> None:
    array[...] = np.frombuffer(items[0], array.dtype).reshape(array.shape)


@cache
def _globals_of(code: CodeType) -> tuple[frozenset[str], tuple[str, ...]]:
    """The names that code and the functions inside it use, and those of globals that it sets."""
    inner = [_globals_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    names = frozenset(code.co_names).union(*(each[0] for each in inner))
    stored = {name for each in inner for name in each[1]}
    if any(operation in code.co_code[::2] for operation in _STORES):  # to disassemble all code takes long
        stored |= {each.argval for each in dis.get_instructions(code) if each.opcode in _STORES}
    return names, tuple(sorted(stored))
