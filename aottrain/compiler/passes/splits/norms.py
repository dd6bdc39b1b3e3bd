"""split_norms: batch and group normalisations as two parts: their statistics, and the pointwise work that uses them.

A backward that recomputed the op whole would pass over the data again for statistics that take a few bytes to save.
And in channels_last the statistics of a batch are sums over rows, which are complete only when all rows are done.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast, laid_out_as
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.lowering.reductions import reduced_dims
from aottrain.ir.graph import JointGraph, calls, info, required_spec, spec_of, value_of
from aottrain.ir.ops import OpKind
from aottrain.ops.norms import channel_dims

aten, own = torch.ops.aten, torch.ops.aottrain

_FORWARDS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_no_training.default,
)

# Elements of a channel that are a row, and of images for which a pass over them costs more than three small kernels.
_LONG_CHANNEL, _MANY = 64, 1 << 16


def split_norms(joint: JointGraph, sums_in_rows: bool = False) -> JointGraph:
    """The same program; rounded otherwise than eager's, as generated kernels round. The graph itself where it has none
    that can be split: of a fixed size. sums_in_rows: whether a kernel can add up the channels of a group in its row."""
    splits = dict.fromkeys(_FORWARDS, _split_forward) | {
        aten.native_batch_norm_backward.default: _split_backward,
        aten.native_group_norm.default: _split_group_norm,
        aten.native_group_norm_backward.default: partial(_split_group_norm_backward, sums_in_rows),
    }
    if not any(node.target in splits for node in calls(joint.graph)):
        return joint
    graph = copy_graph(joint.graph)
    if sums_in_rows:
        _sum_channels_in_rows(graph)
    for node in calls(graph):
        if node.target in splits:
            splits[node.target](graph, node)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _split_forward(graph: fx.Graph, node: fx.Node) -> None:
    x, weight, bias, running_mean, running_var, *rest = _arguments(node)
    training = node.target is not aten._native_batch_norm_legit_no_training.default and rest[0]
    momentum, eps = rest[-2:]
    tracked = isinstance(running_mean, fx.Node) and isinstance(running_var, fx.Node)
    if node.kwargs or not _is_plain(x) or not (tracked or training):
        return
    spec, wide, count = required_spec(x), _wide(x), _count(x)
    with graph.inserting_before(node):
        if not training:
            mean, rstd = cast(node, running_mean, wide), _rstd(node, running_var, eps)
            _replace(node, [add_call(node, own.batch_normalize.default, (x, mean, rstd, weight, bias))])
            return
        if count < 2:
            return
        mean = add_call(node, aten.mean.dim, (x, channel_dims(len(spec.shape)), False), dtype=wide)
        distance_sum, square_sum = _items(node, add_call(node, own.batch_spread.default, (x, mean)), 2)
        # Without running statistics, as in instance norms, nothing reads the new ones.
        running = (running_mean, running_var) if tracked else (mean, mean)
        statistics = (mean, distance_sum, square_sum, *running, count, momentum, eps)
        mean, rstd, *new = _items(node, add_call(node, own.batch_statistics.default, statistics), 4)
        out = add_call(node, own.batch_normalize.default, (x, mean, rstd, weight, bias))
        # Of parameters in half precision eager rounds the statistics; its gradient's own parts take them as they are.
        mean, rstd = (cast(node, value, value_of(node)[1].dtype) for value in (mean, rstd))
    _replace(node, [out, mean, rstd, *new])


def _split_backward(graph: fx.Graph, node: fx.Node) -> None:
    gradient, x, weight, running_mean, running_var, mean, rstd, training, eps, mask = _arguments(node)
    if not _is_plain(x) or not _is_plain(gradient):
        return
    wide = _wide(x)
    with graph.inserting_before(node):
        if not training:
            if not isinstance(running_mean, fx.Node) or not isinstance(running_var, fx.Node):
                return
            mean, rstd = cast(node, running_mean, wide), _rstd(node, running_var, eps)
        if not all(isinstance(value, fx.Node) for value in (mean, rstd)):
            return
        mean, rstd = (_unrounded(node, value, wide) for value in (mean, rstd))
        total, product = _items(node, add_call(node, own.batch_norm_sums.default, (gradient, x, mean, rstd)), 2)
        results: list[fx.Node | None] = [None, product, total]
        if mask[0] and training:
            arguments = (gradient, x, mean, rstd, weight, total, product)
            results[0] = add_call(node, own.batch_norm_input_gradient.default, arguments)
        elif mask[0]:
            step = rstd if weight is None else add_call(node, aten.mul.Tensor, (rstd, weight))
            ones = [1] * (len(required_spec(x).shape) - 2)
            results[0] = add_call(
                node, aten.mul.Tensor, (gradient, add_call(node, aten.view.default, (step, [-1, *ones])))
            )
        for i, example in enumerate(value_of(node)):
            result = results[i]
            if result is not None and example is not None:
                results[i] = cast(node, result, example.dtype)
    _replace(node, results)


def _unrounded(node: fx.Node, value: fx.Node, wide: torch.dtype) -> fx.Node:
    """Statistics as they were before they were rounded, and seen in another shape."""
    rounded = value.args[0] if value.target is aten.view.default else value
    source = rounded.args[0] if isinstance(rounded, fx.Node) and rounded.target is aten._to_copy.default else None
    if isinstance(source, fx.Node) and required_spec(source).dtype is wide:
        return source
    return cast(node, value, wide)


def _rstd(node: fx.Node, variance: fx.Node, eps: Any) -> fx.Node:
    """Of the running variance."""
    shifted = add_call(node, aten.add.Scalar, (cast(node, variance, _wide(node.all_input_nodes[0])), eps))
    return add_call(node, aten.rsqrt.default, (shifted,))


def _split_group_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Wu and He, "Group Normalization", 2018: each group of channels of an example is one row."""
    x, weight, bias, batch, channels, rest, groups, eps = _arguments(node)
    if node.kwargs or not _is_plain(x):
        return
    rows = _Rows(node, batch, groups, channels, rest, _wide(x))
    with graph.inserting_before(node):
        value = cast(node, rows.of(x), rows.dtype)
        var_mean = add_call(node, aten.var_mean.correction, (value, [2, 3]), correction=0, keepdim=True)
        variance, mean = _items(node, var_mean, 2)
        rstd = add_call(node, aten.rsqrt.default, (add_call(node, aten.add.Scalar, (variance, eps)),))
        out = rows.normal(value, mean, rstd)
        for parameter, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
            if parameter is not None:
                out = add_call(node, op, (out, rows.channels(parameter)))
        out = cast(node, _viewed(node, out, required_spec(x).shape), required_spec(x).dtype)
        # Of parameters in half precision eager rounds them; its gradient's own parts take them as they are.
        kept = [cast(node, value, value_of(node)[1].dtype) for value in (mean, rstd)]
        statistics = [_viewed(node, value, (batch, groups)) for value in kept]
    _replace(node, [out, *statistics])


def _split_group_norm_backward(sums_in_rows: bool, graph: fx.Graph, node: fx.Node) -> None:
    gradient, x, mean, rstd, weight, *_, mask = _arguments(node)
    rows = _rows_of(node)
    if rows is None:
        return
    wide, batch, groups = rows.dtype, rows.batch, rows.groups
    with graph.inserting_before(node):
        mean, rstd = (_viewed(node, _unrounded(node, value, wide), (batch, groups, 1, 1)) for value in (mean, rstd))
        values = rows.of(gradient), rows.of(x), mean, rstd
        if rows.are_summed_apart and not sums_in_rows:
            grown, *of_parameters = _gradients_by_examples(rows, *values, weight)
        else:
            grown, *of_parameters = _gradients_by_groups(rows, *values, weight)
        results = [_viewed(node, grown, required_spec(x).shape) if mask[0] else None, *of_parameters]
        for i, example in enumerate(value_of(node)):
            result = results[i]
            if result is not None and example is not None:
                results[i] = cast(node, result, example.dtype)
    _replace(node, results)


def _sum_channels_in_rows(graph: fx.Graph) -> None:
    """Sums of the channels of examples whose groups are normalised, as the gradients of what was added to them, or
    scaled them: these groups' rows are gone through for the norm's gradient anyway. They come after it, where they may,
    for the first sum decides what a kernel's rows are."""
    norms = {
        node: (rows.batch, rows.num_channels, rows.rest)
        for node in calls(graph)
        if node.target is aten.native_group_norm_backward.default
        and (rows := _rows_of(node)) is not None
        and rows.are_summed_apart
    }
    for node in list(calls(graph)) if norms else ():
        is_sum = node.target is aten.sum.dim_IntList and not node.kwargs and node.users
        source, dims = _arguments(node)[:2] if is_sum else (None, None)
        if not _is_plain(source) or not _is_contiguous(source):
            continue
        result, spec = required_spec(node), required_spec(source)
        batch, channels, *rest = spec.shape
        is_of_channels = reduced_dims(source, dims) == tuple(range(2, 2 + len(rest))) != ()
        alike = [norm for norm, shape in norms.items() if shape == (batch, channels, math.prod(rest))]
        if alike and is_of_channels and spec.device.type == "cpu" and result.dtype is spec.dtype:
            with graph.inserting_before(node):
                sums = add_call(node, own.channel_sums_in_rows.default, (source,))
                view = _viewed(node, sums, result.shape)
            node.replace_all_uses_with(view)
            _move_behind(sums, alike)


def _move_behind(node: fx.Node, norms: Sequence[fx.Node]) -> None:
    """A call and its views to behind the next of these norms, unless one that reads it comes before that."""
    moved = [node]
    for each in moved:
        moved.extend(user for user in each.users if info(user).kind is OpKind.VIEW)
    readers = {user for each in moved for user in each.users} - set(moved)
    nodes = list(node.graph.nodes)
    following = next((each for each in nodes[nodes.index(node) :] if each in readers or each in norms), None)
    if following is not None and following in norms:
        for each in reversed(moved):
            following.append(each)


def _gradients_by_groups(
    rows: _Rows, gradient: fx.Node, x: fx.Node, mean: fx.Node, rstd: fx.Node, weight: fx.Node | None
) -> list[fx.Node]:
    """Of x, whose sums are those of a group's row, of the weight and of the bias."""
    node, count = rows.node, rows.num_channels // rows.groups * rows.rest
    g, normal = cast(node, gradient, rows.dtype), rows.normal(cast(node, x, rows.dtype), mean, rstd)
    product = add_call(node, aten.mul.Tensor, (g, normal))
    if weight is not None:
        g, product = (add_call(node, aten.mul.Tensor, (value, rows.channels(weight))) for value in (g, product))
    first, second = (
        add_call(node, aten.div.Scalar, (add_call(node, aten.sum.dim_IntList, (value, [2, 3], True)), count))
        for value in (g, product)
    )
    centered = add_call(node, aten.sub.Tensor, (g, first))
    centered = add_call(node, aten.sub.Tensor, (centered, add_call(node, aten.mul.Tensor, (normal, second))))
    grown = add_call(node, aten.mul.Tensor, (centered, rstd))
    # Last: what is pointwise belongs to the rows above.
    if rows.are_summed_apart:
        sums = add_call(node, own.group_norm_sums_in_rows.default, (gradient, x, mean, rstd))
        total, scaled = _halves(node, add_call(node, aten.sum.dim_IntList, (sums, [1])), (rows.num_channels,))
    else:
        both = _items(node, add_call(node, own.group_norm_sums.default, (gradient, x, mean, rstd)), 2)
        total, scaled = (_viewed(node, value, (rows.num_channels,)) for value in both)
    return [grown, scaled, total]


def _gradients_by_examples(
    rows: _Rows, gradient: fx.Node, x: fx.Node, mean: fx.Node, rstd: fx.Node, weight: fx.Node | None
) -> list[fx.Node]:
    """As `_gradients_by_groups`, from sums of each example's channels, which give all others: one pass fewer over
    gradient and x, for more kernels."""
    node, values = rows.node, (gradient, x, mean, rstd)
    sums = add_call(node, own.group_norm_example_sums.default, values)
    scale, scaled = None, sums
    if weight is not None:
        scale = rows.channels(cast(node, weight, rows.dtype))
        scaled = add_call(node, aten.mul.Tensor, (sums, _viewed(node, scale, required_spec(scale).shape[1:3])))
    of_groups = add_call(node, aten.sum.dim_IntList, (scaled, [3]))
    parts = _halves(node, of_groups, (rows.batch, rows.groups, 1, 1))
    grown = add_call(node, own.group_norm_input_gradient.default, (*values, scale, *parts))
    total, product = _halves(node, add_call(node, aten.sum.dim_IntList, (sums, [1])), (rows.num_channels,))
    return [grown, product, total]


def _rows_of(node: fx.Node) -> _Rows | None:
    """Of a group norm's gradient that can be split."""
    gradient, x, _, _, _, batch, channels, rest, groups, _ = _arguments(node)
    if node.kwargs or not _is_plain(x) or not _is_plain(gradient):
        return None
    return _Rows(node, batch, groups, channels, rest, _wide(x))


@dataclass(frozen=True)
class _Rows:
    """The group norm of `node` in four dimensions: examples, groups, channels of a group, elements of a channel."""

    node: fx.Node
    batch: int
    groups: int
    num_channels: int
    rest: int
    dtype: torch.dtype

    @property
    def are_summed_apart(self) -> bool:
        """Whether sums of each example's channels come first: on a CPU, of channels long enough to be rows."""
        size = self.batch * self.num_channels * self.rest
        on_cpu = required_spec(self.node.args[0]).device.type == "cpu"
        return on_cpu and self.rest >= _LONG_CHANNEL and size >= _MANY

    def of(self, value: fx.Node) -> fx.Node:
        """Contiguous, in the type that they have."""
        shape = self.batch, self.groups, self.num_channels // self.groups, self.rest
        if not _is_contiguous(value):
            value = add_call(self.node, aten.clone.default, (value,), memory_format=torch.contiguous_format)
        return _viewed(self.node, value, shape)

    def channels(self, parameter: fx.Node) -> fx.Node:
        """In its own type, which arithmetic with wider numbers takes as it is."""
        shape = 1, self.groups, self.num_channels // self.groups, 1
        return _viewed(self.node, parameter, shape)

    def normal(self, value: fx.Node, mean: fx.Node, rstd: fx.Node) -> fx.Node:
        distance = add_call(self.node, aten.sub.Tensor, (value, mean))
        return add_call(self.node, aten.mul.Tensor, (distance, rstd))


def _halves(like: fx.Node, both: fx.Node, shape: Sequence[int]) -> list[fx.Node]:
    return [_viewed(like, add_call(like, aten.select.int, (both, 0, i)), shape) for i in range(2)]


def _viewed(like: fx.Node, value: fx.Node, shape: Sequence[int]) -> fx.Node:
    return add_call(like, aten.view.default, (value, list(shape)))


def _is_contiguous(node: fx.Node) -> bool:
    return bool(value_of(node).is_contiguous())


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """Nodes, numbers, lists of them."""
    return node.args


def _is_plain(node: Any) -> bool:
    """A tensor of fixed size with channels."""
    spec = spec_of(node) if isinstance(node, fx.Node) else None
    return spec is not None and spec.symbolic is None and len(spec.shape) > 1 and spec.numel > 0


def _wide(node: Any) -> torch.dtype:
    return torch.promote_types(required_spec(node).dtype, torch.float32)


def _count(node: Any) -> int:
    shape = required_spec(node).shape
    return math.prod(shape) // shape[1]


def _items(like: fx.Node, node: fx.Node, count: int) -> list[fx.Node]:
    return [add_call(like, operator.getitem, (node, i)) for i in range(count)]


def _replace(node: fx.Node, results: list[Any]) -> None:
    """Its results by these, where all of them can lie in memory as those did."""
    replacements: dict[fx.Node, fx.Node] = {}
    with node.graph.inserting_before(node):
        for user in node.users:
            position: Any = user.args[1]
            if user.target is operator.getitem and position < len(results) and results[position] is not None:
                laid_out = laid_out_as(results[position], user)
                if laid_out is None:
                    return
                replacements[user] = laid_out
    for user, result in replacements.items():
        user.replace_all_uses_with(result)
