"""Names and keys that a shell offers on Tab, through argcomplete. Nothing here imports torch, so that it comes at once.

The shell is told once, in the file that it starts with: `eval "$(register-python-argcomplete dpopt)"`, for zsh after
compinit, for fish `register-python-argcomplete --shell fish dpopt | source`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpopt import documents, registry
from dpopt._paths import at_hand
from dpopt.cli.keys import Command
from dpopt.errors import ConfigError


def answer(parser: argparse.ArgumentParser, commands: Mapping[str, Command]) -> None:
    """Tell the shell that has asked what may follow, and end the process."""
    from argcomplete import autocomplete

    def completer(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
        return offers(prefix, parsed_args.overrides or [], commands[parsed_args.command])

    autocomplete(parser, always_complete_options=False, default_completer=completer)  # type: ignore[arg-type]


def offers(prefix: str, before: Sequence[str], command: Command) -> list[str]:
    """The ways in which an argument that begins with `prefix` may go on: keys, values, or elements of a list of values.

    The arguments `before` it, and it, are those of `command`.
    """
    values, (key, equals, value) = command.values(), prefix.partition("=")
    if not equals:
        taken = {argument.partition("=")[0] for argument in before}
        return [*(() if before else command.words), *(f"{name}=" for name in values if name not in taken)]
    names = _VALUES[key](before) if key in _VALUES else values.get(key, [])
    if not value.startswith("["):
        return [f"{key}={name}" for name in names]
    begun = value[: max(value.rfind("["), value.rfind(",")) + 1]
    taken = set(begun.strip("[,").split(","))
    # Each name can go on in two ways, so that no shell takes it for the end of the argument and adds a space.
    return [f"{key}={begun}{name}{end}" for name in names if name not in taken for end in (",", "]")]


def _suites(before: Sequence[str]) -> Mapping[str, Path]:
    from dpopt.suites.suite import suite_files

    return suite_files()


def _rows(before: Sequence[str]) -> Iterable[str]:
    file = _suites(before).get(next((word[6:] for word in before if word.startswith("suite=")), ""))
    settings: Iterable[str] = ()
    with suppress(ConfigError):  # a suite whose file is wrong still completes the names of optimizers
        settings = documents.mapping(file).get("settings") or () if file else ()
    return dict.fromkeys([*settings, *registry.optimizers()])


def _figures(before: Sequence[str]) -> Iterable[str]:
    folder = next((argument.partition("=")[2] for argument in before if argument.startswith("plots=")), "plots")
    return at_hand("plots", "[!_]*.py") if folder == "plots" else sorted(f.stem for f in Path(folder).glob("[!_]*.py"))


# No annotation names these values; a function takes the arguments before the key.
_VALUES: dict[str, Callable[[Sequence[str]], Iterable[str]]] = {
    "suite": _suites,
    "optimizers": _rows,
    "optimizer": lambda before: registry.optimizers(),
    "workloads": lambda before: registry.entries("workload"),
    "workload": lambda before: registry.entries("workload"),
    "figure": _figures,
}
