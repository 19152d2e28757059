"""A command: a function, and the keys that its arguments are read by."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from dpopt.cli.keys import BASE, choices, described, of_document, spelled
from dpopt.fields import hints


@dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        function: of its keys; of the arguments where there are `files` or `words`. Returns the exit code, None for 0.
        text: a line for the list of commands.
        keys: a dataclass, see `keys.read`; None where all keys lie in `files`.
        files: of `conf/base`, that hold keys with their defaults.
        words: that the first argument may be.
        usage: of the arguments.
    """

    function: Callable[[Any], int | None]
    text: str
    keys: type | None = None
    files: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    usage: str = "KEY=VALUE"

    @property
    def description(self) -> str:
        """The command in full."""
        return inspect.getdoc(self.function) or self.text  # so that help and source cannot disagree

    @property
    def help(self) -> str:
        """The keys with their defaults."""
        lines = [described(self.keys)] if self.keys else []
        return "\n\n".join([*lines, *((BASE / f"{name}.yaml").read_text("utf-8") for name in self.files)])

    def values(self) -> dict[str, list[str]]:
        """The keys that the command takes, each with the values that it names."""
        named: dict[str, list[str]] = {}
        for name in self.files:
            named |= of_document(name)
        for field in fields(self.keys) if self.keys else ():
            named[spelled(field.name)] = choices(hints(self.keys)[field.name])
        return named
