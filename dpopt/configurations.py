"""Suites, and the keys of commands: YAML files that Hydra reads, with the defaults that they begin with and overrides.

A suite's file holds all that defines the suite: values from the environment would go into manifests and be published.
Hydra can read environment variables, the clock and other folders. Suites may refer to their own keys (`${epsilon}`) and
begin with files that lie beside them or come with dpopt; all else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from threading import Lock
from typing import Any

from hydra import compose, initialize
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.initialize import get_gh_backup, restore_gh_from_backup
from hydra.version import VersionBase
from omegaconf import MISSING, OmegaConf

from dpopt import documents, fields
from dpopt._paths import shipped
from dpopt.errors import ConfigError, cut, unknown

BASE = Path(str(resources.files("dpopt") / "conf" / "base"))
"""Defaults that suites and commands start from."""
OPEN_KEYS = ("settings", "fields", "published", "options")
"""Keys below which an override may add what the file does not name."""
NUMBER = re.compile(r"[\w.+-]+")
"""What may be a number in an override."""
HOME = re.compile(r"~[^'\\]*")
"""A path below the home folder, which Hydra's grammar does not know without quotes."""
PLAIN = re.compile(r"[\w-]+")
RESOLVER = re.compile(r"\$\{.*:", re.DOTALL)
"""What every `${resolver:...}` has, nested ones too; `${key}` does not."""
GROUP = "_dpopt_is_reading_"
"""Hydra's group of the files that are being read; a name that no application has."""
ONE = Lock()
"""Hydra is one for all threads."""

Layers = dict[str, Any]
"""What a file and those that it begins with hold, by their names."""


def command(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of the command `name`: `conf/base/NAME.yaml` with overrides; see `composed`."""
    return composed(BASE / f"{name}.yaml", overrides, keys(name))


def keys(name: str) -> list[str]:
    """The keys that a command takes, or (name "suite") that a suite's file may hold."""
    return list(documents.mapping(BASE / f"{name}.yaml"))


def composed(
    file: Path, overrides: Sequence[str], known: Sequence[str], content: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A YAML file with Hydra overrides applied, as plain data.

    Args:
        file: the file; errors call it by its name.
        overrides: such as "seeds=[0]".
        known: the keys that it may hold.
        content: in the place of what the file holds.

    Raises:
        ConfigError: the file or an override cannot be used; names the key and the nearest known one.
    """
    prepared = [_prepare(override, known) for override in overrides]
    try:
        found = _compose(file.stem, dict(_layers(file, content)), prepared)
    except ConfigError:
        raise
    except Exception as error:  # whatever the parsers stumble over, the file or an override is at fault
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise ConfigError(str(file), list(overrides), cut(reason)) from error
    for key in found:
        if key not in known:
            raise unknown(file.name, key, known)
    return {str(key): value for key, value in found.items()}


def _layers(file: Path, content: Mapping[str, Any] | None, below: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """What a file holds, and what those hold that it begins with; `below` are the files that begin with it.

    Raises:
        ConfigError: a file cannot be read, leads Hydra elsewhere, or leads back to itself.
    """
    if file.stem in below:
        raise ConfigError(str(file), " -> ".join((*below, file.stem)), "its `defaults` lead back to itself")
    said = documents.mapping(file) if content is None else content
    if "hydra" in said:
        raise ConfigError(str(file), "hydra", "Hydra itself is not set by a suite")
    # OmegaConf reads 1e-3 as a number, where YAML has a text.
    yield file.stem, OmegaConf.load(file) if content is None else OmegaConf.create(dict(content))
    begins = said.get("defaults")
    for entry in begins if isinstance(begins, list) else []:
        if not isinstance(entry, str) or not PLAIN.fullmatch(entry):
            raise ConfigError(f"{file}: defaults", entry, "expected names of files in the same folder, and `_self_`")
        if entry != "_self_":
            yield from _layers(_beside(file, entry), None, (*below, file.stem))


def _beside(file: Path, name: str) -> Path:
    """The file `name` that another one begins with."""
    folders = (file.parent, Path(str(shipped("benchmarks"))), BASE)
    for folder in folders:
        if (found := folder / f"{name}.yaml").is_file():
            return found
    known = sorted({other.stem for folder in folders for other in folder.glob("*.yaml")})
    raise unknown(f"{file}: defaults", name, known)


def _compose(name: str, layers: Layers, overrides: Sequence[str]) -> dict[Any, Any]:
    """What Hydra makes of the layers. It reads memory and looks into no folder; a caller's own Hydra stays."""
    with ONE:
        store, before, version = ConfigStore.instance(), get_gh_backup(), VersionBase.instance().getbase()
        for layer, content in layers.items():
            store.store(layer, content, GROUP, "_global_")
        GlobalHydra.instance().clear()
        try:
            with initialize(None, version_base="1.3"):
                config = compose(f"{GROUP}/{name}", list(overrides))
        finally:
            store.repo.pop(GROUP)
            restore_gh_from_backup(before)
            VersionBase.instance().version_base = version
    content = OmegaConf.to_container(config)
    check_values(content, f"{name}.yaml")
    if absent := ", ".join(_absent(content, name)):
        raise ConfigError(absent, None, "no default: a value has to be given")
    found = OmegaConf.to_container(config, resolve=True)
    if not isinstance(found, dict):
        raise ConfigError(f"{name}.yaml", found, "expected a mapping")
    return found


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


def _absent(content: Any, where: str) -> Iterator[str]:
    """The keys that are still `???`; OmegaConf's `missing_keys` fails where another key refers to one."""
    if content == MISSING:
        yield where
    elif isinstance(content, list | dict):
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _absent(item, f"{where}.{key}")


def plain(value: Any, where: str) -> Any:
    """A value of Python's as a file could hold it.

    Raises:
        ConfigError: it could not.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(part, where) for key, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(part, where) for part in value]
    if isinstance(value, float):
        return float(value)  # not NumPy's, which is one too
    if value is None or isinstance(value, str | bool | int):
        return value
    raise ConfigError(where, value, "expected what a suite's file can hold: numbers, texts, lists and mappings")


def first_key(override: str) -> str:
    """The top-level key that an override such as `+settings.fiber.tuning=fixed` is about."""
    return override.partition("=")[0].lstrip("+~").split(".")[0]


def _prepare(override: str, known: Sequence[str]) -> str:
    key, equals, value = override.partition("=")
    first = first_key(override)
    if HOME.fullmatch(value):
        override = f"{key}='{value}'"
    if not equals and not key.startswith("~"):
        raise ConfigError("override", override, "expected key=value")
    if first not in known:
        raise unknown("override", first, known)
    for number in filter(fields.overflows, NUMBER.findall(override)):
        raise ConfigError(first, number, "too large; infinity is `inf`")
    return f"++{override.lstrip('+')}" if first in OPEN_KEYS and not key.startswith("~") else override
