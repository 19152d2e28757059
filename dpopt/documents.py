"""YAML files of any origin: a mapping that can be read to its end, or one error that names the file."""

from __future__ import annotations

from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml

from dpopt import files
from dpopt.errors import ConfigError, cut
from dpopt.fields import overflows

LARGEST, MOST, DEEPEST = 10**6, 20_000, 50
"""Bytes of a file; values in it and levels of lists and mappings."""


def mapping(file: Path | Traversable) -> dict[str, Any]:
    """The content of a YAML file that holds one mapping; nothing where it is empty.

    Raises:
        ConfigError: the file is larger, longer or deeper than `LARGEST`, `MOST` and `DEEPEST`, not UTF-8, no mapping of
            plain data, has aliases (a few lines of which stand for billions of values), or a number that is too large.
    """
    try:
        content = files.content(file, LARGEST) if isinstance(file, Path) else file.read_bytes()
    except files.Damaged as error:
        raise ConfigError(str(file), "content", str(error)) from error
    try:
        text = content.decode("utf-8")
        _check(file, text)
        return yaml.safe_load(text) or {}
    except UnicodeDecodeError as error:
        raise ConfigError(str(file), f"byte {error.start}", "the text is not UTF-8") from error
    except ConfigError:  # which is a ValueError, as those of the parser below
        raise
    except (yaml.YAMLError, ValueError, TypeError) as error:
        reason = cut(" ".join(str(error).split()))
        raise ConfigError(str(file), "content", f"it is no YAML of plain data: {reason}") from error


def _check(file: Path | Traversable, text: str) -> None:
    # Event by event, before anything is made of them: a few lines can stand for more values than memory holds.
    values, levels, roots = 0, 0, 0
    for event in yaml.parse(text, yaml.SafeLoader):
        where = f"{file}, line {event.start_mark.line + 1 if event.start_mark else 1}"
        if isinstance(event, yaml.NodeEvent):
            values += 1
            roots += not levels
            if not levels and (roots > 1 or not isinstance(event, yaml.MappingStartEvent)):
                allowed = "expected a mapping, key: value, and no more"
                raise ConfigError(where, getattr(event, "value", "a list"), allowed)
            if event.anchor:
                sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
                raise ConfigError(where, f"{sign}{event.anchor}", "write the value out: aliases are not read")
        if isinstance(event, yaml.ScalarEvent) and event.style is None and overflows(event.value):
            raise ConfigError(where, event.value, "too large; infinity is `inf`")
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if values > MOST or levels > DEEPEST:
            raise ConfigError(where, "values", f"expected at most {MOST:,}, on {DEEPEST} levels")
