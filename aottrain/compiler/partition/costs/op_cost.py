"""What computing a value costs: FLOPs by formula, bytes moved, and a roofline of the two."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from aottrain.compat import tree_flatten, tree_map
from aottrain.compiler.graphs.measured_calls import call_of
from aottrain.compiler.graphs.repetition import once_for_alike
from aottrain.ir.graph import calls, info, is_tuple, spec_of, value_of
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.ops import OpKind, communicates, flop_formula, op_info, packet_name
from aottrain.ir.sizes.expressions import concrete, hint, is_symbolic
from aottrain.ir.sizes.polynomials import likely
from aottrain.measure.links import Link, link
from aottrain.measure.rates import DEFAULT_RATES, Rates, rates_for
from aottrain.measure.timings import call_seconds

aten = torch.ops.aten

# A Philox block is ten rounds of two wide products and six word operations for four numbers.
_FLOPS_PER_DRAW = 20
# Of pointwise calls within a kernel: an exponential is a polynomial of about this many operations.
FLOPS_PER_ELEMENT = 20


# Of our collectives, which argument is the number of processes.
_WORLD_AT = {"gather_rows": 2, "gather_start": 2, "scatter_sum": 1, "scatter_start": 1}
# Of their first input they read as many elements as they give.
_LOOKUPS = (aten.embedding, aten.index, aten.index_select, aten.gather)


def node_flops(node: fx.Node) -> int:
    """Floating-point operations of one call; 0 for views. Ops without a formula count one per element they touch."""
    if node.op != "call_function" or communicates(node.target):
        return 0
    if info(node).is_free:
        return 0
    if info(node).kind is OpKind.RANDOM:
        return _FLOPS_PER_DRAW * _numel(node)
    formula = flop_formula(node.target)
    if formula is not None:
        args, kwargs = tree_map(_example, (node.args, dict(node.kwargs)))
        return int(formula(*args, **kwargs, out_val=_example(node)))
    return max([_numel(node), *(_numel(source) for source in node.all_input_nodes)])


def node_bytes(node: fx.Node) -> int:
    """Bytes that one call reads and writes in main memory; 0 for views. Of a table only the rows that are looked up."""
    if node.op != "call_function" or info(node).is_free:
        return 0
    written = _value_bytes(node)
    read = [_value_bytes(source) for source in node.all_input_nodes]
    if is_lookup(node):
        read[0] = min(read[0], written)
    return written + sum(read)


def is_lookup(node: fx.Node) -> bool:
    """Whether a call reads rows or elements of its first input alone."""
    return getattr(node.target, "overloadpacket", None) in _LOOKUPS


def node_seconds(node: fx.Node) -> float:
    """Roofline time of one call at this machine's rates: the slower of arithmetic and memory, and a fixed overhead;
    0 for views."""
    if node.op != "call_function" or info(node).is_free:
        return 0.0
    if communicates(node.target):
        return link_of(node).seconds(taken_in(node))
    rates = _rates_of(node)
    return max(arithmetic_seconds(node), node_bytes(node) / rates.bytes_per_s) + rates.op_overhead_s


def group_of(node: fx.Node) -> str:
    """Of the processes that a collective is over: they name it last; "" where one does not."""
    group = node.args[-1] if node.args else ""
    return group if isinstance(group, str) else ""


def link_of(node: fx.Node) -> Link:
    """Between the processes that a collective is over."""
    return link(group_of(node))


def taken_in(node: fx.Node) -> int:
    """Bytes that a collective brings to this process from the others, each of which passes on what it is given: of a
    gather and of parts of a sum all but its own share, of a whole sum twice that (Thakur et al., 2005, "Optimization
    of Collective Communication Operations in MPICH")."""
    name = packet_name(node.target)
    size = link_of(node).size
    if name in _WORLD_AT and isinstance(given := node.args[_WORLD_AT[name]], int):
        size = given
    if not is_sum_of_many(node):
        return _value_bytes(node) * (size - 1) // size
    rounds = 1 if name in _WORLD_AT else 2
    return rounds * sum(map(_value_bytes, node.all_input_nodes)) * (size - 1) // size


def is_sum_of_many(node: fx.Node) -> bool:
    """Whether a collective adds up what processes give."""
    return any(part in packet_name(node.target) for part in ("sum", "scatter", "reduce"))


def kernel_operations(kernel: KernelIR) -> int:
    """Each instruction counts as many as where running one again is priced."""
    return FLOPS_PER_ELEMENT * len(kernel.body) * math.prod(map(likely, kernel.ranges))


def arithmetic_seconds(node: fx.Node) -> float:
    """Of a product, convolution, attention or the like, what its FLOPs alone take; 0 for other calls."""
    if info(node).kind is not OpKind.COMPUTE:
        return 0.0
    rates = _rates_of(node)
    operands = [tensor for source in node.all_input_nodes for tensor in _tensors(source)] or _tensors(node)
    dtype = operands[0].dtype if operands else None  # a loss in float32 may come of products in halves
    seconds = _unmasked_share(node) * node_flops(node) / rates.flops_per_s(dtype)
    return seconds / (rates.attention if is_attention(node) else 1.0)


def _rates_of(node: fx.Node) -> Rates:
    values = _tensors(node)
    return rates_for(values[0].device) if values else DEFAULT_RATES


def vector_seconds(node: fx.Node, num_bytes: int) -> float:
    """Of one call within a kernel that runs anyway, for which that kernel reads and writes so many bytes more."""
    rates = _rates_of(node)
    arithmetic = FLOPS_PER_ELEMENT * max([_numel(node), *(_numel(source) for source in node.all_input_nodes)])
    return max(arithmetic / rates.flops_by_dtype[torch.float32], num_bytes / rates.bytes_per_s)


def is_attention(node: fx.Node) -> bool:
    """Whether a call is fused attention of ATen's, or its gradient."""
    return op_info(node.target).name.startswith("aten._scaled_dot_product")


def _unmasked_share(node: fx.Node) -> float:
    """Of the scores of causal attention, those that are computed: kernels leave out what the mask hides. 1 for others.

    FLOPs, as `node_flops` and everybody else reports them, count masked scores, too.
    """
    if not is_attention(node):
        return 1.0
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    if not arguments.get("is_causal"):
        return 1.0
    query, key = value_of(arguments["query"]), value_of(arguments["key"])
    num_queries, num_keys = hint(query.shape[-2]), hint(key.shape[-2])
    short = min(num_queries, num_keys)
    unmasked = short * (short + 1) // 2 + (num_queries - short) * num_keys
    return unmasked / max(num_queries * num_keys, 1)


def price_of(cost: str, *graphs: fx.Graph) -> Callable[[fx.Node], float]:
    """Seconds of a node's call. "roofline": node_seconds; "measured": each distinct call is timed once, those of these
    graphs now, others when asked for; what cannot be run alone has its roofline time."""
    if cost == "roofline":
        return once_for_alike(node_seconds)
    prices = _timed(node for graph in graphs for node in calls(graph))

    def seconds(node: fx.Node) -> float:
        if node not in prices:
            prices.update(_timed([node]))
        return prices[node]

    return seconds


def _timed(nodes: Iterable[fx.Node]) -> dict[fx.Node, float]:
    call_by_node = {node: call_of(node) for node in nodes}
    pairs = [(node, call) for node, call in call_by_node.items() if call is not None]
    timed = {node: s for (node, _), s in zip(pairs, call_seconds([call for _, call in pairs]), strict=True)}
    prices: dict[fx.Node, float] = {}
    for node in call_by_node:
        seconds = timed.get(node)
        prices[node] = node_seconds(node) if seconds is None else seconds
    return prices


def total_flops(nodes: Iterable[fx.Node]) -> int:
    return sum(map(once_for_alike(node_flops), nodes))


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
    return tree_map(_as_traced, value)


def _as_traced(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and any(map(is_symbolic, value.shape)):
        return torch.empty(tuple(map(hint, value.shape)), dtype=value.dtype, device="meta")
    return concrete(value)


def _tensors(node: fx.Node) -> list:
    return [leaf for leaf in tree_flatten(value_of(node))[0] if hasattr(leaf, "element_size")]
