"""The messages between an isolated optimizer and the oracle: queries, releases, and the state of a run.

Messages are JSON, and vectors lie in shared memory, each in a slot. What the optimizer sends is never code: a query is
one of the kernel's kinds with one of the kernel's clip rules, made anew from names and numbers.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from dpopt import fields
from dpopt.clipping.rules import RULES, AtBound
from dpopt.errors import ConfigError, unknown
from dpopt.privacy.queries import KINDS, hints
from dpopt.types import ClipRule, Number, Query, Release, Vector

CLIP_RULES: dict[str, type[Any]] = {**RULES, "at_bound": AtBound}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64, torch.bool)}
SLOTS = 16
"""Vectors that one message may hold; the first is the release's."""
LONGEST = 2**24
"""Bytes of a message without its payload."""
_HEAD = struct.Struct("<QQ")


class Gone(RuntimeError):
    """The other process has ended."""


class Channel:
    """Messages over a socket: JSON, and bytes beside it."""

    def __init__(self, connection: socket.socket) -> None:
        self._file = connection.makefile("rwb")
        self._connection = connection

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        text = json.dumps(message).encode()
        try:
            self._file.write(_HEAD.pack(len(text), len(payload)) + text + payload)
            self._file.flush()
        except OSError as error:
            raise Gone("the process of the isolated optimizer has ended") from error

    def receive(self, most: int = LONGEST) -> tuple[dict[str, Any], bytes]:
        """The next message and its payload, of at most `most` bytes.

        Raises:
            Gone: there is nobody who could send one, or it is too long.
        """
        try:
            length, more = _HEAD.unpack(self._read(_HEAD.size))
            if length > LONGEST or more > most:
                raise Gone(f"a message of {length} and {more} bytes")
            message = json.loads(self._read(length))
            if not isinstance(message, dict):
                raise Gone("a message that is no mapping")
            return message, self._read(more)
        except (OSError, ValueError, RecursionError) as error:
            raise Gone(f"the process of the isolated optimizer: {error}") from error

    def close(self) -> None:
        """Hang up."""
        for each in (self._file, self._connection):
            with suppress(OSError):  # there may be nobody to hear it
                each.close()

    def _read(self, length: int) -> bytes:
        content = self._file.read(length)
        if len(content) < length:
            raise Gone("the process of the isolated optimizer has ended")
        return content


class Vectors:
    """`SLOTS` vectors of up to `dimension` numbers in memory that both processes see.

    Args:
        file: descriptor of what `shared_file` made.
        dimension: length d.
    """

    def __init__(self, file: int, dimension: int) -> None:
        self.dimension, size = dimension, max(1, 8 * SLOTS * dimension)
        os.truncate(file, size)  # memory is taken as slots are used
        self._memory = mmap.mmap(file, size)

    def put(self, slot: int, vector: Tensor) -> str:
        """Write a vector; gives the name of its type."""
        kind = str(vector.dtype).removeprefix("torch.")
        self._view(slot, DTYPES[kind]).copy_(vector)
        return kind

    def take(self, slot: Any, kind: Any) -> Vector:
        """A copy of a vector: the other process may write on.

        Raises:
            ConfigError: no such slot or type.
        """
        if not isinstance(slot, int) or not 0 <= slot < SLOTS or kind not in DTYPES:
            raise ConfigError("isolated.vector", [slot, kind], f"expected a slot below {SLOTS} and a known type")
        return self._view(slot, DTYPES[kind]).clone()

    def _view(self, slot: int, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(self._memory, dtype=dtype, count=self.dimension, offset=8 * slot * self.dimension)


def shared_file() -> int:
    """The descriptor of a nameless, empty file for `Vectors`."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("dpopt")
    with tempfile.TemporaryFile() as temporary:
        return os.dup(temporary.fileno())


def query_message(query: Query, vectors: Vectors) -> dict[str, Any]:
    """A query as a message; its vectors go into slots.

    Raises:
        ConfigError: a kind of query or a clip rule that is not the kernel's, or more vectors than there are slots.
    """
    if KINDS.get(query.kind) is not type(query):
        raise ConfigError("query", query, f"an isolated optimizer asks for the kernel's: {', '.join(KINDS)}")
    writer = _Writer(vectors)
    return {"kind": query.kind} | {name: writer.field(getattr(query, name), hint) for name, hint in hints(type(query))}


class _Writer:
    def __init__(self, vectors: Vectors) -> None:
        self._vectors, self._used = vectors, 0

    def field(self, value: Any, hint: Any) -> Any:
        if hint == Number:
            return number_message(value)
        if hint is ClipRule:
            return _rule_message(value)
        return self._vector(value)

    def _vector(self, value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [self._pair(part) if isinstance(part, tuple) else self._vector(part) for part in value]
        if not isinstance(value, Tensor) or value.shape != (self._vectors.dimension,):
            raise ConfigError("query", value, f"expected a tensor of shape [{self._vectors.dimension}]")
        self._used += 1
        if self._used >= SLOTS:
            raise ConfigError("query", f"{self._used} vectors", f"an isolated optimizer may use {SLOTS - 1} in a query")
        return {"slot": self._used, "dtype": self._vectors.put(self._used, value.detach())}

    def _pair(self, pair: tuple[Any, Any]) -> Any:
        weight, point = pair
        return {"weight": number_message(weight), **self._vector(point)}


def query_from(message: Mapping[str, Any], vectors: Vectors) -> Query:
    """The query that `query_message` wrote.

    Raises:
        ConfigError: it is not what it should be.
    """
    kind = message.get("kind")
    if kind not in KINDS:
        raise unknown("isolated.query", kind, KINDS)
    try:
        given = {name: _field(message[name], hint, vectors) for name, hint in hints(KINDS[kind])}
        return KINDS[kind](**given)
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError("isolated.query", kind, f"its message cannot be read ({type(error).__name__})") from error


def _field(value: Any, hint: Any, vectors: Vectors) -> Any:
    if hint == Number:
        return number_from(value)
    if hint is ClipRule:
        return _rule_from(value)
    if isinstance(value, list):
        return [_point(part, vectors) for part in value]
    return None if value is None else _point(value, vectors)


def _point(value: Mapping[str, Any], vectors: Vectors) -> Any:
    vector = vectors.take(value["slot"], value["dtype"])
    return (number_from(value["weight"]), vector) if "weight" in value else vector


def _rule_message(rule: Any) -> dict[str, Any]:
    name = next((name for name, kind in CLIP_RULES.items() if type(rule) is kind), None)
    if name is None:
        raise ConfigError("clip", rule, f"an isolated optimizer uses the kernel's rules: {', '.join(CLIP_RULES)}")
    values = {field.name: number_message(getattr(rule, field.name)) for field in dataclasses.fields(rule)}
    return {"rule": name, "fields": values}


def _rule_from(message: Mapping[str, Any]) -> ClipRule:
    name = message["rule"]
    if name not in CLIP_RULES:
        raise unknown("isolated.clip", name, CLIP_RULES)
    return CLIP_RULES[name](**{key: number_from(value) for key, value in message["fields"].items()})


def number_message(value: Number) -> dict[str, Any]:
    """A number, and whether it was a tensor: what is computed with it may depend on that."""
    is_tensor = isinstance(value, Tensor)
    kind = str(value.dtype).removeprefix("torch.") if is_tensor else None
    return {"number": float(value), "dtype": kind}


def number_from(message: Mapping[str, Any]) -> Number:
    """The number that `number_message` wrote."""
    value, kind = fields.convert(message["number"], float, "isolated.number", {}), message["dtype"]
    return value if kind is None else torch.tensor(value, dtype=DTYPES[kind])


def release_message(release: Release, vectors: Vectors) -> dict[str, Any]:
    """A release as a message: one of length d goes into the first slot, a few numbers beside it."""
    value: Any = release.value.tolist() if release.value.dtype == torch.float64 and len(release.value) < SLOTS else None
    kind = vectors.put(0, release.value) if value is None else "float64"
    return {"value": value, "dtype": kind, "std": number_message(release.std)}


def release_from(message: Mapping[str, Any], vectors: Vectors) -> Release:
    """The release that `release_message` wrote."""
    kind, values = message["dtype"], message["value"]
    value = vectors.take(0, kind) if values is None else torch.tensor(values, dtype=DTYPES[kind])
    return Release(value, number_from(message["std"]))


def leaves_message(leaves: Sequence[Tensor]) -> tuple[dict[str, Any], bytes]:
    """The tensors of a state as a message and its payload."""
    plain = [leaf.detach().contiguous() for leaf in leaves]
    about = [[str(leaf.dtype).removeprefix("torch."), list(leaf.shape)] for leaf in plain]
    return {"leaves": about}, b"".join(leaf.reshape(-1).view(torch.uint8).numpy().tobytes() for leaf in plain)


def leaves_from(message: Mapping[str, Any], payload: bytes) -> list[Tensor]:
    """The tensors that `leaves_message` wrote.

    Raises:
        ConfigError: message and payload do not fit each other.
    """
    leaves, position = [], 0
    try:
        for kind, shape in message["leaves"]:
            dtype = DTYPES[kind]
            size = math.prod(shape) * dtype.itemsize
            part = bytearray(payload[position : position + size])
            if len(part) < size:
                raise ValueError("it is too short")
            flat = torch.frombuffer(part, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            leaves.append(flat.reshape(shape))
            position += size
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError("isolated.state", f"{len(payload)} bytes", f"cannot be read ({error})") from error
    return leaves
