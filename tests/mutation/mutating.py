"""Small mistakes in code, one at a time: operators exchanged, numbers off by one, conditions turned round, statements
left out, results forgotten.

A mutant changes functions in place, in a process that has imported everything: what holds one of them runs the changed
code. Only code within functions is mutated; tables and defaults at module level are read before a mutant is there.
"""

from __future__ import annotations

import ast
import copy
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
    ast.Pow: ast.Mult,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """path: of the module. number: of the mutation among those of the module. function: the qualified name of the
    outermost function around it. before, after: the text of the smallest expression or statement that changes."""

    path: str
    number: int
    line: int
    function: str
    before: str
    after: str

    @property
    def module(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def package(self) -> str:
        return str(Path(self.path).parent)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} ({self.function}): `{self.before}` became `{self.after}`"


def mutants(path: str, text: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its text."""
    tree = ast.parse(text)
    found = []
    for number, (function, place, index) in enumerate(_points(tree)):
        old = place if index is None else getattr(place, index[0])[index[1]]
        new = _changed(place, index)
        texts = [_short(ast.unparse(part)) if part is not None else "nothing" for part in (old, new)]
        found.append(Mutant(path, number, old.lineno, function, *texts))
    return found


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


def mutate(tree: ast.Module, number: int) -> ast.Module:
    """The tree, changed."""
    for i, (_, place, index) in enumerate(_points(tree)):
        if i == number:
            new = _changed(place, index)
            if index is None:
                assert new is not None
                place.__class__ = new.__class__  # type: ignore[assignment]
                place.__dict__.clear()
                place.__dict__.update(new.__dict__)
            else:
                body = getattr(place, index[0])
                body[index[1]] = new if new is not None else ast.copy_location(ast.Pass(), body[index[1]])
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


Point = tuple[str, ast.AST, "tuple[str, int] | None"]


def _points(tree: ast.Module) -> Iterator[Point]:
    """(function, expression to change, None); (function, parent, (field, place in it)) of a statement to leave out."""
    for owner in tree.body:
        members = owner.body if isinstance(owner, ast.ClassDef) else [owner]
        for function in members:
            if isinstance(function, ast.FunctionDef) and not _is_declaration(function):
                name = f"{owner.name}.{function.name}" if isinstance(owner, ast.ClassDef) else function.name
                for statement in _statements(function):
                    yield from ((name, *point) for point in _of_statement(*statement))


def _is_declaration(function: ast.FunctionDef) -> bool:
    return any(
        "overload" in ast.unparse(decorator) or "jit" in ast.unparse(decorator) for decorator in function.decorator_list
    )


def _statements(parent: ast.AST) -> Iterator[tuple[ast.AST, str, int]]:
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for i, child in enumerate(getattr(parent, field, None) or ()):
            if isinstance(child, ast.stmt):
                yield parent, field, i
            if not isinstance(child, ast.expr):
                yield from _statements(child)


def _of_statement(parent: ast.AST, field: str, i: int) -> Iterator[tuple[ast.AST, tuple[str, int] | None]]:
    statement = getattr(parent, field)[i]
    if isinstance(statement, ast.Expr) and isinstance(
        statement.value, ast.Call | ast.Yield | ast.YieldFrom | ast.Await
    ):
        yield parent, (field, i)
    elif isinstance(statement, ast.AugAssign | ast.Continue | ast.Break | ast.Delete | ast.Return):
        if not isinstance(statement, ast.Return) or (statement.value is not None and not _is_none(statement.value)):
            yield parent, (field, i)
    elif isinstance(statement, ast.Raise):
        yield parent, (field, i)
        return  # a message's words and figures are not code to be mistaken
    for expression in _own_expressions(statement):
        yield from ((node, None) for node in _inside(expression) if _is_point(node))


def _own_expressions(statement: ast.stmt) -> Iterator[ast.expr]:
    for name, value in ast.iter_fields(statement):
        if name in (
            "body",
            "orelse",
            "finalbody",
            "handlers",
            "cases",
            "annotation",
            "decorator_list",
            "returns",
            "args",
        ):
            continue
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, ast.expr):
                yield part
            elif isinstance(part, ast.withitem):
                yield part.context_expr


def _inside(expression: ast.AST) -> Iterator[ast.AST]:
    if isinstance(expression, ast.JoinedStr):
        values = [part.value for part in expression.values if isinstance(part, ast.FormattedValue)]
        for value in values:
            yield from _inside(value)
        return
    yield expression
    for child in ast.iter_child_nodes(expression):
        yield from _inside(child)


def _is_point(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return len(node.ops) == 1
    if isinstance(node, ast.BinOp):
        texts = any(isinstance(side, ast.JoinedStr | ast.List | ast.Tuple) for side in (node.left, node.right))
        return type(node.op) in _OPERATORS and not texts and not isinstance(getattr(node.left, "value", None), str)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int)
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not | ast.USub)
    return isinstance(node, ast.BoolOp | ast.IfExp)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _changed(place: ast.AST, index: tuple[str, int] | None) -> ast.AST | None:
    """The statement or expression in the place of the old one; None for a statement that is left out."""
    if index is not None:
        old = getattr(place, index[0])[index[1]]
        if isinstance(old, ast.Return):
            return ast.copy_location(ast.Return(ast.Constant(None)), old)
        return None
    new = copy.deepcopy(place)
    if isinstance(new, ast.Compare):
        new.ops = [_COMPARISONS[type(new.ops[0])]()]
    elif isinstance(new, ast.BinOp):
        new.op = _OPERATORS[type(new.op)]()
    elif isinstance(new, ast.Constant):
        new.value = not new.value if isinstance(new.value, bool) else new.value + 1
    elif isinstance(new, ast.UnaryOp):
        return new.operand
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
    elif isinstance(new, ast.IfExp):
        new.body, new.orelse = new.orelse, new.body
    return new


def plant(root: Path, mutant: Mutant) -> int:
    """Change the functions of the imported module. Returns how many were."""
    path = root / mutant.path
    text = path.read_text(encoding="utf-8")
    new = _codes(compile(mutate(ast.parse(text), mutant.number), str(path), "exec", dont_inherit=True))
    old = _codes(compile(text, str(path), "exec", dont_inherit=True))
    changed = {key: code for key, code in new.items() if key in old and code != old[key]}
    count = 0
    for function in gc.get_objects():
        if isinstance(function, FunctionType) and function.__code__.co_filename == str(path):
            code = changed.get((function.__code__.co_qualname, function.__code__.co_firstlineno))
            if code is not None and code.co_freevars == function.__code__.co_freevars:
                function.__code__ = code
                count += 1
    return count


def _codes(code: CodeType) -> dict[tuple[str, int], CodeType]:
    """Of all functions, by qualified name and line."""
    found = {}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            found[part.co_qualname, part.co_firstlineno] = part
            found.update(_codes(part))
    return found
