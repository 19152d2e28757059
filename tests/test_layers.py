"""Imports go one way: a floor uses those below it, and a file of a folder no file that leads back to it."""

from pathlib import Path

from dpopt.testing.imports import forbidden_imports, imports

PACKAGE = Path(__file__).parents[1] / "dpopt"
FLOORS = [
    {"errors", "markup", "_lazy", "_paths"},
    {"fields", "files", "_extras", "bars"},
    {"documents"},
    {"types", "configurations"},
    {"clipping"},
    {"privacy"},
    {"store", "optimizers", "workloads"},
    {"registry", "cells"},
    {"testing", "isolated"},
    {"training"},
    {"study", "suites", "sklearn"},
    {"runs"},
    {"audit", "bench", "results"},
    {"cli"},
    {"__main__"},
]
"""From the ground up; what is on one floor does not know of each other."""
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
LATE = ("optimizers/__init__", "registry")
"""`dpopt.optimizers()` asks the registry when it is called: the one import that goes up."""


def imported(path: Path) -> set[str]:
    """The files of the package that a file imports, late and for annotations too, such as "store/leases"."""
    used = set()
    for name in imports(path.read_text(), is_typed=True):
        parts = name.split(".")[1:] if name.startswith("dpopt.") else []
        while parts and not PACKAGE.joinpath(*parts).with_suffix(".py").exists():
            if PACKAGE.joinpath(*parts, "__init__.py").exists():
                parts.append("__init__")
                break
            parts.pop()  # a name within a module
        used |= {"/".join(parts)} if parts else set()
    return used


def test_imports_go_down_and_in_no_circle():
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]
    uses = {path.relative_to(PACKAGE).with_suffix("").as_posix(): imported(path) for path in files}
    assert {name.split("/")[0] for name in uses} - {"conf"} <= set(LEVEL), "every module has a floor"
    up = []
    for name, used in uses.items():
        for other in used:
            here, there = name.split("/")[0], other.split("/")[0]
            if here != there and LEVEL[there] >= LEVEL[here] and (name, there) != LATE:
                up.append(f"{name} imports {other}")
    assert up == []
    within = {name: {o for o in used if o.split("/")[0] == name.split("/")[0]} for name, used in uses.items()}
    assert [name for name in within if name in reached(name, within)] == []


def reached(start: str, uses: dict[str, set[str]]) -> set[str]:
    """The files that a file leads to."""
    seen, left = set[str](), [start]
    while left:
        fresh = uses.get(left.pop(), set()) - seen
        seen |= fresh
        left += fresh
    return seen


def test_optimizers_import_no_data():
    for path in sorted((PACKAGE / "optimizers").glob("[!_]*.py")):
        assert forbidden_imports(f"dpopt.optimizers.{path.stem}") == [], path
