"""What a command is: a function of its arguments, and where its help text and what a shell offers come from."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import NamedTuple

BASE = resources.files("dpopt") / "conf" / "base"
IN_TEXT = re.compile(r"\b([a-z_]+)=(?:([a-z_]+)\b)?")
"""A key in a text, and a value that it may have: "by=draws"; no value in "budgets=[1,3]"."""
IN_FILE = re.compile(r"([a-z_]+): *([^#]*?) *(?:#(.*))?")
"""A line of a YAML file: key, default, comment."""
CHOICE = re.compile(r"[\w:]+(?: \| [\w:]+)+")
"""The values that a comment allows: "local | inline"."""


class Command(NamedTuple):
    """A command of the command line.

    Attributes:
        function: of the arguments; returns the exit code, None for 0. Its docstring is the help text and names the keys
            that no file of `bases` does.
        text: a line for the list of commands.
        bases: files of `conf/base` that hold keys of the command, with their defaults.
        arguments: what they look like; words in small letters are meant literally.
    """

    function: Callable[[Sequence[str]], int | None]
    text: str
    bases: tuple[str, ...] = ()
    arguments: str = "KEY=VALUE"

    @property
    def description(self) -> str:
        """What the command does, in full."""
        return inspect.getdoc(self.function) or self.text

    @property
    def defaults(self) -> str:
        """The files of `bases`, comments included."""
        return "\n".join((BASE / f"{name}.yaml").read_text("utf-8") for name in self.bases)

    @property
    def words(self) -> list[str]:
        """What the first argument may be, where it is one of some words."""
        return [word for word in re.split(r"[ |]", self.arguments) if word.isalpha() and word.islower()]

    def keys(self) -> dict[str, list[str]]:
        """The keys that the command takes, each with the values that its help text names."""
        known: dict[str, list[str]] = {}
        for key, value in IN_TEXT.findall(f"{self.arguments} {self.description}"):
            known.setdefault(key, []).extend([value] * bool(value))
        for line in filter(None, map(IN_FILE.fullmatch, self.defaults.splitlines())):
            key, default, comment = line.groups("")
            choice = CHOICE.search(comment)
            switch = ["true", "false"] if default in ("true", "false") else []
            known.setdefault(key, []).extend(choice[0].split(" | ") if choice else switch)
        return known
