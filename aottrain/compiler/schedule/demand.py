"""What calls read, and which calls have to run: what nothing reads ties no work to other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from torch import fx

from aottrain.compiler.lowering import rules_for
from aottrain.compiler.schedule.grouping.groups import start
from aottrain.ir.analysis.unchanged import once
from aottrain.ir.graph import calls, effects_of, info, may_raise, results
from aottrain.ir.ops import OpKind


@once
def read_by(node: fx.Node) -> Sequence[fx.Node]:
    """The operands whose elements a call reads. Of some operands a kernel reads none: of a pool's input, of which its
    gradient has the shape; of log-probabilities where only the number of rows is wanted; of what a copy overwrites.
    A call that no kernel does reads all its operands."""
    operands = node.all_input_nodes
    rules = rules_for(node)
    read = {operand.node for rule in rules for operand in rule.operands}
    if not rules or len(read) == len(operands) or start(0, node, rules) is None:
        return operands
    return [operand for operand in operands if operand in read]


def needed(graph: fx.Graph, sources: Callable[[fx.Node], Sequence[fx.Node]] = read_by) -> frozenset[fx.Node]:
    """All that results and effects need, and what may raise. Nothing else runs: a kernel that no other one reads would
    write nothing. sources: what a call reads."""
    found: set[fx.Node] = set()
    stack = [*effects_of(graph), *filter(may_raise, calls(graph)), *filter(None, results(graph))]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += sources(node)
    return frozenset(found)


def is_read(value: fx.Node, apart_from: Set[fx.Node] = frozenset()) -> bool:
    """Whether a call other than these reads a buffer, through whatever views, or it is a result."""
    stack = [value]
    while stack:
        node = stack.pop()
        for user in node.users:
            if user in apart_from:
                continue
            if user.op == "call_function" and info(user).kind in (OpKind.VIEW, OpKind.STRUCTURE):
                stack.append(user)
            elif node in read_by(user):
                return True
    return False
