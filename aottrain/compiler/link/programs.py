"""Both graphs of a program to functions that run them by generated kernels, and libraries between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from aottrain.compiler.codegen.cpp.library import LIBRARY
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.graphs.symbols import size_facts
from aottrain.compiler.schedule.memory import arena_within
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.graph import PartitionedGraph, calls, placeholders, results, storage_root, value_of
from aottrain.ir.kernels.columns import scratch_bytes
from aottrain.ir.kernels.kernel import draw_numbers, made_of
from aottrain.ir.kernels.open_sizes import size_names
from aottrain.ir.schedule import (
    KernelCall,
    MemoryPlan,
    Schedule,
    adds_rows,
    is_own_attention,
    is_own_product,
    is_own_scan,
)
from aottrain.ir.sizes.polynomials import SizeFacts, open_sizes
from aottrain.ops.attention import native_sources
from aottrain.ops.losses.loss_head import NATIVE
from aottrain.ops.pools import NATIVE as POOLS
from aottrain.ops.products.pieces import native_source
from aottrain.ops.rows import NATIVE as ROWS
from aottrain.ops.rows import SUM_MESSAGES
from aottrain.ops.scans import NATIVE as SCANS
from aottrain.runtime.executor import Runner
from aottrain.runtime.launch import Launch, cpp_launch, scheduled_runner, sized_cpp_launch
from aottrain.toolchain.native import Source, require_all

_LOSS_HEAD = torch.ops.aottrain.linear_cross_entropy.default
_POOL_GRADIENT = torch.ops.aottrain.max_pool_scatter.default
FLAGS = ("-fopenmp", "-fno-trapping-math", "-fwrapv")
# A compiler takes 50 ms to start and as long for each kernel or two; for a long one, as for each 5,000 letters.
_UNIT_KERNELS, _UNIT_LETTERS, _MOST_UNITS = 4, 20_000, 8


@dataclass(frozen=True)
class FusedGraph:
    """One graph with its schedule, memory plan and compiled kernels."""

    graph: fx.Graph
    schedule: Schedule
    memory: MemoryPlan | None
    launches: dict[str, Launch]
    """What runs each kernel, by its name."""
    num_functions: int
    """How many functions the kernels of the whole program are: equal kernels share one."""
    note: str
    """How the whole program's kernels came about."""
    backend: str

    def runner(self) -> Runner:
        return scheduled_runner(self.graph, self.schedule, self.launches, self.memory)


Planned = tuple[fx.Graph, int, Schedule]  # the graph, how many of its results are no residuals, what runs


def plan_program(parts: PartitionedGraph, local: bool = False, facts: SizeFacts | None = None) -> list[Planned]:
    """The schedules of the forward and, where there is one, the backward. local: as `schedule.order.schedule`.

    facts: of symbolic sizes, where what is assumed about them is to be guarded.
    """
    with open_sizes(facts or size_facts(parts.forward)):
        planned = [(parts.forward, parts.num_forward_outputs, schedule(parts.forward, "forward_", local))]
        if parts.backward is not None:
            count = len(results(parts.backward))
            given = _residuals_of_its_own(parts)
            planned.append((parts.backward, count, schedule(parts.backward, "backward_", local, given)))
    return planned


def _residuals_of_its_own(parts: PartitionedGraph) -> frozenset[fx.Node]:
    """The backward's inputs that the forward has made for it alone, each in memory that no other result lies in.

    Who else may hold one all the same, as a retained graph does, is seen when it is to be written over.
    """
    assert parts.backward is not None
    values = results(parts.forward)
    roots = [None if value is None else storage_root(value) for value in values]
    count = Counter(roots)
    inputs = placeholders(parts.backward)[parts.signature.num_sizes :]
    return frozenset(
        node
        for node, root in zip(inputs, roots[parts.num_forward_outputs :], strict=False)
        if root is not None and root.op == "call_function" and count[root] == 1
    )


def fuse_graph(graph: fx.Graph, expected: MemoryPlan | None = None, backend: str = "cpp") -> FusedGraph:
    """A backward on its own, as for calls in which other tangents are defined than was expected.

    expected: the memory plan of the backward that was expected. None, as under a budget: memory is fresh, and kernels
    are small ones, which keep nothing alive for longer than op by op.
    """
    planned = schedule(graph, "backward_", local=expected is None)
    count = len(results(graph))
    memories = [] if expected is None else [arena_within(graph, planned, count, expected)]
    return fuse_program([(graph, count, planned)], memories, backend)[0]


def fuse_program(
    planned: Sequence[Planned], memories: Sequence[MemoryPlan] = (), backend: str = "cpp"
) -> list[FusedGraph]:
    """Make the kernels; those in C++ are compiled together. Raises CompilerError where that fails.

    memories: where the values of each graph live; without them all buffers are fresh and die at their last use, as a
    memory budget counts them.
    """
    kernels = [call for _, _, plan in planned for call in plan.kernels]
    made = _link(kernels, _own_sources(planned)) if backend == "cpp" else _link_triton(kernels)
    return [
        FusedGraph(graph, plan, memory, *made, backend) for (graph, _, plan), memory in zip_longest(planned, memories)
    ]


def _own_sources(planned: Sequence[Planned]) -> list[Source]:
    """What the programs' own ops compile at their first call."""
    sources: dict[Source, None] = {}
    for graph, _, plan in planned:
        for node in calls(graph):
            if node.target is _LOSS_HEAD:
                sources[NATIVE] = None
            elif node.target is _POOL_GRADIENT:
                sources[POOLS] = None
            elif is_own_attention(plan.library(node)):
                sources.update(dict.fromkeys(native_sources(value_of(node)[0].dtype, _is_plain_attention(node))))
            elif is_own_scan(plan.library(node)):
                sources[SCANS] = None
            elif is_own_product(plan.library(node)):
                sources[native_source(value_of(node).dtype)] = None
            elif node.target is SUM_MESSAGES or adds_rows(plan.library(node)):
                sources[ROWS] = None
    return list(sources)


def _is_plain_attention(node: fx.Node) -> bool:
    names = (argument.name for argument in node.target._schema.arguments)  # type: ignore[union-attr]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return all(given.get(name) is None for name in ("attn_mask", "mask", "state"))


def _link_triton(kernels: Sequence[KernelCall]) -> tuple[dict[str, Launch], int, str]:
    # Here: a program of a CPU need not load another renderer.
    from aottrain.compiler.codegen.triton.programs import link_triton

    return *link_triton(kernels), ""


def _link(kernels: Sequence[KernelCall], others: Sequence[Source]) -> tuple[dict[str, Launch], int, str]:
    """What runs each kernel, the number of functions, and how they came about.

    Equal kernels, as those of repeated blocks, are one function. others: what the program's own ops will compile at
    their first call, compiled beside them.
    """
    units, functions = cpp_units(kernels)
    names = [{name for number, name in functions.values() if number == unit} for unit in range(len(units))]
    weights = [*map(len, names), *(1 for _ in others)]
    libraries = require_all([*(Source(text, FLAGS) for text in units), *others], weights)
    launches: dict[str, Launch] = {}
    known: dict[Hashable, tuple[tuple[str, ...], Any]] = {}
    for call in kernels:
        unit, name = functions[call.kernel.name]
        function = getattr(libraries[unit].functions, name)
        key = made_of(call.kernel)
        if key not in known:
            known[key] = size_names(call.kernel), scratch_bytes(call.kernel)
        sizes, scratch = known[key]
        arguments = function, scratch, draw_numbers(call.kernel)
        launches[call.kernel.name] = sized_cpp_launch(*arguments, sizes) if sizes else cpp_launch(*arguments)
    compiled = sum(library.compiled for library in libraries)
    count = len({name for _, name in functions.values()})
    note = f"{count} functions, {compiled} of {len(libraries)} objects compiled, the others found on disk"
    return launches, count, note if launches else ""


def cpp_units(kernels: Sequence[KernelCall]) -> tuple[list[str], dict[str, tuple[int, str]]]:
    """Self-contained C++ texts, to be compiled side by side, and for each kernel its text's number and its function.

    How many there are follows from the kernels alone, so that the same program has the same texts on every machine.
    """
    function_by_code: dict[str, str] = {}  # from a kernel's code to its function
    function_by_kernel: dict[str, str] = {}
    function_by_parts: dict[Hashable, str] = {}  # of kernels that need not be rendered to see that they are equal
    texts: dict[str, str] = {}
    for call in kernels:
        kernel, parts = call.kernel, made_of(call.kernel)
        if parts in function_by_parts:
            function_by_kernel[kernel.name] = function_by_parts[parts]
            continue
        code = re.sub(rf"\b{kernel.name}\b", "KERNEL", render_cpp(kernel))
        if code not in function_by_code:
            name = function_by_code[code] = f"kernel_{len(function_by_code)}"
            header = [f"// {line}" for line in str(kernel).splitlines() if line.strip()]
            texts[name] = "\n".join(header) + "\n" + code.replace("static int KERNEL", f'extern "C" int {name}')
        function_by_kernel[kernel.name] = function_by_parts[parts] = function_by_code[code]
    num_units = max(-(-len(texts) // _UNIT_KERNELS), sum(map(len, texts.values())) // _UNIT_LETTERS)
    units: list[list[str]] = [[LIBRARY] for _ in range(min(num_units, len(texts), _MOST_UNITS))]
    unit_by_function: dict[str, int] = {}
    for name, text in texts.items():
        unit_by_function[name] = min(range(len(units)), key=lambda unit: sum(map(len, units[unit])))
        units[unit_by_function[name]].append(text)
    return ["\n".join(parts) for parts in units], {
        kernel: (unit_by_function[name], name) for kernel, name in function_by_kernel.items()
    }
