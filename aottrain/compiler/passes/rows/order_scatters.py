"""order_scatters: large accumulating writes at looked-up rows, such as the gradient of x[index], row after row.

ATen's index_put on a CPU adds single elements, all threads at once, by atomic operations: up to thirty times slower
than whole rows one after the other, and of no order, so that two runs round differently.

On a GPU ATen sorts the index first, of each table of embeddings and of each x[index], by a dozen launches: the sum is
the same each time. Where the caller has not asked for that (`torch.use_deterministic_algorithms`), rows are added where
they belong by atomic operations, halves in float32.

A table of embeddings that is used again, as a language model's last layer does, has as its gradient a sum: that of the
other use, and one as large that is zero but for the rows that were looked up. Those rows are added to the first one.

The gradient of other rows that are looked up is, on a CPU, that of a table of embeddings, too: a function of our own
adds them up without writing zeros first.

The gradient of a table of few rows, as of the types of tokens, is a sum for each of these, which kernels add up where
they make what is added.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.lowering.rules import LOW_PRECISION
from aottrain.ir.graph import JointGraph, calls, made_in_backward, marks_of, required_spec, spec_of, value_of
from aottrain.ir.ops import ZEROS, packet_name
from aottrain.ir.tensor import TensorSpec

aten = torch.ops.aten

# From so many elements on ATen takes several threads, and with them atomic operations.
MANY = 1 << 15
# Rows of a table for each of which all that is added is gone through.
_FEW = 4
_EXACT = (torch.float32, torch.float64)


def order_scatters(joint: JointGraph) -> JointGraph:
    """The same program with index_add for index_put, where one dimension is indexed by integers, or, in the gradient of
    a lookup, several that follow each other, and for the sum of a gradient of embeddings and another one, which rounds
    otherwise than eager does; on a GPU for gradients of embeddings alone, too; with sums for gradients of few
    embeddings; on a CPU with gradients of embeddings for those of other rows that are looked up. The graph itself where
    there is none."""
    kinds = _is_row_scatter, _embedding_term, _is_alone, _is_of_few_rows, _adds_to_zeros
    if not any(kind(node) for node in calls(joint.graph) for kind in kinds):
        return joint
    graph = copy_graph(joint.graph)
    for node in list(calls(graph)):
        if _is_row_scatter(node):
            _replace(node)
        elif term := _embedding_term(node):
            _add_rows(node, term)
    for node in list(calls(graph)):
        if _adds_to_zeros(node):
            _make_fresh(node)
    for node in list(calls(graph)):  # those that were no term, and are still read
        if node.users and _is_of_few_rows(node):
            _sum_rows(node)
        elif node.users and _is_alone(node):
            _add_rows_to_zeros(node)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _is_row_scatter(node: fx.Node) -> bool:
    if node.target is not aten.index_put.default or node.kwargs or len(node.args) < 4 or not node.args[3]:
        return False
    into, index_args, values, _ = _arguments(node)
    dims = _indexed(index_args)
    target, added, own = spec_of(into), spec_of(values), spec_of(node)
    if marks_of(node) or target is None or added is None or own is None:
        return False
    specs = [spec for dim in dims if (spec := spec_of(index_args[dim])) is not None]
    if len(specs) < len(dims) or any(spec.dtype not in (torch.int64, torch.int32) for spec in specs):
        return False
    if any(spec.symbolic is not None for spec in (target, added, *specs)) or added.dtype is not target.dtype:
        return False
    if dims != [*range(dims[0], dims[0] + len(dims))] or (len(dims) > 1 and not _was_looked_up(node)):
        return False
    numbers = torch.broadcast_shapes(*(spec.shape for spec in specs))
    whole = (*target.shape[: dims[0]], *numbers, *target.shape[dims[-1] + 1 :])
    pays = math.prod(whole) >= MANY if target.device.type == "cpu" else _in_any_order(target)
    return added.shape == whole and pays and own.stride == _dense(target.shape)


def _indexed(index_args: Sequence[fx.Node | None]) -> list[int]:
    """The dimensions."""
    return [dim for dim, index in enumerate(index_args) if index is not None]


def _was_looked_up(node: fx.Node) -> bool:
    """Whether the program has looked up what these indices name in a tensor of that shape. It raises there where one of
    them is out of range, which the number of a row that they make together would not say."""
    into, index_args, *_ = _arguments(node)
    first = next(index for index in index_args if index is not None)
    return any(
        user.target is aten.index.Tensor
        and user < node  # nodes compare by their order
        and user.args[1] == index_args
        and required_spec(user.args[0]).shape == required_spec(into).shape
        for user in first.users
    )


def _in_any_order(spec: TensorSpec) -> bool:
    """Whether it is on a GPU, where nobody asked for the same order each time, and of a type that atomics add."""
    anyhow = not torch.are_deterministic_algorithms_enabled()
    return spec.device.type == "cuda" and anyhow and bool(spec.numel) and spec.dtype in (*_EXACT, *LOW_PRECISION)


def _replace(node: fx.Node) -> None:
    into, index_args, values, _ = _arguments(node)
    dims, shape = _indexed(index_args), tuple(value_of(into).shape)
    before, sizes, after = shape[: dims[0]], shape[dims[0] : dims[-1] + 1], shape[dims[-1] + 1 :]
    with node.graph.inserting_before(node):
        index = _number_of_row(node, [index_args[dim] for dim in dims], sizes)
        rows = *before, math.prod(sizes), *after
        if len(dims) > 1:
            is_zeros = packet_name(into.target) in ZEROS
            into = add_call(node, aten.new_zeros.default, (into, list(rows))) if is_zeros else viewed(into, rows)
        values = viewed(values, (*before, value_of(index).numel(), *after))
        total = viewed(_added(node, into, dims[0], index, values), shape)
    if value_of(total).stride() == value_of(node).stride():
        node.replace_all_uses_with(total)


def _number_of_row(node: fx.Node, indices: Sequence[fx.Node], sizes: Sequence[int]) -> fx.Node:
    """In one dimension for several of these sizes, by an index into each, whose numbers may count from the end."""
    number = None
    for index, size in zip(indices, sizes, strict=True):
        if len(indices) > 1:  # all sizes together may be more than an int32 counts
            index = cast(node, index, torch.int64)
        negative = add_call(node, aten.lt.Scalar, (index, 0))
        index = add_call(node, aten.where.self, (negative, add_call(node, aten.add.Scalar, (index, size)), index))
        if number is not None:
            index = add_call(node, aten.add.Tensor, (add_call(node, aten.mul.Scalar, (number, size)), index))
        number = index
    assert number is not None
    return viewed(number, (value_of(number).numel(),))


def _embedding_term(node: fx.Node) -> fx.Node | None:
    """Of a sum the term that is the gradient of embeddings, where adding its rows to the other term is less work: of
    two such, the later one."""
    if node.target is not aten.add.Tensor or node.kwargs or marks_of(node) or len(set(node.args)) < 2:
        return None
    own, terms = spec_of(node), [term for term in node.args if isinstance(term, fx.Node)]
    gradients = [term for term in terms if _is_embedding_gradient(term)]
    if not gradients or own is None or len(terms) < 2 or any(spec_of(term) != own for term in terms):
        return None
    later = max(gradients)  # nodes compare by their order
    gradient, indices = map(spec_of, _arguments(later)[:2])
    if gradient is None or indices is None or any(spec.symbolic is not None for spec in (own, gradient, indices)):
        return None
    exact = own.dtype in _EXACT and gradient.dtype is own.dtype
    plain = exact and (own.device.type == "cpu" or _in_any_order(own)) and own.stride == _dense(own.shape)
    return later if plain and own.numel >= MANY and 0 < gradient.numel <= own.numel else None


def _is_embedding_gradient(node: fx.Node) -> bool:
    if node.target is not aten.embedding_dense_backward.default or node.kwargs or marks_of(node):
        return False
    *_, by_count = _arguments(node)
    return not by_count and len(node.users) == 1


def _is_alone(node: fx.Node) -> bool:
    """Whether it is such a gradient on a GPU."""
    own = _dense_gradient(node)
    return own is not None and _in_any_order(own)


def _is_of_few_rows(node: fx.Node) -> bool:
    """Whether it is such a gradient, of a table with few rows."""
    own = _dense_gradient(node)
    return own is not None and own.shape[0] <= _FEW and value_of(_arguments(node)[0]).numel() >= MANY


def _dense_gradient(node: fx.Node) -> TensorSpec | None:
    """Of such a gradient, without gaps, whose sizes are known and not 0; None of all else."""
    if not _is_embedding_gradient(node):
        return None
    own, *operands = map(spec_of, (node, *_arguments(node)[:2]))
    if own is None or any(spec is None or spec.symbolic is not None or not spec.numel for spec in (own, *operands)):
        return None
    return own if own.stride == _dense(own.shape) else None


def _adds_to_zeros(node: fx.Node) -> bool:
    """Whether it is the gradient of rows that were looked up, of float32 on a CPU. What the program adds itself may be
    out of range, of which operators that run by themselves would say nothing."""
    if node.target is not aten.index_add.default or not made_in_backward(node) or marks_of(node) or len(node.args) != 4:
        return False
    into, dim, *rest = _arguments(node)
    own, index, rows = map(spec_of, (node, *rest))
    if packet_name(into.target) not in ZEROS or dim != 0 or own is None or index is None or rows is None:
        return False
    known = all(spec.symbolic is None and spec.numel for spec in (own, index, rows))
    plain = own.dtype is torch.float32 and own.device.type == "cpu" and own.stride == _dense(own.shape)
    alike = rows.shape[1:] == own.shape[1:] and index.dtype is torch.int64 and rows.dtype is own.dtype
    return known and plain and alike and len(own.shape) > 1 and rows.numel >= MANY


def _make_fresh(node: fx.Node) -> None:
    """As the gradient of a table of embeddings, which is the same sum, and writes its memory once."""
    _, _, index, rows = _arguments(node)
    own = value_of(node).shape
    width = math.prod(own[1:])
    with node.graph.inserting_before(node):
        flat = viewed(rows, (value_of(index).numel(), width))
        total = add_call(node, aten.embedding_dense_backward.default, (flat, index, own[0], -1, False))
        node.replace_all_uses_with(viewed(total, tuple(own)))


def _sum_rows(node: fx.Node) -> None:
    gradient, indices, _, padding, _ = _arguments(node)
    number, width = value_of(node).shape
    count = value_of(indices).numel()
    with node.graph.inserting_before(node):
        index, rows = viewed(indices, (count,)), viewed(gradient, (count, width))
        sums = []
        for row in range(number):
            # What is not a number stays apart from other rows, as in eager.
            others = add_call(node, aten.ne.Scalar, (index, row if row != padding else -1))
            apart = add_call(node, aten.unsqueeze.default, (others, 1))
            own = add_call(node, aten.masked_fill.Scalar, (rows, apart, 0.0))
            sums.append(add_call(node, aten.sum.dim_IntList, (own, [0], True)))
        node.replace_all_uses_with(add_call(node, aten.cat.default, (sums, 0)))


def _add_rows_to_zeros(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        zeros = add_call(node, aten.new_zeros.default, (node.args[0], list(value_of(node).shape)))
        node.replace_all_uses_with(_with_rows(node, zeros, node))


def _add_rows(node: fx.Node, term: fx.Node) -> None:
    (into,) = (source for source in node.all_input_nodes if source is not term)
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(_with_rows(node, into, term))


def _with_rows(node: fx.Node, into: fx.Node, term: fx.Node) -> fx.Node:
    """The rows of embeddings' gradients in their places, added to what is there."""
    gradient, indices, _, padding, _ = _arguments(term)
    count, width = value_of(indices).numel(), value_of(term).shape[1]
    index, rows = viewed(indices, (count,)), viewed(gradient, (count, width))
    if padding >= 0:  # has no gradient
        unused = add_call(node, aten.unsqueeze.default, (add_call(node, aten.eq.Scalar, (index, padding)), 1))
        rows = add_call(node, aten.masked_fill.Scalar, (rows, unused, 0.0))
    return _added(node, into, 0, index, rows)


def _added(node: fx.Node, into: fx.Node, dim: int, index: fx.Node, rows: fx.Node) -> fx.Node:
    """Halves on a GPU in float32, as ATen sums those of one row up."""
    dtype = value_of(into).dtype
    if value_of(into).device.type == "cuda" and dtype in LOW_PRECISION:
        into, rows = cast(node, into, torch.float32), cast(node, rows, torch.float32)
    return cast(node, add_call(node, aten.index_add.default, (into, dim, index, rows)), dtype)


def viewed(node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    """Contiguous: of rows with gaps between them index_add takes five times as long."""
    if not value_of(node).is_contiguous():
        node = add_call(node, aten.clone.default, (node,), memory_format=torch.contiguous_format)
    return node if value_of(node).shape == shape else add_call(node, aten.view.default, (node, list(shape)))


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Nodes, numbers, lists of them."""
    return node.args
