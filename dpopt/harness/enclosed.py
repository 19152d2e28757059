"""A suite says all that it is itself: whatever it took from its surroundings would go into manifests and be published.

Hydra can read environment variables, the clock and other folders. Suites may refer to their own keys (`${epsilon}`) and
begin with files that lie beside them; all else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from dpopt.errors import ConfigError

PLAIN = re.compile(r"[\w-]+")
RESOLVER = re.compile(r"\$\{.*:", re.DOTALL)
"""What every `${resolver:...}` has, nested ones too; `${key}` does not."""


def check_files(folder: Path, name: str, below: tuple[str, ...] = ()) -> None:
    """Refuse a file that leads Hydra out of its folder, or that begins with one that does.

    Args:
        folder, name: it is `folder/name.yaml`; where there is none, Hydra will say so or has it.
        below: the files that begin with it, from the first on.

    Raises:
        ConfigError: it does.
        yaml.YAMLError: it is no YAML.
    """
    path = folder / f"{name}.yaml"
    if name in below:
        raise ConfigError(str(path), " -> ".join((*below, name)), "its `defaults` lead back to itself")
    content = yaml.safe_load(path.read_bytes()) if path.is_file() else None
    if not isinstance(content, dict):
        return
    if "hydra" in content:
        raise ConfigError(str(path), "hydra", "Hydra itself is not set by a suite")
    begins = content.get("defaults")
    for entry in begins if isinstance(begins, list) else []:
        if not isinstance(entry, str) or not PLAIN.fullmatch(entry):
            raise ConfigError(f"{path}: defaults", entry, "expected names of files in the same folder, and `_self_`")
        check_files(folder, entry, (*below, name))


def check_values(content: Any, where: str) -> None:
    """Refuse plain data with a text that asks one of OmegaConf's resolvers for something, such as `${oc.env:HOME}`.

    Raises:
        ConfigError: names the text, and not what it stands for.
    """
    for text in _texts(content):
        if RESOLVER.search(text):
            allowed = "a suite takes nothing from its surroundings; expected a value, or ${key} for another key's"
            raise ConfigError(where, text, allowed)


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list | dict):
        for item in content.values() if isinstance(content, dict) else content:
            yield from _texts(item)
