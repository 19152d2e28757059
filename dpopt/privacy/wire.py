"""The messages between an isolated optimizer and the oracle, and the one way to read them.

A message is JSON in which each tensor is named where it stands, and the tensors' bytes after it. The optimizer never
sends code: a query is of a class of the kernel, or of an optimizer in dpopt, and is built anew from names and numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pkgutil import resolve_name
from typing import Any, Literal

import torch
from torch import Tensor

from dpopt import fields, markup
from dpopt.clipping.rules import RULES, AtBound
from dpopt.errors import ConfigError, cut
from dpopt.fields import Many, Natural
from dpopt.privacy.queries import KINDS
from dpopt.types import Query

_DTYPES = {name: getattr(torch, name) for name in ("float32", "float64", "int64", "bool", "uint8")}
_CLASSES: dict[str, type[Any]] = {**KINDS, **RULES, "at_bound": AtBound}
"""The classes that a message may name, beside queries of dpopt's optimizers: the kernel's queries and clip rules."""
_SHIPPED = "dpopt.optimizers."
TENSORS = 16
"""The most tensors of a query. Each stands at one place, so it has no more points either."""
_LONGEST = 2**24
"""Bytes of a message without its tensors: a trace of 10^5 draws that all differ fits."""
_ENDED = "the process of the isolated optimizer has ended"
SENDS = "the process of the isolated optimizer sends"
_LENGTH = struct.Struct("<Q")


class IsolatedFailure(RuntimeError):
    """An optimizer has failed in its process (the message is its traceback), or the process ended or sent nonsense."""


class NotImportable(ConfigError):
    """An optimizer, query or clip rule that another process cannot import by its name."""


@dataclass(frozen=True)
class Answer:
    """A message of the optimizer's process, held to these annotations.

    Attributes:
        do: what it asks for: an answer to `query`, a draw, the draw's end; or nothing, as its task is done.
        failed, refused: the error that ended the task, as a traceback; or the `ConfigError`, as a sentence.
        importable: false for a `NotImportable`.
    """

    do: Literal["done", "draw", "close", "ask"] = "done"
    query: Query | None = None
    failed: str = ""
    refused: str = ""
    importable: bool = True
    text: str = ""
    noise_inflation: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    sensitivity: float | None = None
    structure: list[tuple[list[str], Many]] = field(default_factory=list)
    cost: tuple[float, float, float] = (0.0, 0.0, 0.0)
    spec: dict[str, Any] = field(default_factory=dict)
    places: dict[str, Natural] = field(default_factory=dict)
    leaves: list[Tensor] = field(default_factory=list)


class Channel:
    """Messages over a connected stream socket; with `imports`, classes of one's own may be named and imported."""

    def __init__(self, connection: socket.socket, *, imports: bool = False) -> None:
        self._file, self.imports = connection.makefile("rwb"), imports
        connection.close()  # the file holds it open

    def send(self, **message: Any) -> None:
        """Send values by name: those of JSON, tensors, queries and clip rules.

        Raises `IsolatedFailure` if nobody listens, ConfigError for a query, a rule or a tensor that cannot be sent.
        """
        tensors = list[Tensor]()
        body = _plain(message, tensors, self.imports)
        if isinstance(message.get("query"), Query) and len(tensors) > TENSORS:
            raise ConfigError("query", f"{len(tensors)} tensors", f"an isolated optimizer may use {TENSORS} in a query")
        head = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        text = json.dumps([body, head]).encode()
        try:
            self._file.write(_LENGTH.pack(len(text)) + text)
            for tensor in tensors:
                self._file.write(_bytes(tensor))
            self._file.flush()
        except OSError as error:
            raise IsolatedFailure(_ENDED) from error

    def receive(self, tensors: float, size: float, kind: type[Any] = dict) -> Any:
        """The next message: a mapping, or an object of the dataclass `kind`, held to its annotations.

        It may hold `tensors` tensors of `size` bytes in all. Raises `IsolatedFailure` if there is no such message.
        """
        try:
            (length,) = _LENGTH.unpack(self._exactly(bytearray(_LENGTH.size)))
            # Before memory is taken: the sender decides what is written here.
            if length > _LONGEST:
                raise ValueError(f"a text of {length} bytes")
            body, head = json.loads(self._exactly(bytearray(length)))
            if len(head) > tensors:
                raise ValueError(f"{len(head)} tensors")
            values = dict[int, Tensor]()
            for number, (dtype, shape) in enumerate(head):
                size -= _DTYPES[dtype].itemsize * math.prod(shape)
                if size < 0 or min(shape, default=0) < 0:
                    raise ValueError(f"a {dtype} of shape {shape}")
                # Memory of its own for each: with torch's alignment, what is computed has the same bits.
                values[number] = torch.empty(shape, dtype=_DTYPES[dtype])
                self._exactly(_bytes(values[number]))
            message = {name: _built(value, values, self.imports) for name, value in body.items()}
            return message if kind is dict else fields.build(kind, message, "isolated")
        except IsolatedFailure:
            raise
        except Exception as error:  # hostile bytes can fail in any way
            reason = markup.line(cut(f"{type(error).__name__}: {error}"))
            raise IsolatedFailure(f"{SENDS} what cannot be read ({reason})") from error

    def close(self) -> None:
        with suppress(OSError):  # the other process may have hung up already
            self._file.close()

    def _exactly(self, buffer: Any) -> Any:
        try:
            count = self._file.readinto(buffer)
        except OSError:  # it has ended in the middle of a message
            count = 0
        if count < len(buffer):
            raise IsolatedFailure(_ENDED)
        return buffer


def _plain(value: Any, tensors: list[Tensor], imports: bool) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        if value.dtype not in _DTYPES.values():
            raise ConfigError("isolate", value.dtype, f"tensors are sent as {', '.join(_DTYPES)}")
        tensors.append(value)
        return {"$tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        return [_plain(each, tensors, imports) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each, tensors, imports) for name, each in value.items()}
    name = next((name for name, kind in _CLASSES.items() if kind is type(value)), None)
    if name is None and not imports and not type(value).__module__.startswith(_SHIPPED):
        allowed = f"an isolated optimizer uses dpopt's queries and clip rules: {', '.join(_CLASSES)}"
        raise ConfigError("query" if isinstance(value, Query) else "clip", value, allowed)
    name = name or _import_name(value)
    # A field that is not compared, such as a cache, is no part of what a rule or a query is.
    parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
    return {"$class": name, "fields": _plain(parts, tensors, imports)}


def _built(value: Any, tensors: dict[int, Tensor], imports: bool, sequence: Callable[..., Any] = list) -> Any:
    if isinstance(value, list):
        return sequence(_built(each, tensors, imports, sequence) for each in value)
    # A huge number would overflow later, in the middle of a query.
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError("a number that no tensor holds")
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        # Taken out, as a tensor at two places could be changed at one of them.
        return tensors.pop(value["$tensor"])
    if "$class" in value:
        name = value["$class"]
        kind = _CLASSES.get(name) or (resolve_name(name) if imports else _shipped(name))
        # The kernel tells weighted points from plain ones by tuples.
        return kind(**{key: _built(each, tensors, imports, tuple) for key, each in value["fields"].items()})
    return {key: _built(each, tensors, imports, sequence) for key, each in value.items()}


def _shipped(name: str) -> type[Query]:
    kind = resolve_name(name) if name.startswith(_SHIPPED) else None
    if not (isinstance(kind, type) and issubclass(kind, Query)):
        raise ValueError(f"the class {name}")
    return kind


def _import_name(value: Any) -> str:
    name = f"{type(value).__module__}:{type(value).__qualname__}"
    with suppress(ImportError, AttributeError, ValueError):  # the last of a name with `<locals>`
        if dataclasses.is_dataclass(value) and resolve_name(name) is type(value) and not name.startswith("__main__:"):
            return name
    raise NotImportable("isolate", value, "it is no dataclass that another process can import by module and name")


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
