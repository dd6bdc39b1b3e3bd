"""link: the partitioned graphs become a Program, each graph run by the chosen kernel backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import fx

from aottrain.compat import is_wrapped, operators_are_watched
from aottrain.compiler.analysis import Analysis
from aottrain.compiler.codegen.programs import FusedGraph, fuse_graph
from aottrain.compiler.options import Kernel
from aottrain.compiler.partition.undefined import check_constants, specialise_backward
from aottrain.ir.graph import (
    InputKind,
    OutputKind,
    PartitionedGraph,
    as_module,
    placeholders,
    results,
    spec_of,
    value_of,
)
from aottrain.peers import inductor_kernel
from aottrain.runtime.executor import Runner, aten_runner, laid_out
from aottrain.runtime.program import Backward, Pattern, Program, Replay


def link(
    parts: PartitionedGraph,
    analysis: Analysis,
    kernel: Kernel,
    replay: Replay | None = None,
    fused: Sequence[FusedGraph] = (),
) -> Program:
    """`kernel` is "aten", or a callable (GraphModule, example_inputs) -> callable that is given both graphs in turn.

    fused: the graphs with kernels of their own, which then run them.
    """
    signature = parts.signature
    computed = analysis.computed
    replaced = [signature.inputs[i].spec for i in analysis.replaced]
    device = signature.inputs[signature.input_indices(InputKind.RNG)[0]].spec.device
    if parts.backward is not None:
        check_constants(parts.backward, signature.num_sizes + len(parts.residuals))
    size_names = tuple(signature.inputs[i].name for i in signature.input_indices(InputKind.SIZE))
    program = Program(
        forward=_or_by_operators(fused[0].runner(), parts.forward) if fused else build_runner(parts.forward, kernel),
        build_backward=None if parts.backward is None else partial(_build_backward, parts, kernel, fused[1:]),
        num_outputs=len(computed) + len(replaced),
        replaced=analysis.replaced,
        unversioned=analysis.unversioned,
        update_targets=tuple(value.target for value in signature.outputs if value.kind is OutputKind.UPDATE),
        differentiable=(*(known.requires_grad for known in computed), *(True for _ in replaced)),
        gradient_targets=tuple(value.target for value in signature.outputs if value.kind is OutputKind.GRADIENT),
        output_specs=(*(known.spec for known in computed), *replaced),
        device=device,
        draws=parts.num_draws > 0,
        constants=parts.constants,
        replay=replay,
        size_names=size_names,
        viewed=analysis.viewed,
    )
    if size_names and program.build_backward is not None:
        program.backward_for((True,) * sum(program.differentiable))  # now: a kernel may add guards on sizes
    return program


def _build_backward(parts: PartitionedGraph, kernel: Kernel, fused: Sequence[FusedGraph], pattern: Pattern) -> Backward:
    assert parts.backward is not None
    num_sizes, num_residuals = parts.signature.num_sizes, len(parts.residuals)
    graph = specialise_backward(parts.backward, num_sizes + num_residuals, pattern)
    residuals = placeholders(graph)[num_sizes : num_sizes + num_residuals]
    if fused:
        known = fused[0]
        whole = known if graph is known.graph else fuse_graph(graph, known.memory is not None, known.backend)
        runner = _or_by_operators(whole.runner(), graph)
    else:
        runner = build_runner(graph, kernel)
    return Backward(runner, tuple(all(pattern) or bool(node.users) for node in residuals))


def build_runner(graph: fx.Graph, kernel: Kernel) -> Runner:
    """A boxed function that runs one graph by ATen, by Inductor, or by a callable backend."""
    if kernel == "inductor":
        return _or_by_operators(build_runner(graph, inductor_kernel), graph)
    if isinstance(kernel, str):
        return aten_runner(graph)
    examples = [value_of(node) for node in placeholders(graph)]
    call = kernel(as_module(graph), examples)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        given = list(inputs)
        inputs.clear()
        return list(call(*given))

    return run


def _or_by_operators(runner: Runner, graph: fx.Graph) -> Runner:
    """The runner; but the graph op by op while something watches or replaces operators, such as a dispatch mode, or a
    batched gradient: generated kernels would run past it, or find no memory behind what they are given."""

    @cache
    def by_operators() -> Runner:
        return aten_runner(graph)

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not operators_are_watched(inputs):
            return runner(inputs)
        # The other half of the program may run as kernels, which count on these strides.
        given = zip(by_operators()(inputs), results(graph), strict=True)
        return [_as_traced(value, node) for value, node in given]

    return run


def _as_traced(value: torch.Tensor, node: fx.Node | None) -> torch.Tensor:
    if node is None or is_wrapped(value):
        return value
    facts = spec_of(node)
    if facts is None or facts.symbolic is not None or value.layout is not torch.strided:
        return value
    return laid_out(value, facts.stride)
