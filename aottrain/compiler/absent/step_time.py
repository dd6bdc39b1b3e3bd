"""How long a program would take on a device, by its specification: each call as long as the slower of its arithmetic
and its memory traffic; the host launches them meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from aottrain.compiler.graphs.repetition import once_for_alike
from aottrain.compiler.partition.costs.op_cost import arithmetic_seconds, kernel_operations, node_bytes
from aottrain.compiler.traffic import bytes_of, working
from aottrain.ir.graph import PartitionedGraph, calls, info
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.ir.settings.devices import Target


@dataclass(frozen=True)
class StepTime:
    """Seconds of one forward and backward."""

    compute_s: float = 0.0
    """In calls whose arithmetic takes longest."""
    traffic_s: float = 0.0
    """In those whose memory traffic does."""
    gaps_s: float = 0.0
    """Between calls, on the device."""
    launch_s: float = 0.0
    """On the host, at the same time as all of these."""
    num_calls: int = 0

    @property
    def device_s(self) -> float:
        return self.compute_s + self.traffic_s + self.gaps_s

    @property
    def seconds(self) -> float:
        return max(self.device_s, self.launch_s)

    @property
    def limit(self) -> str:
        """What most of the time goes into."""
        if self.launch_s > self.device_s:
            return "launches"
        named = {"compute": self.compute_s, "bandwidth": self.traffic_s, "launches": self.gaps_s}
        return max(named, key=named.__getitem__)

    def __add__(self, other: StepTime) -> StepTime:
        return StepTime(*(getattr(self, name) + getattr(other, name) for name in StepTime.__dataclass_fields__))

    def times(self, count: int) -> StepTime:
        """Of so many."""
        return StepTime(*(getattr(self, name) * count for name in StepTime.__dataclass_fields__))


def step_time(parts: PartitionedGraph, schedules: Sequence[Schedule], target: Target) -> StepTime:
    """schedules: of both graphs where they run as generated kernels; none: their calls run one by one. Called inside
    `measure.decisions.deciding` for this target."""
    alike = once_for_alike(lambda node: _of_node(node, target))
    total = StepTime()
    for call in _calls(parts, schedules):
        total += _of_kernel(call, target) if isinstance(call, KernelCall) else alike(call)
    return total


def _calls(parts: PartitionedGraph, schedules: Sequence[Schedule]) -> Iterator[KernelCall | fx.Node]:
    if schedules:
        for schedule in schedules:
            yield from working(schedule)
        return
    for graph in (parts.forward, parts.backward):
        yield from () if graph is None else (node for node in calls(graph) if not info(node).is_free)


def _of_kernel(call: KernelCall, target: Target) -> StepTime:
    moved = moving(bytes_of(call), target)
    arithmetic = kernel_operations(call.kernel) / target.flops_per_s("float32")
    return replace(moved, compute_s=arithmetic, traffic_s=0.0) if arithmetic > moved.traffic_s else moved


def moving(num_bytes: float, target: Target, num_calls: int = 1) -> StepTime:
    """Of kernels that read and write so many bytes and do little else."""
    seconds = num_bytes / (target.bytes_per_s * target.traffic)
    return StepTime(0.0, seconds, target.gap_s * num_calls, target.launch_s * num_calls, num_calls)


def _of_node(node: fx.Node, target: Target) -> StepTime:
    arithmetic, traffic = arithmetic_seconds(node), moving(node_bytes(node), target)
    if arithmetic > traffic.traffic_s:
        return StepTime(arithmetic, 0.0, traffic.gaps_s, traffic.launch_s, 1)
    return traffic
