"""Backward graphs for calls in which some tangents are undefined, because nothing downstream reads those outputs.

Eager never runs the gradient formulas of such outputs: it gives None, and it never multiplies a zero by an infinity.
So an undefined tangent is propagated: an op that is linear in its undefined arguments, and has no defined one that
depends on tangents, gives an undefined value; a sum of a defined and an undefined value is the defined one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.simplification import remove_dead_code
from aottrain.ir.graph import copy_meta, descendants, info, is_tuple, placeholders, results, spec_of
from aottrain.ir.ops import OpKind

aten = torch.ops.aten

# Linear in the argument at the given position: an undefined value there makes the result undefined.
_LINEAR_FIRST = {
    "mul", "div", "neg", "sum", "mean", "mm", "bmm", "_to_copy", "clone", "convolution_backward", "threshold_backward",
    "native_layer_norm_backward", "native_batch_norm_backward", "native_group_norm_backward", "gelu_backward",
    "silu_backward", "tanh_backward", "sigmoid_backward", "_softmax_backward_data", "_log_softmax_backward_data",
    "embedding_dense_backward", "nll_loss_backward", "nll_loss2d_backward", "slice_backward", "select_backward",
    "cumsum", "masked_fill", "gather", "index_select", "constant_pad_nd", "hardtanh_backward", "elu_backward",
    "leaky_relu_backward", "max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward",
    "mse_loss_backward", "_fused_rms_norm_backward", "conj", "_conj", "real", "view_as_real", "view_as_complex",
}  # fmt: skip
_LINEAR_ANY = {"mul", "mm", "bmm"}


def specialise_backward(backward: fx.Graph, num_residuals: int, defined: Sequence[bool]) -> fx.Graph:
    """The backward for a pattern of defined tangents. Inputs stay the same; gradients become None where undefined."""
    if all(defined):
        return backward
    inputs = placeholders(backward)
    tangents = inputs[num_residuals:]
    late = descendants(tangents)
    undefined = {node for node, flag in zip(tangents, defined, strict=True) if not flag}
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node | None] = {}
    for node in inputs:
        new[node] = graph.placeholder(node.name)
        copy_meta(node, new[node])  # type: ignore[arg-type]
        if node in undefined:
            new[node] = None
    for node in backward.nodes:
        if node.op == "call_function":
            new[node] = _rewrite(graph, node, new, late)
    graph.output([None if node is None else new[node] for node in results(backward)])
    remove_dead_code(graph)
    return graph


def _rewrite(graph: fx.Graph, node: fx.Node, new: dict[fx.Node, fx.Node | None], late: set[fx.Node]) -> fx.Node | None:
    gone = [source for source in node.all_input_nodes if source in new and new[source] is None]
    if gone:
        defined = [source for source in node.all_input_nodes if new[source] is not None and source in late]
        packet = getattr(node.target, "_schema", None)
        name = packet.name.split("::")[-1] if packet is not None else ""
        if not defined and _gives_undefined(node, name, new):
            return None
        if name == "add" and len(node.args) == 2 and len(defined) == 1 and not node.kwargs:
            survivor, lost = spec_of(defined[0]), spec_of(node)
            if survivor is not None and lost is not None and survivor.shape == lost.shape:
                return new[defined[0]]

    def value(source: fx.Node) -> Any:
        return _zeros(graph, source) if new[source] is None else new[source]

    return graph.node_copy(node, value)


def _gives_undefined(node: fx.Node, name: str, new: dict[fx.Node, fx.Node | None]) -> bool:
    first = node.args[0] if node.args else None
    if info(node).kind in (OpKind.VIEW, OpKind.STRUCTURE):
        return True
    if name in _LINEAR_FIRST and isinstance(first, fx.Node) and new[first] is None:
        return True
    if name == "where" and all(isinstance(a, fx.Node) for a in node.args[1:]):
        return all(new[a] is None for a in node.args[1:] if isinstance(a, fx.Node))
    if name == "add":
        return all(isinstance(a, fx.Node) and new[a] is None for a in node.args[:2])
    return name in _LINEAR_ANY


def _zeros(graph: fx.Graph, source: fx.Node) -> fx.Node:
    """Zeros in the place of an undefined value that an op needs to see; eager materialises them at the same places."""
    spec = spec_of(source)
    assert spec is not None and not is_tuple(source), f"{source.name} has no single tensor to stand for it"
    node = graph.call_function(
        aten.zeros.default,
        (list(spec.shape),),
        {"dtype": spec.dtype, "device": spec.device},
    )
    copy_meta(source, node)
    return node
