"""describe: what one compile decided, as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from aottrain.compiler.codegen.rendering import render
from aottrain.compiler.graphs.measured_calls import Workspace, workspaces_of
from aottrain.compiler.graphs.symbols import size_facts
from aottrain.compiler.link.exposure import collectives_of
from aottrain.compiler.link.programs import FusedGraph
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.partition.budget.bound import find_gap
from aottrain.compiler.partition.budget.marginal import Marginal, marginals
from aottrain.compiler.partition.costs.kernel_cost import fused_prices
from aottrain.compiler.partition.costs.op_cost import price_of, total_flops
from aottrain.compiler.partition.costs.storages import StorageGraph, contract
from aottrain.compiler.partition.policy import forward_value
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.schedule.grouping.fusion import one_kernel
from aottrain.compiler.traffic import traffic_of
from aottrain.explain.diagrams import half_diagrams, joint_diagram, without_inputs
from aottrain.explain.kernels import kernel_records, refusals
from aottrain.explain.pictures import Pictures
from aottrain.explain.report import GraphReport, Replays, Tangents, ValueRecord
from aottrain.explain.traffic import Traffic
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import InputKind, JointGraph, PartitionedGraph, calls, info, value_of
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import ForwardValue, PartitionPlan
from aottrain.ir.schedule import Schedule
from aottrain.ir.sizes.polynomials import within
from aottrain.ir.tensor import TensorSpec, tensor_spec
from aottrain.ir.text import graph_text
from aottrain.ir.units import format_shape
from aottrain.measure.decisions import decided_here, planned_for
from aottrain.measure.machine import describe_machine


@dataclass(frozen=True)
class Decided:
    """What one compile decided besides its plan."""

    options: CompileOptions
    """The caller's, with the kernel that was chosen."""
    kernel_reason: str = ""
    """Why it is that kernel; "" where it was asked for."""
    fused: tuple[FusedGraph, ...] = ()
    """Both graphs with their kernels; none where they run op by op."""
    by_pass: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What each rewrite of the program decided, a line each."""
    replays: Replays | None = None
    """Of CUDA graphs; None where the caller wants none."""
    tangents: Tangents = field(default_factory=Tangents)
    """Those for which the backward is made."""


def describe(
    joint: JointGraph,
    plan: PartitionPlan,
    parts: PartitionedGraph,
    decided: Decided,
) -> GraphReport:
    """The report of one compiled program, without its stages and what was measured for it; the other strategies' saved
    bytes stand beside the chosen one's."""
    options = decided.options
    # Measuring what operators need within themselves takes a moment, which not everyone wants to wait for.
    measures = options.counts_workspaces
    workspace = workspaces_of(joint.graph, measured=measures)
    schedules, memories = [part.schedule for part in decided.fused], [part.memory for part in decided.fused]
    timeline = trace_memory(parts, options.reserved_bytes, workspace, schedules, memories)
    price = price_of(options.cost, joint.graph)
    _ask_rates(joint.graph, price)
    trains = parts.backward is not None
    report = GraphReport(
        mode="train" if trains else "inference",
        partition=options.partition_name,
        budget=options.budget,
        kernel=options.kernel_name,
        stages=(),
        saved=(),
        recomputed=(),
        saved_bytes=plan.saved_bytes,
        min_cut_saved_bytes=0,
        save_all_bytes=0,
        predicted_peak_bytes=timeline.peak_bytes,
        memory=timeline.memory,
        forward_flops=0,
        backward_flops=0,
        recompute_flops=0,
        num_nodes={
            "joint": len(calls(joint.graph)),
            "forward": len(calls(parts.forward)),
            "backward": 0 if parts.backward is None else len(calls(parts.backward)),
        },
        forward_text="",
        backward_text="",
        num_draws=joint.num_draws,
        curve=plan.curve,
        kernel_reason=decided.kernel_reason,
        library_calls=_library_calls(decided.fused),
        tuned_calls=_tuned_calls(parts),
        kernels=tuple(call.kernel.name for part in decided.fused for call in part.schedule.kernels),
        num_kernel_functions=decided.fused[0].num_functions if decided.fused else 0,
        collectives=collectives_of(parts, schedules, price),
        arena_bytes=max((part.memory.arena_bytes for part in decided.fused if part.memory is not None), default=0),
        timeline=timeline,
        counts_workspaces=measures,
        loss_heads=decided.by_pass.get("chunk_loss_heads", ()),
        traffic=_traffic(joint, parts, schedules),
        layouts="".join(decided.by_pass.get("choose_layouts", ())),
        cuda_graphs=decided.replays,
        tangents=decided.tangents,
        capture=options.capture,
        inputs=_inputs(joint),
        num_parameters=sum(spec.numel for spec in _specs(joint, InputKind.PARAMETER)),
        machine=_machine(joint),
        diagrams=_pictures(joint, plan, parts, schedules),
    )
    fusing = options.partition == "budget" and bool(decided.fused)
    looked = _Looked(*without_constants(joint, parts), plan, schedules, price, workspace, fusing)
    language = decided.fused[0].backend if decided.fused else "cpp"
    return report.late(looked.finders(partial(render, language=language)))


def _ask_rates(graph: fx.Graph, price: Callable[[fx.Node], float]) -> None:
    """What recompute is priced by is decided while the program is compiled, and stands in its record."""
    priced = {value_of(node).device: node for node in calls(graph) if isinstance(value_of(node), Tensor)}
    for node in priced.values():
        price(node)


def without_constants(joint: JointGraph, parts: PartitionedGraph) -> tuple[JointGraph, PartitionedGraph]:
    """What a report may keep: no memory of the program's."""
    return replace(joint, constants=()), replace(parts, constants=())


@dataclass(frozen=True)
class _Looked:
    """What is found of a program when its report is read: prices, other plans, texts."""

    joint: JointGraph
    parts: PartitionedGraph
    plan: PartitionPlan
    schedules: Sequence[Schedule]
    price: Callable[[fx.Node], float]
    workspace: Workspace
    fusing: bool
    """Whether what is computed again is priced as a part of kernels."""

    def finders(self, render_kernel: Callable[[KernelIR], str]) -> dict[str, Callable[[], Any]]:
        parts, schedules, backward = self.parts, self.schedules, self.parts.backward
        found: dict[str, Callable[[], Any]] = {
            "saved": self._saved,
            "recomputed": self._recomputed,
            "min_cut_saved_bytes": partial(self._saved_bytes, "min_cut"),
            "save_all_bytes": partial(self._saved_bytes, "save_all"),
            "forward_flops": lambda: total_flops(calls(parts.forward)),
            "backward_flops": self._gradient_flops,
            "recompute_flops": self._recompute_flops,
            "forward_text": lambda: graph_text(parts.forward),
            "backward_text": lambda: "" if backward is None else graph_text(backward),
            "gap": lambda: None if backward is None else find_gap(self._contracted, self.plan, parts),
            "kernel_records": lambda: kernel_records(schedules, render_kernel),
            "refusals": lambda: refusals(schedules),
        }
        return {name: cache(decided_here(find)) for name, find in found.items()}

    @cached_property
    def _contracted(self) -> StorageGraph:
        contracted = contract(self.joint, self.price, self.workspace)
        if self.fusing:
            contracted.rerun_seconds = fused_prices(contracted, within(size_facts(self.joint.graph), one_kernel))
        return contracted

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.joint.graph.nodes}

    def _saved(self) -> tuple[ValueRecord, ...]:
        trains = self.parts.backward is not None
        worth = marginals(self._contracted, self.plan, self.parts) if trains else {}
        return tuple(_saved(self._by_name[name], self.plan, worth.get(name)) for name in self.plan.saved)

    def _recomputed(self) -> tuple[ValueRecord, ...]:
        nodes = [self._by_name[name] for name in self.plan.recomputed]
        return tuple(_recomputed(node, self.plan, self.price(node)) for node in nodes)

    def _saved_bytes(self, strategy: str) -> int:
        return 0 if self.parts.backward is None else plan_partition(self.joint, strategy).saved_bytes

    def _gradient_flops(self) -> int:
        late = descendants(self.joint.inputs_of(InputKind.TANGENT))
        return total_flops(node for node in calls(self.joint.graph) if node in late)

    def _recompute_flops(self) -> int:
        backward = self.parts.backward
        return 0 if backward is None else max(total_flops(calls(backward)) - self._gradient_flops(), 0)


def _pictures(
    joint: JointGraph, plan: PartitionPlan, parts: PartitionedGraph, schedules: Sequence[Schedule]
) -> Pictures:
    """Made when they are looked at."""
    joint, parts = without_constants(joint, parts)
    return Pictures(lambda: (joint_diagram(joint, plan.saved, plan.recomputed), *half_diagrams(parts, schedules)))


def _traffic(joint: JointGraph, parts: PartitionedGraph, schedules: Sequence[Schedule]) -> Traffic | None:
    """Counted when it is read."""
    symbolic = any(each.kind is InputKind.SIZE for each in joint.signature.inputs)
    if symbolic or not schedules:
        return None
    return Traffic(partial(traffic_of, *without_constants(joint, parts), schedules))


def without_state(report: GraphReport, graph: fx.GraphModule, inputs: Sequence[Any]) -> GraphReport:
    """`report` of a graph of TorchDynamo's, which hands a module's parameters and buffers in among the inputs: its
    inputs are those of the call alone, and so is its batch in memory."""
    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    tensors = {id(value): (name, value) for name, value in zip(names, inputs, strict=True) if isinstance(value, Tensor)}
    parameters: list[Tensor] = [value for _, value in tensors.values() if isinstance(value, nn.Parameter)]
    others = [(name, value) for name, value in tensors.values() if not isinstance(value, nn.Parameter)]
    batch = [value for name, value in others if "_buffers_" not in name]
    state = {"parameters": parameters, "buffers": [value for name, value in others if "_buffers_" in name]}
    counts = [parameter.numel() for parameter in parameters]
    count = sum(count for count in counts if isinstance(count, int))  # reading a symbol would fix it
    timeline = report.timeline and replace(report.timeline, fixed=_with_state(report.timeline.fixed, state))
    memory = _with_state(report.memory, state)
    held = {id(value) for values in state.values() for value in values}
    steps = {f"input{i}": str(tensor_spec(v)) for i, (key, (_, v)) in enumerate(tensors.items()) if key in held}
    drawn = report.diagrams
    return report.changed(
        inputs=tuple(map(_type_of, batch)),
        num_parameters=count,
        memory=memory,
        timeline=timeline,
        diagrams=Pictures(lambda: [without_inputs(diagram, steps) for diagram in drawn]),
    )


def _with_state(memory: dict[str, int], state: Mapping[str, Sequence[Tensor]]) -> dict[str, int]:
    """Bytes by category, with those of the state taken from the batch's."""
    memory = dict(memory)
    for kind, tensors in state.items():
        sizes = [tensor_spec(value).storage_bytes for value in tensors]
        memory[kind] = memory.get(kind, 0) + sum(sizes)
        memory["batch"] = memory.get("batch", 0) - sum(sizes)
    return memory


def _inputs(joint: JointGraph) -> tuple[str, ...]:
    """Type and shape of each tensor of the batch, in order."""
    return tuple(map(_type_of, _specs(joint, InputKind.BATCH)))


def _specs(joint: JointGraph, *kinds: InputKind) -> list[TensorSpec]:
    return [each.spec for each in joint.signature.inputs if each.kind in kinds and each.spec is not None]


def _type_of(value: Tensor | TensorSpec) -> str:
    return f"{str(value.dtype).removeprefix('torch.')}[{format_shape(value.shape)}]"


def _device(joint: JointGraph) -> torch.device | None:
    """Of its first tensor input."""
    specs = _specs(joint, InputKind.PARAMETER, InputKind.BUFFER, InputKind.BATCH)
    return specs[0].device if specs else None


def _machine(joint: JointGraph) -> str:
    target = planned_for()
    return f"{target.name}, by {target.source}" if target is not None else describe_machine(_device(joint))


def _library_calls(fused: Sequence[FusedGraph]) -> dict[str, int]:
    """How often each operator runs outside of generated kernels; of products that oneDNN does, by that name."""
    counts: Counter[str] = Counter()
    for part in fused:
        for call in part.schedule.calls:
            if isinstance(call, fx.Node) and info(call).kind not in (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE):
                library, _ = part.schedule.libraries.get(call, ("", ""))
                counts[f"{info(call).name} ({library})" if library else info(call).name] += 1
    return dict(counts.most_common())


def _tuned_calls(parts: PartitionedGraph) -> dict[str, int]:
    """Products, convolutions, attention, factorisations, transforms: what libraries have several codes for."""
    graphs = [parts.forward, *([] if parts.backward is None else [parts.backward])]
    nodes = [node for graph in graphs for node in calls(graph)]
    return dict(Counter(info(node).name for node in nodes if info(node).kind is OpKind.COMPUTE).most_common())


def _saved(node: fx.Node, plan: PartitionPlan, worth: Marginal | None) -> ValueRecord:
    told = (None, None) if worth is None else (worth.seconds, worth.peak_change)
    return _record(forward_value(node), plan, *told)


def _recomputed(node: fx.Node, plan: PartitionPlan, seconds: float) -> ValueRecord:
    return _record(forward_value(node, node), plan, seconds, None)


def _record(value: ForwardValue, plan: PartitionPlan, seconds: float | None, peak_change: int | None) -> ValueRecord:
    return ValueRecord(
        name=value.name,
        op=value.op,
        module=value.module,
        source=value.source,
        shape=value.shape,
        dtype=value.dtype,
        num_bytes=value.num_bytes,
        recompute_flops=value.flops,
        reason=plan.reasons.get(value.name, ""),
        recompute_s=seconds,
        peak_change=peak_change,
    )
