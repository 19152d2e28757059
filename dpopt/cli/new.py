"""`dpopt new`: the files that a new optimizer, suite or data set begins with. They work as they are written."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from dpopt import __version__, fields, registry
from dpopt.cli.console import OUT
from dpopt.errors import ConfigError, unknown

if TYPE_CHECKING:
    from dpopt.workloads.data import Entry

TEMPLATES = resources.files("dpopt.cli") / "templates"
NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
MEANT_OTHERWISE = ("all", "none")
"""What `optimizers=` takes beside names."""
ACRONYMS = ("dp", "sgd")
"""Parts of a name that a class writes in capitals."""


class Files(NamedTuple):
    """What is to be written.

    Attributes:
        contents: path -> text, of what is not yet there.
        next_steps: commands that show that it works.
    """

    contents: dict[Path, str]
    next_steps: list[str]


def new(arguments: Sequence[str]) -> None:
    """Write the files that a new optimizer, suite or data set begins with; none is overwritten.

    `new optimizer NAME` writes a Python file and its YAML entry where dpopt's source tree is the current folder, and
    elsewhere a package of its own that registers the optimizer, with its conformance test. `new suite NAME` writes
    benchmarks/NAME.yaml. Both work as they are.

    `new data NAME from=PATH` writes data/NAME.yaml and data/NAME/ from a folder of images (CLASS/IMAGE, or
    train/CLASS/IMAGE and test/CLASS/IMAGE), a CSV file, or a folder that the `datasets` library saved. target=COLUMN
    has the classes (label by default), inputs=COLUMN the texts or images where there are other columns. Where there is
    no test split, test=0.2 of the records become one, always the same by their row numbers. size=64 resizes images.

    Classes, counts and checksums of the records become public. What a table's columns may hold is not taken from the
    records: ranges.COLUMN=[0,100] and values.COLUMN=[a,b] state it, or the entry's `???` are to be filled in;
    public=true says that what the records show of both is public knowledge.
    """
    from dpopt.files import check_writable  # here, as it loads numpy

    if len(arguments) < 2 or (len(arguments) > 2 and arguments[0] != "data"):
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
    """Names are Python modules, and strings in YAML."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name) or yaml.safe_load(name) != name or name in MEANT_OTHERWISE:
        raise ConfigError("name", name, "expected words of small letters and digits such as dp_sign")


def _optimizer(name: str) -> Files:
    if name in registry.optimizers():
        raise ConfigError("name", name, "an optimizer of that name is registered: `dpopt list what=optimizers`")
    class_name = _class_name(name)
    if re.search(rf"\b{class_name}\b", _template("optimizer.py")):
        raise ConfigError("name", name, f"a class {class_name} would hide what its module imports")
    tree = _source_tree()
    return _built_in(name, class_name, tree) if tree else _plug_in(name, class_name)


def _class_name(name: str) -> str:
    """`dp_sign` is the class `DPSign`."""
    return "".join(part.upper() if part in ACRONYMS else part.capitalize() for part in name.split("_"))


def _source_tree() -> Path | None:
    """The source tree of dpopt that the current folder lies in."""
    here = Path.cwd()
    found = (at for at in (here, *here.parents) if (at / "pyproject.toml").exists())
    return next((at for at in found if (at / "dpopt" / "conf" / "optimizer").is_dir()), None)


def _built_in(name: str, class_name: str, tree: Path) -> Files:
    """The two files of an optimizer of dpopt; the tests of the registry hold it to the rules."""
    values = {"name": name, "class": class_name, "module": f"dpopt.optimizers.{name}"}
    contents = {
        tree / "dpopt" / "optimizers" / f"{name}.py": _filled("optimizer.py", values),
        tree / "dpopt" / "conf" / "optimizer" / f"{name}.yaml": _filled("optimizer.yaml", values),
    }
    return Files(
        contents, [f"python -m pytest tests/conformance -k {name}", "dpopt list format=markdown  # for the README"]
    )


def _plug_in(name: str, class_name: str) -> Files:
    """A distribution that registers an optimizer through the entry-point group "dpopt.optimizers"."""
    package, hyphenated = f"dpopt_{name}", name.replace("_", "-")
    values = {"name": name, "class": class_name, "module": f"{package}.{name}"}
    values |= {"package": package, "hyphenated": hyphenated, "version": __version__}
    root = Path(f"dpopt-{hyphenated}")
    contents = {
        root / "pyproject.toml": _filled("pyproject.toml", values),
        root / package / "__init__.py": "",
        root / package / f"{name}.py": _filled("optimizer.py", values),
        root / package / f"{name}.yaml": _filled("optimizer.yaml", values),
        root / "tests" / f"test_{name}.py": _filled("test_optimizer.py", values),
    }
    return Files(contents, [f"pip install --editable '{root}[dev]'", f"python -m pytest {root}", "dpopt list"])


def _suite(name: str) -> Files:
    from dpopt.suites.suite import suite_files

    if name in suite_files():
        raise ConfigError("name", name, f"{suite_files()[name]} is a suite of that name")
    path = (_source_tree() or Path()) / "benchmarks" / f"{name}.yaml"
    return Files(
        {path: _filled("suite.yaml", {})}, [f"dpopt plan suite={name} timed_draws=20", f"dpopt run suite={name}"]
    )


def data(name: str, *options: str) -> Files:
    """A data set of one's own; writes all by itself, as files of records are larger than texts."""
    from dpopt.files import check_writable
    from dpopt.workloads.data import own

    given = given_data(options)
    if "from" not in given:
        raise ConfigError("from", None, "expected from=PATH: a folder of images, a CSV file, or a saved `Dataset`")
    check_writable(Path(), "new")
    entry = own.add(name, fields.path(given.pop("from"), "from"), given)
    counts = ", ".join(f"{part.records:,} {split}" for split, part in entry.splits.items())
    OUT.print(f"data/{name}.yaml, data/{name}/: {entry.kind} in {entry.classes} classes, {counts}")
    unstated = [column for column, stated in entry.columns.items() if not stated.is_stated]
    to_state = (
        [f"state in data/{name}.yaml what is public of {', '.join(unstated)}: {own.HOW_TO_STATE}"] if unstated else []
    )
    return Files({}, [*to_state, "dpopt new suite NAME, with", f"  workloads: [{small_workload(entry)}]"])


def small_workload(entry: Entry) -> str:
    """A workload on a data set that takes little time, as YAML."""
    if entry.kind == "table":
        return f"{{name: table, data: {entry.name}}}"
    if entry.kind == "text":
        return f"{{name: texts, data: {entry.name}}}"
    size = "" if entry.size else ", size: 32"
    return f"{{name: images, data: {entry.name}, architecture: two_conv{size}}}"


def given_data(options: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE and KEY.NAME=VALUE as plain data; only `public` is read as YAML reads it, all else are texts."""
    given: dict[str, Any] = {}
    for option in options:
        key, equals, text = option.partition("=")
        group, dot, column = key.partition(".")
        if not equals or bool(dot) != (group in ("ranges", "values")):
            raise ConfigError("new data", option, "expected KEY=VALUE, ranges.COLUMN=[0,100] or values.COLUMN=[a,b]")
        try:
            value = yaml.load(text, yaml.SafeLoader if key == "public" else yaml.BaseLoader)
        except yaml.YAMLError as error:
            raise ConfigError(f"new data {key}", text, "expected a value such as 3, label or [0, 100]") from error
        (given.setdefault(group, {}) if dot else given)[column or key] = value
    return given


def _filled(template: str, values: dict[str, str]) -> str:
    families = " | ".join(registry.FAMILIES)
    return Template(_template(template)).substitute(values, families=families)


def _template(name: str) -> str:
    return (TEMPLATES / f"{name}.txt").read_text("utf-8")


KINDS: dict[str, Callable[..., Files]] = {"optimizer": _optimizer, "suite": _suite, "data": data}
"""What `new` can make."""
