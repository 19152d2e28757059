"""Packages that few suites need are extras of dpopt; where one is missing, an error says which to install."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dpopt.errors import ConfigError, Missing

EXTRAS = {
    **dict.fromkeys(("dadaptation", "dog", "prodigyopt", "schedulefree"), "parameter-free"),
    **dict.fromkeys(("peft", "tokenizers", "transformers"), "text"),
}
"""Top-level module -> the extra that installs it."""


def hint(module: str) -> str:
    """The command that installs `module`."""
    top = module.partition(".")[0]
    return f"pip install 'dpopt[{EXTRAS[top]}]'" if top in EXTRAS else f"pip install {top}"


def optional(module: str) -> Any:
    """The module of that name, imported; where it is not installed, `ConfigError` says how to install it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there, and lacks one of those that it needs, is another fault.
        if (error.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise ConfigError("package", module.partition(".")[0], f"is not installed: {hint(module)}") from error


def absent(*modules: str) -> list[Missing]:
    """Those of `modules` that are not installed, and how to install them."""
    # Looked for and not imported, which takes seconds for some of them.
    return [
        Missing("package", module, f"is not installed: {hint(module)}", "package", module)
        for module in modules
        if find_spec(module) is None
    ]
