"""Padding with zeros, and taking away, as one call says it: what is padded twice, and parts of what is padded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call
from aottrain.compiler.lowering.rules import arguments
from aottrain.ir.graph import required_spec, spec_of, value_of
from aottrain.ir.tensor import tensor_spec

aten = torch.ops.aten

# Ops that lead to a part, each with what it takes besides a value.
Steps = tuple[tuple[Any, tuple[Any, ...]], ...]


def pads_of(node: fx.Node) -> list[tuple[int, int]] | None:
    """By dimension how many elements are put before and after, of a call that pads with zeros; negative numbers take
    some away."""
    if not is_pad(node):
        return None
    rank = len(required_spec(node).shape)
    pads: list[tuple[int, int]] = [(0, 0)] * rank
    if node.target is aten.constant_pad_nd.default:
        given = arguments(node)[1]
        for i in range(len(given) // 2):
            pads[rank - 1 - i] = given[2 * i], given[2 * i + 1]
        return pads
    source, sizes, dim, start = arguments(node)[:4]
    dim %= rank
    count, size = required_spec(source).shape[dim], sizes[dim]
    begin = min(max(start + size if start < 0 else start, 0), size)
    pads[dim] = begin, size - begin - count
    return pads


def is_pad(node: fx.Node) -> bool:
    if node.kwargs or node.op != "call_function":
        return False
    if node.target is aten.constant_pad_nd.default:
        value = arguments(node)[2] if len(arguments(node)) > 2 else 0
        return bool(value == 0 and math.copysign(1, value) == 1 and spec_of(node) is not None)
    if node.target is not aten.slice_backward.default:
        return False
    return all(isinstance(number, int) for number in arguments(node)[2:]) and bool(arguments(node)[5] == 1)


def padded(like: fx.Node, source: fx.Node, pads: Sequence[tuple[int, int]]) -> fx.Node:
    flat = [number for pair in reversed(pads) for number in pair]
    return add_call(like, aten.constant_pad_nd.default, (source, flat, 0.0))


def padded_part(node: fx.Node, pads: Sequence[tuple[int, int]], steps: Steps) -> fx.Node | None:
    """A part of a padded value, which slices alone take, with the padding that is left."""
    left, shape = list(pads), list(required_spec(node).shape)
    for target, rest in steps:
        dim, start, end, step = rest + (0, None, None, 1)[len(rest) :]
        if target is not aten.slice.Tensor or step != 1:
            return None
        size = shape[dim]
        first, last, _ = slice(start, end).indices(size)
        left[dim] = left[dim][0] - first, left[dim][1] - (size - last)
        shape[dim] = last - first
    source = arguments(node)[0]
    assert isinstance(source, fx.Node)
    of_source = required_spec(source).shape
    if any(min(pair) < 0 and -min(pair) > size for pair, size in zip(left, of_source, strict=True)):
        return None  # nothing of it is left
    return padded(node, source, left)


def crop(node: fx.Node) -> None:
    """What only takes elements away is a copy of a part."""
    pads = pads_of(node)
    if pads is None or node.target is not aten.constant_pad_nd.default or any(max(pair) > 0 for pair in pads):
        return
    with node.graph.inserting_before(node):
        part = arguments(node)[0]
        for dim, (first, last) in enumerate(pads):
            if first or last:
                end = required_spec(arguments(node)[0]).shape[dim] + last
                part = add_call(node, aten.slice.Tensor, (part, dim, -first, end))
        copy = add_call(node, aten.clone.default, (part,), memory_format=torch.contiguous_format)
    if tensor_spec(value_of(copy)).same_layout(required_spec(node)):
        node.replace_all_uses_with(copy)


def pad_once(node: fx.Node) -> None:
    """What is padded that has been padded is padded at once, where nothing else reads it in between."""
    outer = pads_of(node)
    source = arguments(node)[0] if outer is not None else None
    inner = pads_of(source) if isinstance(source, fx.Node) else None
    if outer is None or inner is None or not isinstance(source, fx.Node) or not all(map(is_pad, source.users)):
        return
    pairs = list(zip(inner, outer, strict=True))
    if any(a < 0 < b for one, other in pairs for a, b in zip(one, other, strict=True)):
        return  # zeros take the place of what the first took away
    with node.graph.inserting_before(node):
        first = source.args[0]
        assert isinstance(first, fx.Node)
        new = padded(node, first, [(a + c, b + d) for (a, b), (c, d) in pairs])
    if tensor_spec(value_of(new)).same_layout(required_spec(node)):
        node.replace_all_uses_with(new)
