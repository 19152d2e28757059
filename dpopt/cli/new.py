"""`dpopt new`: the files that a new optimizer, suite or data set begins with."""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import yaml

from dpopt import __version__, registry
from dpopt.cli.console import OUT
from dpopt.cli.keys import read
from dpopt.errors import ConfigError, unknown
from dpopt.fields import key
from dpopt.files import check_writable
from dpopt.workloads.data_keys import DataKeys

_NAMES = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_Files = tuple[dict[Path, str], list[str]]
"""Path -> text of files that are not there yet, and commands that show that they work."""


def new(arguments: Sequence[str]) -> None:
    """Write the files that a new optimizer, suite or data set begins with; none is overwritten.

    `new optimizer NAME` writes a Python file and its YAML entry where dpopt's source tree is the current folder, and
    elsewhere a package of its own that registers the optimizer, with its conformance test. With from=FILE the Python
    file is a copy of that one; otherwise it is a template, which raises an error until its rule is written. `new suite
    NAME` writes benchmarks/NAME.yaml, which works as it is.

    `new data NAME from=PATH` writes data/NAME.yaml and data/NAME/. Where there is no test split, a part of the records
    becomes one, always the same by their row numbers. Classes, counts and checksums of the records become public. The
    ranges and values of a table's columns are not taken from the records: they are stated, or the entry's `???` are to
    be filled in.
    """
    if len(arguments) < 2 or (len(arguments) > 2 and arguments[0] == "suite"):
        raise ConfigError("new", " ".join(arguments), f"expected a kind ({', '.join(KINDS)}) and a name")
    kind, name, *options = arguments
    if kind not in KINDS:
        raise unknown("new", kind, KINDS)
    check_name(name)
    contents, next_steps = KINDS[kind](name, *options)
    for path in contents:
        if path.exists():
            raise ConfigError("name", name, f"{path} exists")
    for folder in {path.parent for path in contents}:
        check_writable(folder, "new")
    for path, text in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
        OUT.print(str(path))
    OUT.print("\n".join(["next:", *(f"  {step}" for step in next_steps)]), style="dim")


def check_name(name: str) -> None:
    """Raise `ConfigError` unless a name can be a Python module, and a string in YAML."""
    is_word = name in ("all", "none")  # which `optimizers=` takes beside names
    if not _NAMES.fullmatch(name) or keyword.iskeyword(name) or yaml.safe_load(name) != name or is_word:
        raise ConfigError("name", name, "expected words of small letters and digits such as dp_sign")


@dataclass(frozen=True, kw_only=True)
class _OptimizerKeys:
    from_: Path | None = key("Python file with the class of the optimizer", None)


def _class_of(file: Path, name: str) -> tuple[str, str]:
    """A module's text, and its class with a rule: of several, the one that is called like the optimizer."""
    try:
        text = file.read_text("utf-8")
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError("from", str(file), f"it cannot be read: {error}") from error
    rules = [each for each in classes if {"step", "direction"} & {getattr(node, "name", "") for node in each.body}]
    chosen = [each for each in rules if each.name.lower() == name.replace("_", "")] or rules
    if len(chosen) != 1:
        raise ConfigError("from", str(file), "expected one class with a method `step` or `direction`")
    return text, chosen[0].name


def _optimizer(name: str, *options: str) -> _Files:
    if name in registry.optimizers():
        raise ConfigError("name", name, "an optimizer of that name is registered: `dpopt list what=optimizers`")
    parts = [part.upper() if part in ("dp", "sgd") else part.capitalize() for part in name.split("_")]
    values = {"name": name, "class": "".join(parts), "families": " | ".join(registry.FAMILIES), "version": __version__}
    rule, entry = _template("optimizer.py"), _template("optimizer.yaml")
    if re.search(rf"\b{values['class']}\b", rule):
        raise ConfigError("name", name, f"a class {values['class']} would hide what its module imports")
    if file := read(_OptimizerKeys, options, "new optimizer").from_:
        rule, values["class"] = _class_of(file, name)
        # What the template's entry says of its own fields is not true of others.
        entry = "".join(entry.splitlines(keepends=True)[:5]).replace(
            "a moving average of the private gradient", "$class"
        )
        if lr := re.search(r"^ +lr: \w+ = ([\d.e-]+)$", rule, re.MULTILINE):
            rates = [float(f"{float(lr[1]) * by:.2g}") for by in (0.1, 0.3, 1, 3, 10)]
            entry += yaml.safe_dump({"grid": {"lr": rates}})
    else:
        rule = Template(rule).substitute(values)
    if tree := _source_tree():
        # Two files are all: the tests of the registry hold every entry to the rules.
        values["module"] = f"dpopt.optimizers.{name}"
        contents = {
            tree / "dpopt" / "optimizers" / f"{name}.py": rule,
            tree / "dpopt" / "conf" / "optimizer" / f"{name}.yaml": Template(entry).substitute(values),
        }
        return contents, [f"python -m pytest tests/conformance -k {name}", "dpopt list"]
    # Elsewhere a distribution of its own registers the class, by the entry-point group "dpopt.optimizers".
    package, hyphenated = f"dpopt_{name}", name.replace("_", "-")
    values |= {"module": f"{package}.{name}", "package": package, "hyphenated": hyphenated}
    root = Path(f"dpopt-{hyphenated}")
    contents = {
        root / "pyproject.toml": Template(_template("pyproject.toml")).substitute(values),
        root / package / "__init__.py": "",
        root / package / f"{name}.py": rule,
        root / package / f"{name}.yaml": Template(entry).substitute(values),
        root / "tests" / f"test_{name}.py": Template(_template("test_optimizer.py")).substitute(values),
    }
    return contents, [f"pip install --editable '{root}[dev]'", f"python -m pytest {root}", "dpopt list"]


def _source_tree() -> Path | None:
    places = [at for at in (Path.cwd(), *Path.cwd().parents) if (at / "pyproject.toml").exists()]
    # The current folder may be a project of its own inside of dpopt's tree.
    return next((at for at in places if (at / "dpopt" / "conf" / "optimizer").is_dir()), None)


def _suite(name: str) -> _Files:
    from dpopt.suites.suite import suite_files

    if name in suite_files():
        raise ConfigError("name", name, f"{suite_files()[name]} is a suite of that name")
    path = (_source_tree() or Path()) / "benchmarks" / f"{name}.yaml"
    return {path: _template("suite.yaml")}, [f"dpopt plan suite={name} timed_draws=20", f"dpopt run suite={name}"]


def _data(name: str, *options: str) -> _Files:
    """Write a data set of one's own; the files of its records are too large to be returned as texts."""
    from dpopt.workloads.data import own
    from dpopt.workloads.data.catalogue import HOW_TO_STATE

    keys = read(DataKeys, options, "new data")
    check_writable(Path(), "new")
    own.check_free(name)
    with own.imported(name, keys) as imported:
        entry = own.keep(imported)
    counts = ", ".join(f"{part.records:,} {split}" for split, part in entry.splits.items())
    OUT.print(f"data/{name}.yaml, data/{name}/: {entry.kind} in {entry.classes} classes, {counts}")
    unstated = [column for column, stated in entry.columns.items() if not stated.is_stated]
    steps = [f"state in data/{name}.yaml what is public of {', '.join(unstated)}: {HOW_TO_STATE}"] if unstated else []
    workload = ", ".join(f"{key}: {value}" for key, value in small_workload(name).items())
    return {}, [*steps, "dpopt new suite NAME, with", f"  workloads: [{{{workload}}}]"]


def small_workload(data: str) -> dict[str, Any]:
    """The name and fields of a workload on a data set that takes little time."""
    from dpopt.workloads.data.catalogue import entry

    dataset = entry(data)
    name = {"table": "table", "text": "texts"}.get(dataset.kind, "images")
    of_images = {"architecture": "two_conv"} | ({} if dataset.size else {"size": 32})
    return {"name": name, "data": data} | (of_images if name == "images" else {})


def _template(name: str) -> str:
    return (resources.files("dpopt.cli") / "templates" / f"{name}.txt").read_text("utf-8")


KINDS: dict[str, Callable[..., _Files]] = {"optimizer": _optimizer, "suite": _suite, "data": _data}
"""Kind -> the files that `new` writes of it."""
