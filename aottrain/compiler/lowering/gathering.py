"""Lookups by index tensors, and copies that rearrange: flips, rolls, scatters into a slice, gated halves."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.indexing import in_parts
from aottrain.compiler.lowering.rules import (
    Operand,
    Output,
    Rule,
    Values,
    aligned,
    argument,
    arguments,
    broadcast,
    lowers,
    moved,
    spec,
    whole,
    wide,
)
from aottrain.ir.kernels.affine import ZERO, Affine


def _own_output(node: fx.Node) -> tuple[Output, ...]:
    return (Output(whole(len(spec(node).shape)), spec(node).dtype),)


@lowers("aten.index_select.default", "aten.gather.default")
def _gather(node: fx.Node) -> list[Rule] | None:
    """Along one dimension; no index counts from the end."""
    source, dim, index = arguments(node)[:3]
    own, rank = spec(node), len(spec(node).shape)
    if not rank or not spec(source).shape:
        return None
    dim %= rank
    size = spec(source).shape[dim]
    selected = "index_select" in str(node.target)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.checked(b.cast(v[1], torch.int64), size, from_end=False)
        return [b.load(v[0], [ZERO if d == dim else b.index[d] for d in range(rank)], [(dim, position)])]

    index_shape = spec(index).shape
    dims = (dim if index_shape and index_shape[0] > 1 else None,) if selected else aligned(index_shape, own.shape)
    dims = dims[: len(index_shape)]
    looked_up = Rule(own.shape, (Operand(source, free=True), Operand(index, dims)), _own_output(node), formula)
    if selected or not own.dtype.is_floating_point or _one_each(spec(source).shape, dim, index_shape) is None:
        return [looked_up]
    return [looked_up, _picked(node, source, index, dim)]


def _picked(node: fx.Node, source: fx.Node, index: fx.Node, dim: int) -> Rule:
    """One element of each row that the kernel has at hand, as a token's log-probability: the greatest of the row if the
    others count as -inf."""
    shape, own, compute = spec(source).shape, spec(node), wide(spec(node).dtype)
    kept = tuple(None if d == dim or size == 1 else d for d, size in enumerate(shape))

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.checked(b.cast(v[1], torch.int64), shape[dim], from_end=False)
        others = b.constant(-math.inf, compute)
        value = b.compute("where", b.compare("eq", b.position(dim), position), b.cast(v[0], compute), others)
        return [b.cast(b.reduce("max", value), own.dtype)]

    at_hand = Operand(source, tuple(None if size == 1 else d for d, size in enumerate(shape)), at_hand=True)
    return Rule(shape, (at_hand, Operand(index, kept)), (Output(kept, own.dtype),), formula, (dim,))


def _one_each(shape: Sequence[int], dim: int, index_shape: Sequence[int]) -> tuple[int | None, ...] | None:
    """The dims of an index that names one element of each row along a dimension; None where it does not."""
    if len(index_shape) != len(shape) or any(
        size != (1 if d == dim else shape[d]) for d, size in enumerate(index_shape)
    ):
        return None
    return tuple(None if size == 1 else d for d, size in enumerate(index_shape))


@lowers("aten.scatter_add.default", "aten.scatter.src", "aten.scatter.value")
def _scatter_one(node: fx.Node) -> Rule | None:
    """One element of each row is added to, or replaced, as by the gradient of what was looked up there."""
    source, dim, index, value = arguments(node)[:4]
    own, rank = spec(node), len(spec(node).shape)
    if not rank or not spec(index).shape or own.dtype is torch.bool:
        return None
    dim %= rank
    dims, adds = _one_each(own.shape, dim, spec(index).shape), "add" in str(node.target)
    if dims is None or (isinstance(value, fx.Node) and spec(value).shape != spec(index).shape):
        return None

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.checked(b.cast(v[1], torch.int64), own.shape[dim], from_end=False)
        new = v[2] if isinstance(value, fx.Node) else b.constant(value, own.dtype)
        if adds:
            total = b.compute("add", *(b.cast(each, wide(own.dtype)) for each in (v[0], new)))
            new = b.cast(total, own.dtype)
        return [b.compute("where", b.compare("eq", b.position(dim), position), new, v[0])]

    operands = [Operand(source, aligned(own.shape, own.shape)), Operand(index, dims)]
    operands += [Operand(value, dims)] if isinstance(value, fx.Node) else []
    return Rule(own.shape, tuple(operands), _own_output(node), formula)


@lowers("aten.index.Tensor")
def _index(node: fx.Node) -> Rule | None:
    """By integers: the dimensions of the indices stand where the first one does, or first if they are apart."""
    source, index_args = arguments(node)[:2]
    own = spec(node)
    indices = {d: index for d, index in enumerate(index_args) if index is not None}
    if not indices or any(spec(index).dtype in (torch.bool, torch.uint8) for index in indices.values()):
        return None
    block = broadcast([spec(index).shape for index in indices.values()])
    first, last = min(indices), max(indices)
    start = first if last - first + 1 == len(indices) else 0
    others = [d for d in range(len(spec(source).shape)) if d not in indices]
    if len(own.shape) != len(block) + len(others):
        return None  # an example value of another shape than eager's, which torch gives for some indices without dims
    result_dims = [d for d in range(len(own.shape)) if not start <= d < start + len(block)]
    domain_dim = dict(zip(others, result_dims, strict=True))

    def formula(b: Builder, v: Values) -> Sequence[int]:
        sizes = spec(source).shape
        positions = [
            (d, b.checked(b.cast(value, torch.int64), sizes[d])) for d, value in zip(indices, v[1:], strict=True)
        ]
        index = [b.index[domain_dim[d]] if d in domain_dim else ZERO for d in range(len(sizes))]
        return [b.load(v[0], index, positions)]

    operands = [Operand(source, free=True)]
    for index in indices.values():
        dims = aligned(spec(index).shape, block)
        operands.append(Operand(index, tuple(None if d is None else d + start for d in dims)))
    return Rule(own.shape, tuple(operands), _own_output(node), formula)


@lowers("aten.flip.default")
def _flip(node: fx.Node) -> Rule | None:
    source, dims = arguments(node)[:2]
    own, rank = spec(node), len(spec(node).shape)
    flipped = {d % rank for d in dims} if rank else set()

    def formula(b: Builder, v: Values) -> Sequence[int]:
        index = [b.index[d] * -1 + Affine((), own.shape[d] - 1) if d in flipped else b.index[d] for d in range(rank)]
        return [b.load(v[0], index)]

    operand = moved(source, [None if d in flipped else d for d in range(rank)])
    return Rule(own.shape, (operand,), _own_output(node), formula)


@lowers("aten.repeat.default")
def _repeat(node: fx.Node) -> Rule | None:
    """Each dimension as often as it says, new ones in front."""
    source, _ = arguments(node)[:2]
    own, rank = spec(node), len(spec(node).shape)
    shape = spec(source).shape
    first = rank - len(shape)

    def formula(b: Builder, v: Values) -> Sequence[int]:
        index, positions = list(b.index[first:]), []
        for d, size in enumerate(shape):
            if own.shape[first + d] != size:
                index[d] = ZERO
                positions.append((d, b.compute("fmod", b.position(first + d), b.constant(size, torch.int64))))
        return [b.load(v[0], index, positions)]

    return Rule(own.shape, (Operand(source, free=True),), _own_output(node), formula)


@lowers("aten.roll.default")
def _roll(node: fx.Node) -> Rule | None:
    """What leaves at the end of a dimension comes in at its start. Without dimensions all are one."""
    source, shifts = arguments(node)[:2]
    own, rank = spec(node), len(spec(node).shape)
    dims = [dim % rank for dim in argument(node, "dims", 2, []) or ([0] if rank == 1 else [])]
    if len(shifts) != len(dims) or len(set(dims)) < len(dims):
        return None
    turns = [(dim, shift % max(own.shape[dim], 1)) for dim, shift in zip(dims, shifts, strict=True)]
    turns = [(dim, shift) for dim, shift in turns if shift]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        if len(turns) == 1:
            return [_rolled(b, v[0], *turns[0], own.shape)]
        places, index = [], list(b.index)
        for dim, shift in turns:
            position = b.position(dim)
            wrapped = b.compare("lt", position, b.constant(shift, torch.int64))
            steps = [b.constant(step, torch.int64) for step in (own.shape[dim] - shift, -shift)]
            places.append((dim, b.compute("add", position, b.compute("where", wrapped, *steps))))
            index[dim] = ZERO
        return [b.load(v[0], index, places)]

    changed = [dim for dim, _ in turns]
    operand = moved(source, [None if d in changed else d for d in range(rank)])
    return Rule(own.shape, (operand,), _own_output(node), formula)


def _rolled(b: Builder, source: int, dim: int, shift: int, shape: Sequence[int]) -> int:
    """Along one dimension: one of two elements at known steps, which neighbours are read with."""
    wrapped = b.compare("lt", b.position(dim), b.constant(shift, torch.int64))
    parts = []
    for guard, step in ((wrapped, shape[dim] - shift), (b.compute("not", wrapped), -shift)):
        index = [b.index[d] + Affine((), step) if d == dim else b.index[d] for d in range(len(shape))]
        parts.append(b.load(source, index, guard=guard))
    return b.compute("where", wrapped, *parts)


@lowers("aten.select_scatter.default", "aten.slice_scatter.default")
def _scatter_slice(node: fx.Node) -> Rule | None:
    """A copy of the first operand with the second one in the place of a slice with step 1."""
    source, part = arguments(node)[:2]
    own, rank = spec(node), len(spec(node).shape)
    selected = "select" in str(node.target)
    dim = argument(node, "dim", 2, 0) % rank
    size = own.shape[dim]
    start = argument(node, "index" if selected else "start", 3, 0) or 0
    if not selected and argument(node, "step", 5, 1) != 1:
        return None
    if spec(part).dtype is not own.dtype or (not selected and len(spec(part).shape) != rank):
        return None
    start = min(max(start + size if start < 0 else start, 0), size)
    count = 1 if selected else spec(part).shape[dim]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.position(dim)
        after = b.compare("ge", position, b.constant(start, torch.int64))
        inside = b.compute("and", after, b.compare("lt", position, b.constant(start + count, torch.int64)))
        index = [b.index[d] + Affine((), -start) if d == dim else b.index[d] for d in range(rank)]
        if selected:
            del index[dim]
        return [b.compute("where", inside, b.load(v[1], index, guard=inside), v[0])]

    dims = [d if d != dim else None for d in range(rank) if d != dim or not selected]
    return Rule(own.shape, (Operand(source, whole(rank)), moved(part, dims)), _own_output(node), formula)


@lowers("aten.glu.default")
def _glu(node: fx.Node) -> Rule | None:
    """The first half along a dimension, times the sigmoid of the second."""
    (source,) = arguments(node)[:1]
    own, rank = spec(node), len(spec(node).shape)
    dim = argument(node, "dim", 1, -1) % rank
    compute = torch.float32 if own.dtype in (torch.bfloat16, torch.float16) else own.dtype

    def formula(b: Builder, v: Values) -> Sequence[int]:
        index = [b.index[d] + Affine((), own.shape[d]) if d == dim else b.index[d] for d in range(rank)]
        first, second = (b.cast(b.load(v[0], at), compute) for at in (b.index, index))
        return [b.cast(b.compute("mul", first, b.compute("sigmoid", second)), own.dtype)]

    return Rule(own.shape, (Operand(source, free=True),), _own_output(node), formula)


@lowers("aten.glu_backward.default")
def _glu_backward(node: fx.Node) -> Rule | None:
    """Of the first half g * s, of the second g * x * s * (1 - s), with s the sigmoid of the second."""
    gradient, source = arguments(node)[:2]
    own, rank = spec(node), len(spec(node).shape)
    dim = argument(node, "dim", 2, -1) % rank
    compute, half = wide(own.dtype), spec(gradient).shape[dim]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position = b.position(dim)
        first = b.compare("lt", position, b.constant(half, torch.int64))
        back = [b.index[d] + Affine((), -half) if d == dim else b.index[d] for d in range(rank)]
        ahead = [b.index[d] + Affine((), half) if d == dim else b.index[d] for d in range(rank)]
        second = b.compute("not", first)
        g = b.compute("where", first, b.load(v[0], b.index, guard=first), b.load(v[0], back, guard=second))
        gate = b.compute("where", first, b.load(v[1], ahead, guard=first), b.load(v[1], b.index, guard=second))
        value = b.load(v[1], back, guard=second)
        g, gate, value = (b.cast(loaded, compute) for loaded in (g, gate, value))
        sigmoid = b.compute("sigmoid", gate)
        left = b.compute("mul", sigmoid, g)
        slope = b.compute("mul", b.compute("sub", b.constant(1, compute), sigmoid), sigmoid)
        right = b.compute("mul", b.compute("mul", slope, g), value)
        return [b.cast(b.compute("where", first, left, right), own.dtype)]

    return Rule(own.shape, (Operand(gradient, free=True), Operand(source, free=True)), _own_output(node), formula)


@lowers("aten.stack.default")
def _stack(node: fx.Node) -> list[Rule] | None:
    """Each element from the one input whose turn it is along the new dimension."""
    sources = arguments(node)[0]
    own, rank = spec(node), len(spec(node).shape)
    if any(spec(source).dtype is not own.dtype for source in sources) or len(sources) > 8:
        return None
    dim = argument(node, "dim", 1, 0) % rank

    kept = [d for d in range(rank) if d != dim]

    def formula(b: Builder, v: Values) -> Sequence[int]:
        position, index = b.position(dim), [b.index[d] for d in kept]
        result = b.load(v[-1], index)
        for number, value in reversed(list(enumerate(v[:-1]))):
            is_selected = b.compare("eq", position, b.constant(number, torch.int64))
            result = b.compute("where", is_selected, b.load(value, index), result)
        return [result]

    # Where parts alternate in memory each is computed for all of them: on a CPU that takes longer than to store them.
    alternate = dim == rank - 1 and own.device.type == "cpu"
    operands = tuple(Operand(source, free=True) if alternate else moved(source, kept) for source in sources)
    dims = [None if d == dim else kept.index(d) for d in range(rank)]
    starts = [own.stride[dim] * number for number in range(len(sources))]
    return [Rule(own.shape, operands, _own_output(node), formula), *in_parts(node, sources, dims, starts)]
