"""choose_kernel: what a program's graphs run as, and why; plan_kernels and make_kernels: those that are generated."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest

import torch
from torch import fx

from aottrain.compiler.graphs.measured_calls import workspaces_of
from aottrain.compiler.graphs.symbols import guard, size_facts
from aottrain.compiler.link.programs import FusedGraph, Planned, fuse_program, plan_program
from aottrain.compiler.link.retention import keep_memory
from aottrain.compiler.link.timeline import trace_memory
from aottrain.compiler.lowering import Rule, rules_for
from aottrain.compiler.lowering.places import devices_of_kernels, inputs_devices
from aottrain.compiler.options import CompileOptions, Kernel
from aottrain.errors import ConfigError
from aottrain.ir.analysis.unchanged import unchanged
from aottrain.ir.graph import JointGraph, PartitionedGraph, calls, value_of
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.schedule import MemoryPlan
from aottrain.ir.settings.choices import FOREIGN, GENERATED
from aottrain.ir.sizes.polynomials import SizeFacts, open_sizes, sizes_at, within
from aottrain.ir.tensor import tensor_spec
from aottrain.ir.units import format_bytes
from aottrain.measure.decisions import planned_for
from aottrain.runtime.cuda.triton_launch import check_device
from aottrain.toolchain.cache import was_said
from aottrain.toolchain.native import compiler_obstacle

# Below this much memory traffic in calls that could be fused, a program is over before generated kernels pay for the
# second that their compilation takes.
_WORTH_COMPILING_BYTES = 1 << 20


def choose_kernel(kernel: Kernel, joint: JointGraph) -> tuple[Kernel, str]:
    """The backend that runs this program, and the reason where it is not the one that was asked for by name.

    "auto" means generated kernels where they pay: Triton on CUDA, C++ on a CPU. What they do not cover runs as "aten".
    Raises ConfigError where Triton was asked for and cannot run.
    """
    if not isinstance(kernel, str) or kernel in FOREIGN:
        return kernel, ""
    chosen, reason = _choose(kernel, joint)
    if kernel in GENERATED and chosen != kernel and not was_said(reason):
        warnings.warn(f"kernel={kernel} runs as {chosen}: {reason}", stacklevel=2)
    return chosen, reason


def _choose(kernel: str, joint: JointGraph) -> tuple[Kernel, str]:
    known = devices_of_kernels(joint.graph) or inputs_devices(joint.graph)  # nothing is read, and nothing computed
    devices = sorted(map(str, known)) or ["cpu"]
    if kernel == "triton" or (kernel == "auto" and all(device.startswith("cuda") for device in devices)):
        return _choose_triton(kernel, devices, joint.graph)
    if devices != ["cpu"]:
        return "aten", f"C++ kernels run on a CPU, and this program has values on {' and '.join(devices)}"
    if obstacle := compiler_obstacle():
        return "aten", obstacle
    if kernel == "auto" and (reason := _too_small(joint.graph)):
        return "aten", reason
    return "cpp", ""


@dataclass(frozen=True)
class KernelPlan:
    """What both graphs of a program are to run as."""

    kernel: Kernel
    """The backend."""
    reason: str = ""
    """Why it is not the one that was to run."""
    planned: Sequence[Planned] = ()
    """Both graphs' schedules where kernels are generated."""
    memories: Sequence[MemoryPlan] = ()
    """As of `link.programs.fuse_program`."""
    facts: SizeFacts | None = None
    """Of symbolic sizes, with what the schedules assume about them."""


@unchanged()
def plan_kernels(
    joint: JointGraph, plan: PartitionPlan, parts: PartitionedGraph, options: CompileOptions
) -> KernelPlan:
    """Which kernels are to be made for options.kernel.

    Under a budget they must not peak above it: where kernels as large as can be do, smaller ones run, and where those
    do, too, the graphs run op by op.
    """
    kernel = options.kernel
    if kernel not in GENERATED:
        return KernelPlan(kernel)
    halves = [graph for graph in (parts.forward, parts.backward) if graph is not None]
    if len(set().union(*map(devices_of_kernels, (joint.graph, *halves)))) > 1:
        return KernelPlan("aten", "one half of the program has values on a CPU alone, and kernels are for one device")
    workspace = workspaces_of(joint.graph, measured=options.counts_workspaces)
    facts = size_facts(parts.forward)
    if plan.limit is None:
        planned = plan_program(parts, facts=facts)
        # On a device calls may be in flight on several streams, which arenas know nothing of; torch's allocator does.
        if kernel != "cpp":
            return KernelPlan(kernel, "", planned, facts=facts)
        with sizes_at(facts.hints) if facts is not None else nullcontext():
            return KernelPlan(kernel, "", planned, keep_memory(parts, planned, workspace), facts)
    tried = []
    for local in (True, False):
        planned = plan_program(parts, local, facts)
        schedules = [schedule for _, _, schedule in planned]
        tried.append((planned, trace_memory(parts, options.reserved_bytes, workspace, schedules).peak_bytes))
    (small, lower), (large, higher) = tried
    # Other plans than the one of no budget were chosen by the peak of small kernels: where large ones peaked lower, a
    # smaller budget might have others.
    if higher <= plan.limit and (lower <= higher or plan.runs_without_a_budget):
        return KernelPlan(kernel, "", large, facts=facts)
    if min(lower, higher) <= plan.limit:
        return KernelPlan(kernel, "", small if lower <= plan.limit else large, facts=facts)
    return KernelPlan("aten", f"fused kernels would peak above the {format_bytes(plan.limit)} that the budget allows")


def make_kernels(plan: KernelPlan) -> list[FusedGraph]:
    """The kernels of both graphs, compiled; none where other backends run them."""
    if not plan.planned:
        return []
    if planned_for() is not None:  # they would run elsewhere
        pairs = zip_longest(plan.planned, plan.memories)
        return [FusedGraph(graph, each, memory, {}, 0, "", str(plan.kernel)) for (graph, _, each), memory in pairs]
    with open_sizes(plan.facts):
        fused = fuse_program(plan.planned, plan.memories, str(plan.kernel))
    if plan.facts is not None:
        guard(fused[0].graph, plan.facts)
    return fused


def _too_small(graph: fx.Graph) -> str:
    """Why generated kernels would not pay; empty where they do."""
    traffic = sum(_fusible_bytes(graph, within(size_facts(graph), rules_for)))
    if traffic >= _WORTH_COMPILING_BYTES:
        return ""
    return f"kernel=auto: only {format_bytes(traffic)} are computed by calls that could be fused"


def _choose_triton(kernel: str, devices: list[str], graph: fx.Graph) -> tuple[Kernel, str]:
    if len(devices) > 1:
        return "aten", f"kernels are generated for one device, and this program has values on {' and '.join(devices)}"
    try:
        if planned_for() is None:
            check_device(torch.device(devices[0]))
    except ConfigError as error:
        if kernel == "triton":
            raise
        return "aten", str(error)
    if kernel == "auto" and (reason := _too_small(graph)):
        return "aten", reason
    return "triton", ""


def _fusible_bytes(graph: fx.Graph, rules_of: Callable[[fx.Node], Sequence[Rule]]) -> Iterator[int]:
    for node in calls(graph):
        if rules_of(node):
            value = value_of(node)
            results = value if isinstance(value, (tuple, list)) else [value]
            yield sum(tensor_spec(t).nbytes for t in results if isinstance(t, torch.Tensor))
