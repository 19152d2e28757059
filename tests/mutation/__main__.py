"""Mutation testing of the kernel: what its own tests do not notice when one line of it is wrong.

    python tests/mutation [count=160] [only=PART OF A NAME] [results=FILE]

makes `count` one-line mutants of the modules in `TARGETS`, spread evenly and always the same, each in a copy of the
tree, and runs the module's tests until one fails. Results are kept in a file, so that a stopped run goes on. Survivors
that change nothing that a test could see are listed, with the reason, in `equivalent.txt`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import track

ROOT = Path(__file__).parents[2]
KERNEL, RULES = "tests/privacy", "tests/clipping"
ORACLE = ["test_owned_queries.py", "test_oracle.py", "test_properties_sensitivity.py"]
TARGETS: dict[str, list[str]] = {
    "privacy/queries.py": ORACLE,
    "privacy/data.py": ORACLE,
    "privacy/oracle.py": ORACLE,
    "privacy/sampling.py": ["test_sampling.py", "test_properties_sampling.py", "test_oracle.py"],
    "privacy/ledger.py": ["test_ledger.py", "test_properties_accounting.py"],
    "privacy/accountants.py": ["test_accountants.py", "test_properties_accounting.py"],
    "privacy/solving.py": ["test_calibration.py"],
    "privacy/calibration.py": ["test_calibration.py", "test_owned_queries.py"],
    "clipping/rules.py": ["../clipping/test_rules.py", "test_owned_queries.py", "test_properties_sensitivity.py"],
    "clipping/flat.py": ["../clipping/test_rules.py", "test_properties_sensitivity.py", "../clipping/test_vmap.py"],
}
"""Module -> the tests of these two folders that know it, quick ones first; the rest of its folder follows."""
SECONDS = 900
"""A mutant that takes longer has been noticed."""
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
DROPPED = {"clamp", "clamp_", "nan_to_num", "nan_to_num_", "isfinite", "mul_", "div_", "detach", "double", "contiguous"}
"""Methods whose call is left out; what they are called on takes its place."""


class Mutant(NamedTuple):
    """A module with one thing changed."""

    module: str
    line: int
    change: str
    source: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.line} {self.change}"


class _Mutate(ast.NodeTransformer):
    """Changes the place with number `chosen`, and counts places."""

    def __init__(self, chosen: int) -> None:
        self._chosen, self.places = chosen, 0
        self.line, self.change = 0, ""

    def _is_chosen(self, node: ast.AST, change: str) -> bool:
        self.places += 1
        if self.places - 1 != self._chosen:
            return False
        self.line, self.change = getattr(node, "lineno", 0), change
        return True

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # the text of an error is for people

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.body = [self.visit(part) for part in node.body]  # not its signature
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, "condition negated"):
            node.test = ast.copy_location(ast.UnaryOp(ast.Not(), node.test), node.test)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for i, operator in enumerate(node.ops):
            if type(operator) in SWAPS and self._is_chosen(node, f"{_word(operator)} swapped"):
                node.ops[i] = SWAPS[type(operator)]()  # type: ignore[assignment]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in SWAPS and self._is_chosen(node, f"{_word(node.op)} swapped"):
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen(node, f"{_word(node.op)} swapped"):
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        if is_number and self._is_chosen(node, f"{node.value} -> {node.value + 1}"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        if name in DROPPED and self._is_chosen(node, f".{name}() left out"):
            return node.func.value  # type: ignore[union-attr]
        return node


def _word(operator: ast.AST) -> str:
    return type(operator).__name__


def mutants(module: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    source = (ROOT / "dpopt" / module).read_text()
    counter = _Mutate(-1)
    counter.visit(ast.parse(source))
    for place in range(counter.places):
        mutate = _Mutate(place)
        tree = ast.fix_missing_locations(mutate.visit(ast.parse(source)))
        yield Mutant(module, mutate.line, f"{mutate.change} ({place})", ast.unparse(tree))


def chosen(count: int) -> list[Mutant]:
    """`count` mutants over all modules, in an order that looks random and stays the same."""
    every = [mutant for module in TARGETS for mutant in mutants(module)]
    return sorted(every, key=lambda mutant: hashlib.sha256(mutant.name.encode()).digest())[:count]


def is_noticed(mutant: Mutant, tree: Path) -> bool:
    """Whether a test fails, in a copy of the project at `tree`."""
    path = tree / "dpopt" / mutant.module
    whole = path.read_text()
    path.write_text(mutant.source)
    folder = KERNEL if mutant.module.startswith("privacy") else RULES
    tests = [f"{KERNEL}/{name}" for name in TARGETS[mutant.module]]
    try:
        return any(_fails(part, tree) for part in (tests, [folder]))
    finally:
        path.write_text(whole)


def _fails(tests: list[str], tree: Path) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "DPOPT_CACHE": str(tree / "cache")}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return True
    return done.returncode != 0


def main(arguments: list[str]) -> int:
    """Run what is not known yet, and print the survivors; 1 where more than 5 % survive."""
    given = dict(argument.split("=", 1) for argument in arguments)
    file = Path(given.get("results", ROOT / "results" / "mutation.json"))
    known: dict[str, bool] = json.loads(file.read_text()) if file.exists() else {}
    some = [mutant for mutant in chosen(int(given.get("count", 160))) if given.get("only", "") in mutant.name]
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "project"
        kept = shutil.ignore_patterns(".git", ".venv", "results", "plots", "__pycache__")
        shutil.copytree(ROOT, tree, ignore=kept)
        if any(_fails([f"{KERNEL}/{name}" for name in tests], tree) for tests in (ORACLE,)):
            console.print("[red]error:[/red] the tests fail as it is")
            return 2
        for mutant in track([mutant for mutant in some if mutant.name not in known], console=console):
            known[mutant.name] = is_noticed(mutant, tree)
            file.write_text(json.dumps(known, indent=1))
    excused = (Path(__file__).parent / "equivalent.txt").read_text()
    survivors = [mutant.name for mutant in some if not known[mutant.name]]
    real = [name for name in survivors if name.rpartition(" (")[0] not in excused]
    for name in survivors:
        console.print(f"survived: {name}{'' if name in real else ' (changes nothing)'}", markup=False)
    console.print(
        f"{len(some) - len(survivors)} of {len(some)} mutants noticed; {len(real)} survivors are not explained"
    )
    return 1 if len(survivors) > 0.05 * len(some) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
