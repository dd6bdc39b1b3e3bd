"""simplify: the same functional program with fewer nodes. Only rewrites that leave every value bitwise the same.

No float algebra (x * 0, x - x, x / x): law 9.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_flatten
from aottrain.compiler.graphs.effects import anchor_checks, drop_anchors
from aottrain.compiler.graphs.rewriting import add_call, copy_into, fake_result
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import (
    GraphSignature,
    InputKind,
    JointGraph,
    calls,
    copy_meta,
    info,
    is_size,
    marks_of,
    placeholders,
    set_marks,
    spec_of,
    value_of,
    view_source,
)
from aottrain.ir.ops import OpKind, is_pure
from aottrain.ir.sizes.expressions import SizeExpression, size_of
from aottrain.ir.tensor import start_of

aten = torch.ops.aten

# Ops that return their argument's own values in its own storage.
_IDENTITIES = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
# Ops that put their second argument into a copy of their first.
_SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.diagonal_scatter.default)
# Of which kernels make a stack.
_MOST_TURNS = 8


def simplify(joint: JointGraph) -> JointGraph:
    """Identities, copies into fresh memory, unread batch-norm statistics, concatenations of concatenations and of
    what takes turns, common subexpressions, dead code."""
    graph = copy_graph(joint.graph)
    anchor_checks(joint.with_graph(graph))
    _express_sizes(graph, joint.signature)
    for node in list(graph.nodes):
        if node.op == "call_function":
            _drop_identity(node)
            _drop_copy_into_fresh(graph, node)
            _drop_running_statistics(node)
            _join_concatenations(node)
            _stack_turns(node)
    _merge_common_subexpressions(graph)
    remove_dead_code(graph)
    drop_anchors(joint.with_graph(graph))
    graph.lint()
    return joint.with_graph(graph)


def _express_sizes(graph: fx.Graph, signature: GraphSignature) -> None:
    """Each symbolic number becomes one expression of the symbols, whatever it was read from: so no tensor is kept for
    its shape alone, and both graphs compute what they need."""
    symbols = {
        spec.name: node
        for node, spec in zip(placeholders(graph), signature.inputs, strict=True)
        if spec.kind is InputKind.SIZE
    }
    if not symbols:
        return
    for node in calls(graph):
        if not is_size(node):
            continue
        size = size_of(value_of(node))
        if not isinstance(size, SizeExpression):
            node.replace_all_uses_with(size)
        elif size.text in symbols:
            node.replace_all_uses_with(symbols[size.text])
        elif any(name not in symbols for name in size.names):
            raise UnsupportedError(f"the size {size} is not one of the inputs' shapes")
        else:
            with graph.inserting_before(node):
                new = graph.call_function(size, tuple(symbols[name] for name in size.names))
            copy_meta(node, new)
            node.replace_all_uses_with(new)
        graph.erase_node(node)


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy that shares the (immutable) metadata values."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            new.output(fx.node.map_arg(node.args[0], mapping.__getitem__))
        else:
            mapping[node] = copy_into(new, node, mapping.__getitem__)
    return new


def remove_dead_code(graph: fx.Graph) -> None:
    """Erase every call that nothing reads, but effects."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and is_pure(node.target):
            graph.erase_node(node)


def _drop_identity(node: fx.Node) -> None:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not _is_identity(node, source):
        return
    if source.op != "placeholder" or not _is_result(node):
        node.replace_all_uses_with(source)


def _is_identity(node: fx.Node, source: fx.Node) -> bool:
    if node.target is aten.expand.default:  # as all products of batches begin
        return spec_of(node) == spec_of(source)
    return node.target in _IDENTITIES


def _is_result(node: fx.Node) -> bool:
    """Whether the caller gets this value or a view of it: then its memory must stay its own."""
    for user in node.users:
        follows = user.op == "call_function" and (view_source(user) is node or info(user).kind is OpKind.STRUCTURE)
        if user.op == "output" or (follows and _is_result(user)):
            return True
    return False


def _drop_copy_into_fresh(graph: fx.Graph, node: fx.Node) -> None:
    """copy(x, value) reads only x's layout: with equal layouts it is the value, or the value converted; and where it is
    put into other memory, whatever the layouts are. A value that starts elsewhere in its memory is copied: views of the
    copy are known, and as_strided counts, from its start."""
    if node.target is not aten.copy.default:
        return
    value = node.args[1]
    destination, source = spec_of(node.args[0]), spec_of(value)  # type: ignore[arg-type]
    if destination is None or source is None or not isinstance(value, fx.Node):
        return
    alike = destination.shape == source.shape and destination.symbolic == source.symbolic
    if alike and destination.dtype == source.dtype and destination.device == source.device and _is_plain(value):
        for user in list(node.users):  # which put it into memory of their own, however it lies
            if user.target in _SCATTERS and user.args[0] is not node:
                user.update_arg(1, value)
    if not destination.same_layout(source) or destination.device != source.device:
        return
    if destination.dtype == source.dtype:
        if not _is_result(node) and start_of(value_of(value)) == start_of(value_of(node)) is not None:
            node.replace_all_uses_with(value)
        return
    with graph.inserting_before(node):
        converted = graph.call_function(aten._to_copy.default, (value,), {"dtype": destination.dtype})
    converted.meta = dict(node.meta)
    node.replace_all_uses_with(converted)


def _is_plain(node: fx.Node) -> bool:
    return not value_of(node).is_conj() and not value_of(node).is_neg()


def _drop_running_statistics(node: fx.Node) -> None:
    """In training the batch-norm backward takes the batch's statistics; the running ones, which the step mutates, are
    among its arguments but are not read."""
    if node.target is aten.native_batch_norm_backward.default and node.args[7] is True:
        node.args = (*node.args[:3], None, None, *node.args[5:])


def _join_concatenations(node: fx.Node) -> None:
    """The parts of a concatenation that is read by another one along the same dimension alone are parts of that one."""
    if node.target is not aten.cat.default or spec_of(node) is None:
        return
    whole = spec_of(node)
    assert whole is not None

    def is_part(part: Any) -> bool:
        return (
            part.target is aten.cat.default
            and list(part.users) == [node]
            and _along(part) == _along(node)
            and marks_of(part) == marks_of(node)
            and all(value_of(source).dtype is whole.dtype for source in part.all_input_nodes)
        )

    sources: Any = node.args[0]
    if not any(map(is_part, sources)) or len(set(sources)) < len(sources):
        return
    flat = [source for part in sources for source in (part.args[0] if is_part(part) else (part,))]
    if fake_result(aten.cat.default, (flat, *node.args[1:]), dict(node.kwargs)).stride() == value_of(node).stride():
        node.args = (flat, *node.args[1:])


def _stack_turns(node: fx.Node) -> None:
    """What is put side by side one element each along the last dimension takes turns: a stack, of which kernels
    compute each part once."""
    whole = spec_of(node)
    if node.target is not aten.cat.default or whole is None or _along(node) != len(whole.sizes) - 1:
        return
    sources: Any = node.args[0]
    specs = [spec for source in sources if (spec := spec_of(source)) is not None]
    alike = all(spec.sizes == (*whole.sizes[:-1], 1) and spec.dtype is whole.dtype for spec in specs)
    if not alike or len(specs) < len(sources) or not 2 <= len(sources) <= _MOST_TURNS:
        return
    with node.graph.inserting_before(node):
        parts = [add_call(source, aten.select.int, (source, -1, 0)) for source in sources]
        stacked = add_call(node, aten.stack.default, (parts, -1))
    if value_of(stacked).stride() == value_of(node).stride():
        set_marks(stacked, marks_of(node))
        node.replace_all_uses_with(stacked)


def _along(node: fx.Node) -> int:
    """The dimension of a concatenation."""
    dim: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return int(dim % max(value_of(node).dim(), 1))


def _merge_common_subexpressions(graph: fx.Graph) -> None:
    first_by_key: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_pure(node.target) or _is_result(node):
            continue
        key = _expression(node)
        if key is None:
            continue
        first = first_by_key.setdefault(key, node)
        if first is not node:
            merged = zip(marks_of(first), marks_of(node), strict=True)
            set_marks(first, tuple((number, max(mark, other)) for (number, mark), (_, other) in merged))
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _expression(node: fx.Node) -> Any:
    """Hashable text of what the node computes; None where an argument cannot be compared.

    What a checkpointed region computes is its own: shared with other code it would have to be saved.
    """
    leaves, tree = tree_flatten((node.args, node.kwargs))
    parts: list[Any] = [node.target, str(tree), tuple(number for number, _ in marks_of(node))]
    for leaf in leaves:
        # True == 1 == 1.0 and 0.0 == -0.0 in Python, but not to an op: the type and the sign are part of the key.
        parts.append(leaf if isinstance(leaf, fx.Node) else (type(leaf), repr(leaf)))
    try:
        key = tuple(parts)
        hash(key)
    except TypeError:
        return None
    return key
