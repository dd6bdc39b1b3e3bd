"""link: the partitioned graphs become a Program, each graph run by the chosen kernel backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import fx

from aottrain.compat import is_wrapped, operators_are_watched
from aottrain.compiler.joint.analysis import Analysis
from aottrain.compiler.joint.links import CutBackward
from aottrain.compiler.link.programs import FusedGraph, fuse_graph
from aottrain.compiler.lowering.places import devices_of_kernels
from aottrain.compiler.options import CompileOptions, Kernel
from aottrain.compiler.partition.undefined import check_constants, specialise_backward
from aottrain.errors import CompilerError, UnsupportedError
from aottrain.explain.report import Replays, Tangents
from aottrain.ir.graph import (
    InputKind,
    JointGraph,
    OutputKind,
    PartitionedGraph,
    as_module,
    calls,
    devices_of,
    info,
    is_size,
    placeholders,
    results,
    spec_of,
    value_of,
)
from aottrain.ir.ops import OpKind, uses_generator
from aottrain.ir.settings.budget import bounds_bytes
from aottrain.peers import inductor_kernel
from aottrain.runtime.cuda.cuda_graphs import RECORDERS, RecordedRunner
from aottrain.runtime.executor import Runner, aten_runner, laid_out
from aottrain.runtime.failures import signalling
from aottrain.runtime.faults import Faults
from aottrain.runtime.program import Backward, Counts, Pattern, Program, Replay
from aottrain.toolchain.cache import say_once


def link(
    parts: PartitionedGraph,
    analysis: Analysis,
    kernel: Kernel,
    replay: Replay | None = None,
    linked: JointGraph | None = None,
    *,
    fused: Sequence[FusedGraph] = (),
    replays: Replays | None = None,
    faults: Faults | None = None,
    tangents: Tangents | None = None,
) -> Program:
    """Both graphs as one program.

    kernel: "aten", or a callable (GraphModule, example_inputs) -> callable that is given both graphs in turn.
    replay: the forward as it was traced, for second derivatives.
    linked: the whole program with tangents for links, where it has some.
    fused: the graphs with kernels of their own, which then run them; the backward is for `tangents.defined`.
    replays: counts those of CUDA graphs, see `plan_replays`.
    faults: where what goes wrong in a step is counted.
    """
    signature = parts.signature
    targets = tuple(value.target for value in signature.outputs if value.kind is OutputKind.GRADIENT)
    cut_off = _cut_off(parts, targets)
    if cut_off and len(cut_off) == len(targets) and analysis.links.links:
        raise UnsupportedError("gradients pass between results, and reach none of the inputs")
    computed = analysis.computed
    replaced = [signature.inputs[i].spec for i in analysis.replaced]
    device = signature.inputs[signature.input_indices(InputKind.RNG)[0]].spec.device
    if parts.backward is not None:
        check_constants(parts.backward, signature.num_sizes + len(parts.residuals))
    size_names = tuple(signature.inputs[i].name for i in signature.input_indices(InputKind.SIZE))
    forward = fused[0].runner() if fused else build_runner(parts.forward, kernel)
    recorded = _recorded(forward, parts, device, replays)
    faults = faults or Faults()
    backward_builder = _BackwardBuilder(parts, kernel, fused[1:], faults)
    run_forward = _or_by_operators(recorded or forward, parts.forward) if fused or recorded else forward
    program = Program(
        forward=signalling(run_forward, parts.num_draws > 0, _drawn_from(parts.forward)),
        build_backward=None
        if parts.backward is None
        else partial(_build_backward, backward_builder, recorded, tangents or Tangents()),
        num_outputs=len(computed) + len(replaced),
        replaced=analysis.replaced,
        unversioned=analysis.unversioned,
        update_targets=tuple(value.target for value in signature.outputs if value.kind is OutputKind.UPDATE),
        differentiable=(*(output.requires_grad for output in computed), *(True for _ in replaced)),
        gradient_targets=targets,
        cut_off=cut_off,
        isolated=frozenset(i for i, output in enumerate(computed) if output.isolated),
        anchored=bool(cut_off) and len(cut_off) == len(targets),
        output_specs=(*(output.spec for output in computed), *replaced),
        device=device,
        draws=parts.num_draws > 0,
        constants=parts.constants,
        replay=replay,
        size_names=size_names,
        viewed=analysis.viewed,
        faults=faults,
        links=analysis.links,
        watched=analysis.watched,
        saved_state=analysis.saved_state,
        build_cut=partial(_build_cut, backward_builder, CutBackward(linked, parts)) if linked is not None else None,
    )
    if size_names and program.build_backward is not None:
        program.backward_for((True,) * sum(program.differentiable))  # now: a kernel may add guards on sizes
    return program


def _cut_off(parts: PartitionedGraph, targets: Sequence[int]) -> frozenset[int]:
    """Primals that no gradient reaches."""
    values = [] if parts.backward is None else results(parts.backward)
    return frozenset(i for i, value in zip(targets, values, strict=False) if value is None)


def _drawn_from(forward: fx.Graph) -> list[torch.device]:
    """Where the graph draws from eager's generators: on a device it may also ask the CPU's for a seed."""
    draws = any(uses_generator(node.target) for node in calls(forward))
    return sorted({torch.device("cpu"), *devices_of(forward)}, key=str) if draws else []


@dataclass(frozen=True)
class _BackwardBuilder:
    """What every backward of a program is built from, whichever tangents it is for."""

    parts: PartitionedGraph
    kernel: Kernel
    fused: Sequence[FusedGraph]
    """The backward for the tangents that were expected, with its kernels; none where another backend runs it."""
    faults: Faults

    def runner(self, graph: fx.Graph, as_expected: bool = False) -> Runner:
        if self.fused:
            return _fused_runner(graph, self.fused[0], as_expected, self.faults)
        return build_runner(graph, self.kernel)

    def residuals(self, graph: fx.Graph) -> list[fx.Node]:
        start = self.parts.signature.num_sizes
        return placeholders(graph)[start : start + len(self.parts.residuals)]


def _build_backward(
    builder: _BackwardBuilder, forward: RecordedRunner | None, tangents: Tangents, pattern: Pattern
) -> Backward:
    parts = builder.parts
    assert parts.backward is not None
    as_expected = pattern == (tangents.defined or (True,) * len(pattern))
    if not as_expected:
        tangents.others.append(pattern)
    if builder.fused and as_expected:
        graph = builder.fused[0].graph
    else:
        graph = specialise_backward(parts.backward, parts.signature.num_sizes + len(parts.residuals), pattern)
    runner = builder.runner(graph, as_expected)
    if forward is not None:
        count = len(results(graph))
        stays = (False,) * len(placeholders(graph))
        runner = RecordedRunner(runner, forward.recorder, forward.counts, stays, count, forward)
    if builder.fused or forward is not None:
        runner = _or_by_operators(runner, graph)
    return Backward(runner, tuple(all(pattern) or bool(node.users) for node in builder.residuals(graph)))


def _build_cut(builder: _BackwardBuilder, cut: CutBackward, defined: Pattern, counts: Counts) -> Backward:
    graph = cut.graph(defined, counts)
    runner = _or_by_operators(builder.runner(graph), graph)
    return Backward(runner, tuple(bool(node.users) for node in builder.residuals(graph)))


def _fused_runner(graph: fx.Graph, expected: FusedGraph, as_expected: bool, faults: Faults) -> Runner:
    """expected: the backward for the tangents that were expected, from which others take their arena."""
    if as_expected:
        return expected.runner()
    if any(map(is_size, placeholders(graph))):  # it is too late for guards on sizes
        return aten_runner(graph)
    if devices_of_kernels(graph) != devices_of_kernels(expected.graph):  # what is left computes numbers of the host
        return aten_runner(graph)
    try:
        return fuse_graph(graph, expected.memory, expected.backend).runner()
    except CompilerError as error:
        say_once(f"the backward without some of its tangents runs op by op: {error}")
        return aten_runner(graph)
    except Exception as error:
        faults.note("the kernels of a backward in which some tangents are undefined", error)
        return aten_runner(graph)


def build_runner(graph: fx.Graph, kernel: Kernel) -> Runner:
    """A boxed function that runs one graph by ATen, by Inductor, or by a callable backend."""
    if kernel == "inductor":
        return _or_by_operators(build_runner(graph, inductor_kernel), graph)
    if isinstance(kernel, str):
        return aten_runner(graph)
    examples = [value_of(node) for node in placeholders(graph)]
    call = kernel(as_module(graph), examples)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        values = list(inputs)
        inputs.clear()
        return list(call(*values))

    return run


def plan_replays(parts: PartitionedGraph, options: CompileOptions) -> Replays | None:
    """Whether both graphs may be CUDA graphs, and why not; None where the caller wants none."""
    return Replays(_unrecordable(parts, options)) if options.cuda_graphs else None


def _unrecordable(parts: PartitionedGraph, options: CompileOptions) -> str:
    if not isinstance(options.kernel, str) or options.kernel == "inductor":
        return f"kernel={options.kernel_name} runs the graphs in its own way"
    if parts.signature.num_sizes:
        return "the program's sizes are symbolic"
    if bounds_bytes(options.budget):
        return "the budget bounds the bytes of a step, and recordings hold theirs beyond it"
    graphs = [graph for graph in (parts.forward, parts.backward) if graph is not None]
    devices = sorted({str(device) for graph in graphs for device in devices_of(graph)})
    if len(devices) != 1 or torch.device(devices[0]).type not in RECORDERS:
        return f"the program has values on {' and '.join(devices)}"
    for graph in graphs:
        for node in calls(graph):
            if info(node).kind is OpKind.EFFECT:
                return f"{info(node).name} has an effect that a replay would not have"
    return ""


def _recorded(
    runner: Runner, parts: PartitionedGraph, device: torch.device, replays: Replays | None
) -> RecordedRunner | None:
    if replays is None or replays.reason:
        return None
    kinds = [value.kind for value in parts.signature.inputs][: len(placeholders(parts.forward))]
    stays = [kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT) for kind in kinds]
    return RecordedRunner(runner, RECORDERS[device.type](device), replays, stays, parts.num_forward_outputs)


def _or_by_operators(runner: Runner, graph: fx.Graph) -> Runner:
    """The runner; but the graph op by op while something watches or replaces operators, such as a dispatch mode, or a
    batched gradient. Generated kernels would bypass it, or find no memory behind their operands."""

    @cache
    def by_operators() -> Runner:
        return aten_runner(graph)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not operators_are_watched(inputs):
            return runner(inputs)
        # The other half of the program may run as kernels, which count on these strides.
        sizes = {node.name: value for node, value in zip(placeholders(graph), inputs, strict=True) if is_size(node)}
        pairs = zip(by_operators()(inputs), results(graph), strict=True)
        return [_as_traced(value, node, sizes) for value, node in pairs]

    return run


def _as_traced(value: torch.Tensor, node: fx.Node | None, sizes: Mapping[str, Any]) -> torch.Tensor:
    if node is None or value is None or is_wrapped(value):
        return value
    spec = spec_of(node)
    if spec is None or value.layout is not torch.strided:
        return value
    return laid_out(value, spec.layout(sizes)[1])
