"""Names of a package that are imported on first use, so that reading results does not import torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def attach(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) for `package`, of public name -> module that holds it, or is it itself."""

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(names[name])
        value = getattr(module, name, module)
        setattr(sys.modules[package], name, value)  # from here on it is found without this function
        return value

    return load, lambda: sys.modules[package].__all__
