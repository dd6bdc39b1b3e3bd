"""Predicted peak memory: the storages alive at each instant of the forward and of the backward, op by op.

Exact for what the graphs allocate when they run op by op and free each value at its last use. What library calls
allocate inside themselves is the caller's to say: workspace.workspaces_of measures it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from aottrain.compiler.partition.workspace import Workspace, no_workspace
from aottrain.ir.graph import (
    InputKind,
    OutputKind,
    PartitionedGraph,
    allocations,
    is_tuple,
    placeholders,
    results,
    storage_bytes,
    storage_root,
    view_source,
)


@dataclass(frozen=True)
class Peak:
    """total: bytes alive at the worst instant; memory: the same by category; at: the op that runs then."""

    total: int
    memory: dict[str, int]
    at: str


def predict_peak(parts: PartitionedGraph, reserved_bytes: int = 0, workspace: Workspace = no_workspace) -> Peak:
    """Peak of one call and its backward. Parameters, buffers, batch and `reserved_bytes` are alive throughout; outputs
    and residuals from the forward on; gradients until the end of the backward; `workspace(node)` while the call runs.
    """
    sizes = {kind: 0 for kind in InputKind}
    for value in parts.signature.inputs:
        sizes[value.kind] += value.spec.storage_bytes
    base = {
        "parameters": sizes[InputKind.PARAMETER],
        "buffers": sizes[InputKind.BUFFER],
        "batch": sizes[InputKind.BATCH] + (sizes[InputKind.RNG] if parts.num_draws else 0),  # a seed for each call
        "reserved": reserved_bytes,
    }
    count, num_sizes = parts.num_forward_outputs, parts.signature.num_sizes
    values = results(parts.forward)
    outputs, residuals = _roots(values[:count]), _roots(values[count:])
    peaks = [_sweep(parts.forward, base, {}, {"saved": residuals, "outputs": outputs - residuals}, workspace)]
    if parts.backward is not None:
        inputs = placeholders(parts.backward)
        held = {
            node: storage_bytes(node)
            for node, (_, primal) in zip(inputs[num_sizes:], parts.residuals, strict=False)
            if primal is None
        }
        tangents = inputs[num_sizes + len(parts.residuals) :]
        returned = _roots(values[: len(parts.signature.output_indices(OutputKind.OUTPUT, OutputKind.REPLACEMENT))])
        after = {**base, "outputs": sum(map(storage_bytes, returned)) + sum(map(storage_bytes, tangents))}
        peaks.append(_sweep(parts.backward, after, held, {"gradients": _roots(results(parts.backward))}, workspace))
    return max(peaks, key=lambda peak: peak.total)


def _roots(nodes: Iterable[fx.Node | None]) -> set[fx.Node]:
    found = {storage_root(node) for node in nodes if node is not None}
    return {node for node in found if node.op != "placeholder"}


def _sweep(
    graph: fx.Graph, base: dict[str, int], held: dict[fx.Node, int], kept: dict[str, set[fx.Node]], workspace: Workspace
) -> Peak:
    """held: inputs that die at their last use (their category is "saved"); kept: storages that outlive the graph."""
    order = list(graph.nodes)
    category = {node: name for name, nodes in kept.items() for node in nodes}
    last: dict[fx.Node, int] = {}
    for i, node in enumerate(order):
        for source in node.all_input_nodes:
            last[storage_root(source)] = i
        last.setdefault(storage_root(node), i)
    for node in order:
        for user in node.users if is_tuple(node) and view_source(node) is None else ():
            last[user] = max(last[user], last[node])  # a tuple holds all its items until the last of them is taken
    dying: dict[int, list[fx.Node]] = {}
    for node, i in last.items():
        if node not in category:
            dying.setdefault(i, []).append(node)
    live: dict[fx.Node, int] = dict(held)
    total = sum(base.values()) + sum(live.values())
    best, best_live, best_at = total, dict(live), ""
    for i, node in enumerate(order):
        new = allocations(node)
        for root, size in new:
            live[root] = size
            total += size
        passing = workspace(node) if new else 0
        if total + passing > best:
            best, best_live, best_at = total + passing, dict(live), node.name
        for root in dying.get(i, []):
            total -= live.pop(root, 0)
    memory = dict(base)
    for root, size in best_live.items():
        name = "saved" if root in held else category.get(root, "temporaries")
        memory[name] = memory.get(name, 0) + size
    memory["temporaries"] = memory.get("temporaries", 0) + best - sum(memory.values())
    return Peak(best, memory, best_at)
