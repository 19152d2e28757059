"""The imports that the module of an optimizer may have: nothing that leads to data, files or other processes."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module, util

MAY_USE = frozenset({"__future__", "collections", "dataclasses", "math", "torch", "typing"})
"""Distributions and modules that an optimizer may import."""
_MAY_USE_MORE = {"dpopt.optimizers.torch_optim": {"contextlib", "functools", "importlib"}}
"""It wraps a class that is given by its import path."""
MAY_USE_OF_DPOPT = ("clipping.rules", "errors", "fields", "optimizers", "privacy.queries", "types")
_BUILTINS = frozenset({"__import__", "compile", "eval", "exec", "open"})
"""Built-in functions that would go round the rule."""


def imports(source: str, package: str = "", *, is_typed: bool = False) -> Iterator[str]:
    """Absolute names that the module `source` in `package` imports; those only a type checker sees if it `is_typed`."""
    tree = ast.parse(source)
    for node in [] if is_typed else ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origin = util.resolve_name("." * node.level + (node.module or ""), package)
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def forbidden_imports(module: str) -> list[str]:
    """Imports and built-in functions that the optimizer's module `module` may not use, as "module: name".

    Other modules of a plug-in's own top-level package are held to the same rule.
    """
    forbidden, pending, seen = [], [module], set()
    while pending:
        name = pending.pop()
        if name in seen:
            continue
        seen.add(name)
        source = inspect.getsource(import_module(name))
        names = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
        forbidden += [f"{name}: {builtin}" for builtin in names & _BUILTINS]
        for imported in imports(source, sys.modules[name].__package__ or ""):
            root, _, inner = imported.partition(".")
            if root == "dpopt":
                is_allowed = any(f"{inner}.".startswith(f"{allowed}.") for allowed in MAY_USE_OF_DPOPT)
            else:
                is_allowed = root in MAY_USE | _MAY_USE_MORE.get(name, set())
            if sibling := _sibling(imported, name):  # a helper of the same package: what it imports counts too
                pending.append(sibling)
            elif not is_allowed:
                forbidden.append(f"{name}: {imported}")
    return sorted(forbidden)


def _sibling(imported: str, module: str) -> str | None:
    root = module.partition(".")[0]
    if root == "dpopt" or imported.partition(".")[0] != root:
        return None
    return next((name for name in (imported, imported.rpartition(".")[0]) if name in sys.modules), None)
