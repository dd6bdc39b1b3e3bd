"""Ops that read at other places than their own: embeddings, concatenation, padding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.rules import (
    Operand,
    Output,
    Rule,
    Values,
    argument,
    arguments,
    lowers,
    moved,
    spec,
    whole,
)
from aottrain.ir.kernels.affine import ZERO, Affine


@lowers("aten.embedding.default")
def _embedding(node: fx.Node) -> Rule | None:
    table, tokens = arguments(node)[:2]
    if not (isinstance(table, fx.Node) and isinstance(tokens, fx.Node)):
        return None
    own = spec(node)
    rank = len(own.shape)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.checked(b.cast(v[1], torch.int64), spec(table).shape[0], from_end=False)
        return [b.load(v[0], (ZERO, b.index[rank - 1]), [(0, position)])]

    operands = (Operand(table, free=True), Operand(tokens, _present(tokens, whole(rank - 1))))
    return Rule(own.shape, operands, (Output(whole(rank), own.dtype),), formula)


def _present(node: fx.Node, dims: tuple[int, ...]) -> tuple[int | None, ...]:
    """These dims, None where the node has size 1."""
    return tuple(None if size == 1 else d for size, d in zip(spec(node).shape, dims, strict=True))


@lowers("aten.cat.default")
def _cat(node: fx.Node) -> list[Rule] | None:
    """Each element from the one input whose part of the dimension it lies in."""
    own = spec(node)
    sources = [source for source in arguments(node)[0] if spec(source).shape != (0,)]
    if any(spec(source).dtype is not own.dtype for source in sources) or len(sources) > 8:
        return None
    dim = argument(node, "dim", 1, 0) % len(own.shape)
    starts = [0]
    for source in sources:
        starts.append(starts[-1] + spec(source).shape[dim])

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.position(dim)
        result: int | None = None
        for value, source, start in reversed(list(zip(v, sources, starts, strict=False))):
            end = start + spec(source).shape[dim]
            inside = b.compare("lt", position, b.constant(end, torch.int64))
            if start:
                after = b.compare("ge", position, b.constant(start, torch.int64))
                inside = b.compute("and", after, inside)
            index = list(b.index)
            index[dim] = index[dim] + Affine((), -start)
            part = b.load(value, index, guard=inside)
            result = part if result is None else b.compute("where", inside, part, result)
        assert result is not None
        return [result]

    operands = tuple(moved(source, _all_but(len(own.shape), dim)) for source in sources)
    read = Rule(own.shape, operands, (Output(whole(len(own.shape)), own.dtype),), formula)
    return [read, *in_parts(node, sources, whole(len(own.shape)), [own.stride[dim] * start for start in starts[:-1]])]


def in_parts(
    node: fx.Node, sources: Sequence[fx.Node], dims: Sequence[int | None], starts: Sequence[int]
) -> list[Rule]:
    """Of a result that is made of sources of one shape: each is written to its part of it, where a kernel has its
    elements. dims: for each of the result's dimensions the sources' one. starts: where the parts begin, in elements."""
    shape = spec(sources[0]).shape
    if len(sources) < 2 or any(spec(source).shape != shape for source in sources):
        return []
    operands = tuple(Operand(source, _present(source, whole(len(shape)))) for source in sources)
    outputs = tuple(
        Output(tuple(None if d is None or shape[d] == 1 else d for d in dims), spec(node).dtype, start=start)
        for start in starts
    )
    return [Rule(shape, operands, outputs, lambda b, v: list(v))]


def _all_but(rank: int, *changed: int) -> list[int | None]:
    return [None if d in changed else d for d in range(rank)]


@lowers("aten.slice_backward.default", "aten.select_backward.default")
def _slice_backward(node: fx.Node) -> Rule | None:
    """The gradient at the slice's place, zeros around it and between its steps."""
    gradient, sizes, dim, start = arguments(node)[:4]
    if not (isinstance(gradient, fx.Node) and isinstance(dim, int) and isinstance(start, int)):
        return None
    own = spec(node)
    selected = "select" in str(node.target)
    dim, rank = dim % len(own.shape), len(own.shape)
    size = own.shape[dim]
    step = 1 if selected else arguments(node)[5]
    count = 1 if selected else spec(gradient).shape[dim]
    start = start + size if start < 0 else start
    start = min(max(start, 0), size)
    end = start + max(step * (count - 1) + 1, 0)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.position(dim)
        after = b.compare("ge", position, b.constant(start, torch.int64))
        inside = b.compute("and", after, b.compare("lt", position, b.constant(end, torch.int64)))
        index = list(b.index)
        index[dim] = index[dim] + Affine((), -start)
        if step != 1:
            distance, width = b.at(index[dim]), b.constant(step, torch.int64)
            hit = b.compare("eq", b.compute("fmod", distance, width), b.constant(0, torch.int64))
            index[dim] = ZERO
            row = b.compute("div", distance, width)
            return [b.load(v[0], index, [(dim, row)], guard=b.compute("and", inside, hit))]
        if selected:
            del index[dim]
        return [b.load(v[0], index, guard=inside)]

    dims = _all_but(rank, dim)
    operand = moved(gradient, dims[:dim] + dims[dim + 1 :] if selected else dims)
    if step != 1 and own.device.type == "cpu":
        operand = Operand(gradient, free=True)  # its elements are looked up one by one, so they are better made before
    return Rule(own.shape, (operand,), (Output(whole(rank), own.dtype),), formula)


@lowers("aten.constant_pad_nd.default")
def _pad(node: fx.Node) -> Rule | None:
    source, pads = arguments(node)[:2]
    if not isinstance(source, fx.Node):
        return None
    value = argument(node, "value", 2, 0)
    own, rank = spec(node), len(spec(node).shape)
    before = [0] * rank
    for i in range(len(pads) // 2):
        before[rank - 1 - i] = pads[2 * i]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        guard: int | None = None
        index = list(b.index)
        for dim, size in enumerate(spec(source).shape):
            index[dim] = index[dim] + Affine((), -before[dim])
            if own.shape[dim] == size and before[dim] == 0:
                continue
            position = b.at(index[dim])
            inside = b.compute(
                "and",
                b.compare("ge", position, b.constant(0, torch.int64)),
                b.compare("lt", position, b.constant(size, torch.int64)),
            )
            guard = b.both(guard, inside)
        return [b.load(v[0], index, guard=guard, other=value)]

    changed = [d for d, size in enumerate(spec(source).shape) if own.shape[d] != size or before[d]]
    return Rule(own.shape, (moved(source, _all_but(rank, *changed)),), (Output(whole(rank), own.dtype),), formula)


@lowers("aten.tril.default", "aten.triu.default")
def _triangle(node: fx.Node) -> Rule | None:
    source = arguments(node)[0]
    if not isinstance(source, fx.Node):
        return None
    diagonal = argument(node, "diagonal", 1, 0)
    own, rank = spec(node), len(spec(node).shape)
    upper = "triu" in str(node.target)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        distance = b.at(b.index[rank - 1] + b.index[rank - 2] * -1)
        keep = b.compare("ge" if upper else "le", distance, b.constant(diagonal, torch.int64))
        return [b.compute("where", keep, v[0], b.constant(0, own.dtype))]

    return Rule(own.shape, (Operand(source, whole(rank)),), (Output(whole(rank), own.dtype),), formula)


@lowers("aten.diagonal_backward.default")
def _diagonal_backward(node: fx.Node) -> Rule | None:
    """The gradient on the diagonal of two dimensions, zeros elsewhere."""
    gradient, sizes, offset, first, second = arguments(node)[:5]
    if not isinstance(gradient, fx.Node) or not all(isinstance(each, int) for each in (offset, first, second)):
        return None
    own, rank = spec(node), len(sizes)
    first, second = first % rank, second % rank
    others = [d for d in range(rank) if d not in (first, second)]
    along = first if offset >= 0 else second  # the diagonal begins at its start

    def formula(b: Builder, v: Values) -> Sequence[int]:
        distance = b.at(b.index[second] + b.index[first] * -1)
        inside = b.compare("eq", distance, b.constant(offset, torch.int64))
        return [b.load(v[0], [*(b.index[d] for d in others), b.index[along]], guard=inside)]

    operand = Operand(gradient, free=True)
    return Rule(own.shape, (operand,), (Output(whole(rank), own.dtype),), formula)
