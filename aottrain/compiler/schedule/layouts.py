"""Where a tensor lies in the buffer that it is a view of; a call's results, and the order of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

import aottrain.ops.pools  # noqa: F401  # defines operators
from aottrain.compiler.lowering import Rule
from aottrain.ir.analysis.unchanged import once
from aottrain.ir.graph import required_spec, spec_of, storage_root, value_of
from aottrain.ir.sizes.expressions import size_of
from aottrain.ir.sizes.polynomials import UndecidedError, current_facts, likely
from aottrain.ir.tensor import opened


@dataclass(frozen=True)
class Layout:
    """Where a tensor lies, in its elements from the start of the buffer that it is a view of."""

    root: fx.Node
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int


@once
def layout_of(node: fx.Node) -> Layout | None:
    """None where the view has another type than its buffer, but for the reals of complex numbers, begins before it, or
    is laid out as no polynomial says."""
    root = storage_root(node)
    value, base = value_of(node), value_of(root)
    if not isinstance(value, torch.Tensor) or not isinstance(base, torch.Tensor):
        return None
    if value.is_neg() or value.is_conj() or base.is_neg():
        return None
    facts = current_facts()
    are_reals = base.is_complex() and value.dtype is base.dtype.to_real()
    if value.dtype is not base.dtype and (not are_reals or facts is not None or base.is_conj()):
        return None
    start = value.storage_offset() - base.storage_offset() * (1 + are_reals)
    if facts is None:
        start = int(start)
        shape, stride = tuple(value.shape), value.stride()
    else:
        spec, whole = required_spec(node), required_spec(root)
        if not (spec.is_known and whole.is_known):
            return None
        try:
            start, shape, stride = opened(size_of(start), facts), spec.shape, spec.stride
        except UndecidedError:
            return None
    if start < 0:
        return None  # before the first element of the kernel's argument
    return Layout(root, shape, stride, start)


# What a GPU copies by itself: so many bytes in another order are worth a launch.
_LARGE_TURN = 1 << 20
_NEIGHBOURS = 8


def turns_around(node: fx.Node) -> bool:
    """Whether a call copies many bytes on a GPU into another order of memory and does nothing else."""
    spec = spec_of(node) if node.target is torch.ops.aten.clone.default else None
    if spec is None or spec.device.type != "cuda" or spec.symbolic is not None or spec.nbytes < _LARGE_TURN:
        return False
    before = required_spec(node.args[0])
    nearest, was = (_nearest(each.shape, each.stride) for each in (spec, before))
    return nearest != was and min(spec.shape[nearest], spec.shape[was]) >= _NEIGHBOURS


def stands_alone(node: fx.Node) -> bool:
    """Whether a call is a kernel of its own on a GPU: a large copy into another order of memory, and a pool's gradient.

    Of a kernel that does more beside such a copy one side lies across memory, be it what it reads, what else it writes,
    or a row that it reduces: for 64 images of 128 x 32 x 32 halves such ones took 119 to 365 us on an H200, where their
    bytes take about 10, and a copy alone 24. The gradient of a pool came out wrong there in a kernel that also added up
    rows of 400 elements (Triton 3.6), though its PTX and the interpreter say that it is right; without such rows, in
    torch's database of modules, it was right.
    """
    if node.target is torch.ops.aottrain.max_pool_gradient.default:
        return required_spec(node).device.type == "cuda"
    return turns_around(node)


def _nearest(shape: Sequence[int], stride: Sequence[int]) -> int:
    """The dimension whose elements are nearest to each other."""
    return min((d for d, size in enumerate(shape) if size > 1), key=lambda d: stride[d], default=0)


def results_of(node: fx.Node) -> list[fx.Node | None]:
    """The buffers of a call's results, in order: the node, or its items (None for one that nothing reads)."""
    value = value_of(node)
    if not isinstance(value, (tuple, list)):
        return [node]
    results: list[fx.Node | None] = [None] * len(value)
    for user in node.users:
        if user.op == "call_function" and getattr(user.target, "__name__", "") == "getitem":
            results[user.args[1]] = user  # type: ignore[index]
    return results


def result_nodes(node: fx.Node, rule: Rule) -> list[fx.Node | None]:
    """Those of the results that the rule gives: all but the ones that a mask leaves out; the only one, for each of its
    parts."""
    value = value_of(node)
    results = results_of(node)
    if rule.in_parts:
        return results * len(rule.outputs)
    if not isinstance(value, (tuple, list)):
        return results
    if len(rule.outputs) == len(value):
        return results
    return [item for item, example in zip(results, value, strict=True) if example is not None]


def memory_order(node: fx.Node, rule: Rule) -> list[int]:
    """The domain's dimensions, the one with the largest steps in memory first: as in the largest tensor it touches."""
    best: tuple[int, Sequence[int | None], Sequence[int]] | None = None
    for item, output in zip(result_nodes(node, rule), rule.outputs, strict=True):
        spec = spec_of(item) if item is not None else None
        if spec is not None and output.column is None and (best is None or likely(spec.numel) > best[0]):
            best = likely(spec.numel), output.dims, spec.stride
    for operand in rule.operands:
        spec = spec_of(operand.node)
        if not operand.free and spec is not None and (best is None or likely(spec.numel) > best[0]):
            best = likely(spec.numel), operand.dims, spec.stride
    steps = [0] * len(rule.shape)
    if best is not None:
        for d, stride in zip(best[1], best[2], strict=True):
            if d is not None:
                steps[d] = likely(stride)
    return sorted(range(len(rule.shape)), key=lambda d: (-steps[d], d))
