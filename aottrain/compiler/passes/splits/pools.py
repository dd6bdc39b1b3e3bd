"""split_pools: maximum pooling keeps a byte for each result, and a relu before it takes its gradient after the pool.

The backward of ATen's op needs 64 bits for each result, the place of its maximum in the image; the place in the window
says as much. A relu's gradient is zero where its result is not above zero. Where a pool follows, only the places of its
maxima have a gradient, and the relu's results there are the pool's: of these a few are read, of the relu's all.

scatter_pools: a gradient whose columns lie side by side is made by a function of our own (`ops.pools`).
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.lowering.pooling import LARGEST_WINDOW, pair
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, marks_of, required_spec, spec_of, value_of
from aottrain.ops.pools import SCATTERED
from aottrain.toolchain.native import find_compiler

aten, own = torch.ops.aten, torch.ops.aottrain


def split_pools(joint: JointGraph) -> JointGraph:
    """The same program, bit for bit; the graph itself where it has no such pool: of fixed size, with a backward."""
    return split_calls(joint, _is_split, _split)


def _window(node: fx.Node, first: int) -> tuple[list[int], list[int], list[int], tuple[int, int], bool]:
    """Window, step, padding, dilation and whether sizes are rounded up, from a call's arguments at `first` on."""
    given: tuple[Any, ...] = (*node.args[first:], *((), 0, 1, False)[len(node.args) - first - 1 :])
    window, step, pad, gaps, ceil_mode = given[:5]
    return list(pair(window)), list(pair(step or window)), list(pair(pad)), pair(gaps), ceil_mode


def _is_split(node: fx.Node) -> bool:
    if node.target is not aten.max_pool2d_with_indices.default or node.kwargs or marks_of(node):
        return False
    specs = [spec_of(each) for each in (node.args[0], *node.users) if isinstance(each, fx.Node)]
    if any(spec is None or spec.symbolic is not None or not spec.numel for spec in specs):
        return False
    window, *_, gaps, _ = _window(node, 1)
    backwards = _backwards(node)
    return (
        bool(backwards)
        and math.prod(window) <= LARGEST_WINDOW
        and gaps == (1, 1)
        and required_spec(node.args[0]).dtype.is_floating_point
        and all(_channels_last(each) is not None for each in backwards)
    )


def _backwards(node: fx.Node) -> list[fx.Node]:
    """The calls that read the places of the maxima, if nothing else does."""
    readers = [user for item in node.users if item.args[1] == 1 for user in item.users]
    target = aten.max_pool2d_with_indices_backward.default
    plain = all(user.target is target and len(user.args) == 8 and not marks_of(user) for user in readers)
    return readers if plain else []


def _channels_last(node: fx.Node) -> bool | None:
    """Whether a result lies so; None where it lies neither so nor in its dimensions' order."""
    value = value_of(node)
    if value.is_contiguous():
        return False
    return True if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) else None


def _split(node: fx.Node) -> None:
    source: Any = node.args[0]
    window, step, pad, _, ceil_mode = _window(node, 1)
    backwards = _backwards(node)
    with node.graph.inserting_before(node):
        pool = add_call(node, own.max_pool_taps.default, (source, window, step, pad, ceil_mode))
        largest, taps = (add_call(node, operator.getitem, (pool, i)) for i in (0, 1))
    for item in list(node.users):
        if item.args[1] == 0:
            item.replace_all_uses_with(largest)
    for backward in backwards:
        gradient: Any = backward.args[0]
        size = list(required_spec(backward).shape[-2:])
        relu = _relu_after(backward, source)
        with node.graph.inserting_before(backward):
            if relu is not None:
                gradient = add_call(backward, aten.threshold_backward.default, (gradient, largest, 0))
            where = bool(_channels_last(backward))
            arguments = (gradient, taps, size, window, step, pad, ceil_mode, where)
            (relu or backward).replace_all_uses_with(add_call(backward, own.max_pool_gradient.default, arguments))


def scatter_pools(joint: JointGraph) -> JointGraph:
    """The same program, bit for bit, on a CPU: a pool's gradient whose columns lie side by side is added to the places
    that have one; the graph itself where it has none."""
    return split_calls(joint, _is_scattered, _scatter) if find_compiler() is not None else joint


def _is_scattered(node: fx.Node) -> bool:
    if node.target is not own.max_pool_gradient.default or node.args[7] or marks_of(node):
        return False
    spec = required_spec(node)
    return spec.device.type == "cpu" and spec.dtype in SCATTERED


def _scatter(node: fx.Node) -> None:
    with node.graph.inserting_before(node):
        node.replace_all_uses_with(add_call(node, own.max_pool_scatter.default, node.args[:6]))


def _relu_after(backward: fx.Node, source: fx.Node) -> fx.Node | None:
    """The gradient of the relu that the pool reads, where that takes what the pool's gives and nothing else does."""
    users = list(backward.users)
    if source.target is not aten.relu.default or len(users) != 1:
        return None
    (user,) = users
    if user.target is not aten.threshold_backward.default or user.args != (backward, source, 0) or marks_of(user):
        return None
    return user if value_of(user).stride() == value_of(backward).stride() else None
