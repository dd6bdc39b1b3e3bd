"""write_out: calls that only libraries know, as views, copies, products and sums, which kernels share.

Channels that become pixels, and pixels that become channels; windows that lie side by side, added up where they came
from; the mean of whole images; one element in the place of a dimension; lengths along dimensions that neighbours in
memory do not lie along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast, laid_out_as
from aottrain.compiler.lowering import rules_for
from aottrain.compiler.lowering.reductions import is_of_one, reduced_dims
from aottrain.compiler.lowering.rules import LOW_PRECISION, argument, arguments
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, required_spec, spec_of, value_of

aten = torch.ops.aten

# What is smaller is in a cache when it is read again.
_LEAST = 1 << 16
# Calls that are looked at for rows that they reduce.
_MOST_BESIDE = 96


def write_out(joint: JointGraph) -> JointGraph:
    """The same program; sums may be rounded otherwise than eager's. The graph itself where it has no such call."""
    return split_calls(joint, _is_written_out, _write)


def _is_written_out(node: fx.Node) -> bool:
    known = _KNOWN.get(node.target)
    specs = [spec_of(source) for source in (node, *node.all_input_nodes)]
    plain = all(spec is not None and spec.symbolic is None and spec.is_known and spec.numel for spec in specs)
    return known is not None and plain and not node.kwargs and known[0](node)


def _write(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        placed = laid_out_as(_KNOWN[node.target][1](node), node)
    if placed is not None:
        node.replace_all_uses_with(placed)


def _shape(value: Any) -> list[int]:
    return list(required_spec(value).shape)


def _turned(like: fx.Node, value: Any, parts: list[int], order: list[int], shape: list[int]) -> fx.Node:
    """A value with its dimensions taken apart, in another order, and joined again."""
    apart = add_call(like, aten.view.default, (value, parts))
    turned = add_call(like, aten.permute.default, (apart, order))
    copy = add_call(like, aten.clone.default, (turned,), memory_format=torch.contiguous_format)
    return add_call(like, aten.view.default, (copy, shape))


def _is_contiguous(node: fx.Node) -> bool:
    source: Any = arguments(node)[0]
    return bool(value_of(source).is_contiguous())


def _shuffled(node: fx.Node) -> fx.Node:
    *leading, channels, height, width = _shape(arguments(node)[0])
    step: Any = arguments(node)[1]
    rank = len(leading)
    parts = [*leading, channels // step**2, step, step, height, width]
    order = [*range(rank), *(rank + d for d in (0, 3, 1, 4, 2))]
    return _turned(node, arguments(node)[0], parts, order, _shape(node))


def _unshuffled(node: fx.Node) -> fx.Node:
    *leading, channels, height, width = _shape(arguments(node)[0])
    step: Any = arguments(node)[1]
    rank = len(leading)
    parts = [*leading, channels, height // step, step, width // step, step]
    order = [*range(rank), *(rank + d for d in (0, 2, 4, 1, 3))]
    return _turned(node, arguments(node)[0], parts, order, _shape(node))


def _are_windows(node: fx.Node) -> bool:
    _, sizes, dim, size, step = arguments(node)
    return bool(sizes and size == step and sizes[dim] % size == 0)


def _from_windows(node: fx.Node) -> fx.Node:
    gradient, sizes, dim, *_ = arguments(node)
    rank = len(sizes)
    dim = dim % rank
    order = [*range(dim + 1), rank, *range(dim + 1, rank)]
    turned = add_call(node, aten.permute.default, (gradient, order))
    copy = add_call(node, aten.clone.default, (turned,), memory_format=torch.contiguous_format)
    return add_call(node, aten.view.default, (copy, list(sizes)))


def _is_whole(node: fx.Node) -> bool:
    """Whether a window of a mean is the image."""
    window: Any = arguments(node)[1]
    size = _shape(arguments(node)[0])[-2:]
    rest = arguments(node)[3:]
    return [*window] * (3 - len(window)) == size and (not rest or set(rest[0]) == {0}) and len(rest) < 2


def _mean(node: fx.Node) -> fx.Node:
    return add_call(node, aten.mean.dim, (arguments(node)[0], [-2, -1], True))


def _mean_backward(node: fx.Node) -> fx.Node:
    height, width = _shape(node)[-2:]
    spread = add_call(node, aten.expand.default, (arguments(node)[0], _shape(node)))
    return add_call(node, aten.div.Scalar, (spread, height * width))


def _is_whole_backward(node: fx.Node) -> bool:
    _, source, window, _, padding, ceil_mode, _, divisor = arguments(node)
    sizes = [*window] * (3 - len(window))
    return bool(sizes == _shape(source)[-2:] and set(padding) == {0} and not ceil_mode and divisor is None)


def _is_all(node: fx.Node) -> bool:
    _, sizes, dim, _ = arguments(node)
    return bool(sizes[dim] == 1)


def _unsqueezed(node: fx.Node) -> fx.Node:
    gradient, sizes, dim, _ = arguments(node)
    return add_call(node, aten.unsqueeze.default, (gradient, dim % len(sizes)))


def _is_length(node: fx.Node) -> bool:
    """Of a root of squares that no kernel adds up by rows."""
    source, power, dims = arguments(node)[0], argument(node, "ord", 1, 2), argument(node, "dim", 2)
    fits = required_spec(source).dtype.is_floating_point and not is_of_one(source, reduced_dims(source, dims))
    return bool(fits and power == 2 and dims and len(arguments(node)) < 5 and not rules_for(node))


def _length(node: fx.Node) -> fx.Node:
    source, _, dims, *keeps = arguments(node)
    dtype = required_spec(node).dtype
    wide = cast(node, source, torch.float32 if dtype in LOW_PRECISION else dtype)
    squares = add_call(node, aten.mul.Tensor, (wide, wide))
    total = add_call(node, aten.sum.dim_IntList, (squares, dims, *keeps))
    return cast(node, add_call(node, aten.sqrt.default, (total,)), dtype)


def _is_sum_of_rows(node: fx.Node) -> bool:
    """Whether a sum's innermost dimensions are rows that the kernel reduces in which its terms are made, and there are
    dimensions to be added up beside those that it keeps: as a weight's gradient beside a norm of each image."""
    source = arguments(node)[0]
    return isinstance(source, fx.Node) and required_spec(source).nbytes >= _LEAST and bool(_row_of_sum(node))


def _row_of_sum(node: fx.Node) -> list[int]:
    source: Any = arguments(node)[0]
    spec, given = required_spec(source), arguments(node)[1] or ()
    dims = {d % len(spec.shape) for d in given if spec.shape[d] > 1}
    order = sorted((d for d, size in enumerate(spec.shape) if size > 1), key=lambda d: -spec.stride[d])
    if not dims or len(dims) == len(order):
        return []
    ends = [sorted(order[-count:]) for count in range(1, len(dims)) if dims.issuperset(order[-count:])]
    rows = [rules_for(call)[:1] for call in _beside(source)] if ends else []
    found = [
        [d for d in rule.reduced if spec.shape[d] > 1] for (rule,) in filter(None, rows) if rule.shape == spec.shape
    ]
    return next((row for row in found if row in ends), [])


def _beside(value: fx.Node) -> list[fx.Node]:
    """Calls that a kernel of elementwise work may have that makes a value, and what reads the same."""
    shape, found, stack = required_spec(value).shape, dict.fromkeys([value]), [value]
    while stack and len(found) < _MOST_BESIDE:
        node = stack.pop()
        near = [*node.all_input_nodes, *(user for user in node.users if user.op == "call_function")]
        for other in near:
            if other not in found:
                found[other] = None
                spec = spec_of(other)
                stack += [other] if spec is None or spec.shape == shape else []
    return list(found)


def _sum_of_rows(node: fx.Node) -> fx.Node:
    source, dims, *keeps = arguments(node)
    own = required_spec(node).dtype
    wide = torch.float32 if own in LOW_PRECISION else own
    rows = add_call(node, aten.sum.dim_IntList, (source, _row_of_sum(node), True), dtype=wide)
    return cast(node, add_call(node, aten.sum.dim_IntList, (rows, dims, *keeps)), own)


# By target whether a call is written out, and as what.
_KNOWN: dict[Any, tuple[Callable[[fx.Node], bool], Callable[[fx.Node], fx.Node]]] = {
    aten.pixel_shuffle.default: (_is_contiguous, _shuffled),
    aten.pixel_unshuffle.default: (_is_contiguous, _unshuffled),
    aten.unfold_backward.default: (_are_windows, _from_windows),
    aten.avg_pool2d.default: (_is_whole, _mean),
    aten.avg_pool2d_backward.default: (_is_whole_backward, _mean_backward),
    aten.select_backward.default: (_is_all, _unsqueezed),
    aten.sum.dim_IntList: (_is_sum_of_rows, _sum_of_rows),
    aten.linalg_vector_norm.default: (_is_length, _length),
}
