"""pair_complex: what a program does to complex numbers between calls of a library, done to pairs of reals by kernels.

Fourier layers cut out, pad, weight and add up what a transform gives, and the gradient of a weight is a sum over all
sequences or images. Kernels are of real numbers, so each of these was a call of its own that reads and writes all of
it. As pairs, which is how complex numbers lie in memory, they are kernels, and what is between them is nowhere in
memory. What a library reads afterwards is a view of the pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, laid_out_as
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.passes.splits.complexes import Parts, multiplied, stacked
from aottrain.ir.graph import JointGraph, calls, marks_of, spec_of, value_of

aten = torch.ops.aten

# A CPU's libraries multiply complex matrices of a batch one after the other, by a call for each: of fewer products than
# so many that takes longer than multiplying.
_SMALL = 1 << 15


class Pairs(NamedTuple):
    """Complex numbers (*shape) as reals (*shape, 2)."""

    reals: fx.Node
    is_conjugate: bool = False
    """The imaginary parts are the others' negatives."""


# Gives a call's value as pairs, from its arguments, in which each complex operand is there as pairs.
Rule = Callable[..., Pairs]


def pair_complex(joint: JointGraph) -> JointGraph:
    """The same program up to rounding; the graph itself where it has no two such calls in a row."""
    if not any(_groups(joint.graph)):
        return joint
    graph = copy_graph(joint.graph)
    for group in list(_groups(graph)):
        _rewrite(group)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _groups(graph: fx.Graph) -> Iterator[list[fx.Node]]:
    """Calls of which each reads another's result, in the order of the graph, where that saves some of its traffic."""
    group_of: dict[fx.Node, list[fx.Node]] = {}
    for node in calls(graph):
        if not _is_suitable(node):
            continue
        group = [node]
        for operand in node.all_input_nodes:
            other = group_of.get(operand, group)
            if other is not group:
                other.extend(group)
                group_of.update(dict.fromkeys(group, other))
                group = other
        group_of[node] = group
    for group in {id(group): group for group in group_of.values()}.values():
        if sum(_PASSES.get(node.target, 1) for node in group) > 1:
            yield sorted(group)  # nodes compare by their order


def _is_suitable(node: fx.Node) -> bool:
    spec = spec_of(node)
    if node.target not in _RULES or spec is None or spec.symbolic is not None or not spec.dtype.is_complex:
        return False
    if marks_of(node) or not spec.numel or not set(node.kwargs) <= {"memory_format", "pin_memory"}:
        return False
    if node.kwargs.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        return False
    operands = [spec_of(operand) for operand in node.all_input_nodes]
    if not operands:
        return False
    if node.target is aten.view_as_complex.default:
        return operands[0] is not None and operands[0].dtype is spec.dtype.to_real()
    same = all(each is not None and each.dtype in (spec.dtype, spec.dtype.to_real()) for each in operands)
    either = node.all_input_nodes if node.target is aten.mul.Tensor else node.all_input_nodes[:1]
    return same and any(value_of(operand).is_complex() for operand in either) and _allows(node)


def _allows(node: fx.Node) -> bool:
    """What the rules do not say of an operator's arguments."""
    others = [operand for operand in node.args[1:] if isinstance(operand, fx.Node)]
    if node.target is aten.constant_pad_nd.default:
        return len(node.args) < 3 or bool(node.args[2] == 0)
    if node.target is aten.bmm.default:
        n, m, k = value_of(node.args[0]).shape  # type: ignore[arg-type]
        few = n > 1 and m * k * value_of(node).shape[2] <= _SMALL
        return few and len(others) == 1 and value_of(others[0]).is_complex() and value_of(node).device.type == "cpu"
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        return bool(others) or isinstance(node.args[1], int | float)
    if node.target in (aten.add.Tensor, aten.sub.Tensor, aten.slice_scatter.default, aten.select_scatter.default):
        return len(others) == 1 and value_of(others[0]).is_complex()
    return True


def _rewrite(group: Sequence[fx.Node]) -> None:
    pairs: dict[fx.Node, Pairs] = {}
    inside = set(group)

    def operand(node: fx.Node) -> Any:
        if node not in pairs and value_of(node).is_complex():
            pairs[node] = _as_pairs(node)
        return pairs.get(node, node)

    for node in group:
        with node.graph.inserting_before(node):
            pairs[node] = _RULES[node.target](node, *(_with_pairs(argument, operand) for argument in node.args))
    for node in group:
        readers = [user for user in node.users if user not in inside]
        if readers:
            _hand_over(node, pairs[node], readers)


def _with_pairs(argument: Any, operand: Callable[[fx.Node], Any]) -> Any:
    if isinstance(argument, list | tuple):
        return [_with_pairs(item, operand) for item in argument]
    return operand(argument) if isinstance(argument, fx.Node) else argument


def _as_pairs(node: fx.Node) -> Pairs:
    """Of what another call gives. Inserted where the graph inserts now."""
    plain = node
    if value_of(node).is_conj() or (node.op == "call_function" and not node.all_input_nodes):
        # The tangent of a lazily conjugate result comes as one or as none; so does the conjugate of a number.
        plain = add_call(node, aten.clone.default, (node,), None, memory_format=torch.contiguous_format)
    return Pairs(add_call(node, aten.view_as_real.default, (plain,)))


def _hand_over(node: fx.Node, pairs: Pairs, readers: Sequence[fx.Node]) -> None:
    """To calls that read the complex numbers, or the pairs themselves."""
    with node.graph.inserting_before(node):
        of_reals = [reader for reader in readers if reader.target is aten.view_as_real.default]
        for reader in of_reals:
            same = laid_out_as(_plain(node, pairs), reader)
            if same is not None:
                reader.replace_all_uses_with(same)
        others = [reader for reader in readers if reader not in of_reals]
        value = _complex_as(node, pairs) if others else None
        if value is not None:
            for reader in others:
                reader.replace_input_with(node, value)


def _complex_as(node: fx.Node, pairs: Pairs) -> fx.Node | None:
    """The pairs as complex numbers, conjugate ones as a lazy view of the others, as the node has them."""
    is_lazy = value_of(node).is_conj()
    reals = pairs.reals if is_lazy and pairs.is_conjugate else _plain(node, pairs)
    if not _lie_as_complex(value_of(reals)) or is_lazy > pairs.is_conjugate:
        return None
    value = add_call(node, aten.view_as_complex.default, (reals,))
    return laid_out_as(add_call(node, aten._conj.default, (value,)) if is_lazy else value, node)


def _lie_as_complex(reals: torch.Tensor) -> bool:
    """Whether both parts of each number are neighbours, and each begins where one of that size may."""
    *steps, between = reals.stride()
    return between == 1 and all(step % 2 == 0 for step in (*steps, reals.storage_offset()))


def _parts(like: fx.Node, reals: fx.Node) -> tuple[fx.Node, fx.Node]:
    return add_call(like, aten.select.int, (reals, -1, 0)), add_call(like, aten.select.int, (reals, -1, 1))


def _plain(like: fx.Node, pairs: Pairs) -> fx.Node:
    """Without a sign that is still to be changed."""
    if not pairs.is_conjugate:
        return pairs.reals
    real, imaginary = _parts(like, pairs.reals)
    return stacked(like, [real, add_call(like, aten.neg.default, (imaginary,))])


def _rank(pairs: Pairs) -> int:
    return int(value_of(pairs.reals).ndim) - 1


def _along(*places: int) -> Rule:
    """The same operator of pairs. places: of its arguments, those that are the number of a dimension."""

    def rule(node: fx.Node, first: Pairs, *rest: Any) -> Pairs:
        inserted = node.target is aten.unsqueeze.default
        given: list[Any] = [first, *rest]
        for place in (place for place in places if place < len(given)):
            given[place] = given[place] % (_rank(first) + inserted)
        if any(isinstance(each, Pairs) for each in rest):
            given = [_plain(node, each) if isinstance(each, Pairs) else each for each in given]
            return Pairs(add_call(node, node.target, tuple(given)))
        return Pairs(add_call(node, node.target, (first.reals, *given[1:])), first.is_conjugate)

    return rule


def _permute(node: fx.Node, x: Pairs, dims: Sequence[int]) -> Pairs:
    order = [*(dim % _rank(x) for dim in dims), _rank(x)]
    return Pairs(add_call(node, aten.permute.default, (x.reals, order)), x.is_conjugate)


def _transpose_matrix(node: fx.Node, x: Pairs) -> Pairs:
    return _permute(node, x, [*range(_rank(x))][::-1])


def _squeeze(node: fx.Node, x: Pairs, dims: Sequence[int]) -> Pairs:
    return Pairs(add_call(node, aten.squeeze.dims, (x.reals, [dim % _rank(x) for dim in dims])), x.is_conjugate)


def _reshape(node: fx.Node, x: Pairs, *_: Any) -> Pairs:
    shape = [*value_of(node).shape, 2]
    return Pairs(add_call(node, node.target, (x.reals, shape)), x.is_conjugate)


def _conjugate(node: fx.Node, x: Pairs) -> Pairs:
    return Pairs(x.reals, not x.is_conjugate)


def _clone(node: fx.Node, x: Pairs) -> Pairs:
    return Pairs(add_call(node, aten.clone.default, (x.reals,), None, **node.kwargs), x.is_conjugate)


def _zeros(node: fx.Node, x: Pairs, *_: Any) -> Pairs:
    if node.target is aten.zeros_like.default:  # of a tangent it is a gradient (see `partition.undefined`)
        return Pairs(add_call(node, aten.zeros_like.default, (x.reals,)))
    return Pairs(add_call(node, aten.new_zeros.default, (x.reals, [*value_of(node).shape, 2])))


def _pad(node: fx.Node, x: Pairs, widths: Sequence[int], *_: Any) -> Pairs:
    return Pairs(add_call(node, aten.constant_pad_nd.default, (x.reals, [0, 0, *widths], 0.0)), x.is_conjugate)


def _into_zeros(node: fx.Node, x: Pairs, sizes: Sequence[int], dim: int, *rest: int) -> Pairs:
    """The gradient of a slice, or of one of its places."""
    arguments = x.reals, [*sizes, 2], dim % len(sizes), *rest
    return Pairs(add_call(node, node.target, arguments), x.is_conjugate)


def _added(node: fx.Node, x: Pairs, y: Pairs) -> Pairs:
    return Pairs(add_call(node, node.target, (_plain(node, x), _plain(node, y))))


def _negative(node: fx.Node, x: Pairs) -> Pairs:
    return Pairs(add_call(node, aten.neg.default, (x.reals,)), x.is_conjugate)


def _concatenated(node: fx.Node, each: Sequence[Pairs], dim: int = 0) -> Pairs:
    return Pairs(add_call(node, aten.cat.default, ([_plain(node, x) for x in each], dim % _rank(each[0]))))


def _summed(node: fx.Node, x: Pairs, dims: Sequence[int] | None, keepdim: bool = False) -> Pairs:
    over = [dim % _rank(x) for dim in dims or range(_rank(x))]
    return Pairs(add_call(node, aten.sum.dim_IntList, (x.reals, over, keepdim)), x.is_conjugate)


def _multiplied(node: fx.Node, x: Any, y: Any) -> Pairs:
    """As ATen multiplies by a real number: as by one whose imaginary part is 0, which what is not finite shows."""
    if not isinstance(x, Pairs):
        x, y = y, x
    if isinstance(y, Pairs):
        left, right = (Parts(*_parts(node, each.reals), each.is_conjugate) for each in (x, y))
        return Pairs(stacked(node, multiplied(node, left, right)))
    operator: Any = aten.mul.Scalar
    nothing: Any = 0.0
    if isinstance(y, fx.Node):  # zeros that are those of a tangent where it is one (see `partition.undefined`)
        operator, nothing = aten.mul.Tensor, add_call(node, aten.zeros_like.default, (y,))
    real, imaginary = _parts(node, _plain(node, x))
    zeros = [add_call(node, operator, (part, nothing)) for part in (imaginary, real)]
    scaled = [add_call(node, operator, (part, y)) for part in (real, imaginary)]
    operators = zip((aten.sub.Tensor, aten.add.Tensor), zip(scaled, zeros, strict=True), strict=True)
    return Pairs(stacked(node, [add_call(node, each, terms) for each, terms in operators]))


def _multiplied_matrices(node: fx.Node, left: Pairs, right: Pairs) -> Pairs:
    """(n, m, k) times (n, k, p) as products of reals (n, m, 2k) and (n, 2k, 2p): two rows of the right one for each of
    its rows b, of (b, ib) or, for a conjugate left one, of (b, -ib)."""
    n, m, p = value_of(node).shape
    rows = add_call(node, aten.clone.default, (left.reals,), None, memory_format=torch.contiguous_format)
    rows = add_call(node, aten.view.default, (rows, [n, m, -1]))
    real, imaginary = _parts(node, _plain(node, right))
    turned = imaginary if left.is_conjugate else add_call(node, aten.neg.default, (imaginary,))
    other = add_call(node, aten.neg.default, (real,)) if left.is_conjugate else real
    both = [stacked(node, parts) for parts in ((real, imaginary), (turned, other))]
    columns = add_call(node, aten.view.default, (add_call(node, aten.stack.default, (both, 2)), [n, -1, 2 * p]))
    product = add_call(node, aten.bmm.default, (rows, columns))
    return Pairs(add_call(node, aten.view.default, (product, [n, m, p, 2])))


_VIEWS: dict[Any, Rule] = {
    aten.slice.Tensor: _along(1),
    aten.select.int: _along(1),
    aten.unsqueeze.default: _along(1),
    aten.transpose.int: _along(1, 2),
    aten.squeeze.dim: lambda node, x, dim: _squeeze(node, x, [dim]),
    aten.squeeze.dims: _squeeze,
    aten.permute.default: _permute,
    aten.t.default: _transpose_matrix,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.expand.default: _reshape,
    aten._conj.default: _conjugate,
    aten.resolve_conj.default: lambda node, x: x,
    aten.view_as_complex.default: lambda node, reals: Pairs(reals),
    aten.zeros_like.default: _zeros,
    aten.new_zeros.default: _zeros,
}
_RULES: dict[Any, Rule] = {
    **_VIEWS,
    aten._conj_physical.default: _conjugate,
    aten.clone.default: _clone,
    aten.slice_scatter.default: _along(2),
    aten.select_scatter.default: _along(2),
    aten.slice_backward.default: _into_zeros,
    aten.select_backward.default: _into_zeros,
    aten.constant_pad_nd.default: _pad,
    aten.add.Tensor: _added,
    aten.sub.Tensor: _added,
    aten.neg.default: _negative,
    aten.cat.default: _concatenated,
    aten.sum.dim_IntList: _summed,
    aten.mul.Tensor: _multiplied,
    aten.mul.Scalar: _multiplied,
    aten.bmm.default: _multiplied_matrices,
}
# How often each of them goes through what it gives, where it is a call of its own.
_PASSES = {
    **dict.fromkeys(_VIEWS, 0),
    **dict.fromkeys((aten.slice_scatter.default, aten.select_scatter.default, aten.bmm.default), 2),
}
