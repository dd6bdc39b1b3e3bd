"""describe: what one compile decided, as plain data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from aottrain.compiler.loss_head import LossHead
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.partition.cost import node_flops, total_flops
from aottrain.compiler.partition.peak import predict_peak
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.partition.workspace import no_workspace, workspaces_of
from aottrain.ir.graph import (
    InputKind,
    JointGraph,
    PartitionedGraph,
    calls,
    descendants,
    info,
    is_tuple,
    module_of,
    source_of,
    spec_of,
    storage_bytes,
    value_of,
)
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.report import GraphReport, StageRecord, ValueRecord
from aottrain.ir.tensor import tensor_spec
from aottrain.ir.text import graph_text


def describe(
    joint: JointGraph,
    plan: PartitionPlan,
    parts: PartitionedGraph,
    options: CompileOptions,
    records: Sequence[StageRecord],
    heads: Sequence[LossHead] = (),
) -> GraphReport:
    """The report of one compiled program; the other strategies' saved bytes stand beside the chosen one's."""
    by_name = {node.name: node for node in joint.graph.nodes}
    # Measuring what operators need within themselves takes a moment; who gives no budget does not wait for it.
    workspace = workspaces_of(joint.graph) if options.partition == "budget" else no_workspace
    peak = predict_peak(parts, options.reserved_bytes, workspace)
    trains = parts.backward is not None
    late = descendants(joint.inputs_of(InputKind.TANGENT))
    backward_nodes = [] if parts.backward is None else calls(parts.backward)
    gradient_flops = total_flops(node for node in calls(joint.graph) if node in late)
    all_backward = total_flops(backward_nodes)
    return GraphReport(
        mode="train" if trains else "inference",
        partition=options.partition,
        budget=options.budget,
        kernel=options.kernel_name,
        stages=tuple(records),
        saved=tuple(_record(by_name[name], plan, _producer(by_name[name])) for name in plan.saved),
        recomputed=tuple(_record(by_name[name], plan, by_name[name]) for name in plan.recomputed),
        saved_bytes=plan.saved_bytes,
        min_cut_saved_bytes=plan_partition(joint, "min_cut").saved_bytes if trains else 0,
        save_all_bytes=plan_partition(joint, "save_all").saved_bytes if trains else 0,
        predicted_peak_bytes=peak.total,
        memory=peak.memory,
        forward_flops=total_flops(calls(parts.forward)),
        backward_flops=gradient_flops,
        recompute_flops=max(all_backward - gradient_flops, 0),
        num_nodes={
            "joint": len(calls(joint.graph)),
            "forward": len(calls(parts.forward)),
            "backward": len(backward_nodes),
        },
        forward_text=graph_text(parts.forward),
        backward_text="" if parts.backward is None else graph_text(parts.backward),
        num_draws=joint.num_draws,
        curve=plan.curve,
        loss_heads=tuple(map(str, heads)),
    )


def _producer(node: fx.Node) -> fx.Node:
    """The op that computes a value: for an item of a tuple the one that gives the tuple."""
    source = node.args[0] if node.op == "call_function" and info(node).kind is OpKind.STRUCTURE else node
    return source if isinstance(source, fx.Node) else node


def _record(node: fx.Node, plan: PartitionPlan, producer: fx.Node) -> ValueRecord:
    """producer: whose operator and cost are told. A tuple has the shape of its first item, and no bytes of its own."""
    spec = spec_of(node)
    if is_tuple(node):
        first = next(iter(value_of(node)), None)
        spec = tensor_spec(first) if isinstance(first, torch.Tensor) else None
    return ValueRecord(
        name=node.name,
        op=info(producer).name if producer.op == "call_function" else "input",
        module=module_of(node),
        source=source_of(node),
        shape=() if spec is None else spec.shape,
        dtype="tuple" if spec is None else str(spec.dtype).removeprefix("torch."),
        num_bytes=storage_bytes(node),
        recompute_flops=node_flops(producer),
        reason=plan.reasons.get(node.name, ""),
    )
