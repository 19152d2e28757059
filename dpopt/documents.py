"""YAML files of any origin: a mapping that can be read to its end, or one error that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dpopt.errors import ConfigError, cut
from dpopt.fields import overflows

LARGEST, MOST, DEEPEST = 10**6, 20_000, 50
"""Bytes of a file; values in it and levels of lists and mappings, both with aliases written out."""


class _Extent(NamedTuple):
    """How many values a part of a file stands for, and on how many levels."""

    values: int = 1
    levels: int = 0


class _Reader:
    """Goes through the events of a file and stops at the first that shows something wrong: the rest may be endless."""

    def __init__(self, file: Path | Traversable) -> None:
        self._file, self._line = file, 1
        self._known: dict[str, _Extent] = {}
        self._open: list[tuple[str | None, _Extent]] = [(None, _Extent())]

    def read(self, events: Iterator[yaml.Event]) -> None:
        for event in events:
            self._line = event.start_mark.line + 1 if event.start_mark else self._line
            is_root = len(self._open) == 1 and isinstance(event, yaml.NodeEvent)
            if is_root and (self._open[0][1].levels or not isinstance(event, yaml.MappingStartEvent)):
                raise self._refusal(getattr(event, "value", "a list"), "expected a mapping, key: value, and no more")
            if isinstance(event, yaml.CollectionStartEvent):
                self._open.append((event.anchor, _Extent(1, 1)))
                self._check()
            elif isinstance(event, yaml.CollectionEndEvent):
                self._add(*self._open.pop())
            elif isinstance(event, yaml.AliasEvent):
                self._alias(event.anchor)
            elif isinstance(event, yaml.ScalarEvent):
                self._scalar(event)

    def _alias(self, name: str) -> None:
        if name not in self._known:
            raise self._refusal(f"*{name}", "expected the name of what has ended before")
        self._add(None, self._known[name])

    def _scalar(self, event: yaml.ScalarEvent) -> None:
        if event.style is None and overflows(event.value):
            raise self._refusal(event.value, "too large; infinity is `inf`")
        self._add(event.anchor, _Extent())

    def _add(self, name: str | None, extent: _Extent) -> None:
        """Add the extent of a part, called `name`, to the part that contains it."""
        if name:
            self._known[name] = extent
        outer, (values, levels) = self._open[-1]
        self._open[-1] = outer, _Extent(values + extent.values, max(levels, extent.levels + 1))
        self._check()

    def _check(self) -> None:
        values = sum(extent.values for _, extent in self._open)
        if values > MOST or len(self._open) + self._open[-1][1].levels > DEEPEST:
            raise self._refusal("values", f"expected at most {MOST:,}, on {DEEPEST} levels, with aliases written out")

    def _refusal(self, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self._file}, line {self._line}", value, allowed)


def mapping(file: Path | Traversable) -> dict[str, Any]:
    """What a YAML file holds; nothing where it is empty.

    Raises:
        ConfigError: as `check`, or a tag asks for something other than plain data.
    """
    text = check(file)
    try:
        return yaml.safe_load(text) or {}
    except (yaml.YAMLError, ValueError, TypeError) as error:
        raise _unreadable(file, error) from error


def check(file: Path | Traversable) -> str:
    """The text of a YAML file that is empty or holds one mapping.

    Raises:
        ConfigError: the file is larger, longer or deeper than `LARGEST`, `MOST` and `DEEPEST`, not UTF-8, not YAML, no
            mapping, refers to itself, or has a number that is too large.
    """
    content = file.read_bytes()
    if len(content) > LARGEST:
        raise ConfigError(str(file), f"{len(content)} bytes", f"expected at most {LARGEST:,}")
    try:
        text = content.decode("utf-8")
        _Reader(file).read(yaml.parse(text, yaml.SafeLoader))
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), f"byte {error.start}", "the text is not UTF-8") from error
    except yaml.YAMLError as error:
        raise _unreadable(file, error) from error
    return text


def _unreadable(file: Path | Traversable, error: Exception) -> ConfigError:
    return ConfigError(str(file), "content", f"it is no YAML of plain data: {cut(' '.join(str(error).split()))}")
