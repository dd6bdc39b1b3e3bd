"""Whether a size never falls as those grow that it follows from."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from aottrain.ir.sizes.expressions import Size, SizeExpression


def rises(size: Size, least: Mapping[str, int]) -> bool:
    """Proven from the text of an expression. least: the least value of each symbol."""
    return not isinstance(size, SizeExpression) or _least(ast.parse(size.text, mode="eval").body, least) is not None


def _least(node: ast.expr, least: Mapping[str, int]) -> int | None:
    """The least value of what is proven never to fall; None where it is not."""
    if not any(isinstance(inner, ast.Name) for inner in ast.walk(node)):
        value = eval(compile(ast.Expression(node), "<aottrain size>", "eval"), {})
        return value if isinstance(value, int) else None
    if isinstance(node, ast.Name):
        return least[node.id]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        found = [_least(argument, least) for argument in node.args]
        return None if None in found else (min if node.func.id == "min" else max)(found)  # type: ignore[type-var]
    return _least_of_two(node, least) if isinstance(node, ast.BinOp) else None


def _least_of_two(node: ast.BinOp, least: Mapping[str, int]) -> int | None:
    left, right = _least(node.left, least), _least(node.right, least)
    if left is None or right is None:
        return None
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Mult) and left >= 0 and right >= 0:
        return left * right
    if isinstance(node.op, ast.FloorDiv) and isinstance(node.right, ast.Constant) and right > 0:
        return left // right
    return None
