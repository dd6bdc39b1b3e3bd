"""choose_layouts: convolutions, and the ops between them, in channels_last where the libraries are faster that way.

Only values within the program change. Inputs are copied once where a convolution reads them, and each result has the
strides that eager gives it. Whether it pays is measured: each distinct convolution once in either layout, kept on disk.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_map
from aottrain.compiler.graphs.measured_calls import call_of
from aottrain.compiler.graphs.rewriting import add_call, fake_result
from aottrain.compiler.graphs.simplification import remove_dead_code
from aottrain.ir.graph import (
    JointGraph,
    OutputKind,
    calls,
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
from aottrain.ir.settings.decisions import AS_GIVEN, CHANNELS_LAST, SOURCES, Decision, Timing
from aottrain.ir.tensor import TensorSpec
from aottrain.ir.units import format_seconds
from aottrain.measure.calls import OpCall
from aottrain.measure.decisions import Timed, decide
from aottrain.measure.rates import rates_for
from aottrain.measure.timings import calls_timed

aten = torch.ops.aten

# The tensors among a convolution's arguments that are images: of the backward the gradient, too.
_IMAGES: dict[Any, tuple[int, ...]] = {aten.convolution.default: (0,), aten.convolution_backward.default: (0, 1)}
_TRANSPOSED: dict[Any, int] = {aten.convolution.default: 6, aten.convolution_backward.default: 7}
_DTYPES = (torch.float32, torch.bfloat16)
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
# Pointwise ops of images that torch does not tag as such.
_UNTAGGED = {
    f"aten.{name}{part}.default"
    for name in ("elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "softplus")
    for part in ("", "_backward")
}
# Views that any strides allow.
_VIEWS = {
    "aten.expand.default", "aten.permute.default", "aten.transpose.int", "aten.unsqueeze.default", "aten.slice.Tensor",
    "aten.select.int", "aten.squeeze.dim", "aten.squeeze.dims",
}  # fmt: skip
# Of the time of the convolutions: less is not worth another rounding.
_GAIN = 0.03
# Every how many-th image a batch norm's first mean is of.
_EACH = 8


@dataclass(frozen=True)
class LayoutChoice:
    """In which layout a program's convolutions run."""

    graph: fx.Graph | None = None
    """The program with its images in channels_last; None where it stays as it was."""
    reason: str = ""
    """In words, for the report; empty where there is no convolution."""


def choose_layouts(joint: JointGraph) -> LayoutChoice:
    """The decision for all convolutions of a program together, forward and backward."""
    convolutions = [node for node in calls(joint.graph) if _is_candidate(node)]
    if not convolutions:
        return LayoutChoice()
    rewritten = _Rewriting(joint.graph, frozenset(joint.signature.output_indices(OutputKind.TOTAL))).run()
    subject = f"{len(convolutions)} convolutions, forward and backward,"
    decision = decide(
        "layouts", _decision_key(convolutions), CHANNELS_LAST, partial(_timed, convolutions, rewritten.copies), _prefer
    )
    if decision.choice == AS_GIVEN:
        return LayoutChoice(None, f"{subject} as the program has them: {_times_text(decision)}")
    return LayoutChoice(rewritten.graph, f"{subject} in channels_last: {_times_text(decision)}")


def _decision_key(convolutions: Sequence[fx.Node]) -> str:
    """The same for programs of the same convolutions."""
    texts = sorted(str(call and call.plain_text) for call in map(call_of, convolutions))
    return f"{len(convolutions)} convolutions {hashlib.sha256(chr(0).join(texts).encode()).hexdigest()[:12]}"


def _prefer(times: Mapping[str, Timing]) -> str:
    is_worth_it = times[CHANNELS_LAST].seconds <= (1 - _GAIN) * times[AS_GIVEN].seconds
    return CHANNELS_LAST if is_worth_it else AS_GIVEN


def _times_text(decision: Decision) -> str:
    if not decision.times:
        return SOURCES[decision.source]
    changed, unchanged = (format_seconds(decision.times[name].seconds) for name in (CHANNELS_LAST, AS_GIVEN))
    busy = f"; {SOURCES[decision.source]}" if decision.source == "busy" else ""
    return f"{changed} with copies, as given {unchanged}{busy}"


def _is_candidate(node: fx.Node) -> bool:
    """A convolution of images on a CPU, not transposed."""
    if not _images(node) or node.args[_TRANSPOSED[node.target]]:
        return False
    for source in node.all_input_nodes:
        spec = spec_of(source)
        if spec is None or spec.symbolic is not None or spec.dtype not in _DTYPES or spec.device.type != "cpu":
            return False
    return all(len(required_spec(node.args[i]).shape) == 4 and required_spec(node.args[i]).numel for i in _images(node))


def _images(node: fx.Node) -> tuple[int, ...]:
    return _IMAGES.get(node.target, ())


def _timed(nodes: Sequence[fx.Node], copies: Sequence[fx.Node]) -> Timed:
    """All calls as they are, and with their images in channels_last and the copies that this takes. The spread is the
    largest; nothing is measured where one call is not."""
    convolutions, copy_timings = [_convolution_timed(node) for node in nodes], [_copy_timed(node) for node in copies]
    old_times = [timed.times.get(AS_GIVEN, Timing(0.0)) for timed in convolutions]
    new_times = [timed.times.get(CHANNELS_LAST, Timing(0.0)) for timed in (*convolutions, *copy_timings)]
    sources = {timed.source for timed in (*convolutions, *copy_timings)}
    if "model" in sources:
        return Timed()
    source = next(source for source in ("busy", "measured", "cache") if source in sources)
    if not all(timed.times for timed in (*convolutions, *copy_timings)):
        return Timed(source=source)
    return Timed({AS_GIVEN: _total(old_times), CHANNELS_LAST: _total(new_times)}, source)


def _total(times: Sequence[Timing]) -> Timing:
    return Timing(sum(time.seconds for time in times), max(time.spread for time in times))


def _convolution_timed(node: fx.Node) -> Timed:
    call = call_of(node)
    assert call is not None
    images = _images(node)
    args = tuple(_in_channels_last(arg) if i in images else arg for i, arg in enumerate(call.args))
    return calls_timed({AS_GIVEN: call, CHANNELS_LAST: OpCall(call.target, args, call.kwargs, call.result_bytes)})


def _copy_timed(node: fx.Node) -> Timed:
    """A copy from one layout into the other: measured, for it may run at a tenth of what memory gives. Twice, for the
    kernel that it becomes a part of goes across memory in its place, and that of a norm in two passes."""
    call = call_of(node)
    assert call is not None
    timed = calls_timed({"copy": call})
    if timed.source == "model":
        rates = rates_for(torch.device("cpu"))
        seconds = 2 * required_spec(node).nbytes / rates.bytes_per_s + rates.op_overhead_s / 2
        timed = Timed({"copy": Timing(seconds)}, "cache")  # by rates that were measured before
    if not timed.times:  # the machine was found busy before anything ran
        return timed
    copy = timed.times["copy"]
    return Timed({CHANNELS_LAST: Timing(2 * copy.seconds, copy.spread)}, timed.source)


def _in_channels_last(spec: TensorSpec) -> TensorSpec:
    return replace(spec, stride=_strides(spec.shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of channels_last."""
    _, channels, height, width = shape
    return channels * height * width, 1, channels * width, channels


@dataclass
class _Rewriting:
    """Copies `source` to `graph` node by node, with images in channels_last."""

    source: fx.Graph
    inner: frozenset[int] = frozenset()
    """Positions of results that no caller gets: they may have any layout."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The copy of each node of the source."""
    copies: list[fx.Node] = field(default_factory=list)
    """Calls that only change a layout."""
    _in_old_layout: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For nodes of the source: the value copied back into the layout that it had."""
    _changed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """For nodes of the graph: the value copied into channels_last."""

    def run(self) -> _Rewriting:
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
        self.copies = [node for node in self.copies if node.graph is self.graph and node.users]
        self.graph.lint()
        return self

    def _call(self, node: fx.Node) -> fx.Node:
        if _is_candidate(node):
            images = _images(node)
            args = tuple(
                self._to_channels_last(arg) if i in images else _map_nodes(arg, self._as_before)  # type: ignore[arg-type]
                for i, arg in enumerate(node.args)
            )
            return self._emit(node, args, node.kwargs)
        if (spread := _spread_number(node)) is not None:
            # One number for all elements, as a mean's gradient: in no layout until something reads it.
            kwargs: dict[str, Any] = dict(node.kwargs)
            number = add_call(self.new[spread], node.target, (self.new[spread], *node.args[1:]), **kwargs)
            expanded = add_call(number, aten.expand.default, (number, list(required_spec(node).shape)))
            for new in (number, expanded):
                copy_provenance(node, new)
            return expanded
        take = self.new.__getitem__ if _takes_any_layout(node) else self._as_before
        args, kwargs = _map_nodes((node.args, dict(node.kwargs)), take)
        if _is_first_mean(node) and not _alike(args[0], node.all_input_nodes[0]):
            args = (self._sample(args[0]), *args[1:])
        return self._emit(node, args, kwargs)

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

    def _emit(self, node: fx.Node, args: Any, kwargs: Any) -> fx.Node:
        """The call on these arguments. Its value is the old one where theirs are."""
        new = self.graph.create_node("call_function", node.target, args, dict(kwargs), node.name)
        copy_meta(node, new)
        pairs = zip(new.all_input_nodes, node.all_input_nodes, strict=False)
        same = len(new.all_input_nodes) == len(node.all_input_nodes) and all(_alike(a, b) for a, b in pairs)
        value = _pointwise_in_channels_last(node, new)
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
        return self._restored(node, new)

    def _as_before(self, node: fx.Node) -> fx.Node:
        """The value in the layout that it had."""
        new = self.new[node]
        if _alike(new, node):
            return new
        if node not in self._in_old_layout:
            self._in_old_layout[node] = self._restored(node, new)
        return self._in_old_layout[node]

    def _restored(self, node: fx.Node, new: fx.Node) -> fx.Node:
        if view_source(node) is not None:
            args, kwargs = _map_nodes((node.args, dict(node.kwargs)), self._as_before)
            again = self.graph.create_node("call_function", node.target, args, kwargs)
            copy_meta(node, again)
            return again
        stride = required_spec(node).stride
        order = sorted(range(len(stride)), key=lambda d: -stride[d])  # stable: those of size 1 stay in their place
        straight = order == sorted(order)
        moved = new if straight else add_call(new, aten.permute.default, (new, order))
        moved = add_call(new, aten.clone.default, (moved,), memory_format=torch.contiguous_format)
        self.copies.append(moved)
        back = [order.index(d) for d in range(len(order))]
        return moved if straight else add_call(new, aten.permute.default, (moved, back))

    def _to_channels_last(self, node: fx.Node) -> fx.Node:
        """The value in channels_last."""
        new = self.new[node]
        if _same_strides(required_spec(new), _strides(required_spec(new).shape)):
            return new
        if new not in self._changed:
            copy = add_call(new, aten.clone.default, (new,), memory_format=torch.channels_last)
            self.copies.append(copy)
            self._changed[new] = copy
        return self._changed[new]


def _pointwise_in_channels_last(old: fx.Node, new: fx.Node) -> torch.Tensor | None:
    """A pointwise result of which an operand of its shape is in channels_last is so, whatever the others are. None for
    other results."""
    spec = spec_of(old)
    if spec is None or len(spec.shape) != 4 or not _is_pointwise(old):
        return None
    strides = _strides(spec.shape)
    operands = [spec_of(source) for source in new.all_input_nodes]
    if any(other and other.shape == spec.shape and _same_strides(other, strides) for other in operands):
        return value_of(old).new_empty_strided(spec.shape, strides)
    return None


def _spread_number(node: fx.Node) -> fx.Node | None:
    """The one number that is expanded to be the only operand of a pointwise call; None for other calls."""
    source = node.args[0] if node.all_input_nodes else None
    if not isinstance(source, fx.Node) or len(node.all_input_nodes) != 1 or not _is_pointwise(node):
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


def _takes_any_layout(node: fx.Node) -> bool:
    if info(node).kind is OpKind.STRUCTURE or info(node).name in _VIEWS:
        return True
    return _is_pointwise(node) or info(node).name in _ANY_LAYOUT


def _is_pointwise(node: fx.Node) -> bool:
    has_format = node.kwargs.get("memory_format") not in (None, torch.preserve_format)
    tagged = torch.Tag.pointwise in getattr(node.target, "tags", ()) or info(node).name in _UNTAGGED
    return tagged and not has_format


def _alike(new: fx.Node, old: fx.Node) -> bool:
    """Whether the values of both have the same layout."""
    a, b = spec_of(new), spec_of(old)
    if a is None or b is None:
        return _items_alike(value_of(new), value_of(old))
    return a.shape == b.shape and _same_strides(a, b.stride)


def _items_alike(a: Any, b: Any) -> bool:
    if not isinstance(a, (tuple, list)) or not isinstance(b, (tuple, list)):
        return True
    pairs = zip(a, b, strict=True)
    return all(x.stride() == y.stride() for x, y in pairs if isinstance(x, torch.Tensor) and x.numel() > 1)


def _same_strides(spec: TensorSpec, stride: tuple[int, ...]) -> bool:
    if math.prod(spec.shape) <= 1:
        return True
    return all(size == 1 or a == b for size, a, b in zip(spec.shape, spec.stride, stride, strict=True))


def _map_nodes(nest: Any, function: Callable[[fx.Node], fx.Node]) -> Any:
    return tree_map(lambda value: function(value) if isinstance(value, fx.Node) else value, nest)
