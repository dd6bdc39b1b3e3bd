"""A program with some of its calls in channels_last: each value has two versions, and each call works wholly in one.

Which calls do is given. In eager's layouts are all others, what a caller gets, and each weight; a copy stands where a
call reads a value that was made in the other layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

import aottrain.ops.norms  # noqa: F401  # defines operators
from aottrain.compat import tree_map
from aottrain.compiler.graphs.rewriting import add_call, fake_result
from aottrain.compiler.graphs.simplification import remove_dead_code
from aottrain.ir.graph import (
    copy_meta,
    copy_provenance,
    info,
    required_spec,
    results,
    set_value,
    spec_of,
    value_of,
    view_source,
)
from aottrain.ir.ops import OpKind
from aottrain.ir.tensor import TensorSpec, contiguous_strides

aten = torch.ops.aten

# The tensors among a convolution's arguments that are images: of the backward the gradient, too.
_IMAGES: dict[Any, tuple[int, ...]] = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.float32, torch.bfloat16, torch.float16)}
# Beside pointwise ops, those that work as well on any layout of images.
_ANY_LAYOUT = {
    "aten.mean.dim", "aten.sum.dim_IntList", "aten.mean.default", "aten.sum.default", "aten.amax.default",
    "aten._softmax.default", "aten._softmax_backward_data.default",
    "aten._log_softmax.default", "aten._log_softmax_backward_data.default",
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten.cat.default",
    "aten.constant_pad_nd.default", "aten.clone.default",
    "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default",
    "aten.avg_pool2d.default", "aten.avg_pool2d_backward.default",
    "aten._adaptive_avg_pool2d.default", "aten._adaptive_avg_pool2d_backward.default",
    "aten.upsample_nearest2d.default", "aten.upsample_nearest2d_backward.default",
    "aten._upsample_nearest_exact2d.default", "aten._upsample_nearest_exact2d_backward.default",
    "aten.native_batch_norm_backward.default", "aten._native_batch_norm_legit_functional.default",
    "aottrain.batch_spread.default", "aottrain.batch_normalize.default", "aottrain.batch_norm_sums.default",
    "aottrain.batch_norm_input_gradient.default",
}  # fmt: skip
# Pointwise ops of images that torch does not tag as such; casts among them.
_UNTAGGED = {
    f"aten.{name}{part}.default"
    for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "softplus")
    for part in ("", "_backward")
} | {"aten._to_copy.default"}
# Views that any strides allow.
_VIEWS = {
    "aten.expand.default", "aten.permute.default", "aten.transpose.int", "aten.unsqueeze.default", "aten.slice.Tensor",
    "aten.select.int", "aten.squeeze.dim", "aten.squeeze.dims", "aten.split.Tensor", "aten.split_with_sizes.default",
    "aten.unbind.int",
}  # fmt: skip
# Every how many-th image a batch norm's first mean is of.
_EACH = 8


def is_candidate(node: fx.Node) -> bool:
    """A convolution of images on a CPU, or by cuDNN."""
    if not images_of(node):
        return False
    for source in node.all_input_nodes:
        spec = spec_of(source)
        if spec is None or spec.symbolic is not None or spec.dtype not in _DTYPES.get(spec.device.type, ()):
            return False
        if spec.device.type == "cuda" and (torch.version.hip is not None or not torch.backends.cudnn.enabled):
            return False
    images = [required_spec(node.args[i]) for i in images_of(node)]
    return all(len(spec.shape) == 4 and spec.numel for spec in images)


def images_of(node: fx.Node) -> tuple[int, ...]:
    return _IMAGES.get(node.target, ())


def in_channels_last(spec: TensorSpec) -> TensorSpec:
    return replace(spec, stride=channels_last(spec.shape))


def channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of channels_last."""
    _, channels, height, width = shape
    return channels * height * width, 1, channels * width, channels


@dataclass
class Rewriting:
    """Copies `source` to `graph` node by node, with the images of some calls in channels_last."""

    source: fx.Graph
    inner: Collection[int] = frozenset()
    """Positions of results that no caller gets: they may have any layout."""
    chosen: Collection[fx.Node] | None = None
    """The calls of `source` that work in channels_last; None: all that can."""
    laid: Rewriting | None = None
    """The same with all calls in channels_last that can be: the layout that values have there."""
    copies: dict[fx.Node, tuple[fx.Node, bool]] = field(default_factory=dict)
    """Calls that only change a layout: the value of `source` that they copy, and whether into channels_last."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The copy of each node of the source."""
    _in_old_layout: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For nodes of the source: the value copied back into the layout that it had."""
    _in_laid_layout: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For nodes of the source: the value copied into the layout that it has in `laid`."""
    _changed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For nodes of the graph: the value copied into channels_last."""

    def run(self) -> Rewriting:
        for node in self.source.nodes:
            if node.op == "output":
                values = enumerate(results(self.source))
                inner = self.inner
                self.graph.output([v and (self.new[v] if i in inner else self._result(v)) for i, v in values])
            elif node.op != "call_function":
                self.new[node] = self.graph.node_copy(node)
            else:
                self.new[node] = self._call(node)
        remove_dead_code(self.graph)
        self.copies = {node: value for node, value in self.copies.items() if node.graph is self.graph and node.users}
        self.graph.lint()
        return self

    def _call(self, node: fx.Node) -> fx.Node:
        is_laid = self.chosen is None or node in self.chosen
        if is_laid and is_candidate(node):
            images = images_of(node)
            args = tuple(
                self._to_channels_last(arg) if i in images else _map_nodes(arg, self._as_before)  # type: ignore[arg-type]
                for i, arg in enumerate(node.args)
            )
            return self._emit(node, args, node.kwargs, is_laid)
        if (spread := spread_number(node)) is not None:
            # One number for all elements, as a mean's gradient: in no layout until something reads it.
            kwargs: dict[str, Any] = dict(node.kwargs)
            number = add_call(self.new[spread], node.target, (self.new[spread], *node.args[1:]), **kwargs)
            expanded = add_call(number, aten.expand.default, (number, list(required_spec(node).shape)))
            for new in (number, expanded):
                copy_provenance(node, new)
            return expanded
        if info(node).kind is OpKind.STRUCTURE:  # an item of what a call gave is as it gave it
            take = self.new.__getitem__
        else:
            take = self._as_laid if is_laid and takes_any_layout(node) else self._as_before
        args, kwargs = _map_nodes((node.args, dict(node.kwargs)), take)
        if _is_first_mean(node) and not alike(args[0], node.all_input_nodes[0]):
            args = (self._sample(args[0]), *args[1:])
        return self._emit(node, args, kwargs, is_laid)

    def _sample(self, images: fx.Node) -> fx.Node:
        """Some of the images, for a mean from which distances are taken: `batch_statistics` corrects for what it lacks.

        Otherwise all images would be read once more: a sum over rows is known only when all rows are done. Of n numbers
        the mean of any m is at most sqrt(n / m) deviations off, so the variance loses at most a factor of 1 + n / m of
        its last digits to cancellation, and commonly none.
        """
        count = required_spec(images).shape[0]
        if count < 2 * _EACH:
            return images
        return add_call(images, aten.slice.Tensor, (images, 0, 0, count, _EACH))

    def _emit(self, node: fx.Node, args: Any, kwargs: Any, is_laid: bool) -> fx.Node:
        """The call on these arguments. Its value is the old one where theirs are."""
        new = self.graph.create_node("call_function", node.target, args, dict(kwargs), node.name)
        copy_meta(node, new)
        pairs = zip(new.all_input_nodes, node.all_input_nodes, strict=False)
        same = len(new.all_input_nodes) == len(node.all_input_nodes) and all(alike(a, b) for a, b in pairs)
        value = _pointwise_in_channels_last(node, new) if is_laid else None
        if value is None and same:
            return new
        if value is None:
            value = fake_result(new.target, new.args, dict(new.kwargs))
        new.meta.pop("aottrain_spec", None)
        set_value(new, value)
        return new

    def _result(self, node: fx.Node) -> fx.Node:
        """What a caller gets: also in dimensions of size 1 the strides that it had."""
        new = self._as_before(node)
        before = spec_of(node)
        if before is None or new.op != "call_function" or required_spec(new).stride == before.stride:
            return new
        if before.stride != contiguous_strides(before.shape):
            return self._restored(node)
        # A view gives dimensions of size 1 the strides of a contiguous tensor, but one of the same shape.
        without = add_call(new, aten.view.default, (new, [size for size in before.shape if size != 1]))
        return add_call(new, aten.view.default, (without, list(before.shape)))

    def _as_before(self, node: fx.Node) -> fx.Node:
        """The value in the layout that it had."""
        new = self.new[node]
        if alike(new, node):
            return new
        if node not in self._in_old_layout:
            self._in_old_layout[node] = self._restored(node)
        return self._in_old_layout[node]

    def _restored(self, node: fx.Node) -> fx.Node:
        if view_source(node) is not None:
            return self._again(node, self._as_before)
        return self._copied(node, required_spec(node).stride, False)

    def _as_laid(self, node: fx.Node) -> fx.Node:
        """The value in the layout that it has where all is in channels_last that can be."""
        new = self.new[node]
        if self.laid is None or alike(self.laid.new[node], node) or alike(self.laid.new[node], new):
            return new
        if node not in self._in_laid_layout:
            if view_source(node) is not None:
                again = self._again(node, self._as_laid)
            else:
                again = self._copied(node, required_spec(self.laid.new[node]).stride, True)
            self._in_laid_layout[node] = again
        return self._in_laid_layout[node]

    def _again(self, view: fx.Node, take: Callable[[fx.Node], fx.Node]) -> fx.Node:
        """The view of what it is a view of, in another layout."""
        args, kwargs = _map_nodes((view.args, dict(view.kwargs)), take)
        again = self.graph.create_node("call_function", view.target, args, kwargs)
        copy_meta(view, again)
        value = fake_result(again.target, again.args, dict(again.kwargs))
        again.meta.pop("aottrain_spec", None)
        set_value(again, value)
        return again

    def _copied(self, node: fx.Node, stride: tuple[int, ...], into: bool) -> fx.Node:
        """The value copied, its dimensions in the order of these strides."""
        new = self.new[node]
        order = sorted(range(len(stride)), key=lambda d: -stride[d])  # stable: those of size 1 stay in their place
        straight = order == sorted(order)
        moved = new if straight else add_call(new, aten.permute.default, (new, order))
        moved = add_call(new, aten.clone.default, (moved,), memory_format=torch.contiguous_format)
        self.copies[moved] = node, into
        back = [order.index(d) for d in range(len(order))]
        return moved if straight else add_call(new, aten.permute.default, (moved, back))

    def _to_channels_last(self, node: fx.Node) -> fx.Node:
        """The value in channels_last."""
        new = self._as_laid(node)
        if same_strides(required_spec(new), channels_last(required_spec(new).shape)):
            return new
        if new not in self._changed:
            copy = add_call(new, aten.clone.default, (new,), memory_format=torch.channels_last)
            self.copies[copy] = node, True
            self._changed[new] = copy
        return self._changed[new]


def _pointwise_in_channels_last(old: fx.Node, new: fx.Node) -> torch.Tensor | None:
    """A pointwise result of which an operand of its shape is in channels_last is so, whatever the others are. None for
    other results."""
    spec = spec_of(old)
    if spec is None or len(spec.shape) != 4 or not is_pointwise(old):
        return None
    strides = channels_last(spec.shape)
    operands = [spec_of(source) for source in new.all_input_nodes]
    if any(other and other.shape == spec.shape and same_strides(other, strides) for other in operands):
        return value_of(old).new_empty_strided(spec.shape, strides)
    return None


def spread_number(node: fx.Node) -> fx.Node | None:
    """The one number that is expanded to be the only operand of a pointwise call; None for other calls."""
    source = node.args[0] if node.all_input_nodes else None
    if not isinstance(source, fx.Node) or len(node.all_input_nodes) != 1 or not is_pointwise(node):
        return None
    spec, number = spec_of(node), view_source(source)
    if spec is None or len(spec.shape) != 4 or source.target is not aten.expand.default or number is None:
        return None
    if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return None
    return number if required_spec(number).numel == 1 and spec.numel > 1 else None


def _is_first_mean(node: fx.Node) -> bool:
    """Whether it is the mean that the statistics of a batch norm begin with."""
    readers = {user.target for user in node.users}
    own = torch.ops.aottrain
    return node.target is aten.mean.dim and readers == {own.batch_spread.default, own.batch_statistics.default}


def takes_any_layout(node: fx.Node) -> bool:
    if info(node).kind is OpKind.STRUCTURE or info(node).name in _VIEWS:
        return True
    return is_pointwise(node) or info(node).name in _ANY_LAYOUT


def is_pointwise(node: fx.Node) -> bool:
    has_format = node.kwargs.get("memory_format") not in (None, torch.preserve_format)
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ()) or info(node).name in _UNTAGGED
    return tagged and not has_format


def alike(new: fx.Node, old: fx.Node) -> bool:
    """Whether the values of both have the same layout."""
    a, b = spec_of(new), spec_of(old)
    if a is None or b is None:
        return _items_alike(value_of(new), value_of(old))
    return a.shape == b.shape and same_strides(a, b.stride)


def _items_alike(a: Any, b: Any) -> bool:
    if not isinstance(a, (tuple, list)) or not isinstance(b, (tuple, list)):
        return True
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, torch.Tensor) and x.numel() > 1]
    return all(x.layout is not torch.strided or x.stride() == y.stride() for x, y in pairs)


def same_strides(spec: TensorSpec, stride: tuple[int, ...]) -> bool:
    if math.prod(spec.shape) <= 1:
        return True
    if not spec.stride or not stride:  # a sparse tensor has none
        return spec.stride == stride
    return all(size == 1 or a == b for size, a, b in zip(spec.shape, spec.stride, stride, strict=True))


def _map_nodes(nest: Any, function: Callable[[fx.Node], fx.Node]) -> Any:
    return tree_map(lambda value: function(value) if isinstance(value, fx.Node) else value, nest)
