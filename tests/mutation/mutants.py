"""One-line mutants: copies of a module's source with one thing changed, each named by the line that it changes."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

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
    """A module with one thing changed.

    Attributes:
        module: its path in the package.
        function: qualified name of the function or class that is changed; "" outside of any.
        before, after: the line that differs, as `ast.unparse` writes it.
        source: the changed module.
    """

    module: str
    function: str
    before: str
    after: str
    source: str

    @property
    def name(self) -> str:
        """The same wherever the line stands."""
        return f"{self.module} {self.function}: {self.before} => {self.after}"


class _Mutate(ast.NodeTransformer):
    """Changes the place with number `chosen`, and counts places."""

    def __init__(self, chosen: int) -> None:
        self._chosen, self.places = chosen, 0
        self._inside: list[str] = []
        self.function = ""

    def _is_chosen(self) -> bool:
        self.places += 1
        if self.places - 1 != self._chosen:
            return False
        self.function = ".".join(self._inside)
        return True

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node  # the text of an error is for people

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.value = self.visit(node.value) if node.value else None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        return self._body(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._body(node)

    def _body(self, node: ast.ClassDef | ast.FunctionDef) -> ast.AST:
        self._inside.append(node.name)
        node.body = [self.visit(part) for part in node.body]  # neither its signature nor its decorators
        self._inside.pop()
        return node

    def visit_If(self, node: ast.If) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        for i, operator in enumerate(node.ops):
            if type(operator) in SWAPS and self._is_chosen():
                node.ops[i] = SWAPS[type(operator)]()  # type: ignore[assignment]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if type(node.op) in SWAPS and self._is_chosen():
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if self._is_chosen():
            node.op = SWAPS[type(node.op)]()  # type: ignore[assignment]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        is_number = isinstance(node.value, int | float) and not isinstance(node.value, bool)
        return ast.Constant(node.value + 1) if is_number and self._is_chosen() else node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        return node.func.value if name in DROPPED and self._is_chosen() else node  # type: ignore[union-attr]


def mutants(module: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a module."""
    whole = ast.unparse(ast.parse(source)).splitlines()
    counter = _Mutate(-1)
    counter.visit(ast.parse(source))
    for place in range(counter.places):
        mutate = _Mutate(place)
        text = ast.unparse(ast.fix_missing_locations(mutate.visit(ast.parse(source))))
        for before, after in zip(whole, text.splitlines(), strict=True):
            if before != after:  # 1e30 + 1 is no other number
                yield Mutant(module, mutate.function, before.strip(), after.strip(), text)
