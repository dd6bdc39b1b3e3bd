"""What computing a value costs: FLOPs by formula, bytes moved, and a roofline of the two."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_flatten, tree_map
from aottrain.ir.graph import info, is_tuple, spec_of, value_of
from aottrain.ir.ops import OpKind, flop_formula
from aottrain.ir.sizes import hint, is_symbolic

# A two-core CPU's float32 rates; only their ratio decides between plans.
ARITHMETIC_FLOPS_PER_S = 180e9
MEMORY_BYTES_PER_S = 20e9
OP_OVERHEAD_S = 2e-6

_FREE = (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)

# A Philox block is ten rounds of two wide products and six word operations for four numbers.
_FLOPS_PER_DRAW = 20


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one call; 0 for views. Ops without a formula count one per element they touch."""
    if node.op != "call_function":
        return 0
    kind = info(node).kind
    if kind in _FREE:
        return 0
    if kind is OpKind.RANDOM:
        return _FLOPS_PER_DRAW * _numel(node)
    formula = flop_formula(node.target)
    if formula is not None:
        args, kwargs = tree_map(_example, (node.args, dict(node.kwargs)))
        return int(formula(*args, **kwargs, out_val=_example(node)))
    return max([_numel(node), *(_numel(source) for source in node.all_input_nodes)])


def node_bytes(node: fx.Node) -> int:
    """Bytes that one call reads and writes in main memory; 0 for views."""
    if node.op != "call_function" or info(node).kind in _FREE:
        return 0
    return _value_bytes(node) + sum(_value_bytes(source) for source in node.all_input_nodes)


def node_seconds(node: fx.Node) -> float:
    """Roofline time of one call: the slower of arithmetic and memory, and a fixed overhead; 0 for views."""
    if node.op != "call_function" or info(node).kind in _FREE:
        return 0.0
    arithmetic = node_flops(node) / ARITHMETIC_FLOPS_PER_S if info(node).kind is OpKind.COMPUTE else 0.0
    return max(arithmetic, node_bytes(node) / MEMORY_BYTES_PER_S) + OP_OVERHEAD_S


def total_flops(nodes: Iterable[fx.Node]) -> int:
    return sum(node_flops(node) for node in nodes)


def _numel(node: fx.Node) -> int:
    return sum(hint(value.numel()) for value in _tensors(node))


def _value_bytes(node: fx.Node) -> int:
    spec = spec_of(node)
    if spec is not None:
        return min(spec.nbytes, spec.storage_bytes)
    return sum(hint(value.numel()) * value.element_size() for value in _tensors(node)) if is_tuple(node) else 0


def _example(argument: Any) -> Any:
    """What a FLOP formula reads in the place of an argument: symbolic sizes have the numbers that were traced."""
    value = value_of(argument) if isinstance(argument, fx.Node) else argument
    return tree_map(_concrete, value)


def _concrete(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and any(map(is_symbolic, value.shape)):
        return torch.empty(tuple(map(hint, value.shape)), dtype=value.dtype, device="meta")
    return hint(value) if is_symbolic(value) else value


def _tensors(node: fx.Node) -> list:
    return [leaf for leaf in tree_flatten(value_of(node))[0] if hasattr(leaf, "element_size")]
