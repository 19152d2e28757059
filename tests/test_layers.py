"""Imports go one way: a floor may use those below it, and nothing beside or above it, for annotations neither."""

from pathlib import Path

import pytest

from dpopt.testing.imports import forbidden_imports, imports

PACKAGE = Path(__file__).parents[1] / "dpopt"
LAYERS = [
    {"errors", "markup", "_lazy", "_paths"},
    {"fields", "files", "_extras"},
    {"documents", "sizes"},
    {"types", "configurations"},
    {"clipping"},
    {"privacy"},
    {"store", "optimizers", "workloads"},
    {"registry"},
    {"testing", "isolated"},
    {"training"},
    {"study"},
    {"harness"},
    {"audit", "bench", "results"},
    {"cli"},
    {"__main__"},
]
"""From the ground up; what is on one floor does not know of each other."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE or path.stem != "__init__"]


def layer(path):
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def test_every_module_has_a_layer():
    assert {layer(path) for path in FILES} - {"conf"} <= set(LEVEL)


@pytest.mark.parametrize(
    "path", [path for path in FILES if layer(path) != "conf"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_import_goes_backwards(path):
    own = LEVEL[layer(path)]
    for name in imports(path.read_text(), is_typed=True):
        parts = name.split(".")
        if parts[0] == "dpopt" and parts[1] in LEVEL:
            deferred = {"registry": {"optimizers"}}  # `dpopt.optimizers()` asks the registry when it is called
            if layer(path) in deferred.get(parts[1], set()) and path.stem == "__init__":
                continue
            assert parts[1] == layer(path) or LEVEL[parts[1]] < own, f"{path} imports {name}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "optimizers").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_optimizers_import_no_data(path):
    assert forbidden_imports(f"dpopt.optimizers.{path.stem}") == []
