"""Suites, and the keys of commands: YAML files with the defaults that they begin with, and Hydra's overrides.

Values from the environment would go into manifests and be published. So files are put on top of each other here, and
only Hydra's grammar of overrides is used. Suites may refer to their other keys (`${epsilon}`) and begin with files that
lie beside them or come with dpopt; all else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict

from dpopt import documents, fields
from dpopt._paths import shipped
from dpopt.errors import ConfigError, cut, unknown

_BASE = Path(str(resources.files("dpopt") / "conf" / "base"))
"""Defaults that suites and commands start from."""
OPEN_KEYS = ("settings", "fields", "published", "options")
"""Keys below which an override may add what the file does not name."""


def command(name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """The keys of the command `name`: `conf/base/NAME.yaml` with overrides; see `composed`."""
    return composed(_BASE / f"{name}.yaml", overrides, keys(name))


def keys(name: str) -> list[str]:
    """The keys that a command takes, or (name "suite") that a suite's file may hold."""
    return list(documents.mapping(_BASE / f"{name}.yaml"))


def composed(
    file: Path, overrides: Sequence[str], permitted: Sequence[str], content: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A YAML file, or `content` in its place, with Hydra's overrides applied, as plain data.

    Raises:
        ConfigError: the file or an override cannot be used, or a key is not `permitted`; suggests the nearest one.
    """
    lines = [_checked(override, permitted) for override in overrides]
    try:
        config = _layered(file, content)
        OmegaConf.set_struct(config, True)  # an override names a key that there is
        for override in OverridesParser.create().parse_overrides(lines):
            _apply(override, config)
        written = OmegaConf.to_container(config)
        check_values(written, f"{file.stem}.yaml")
        # OmegaConf's `missing_keys` fails where another key refers to one that is missing.
        if absent := ", ".join(at for at, leaf in _leaves(written, file.stem) if leaf == MISSING):
            raise ConfigError(absent, None, "no default: a value has to be given")
        values = OmegaConf.to_container(config, resolve=True)
    except ConfigError:
        raise
    except Exception as error:  # whatever the parsers stumble over, the file or an override is at fault
        reason = " ".join(f"{error} {error.__cause__ or ''}".split())
        raise ConfigError(str(file), list(overrides), cut(reason)) from error
    assert isinstance(values, dict)
    for key in values:
        if key not in permitted:
            raise unknown(file.name, key, permitted)
    return {str(key): value for key, value in values.items()}


def joined(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` on top of `below`: mappings in both are joined, other values replaced."""
    both = [key for key in above if isinstance(above[key], Mapping) and isinstance(below.get(key), Mapping)]
    return {**below, **above, **{key: joined(below[key], above[key]) for key in both}}


def _layered(file: Path, content: Mapping[str, Any] | None, below: tuple[str, ...] = ()) -> DictConfig:
    """A file on top of those that it begins with; `below` are the files that begin with it."""
    if file.stem in below:
        raise ConfigError(str(file), " -> ".join((*below, file.stem)), "its `defaults` lead back to itself")
    layered = documents.mapping(file) if content is None else content
    if "hydra" in layered:
        raise ConfigError(str(file), "hydra", "Hydra itself is not set by a suite")
    # OmegaConf reads 1e-3 as a number, where YAML has a text.
    layer = OmegaConf.load(file) if content is None else OmegaConf.create(dict(content))
    assert isinstance(layer, DictConfig)
    begins = layered.get("defaults")
    layers, names = [], begins if isinstance(begins, list) else []
    for entry in names if "_self_" in names else [*names, "_self_"]:
        if not isinstance(entry, str) or not re.fullmatch(r"[\w-]+", entry):
            raise ConfigError(f"{file}: defaults", entry, "expected names of files in the same folder, and `_self_`")
        if entry == "_self_":
            keys: list[Any] = [key for key in layer if key != "defaults"]  # of any type: wrong ones are refused below
            layers.append(OmegaConf.masked_copy(layer, keys))
        else:
            # A suite's neighbours come first: with its folder goes all that it means.
            folders = (file.parent, shipped("benchmarks"), _BASE)
            path = next((path for folder in folders if (path := folder / f"{entry}.yaml").is_file()), None)
            if path is None:
                stems = {other.stem for folder in folders for other in folder.glob("*.yaml")}
                raise unknown(f"{file}: defaults", entry, stems)
            layers.append(_layered(path, None, (*below, file.stem)))
    merged = OmegaConf.merge(*layers)
    assert isinstance(merged, DictConfig)
    return merged


def _apply(override: Override, config: DictConfig) -> None:
    key, value = override.key_or_group, override.value()
    if override.package is not None or override.is_sweep_override() or override.is_add():
        raise ValueError(f"{override.input_line}: expected key=value, with one value; + is for keys below {OPEN_KEYS}")
    if override.is_delete():
        above, _, last = key.rpartition(".")
        present = OmegaConf.select(config, key, throw_on_missing=False)
        if present is None or (value is not None and value != present):
            raise ValueError(f"{override.input_line}: there is no such value to delete")
        with open_dict(config):  # OmegaConf deletes nothing from what takes no further keys
            del (OmegaConf.select(config, above) if above else config)[last]
    else:
        OmegaConf.update(config, key, value, merge=True, force_add=override.is_force_add())


def check_values(content: Any, where: str) -> None:
    """Raise `ConfigError` for a text that asks one of OmegaConf's resolvers for something, such as `${oc.env:HOME}`."""
    # The error names the text and not its value, which may be a secret.
    for _, leaf in _leaves(content, where):
        if isinstance(leaf, str) and re.search(r"\$\{.*:", leaf, re.DOTALL):  # nested ones too, and no ${key}
            allowed = "a suite takes nothing from its surroundings; expected a value, or ${key} for another key's"
            raise ConfigError(where, leaf, allowed)


def _leaves(content: Any, where: str) -> Iterator[tuple[str, Any]]:
    if isinstance(content, list | dict):
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            yield from _leaves(item, f"{where}.{key}")
    else:
        yield where, content


def plain(value: Any, where: str) -> Any:
    """A value of Python's as a file could hold it; `ConfigError` where none could."""
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


def _checked(override: str, permitted: Sequence[str]) -> str:
    key, equals, value = override.partition("=")
    first = first_key(override)
    if re.fullmatch(r"~[^'\\]*", value):  # Hydra's grammar knows no path below the home folder without quotes
        override = f"{key}='{value}'"
    if not equals and not key.startswith("~"):
        raise ConfigError("override", override, "expected key=value")
    if first not in permitted:
        raise unknown("override", first, permitted)
    # Here, as Hydra's grammar makes infinity of 1e400, which at an epsilon means no noise.
    for number in filter(fields.overflows, re.findall(r"[\w.+-]+", override)):
        raise ConfigError(first, number, "too large; infinity is `inf`")
    return f"++{override.lstrip('+')}" if first in OPEN_KEYS and not key.startswith("~") else override
