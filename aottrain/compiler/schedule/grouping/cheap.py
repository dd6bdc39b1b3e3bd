"""Pointwise calls that are done again where their values are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

from torch import fx

from aottrain.compiler.lowering import Rule, rules_for
from aottrain.compiler.lowering.rules import tried
from aottrain.compiler.schedule.layouts import turns_around
from aottrain.ir.graph import calls, info, readers_of, required_spec, spec_of, storage_root
from aottrain.ir.kernels.kernel import Compute, Constant, Load
from aottrain.ir.ops import OpKind
from aottrain.ir.sizes.polynomials import likely, same

# What is done again for each reader, and, in a concatenation, also where another part is taken.
_CHEAP = frozenset({"add", "sub", "mul", "div", "fma", "neg", "abs", "sign", "max", "min", "sqrt", "rsqrt", "where",
                    "cast", "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "not"})  # fmt: skip
_DEAR = frozenset({"exp", "log", "tanh", "sigmoid", "erf", "reciprocal", "exp2", "log1p", "expm1"})
"""Cheap beside memory on a GPU alone."""
# Of one operand: what rolls around is in one of two places, and a window has more.
_MOST_LOADS = 2
# Of a kernel that is looked through for what it reads.
_MOST_CALLS = 32
VIEWS = (OpKind.VIEW, OpKind.STRUCTURE)


def cheap_rule(node: fx.Node, dear: bool = False, moves: bool = False) -> tuple[Rule, int] | None:
    """The rule of a cheap pointwise call, and how many steps it takes. dear: exponentials and the like are cheap on a
    CPU as well, beside memory that is written and read. moves: calls that read one element elsewhere count as well."""
    rules = rules_for(node) if node.op == "call_function" and info(node).kind not in VIEWS else []
    rules = [rule for rule in rules if not (moves and rule.in_parts)]
    spec = spec_of(node)
    if len(rules) != 1 or spec is None or rules[0].shape != spec.shape or len(rules[0].outputs) != 1:
        return None
    if turns_around(node):
        return None
    (rule,) = rules
    if rule.reduced or rule.columns or (not moves and any(operand.free for operand in rule.operands)):
        return None
    steps = tried(rule)
    allowed = _CHEAP if spec.device.type == "cpu" and not dear else _CHEAP | _DEAR
    for step in steps:
        if isinstance(step, Compute):
            divides = step.op == "div" and not step.dtype.is_floating_point
            if step.op not in allowed or (divides and not moves):
                return None
        elif not isinstance(step, Constant) and not moves:
            return None
    loads = Counter(step.buffer for step in steps if isinstance(step, Load))
    return None if any(count > _MOST_LOADS for count in loads.values()) else (rule, len(rule.operands) + len(steps))


def is_gone_through(rules: Sequence[Rule]) -> bool:
    """Whether all parts of a concatenation, which are made in one loop nest, are added up as well, as the gradients of
    two biases are: that nest is there anyway, and writes them to their places."""
    parts = next((rule.operands for rule in rules if rule.in_parts), ())
    return bool(parts) and all(any(map(_adds_up, readers_of(storage_root(part.node)))) for part in parts)


def _adds_up(reader: fx.Node) -> bool:
    return any(rule.reduced or rule.columns for rule in rules_for(reader))


def shared_sources(graph: fx.Graph, settled: Set[fx.Node]) -> set[fx.Node]:
    """Values from each of which alone, beside what is in memory, several others follow by cheap work that are read at
    places of their own only: as the gradients of a convolution's shifts. One is stored instead of these; neither need
    be where they are the parts of one concatenation, which one loop nest makes."""
    made: dict[fx.Node, list[set[fx.Node]]] = {}
    for node in calls(graph):
        readers = readers_of(node) if info(node).kind not in VIEWS and cheap_rule(node) is not None else ()
        if node in settled or not readers or not all(_reads_elsewhere(reader, node) for reader in readers):
            continue
        missing = _missing(node, settled)
        for source in missing if len(missing) == 1 else ():
            if likely(required_spec(source).nbytes) <= likely(required_spec(node).nbytes):
                made.setdefault(source, []).append(set(readers))
    return {source for source, read in made.items() if len(read) > 1 and not _in_one(set[fx.Node]().union(*read))}


def _in_one(readers: Set[fx.Node]) -> bool:
    return len(readers) == 1 and any(rule.in_parts for reader in readers for rule in rules_for(reader))


def _reads_elsewhere(reader: fx.Node, root: fx.Node) -> bool:
    found = [o for rule in rules_for(reader)[:1] for o in rule.operands if storage_root(o.node) is root]
    return bool(found) and all(operand.free and operand.moved for operand in found)


def _missing(node: fx.Node, settled: Set[fx.Node]) -> set[fx.Node]:
    """What cheap work would have to find in memory, and does not."""
    found, work, seen = set[fx.Node](), [node], {node}
    for call in work:
        known = cheap_rule(call)
        for operand in known[0].operands if known is not None else ():
            root = storage_root(operand.node)
            if root.op != "call_function" or root in settled or root in seen:
                continue
            seen.add(root)  # once, by however many ways it is reached: of a recurrence they double with each step
            if cheap_rule(root) is not None:
                work.append(root)
            elif 2 * likely(required_spec(root).numel) > likely(required_spec(node).numel):
                found.add(root)
    return found


def _have_one_shape(rule: Rule, node: fx.Node) -> bool:
    """False of a call with several results."""
    if (spec := spec_of(node)) is None:
        return False
    shape = spec.shape
    return len(shape) == len(rule.shape) and all(map(same, shape, rule.shape))


def read_beside(node: fx.Node) -> set[fx.Node]:
    """What a kernel reads, each element once, that makes what a call's only reader makes of the call's result and of
    other elementwise work."""
    readers = readers_of(node)
    found, stack = set[fx.Node](), list(readers) if len(readers) == 1 else []
    for call in stack:
        rules = rules_for(call) if len(stack) <= _MOST_CALLS and call is not node else []
        if len(rules) != 1 or rules[0].reduced or rules[0].columns or not _have_one_shape(rules[0], node):
            continue
        for operand in rules[0].operands:
            root = storage_root(operand.node)
            if operand.free or root is node:
                continue
            if root.op != "call_function":
                found.add(root)
            elif root not in stack:
                stack.append(root)
    return found
