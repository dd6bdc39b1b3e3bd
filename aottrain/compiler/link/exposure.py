"""What a program's collectives cost it: the order of its calls, simulated.

A call takes the time that the planner's cost model says, a collective what the link of its group does, one after the
other; what is under way is hidden behind calls until the program waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from aottrain.compiler.partition.costs.op_cost import (
    group_of,
    is_sum_of_many,
    kernel_operations,
    link_of,
    node_bytes,
    taken_in,
)
from aottrain.compiler.traffic import bytes_of
from aottrain.explain.records import BACKWARD, FORWARD, Collective, Collectives
from aottrain.ir.flights import start_of
from aottrain.ir.graph import PartitionedGraph, calls, info, spec_of, value_of
from aottrain.ir.ops import communicates, ends_flight, packet_name, starts_flight
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.measure.rates import rates_for

Price = Callable[[fx.Node], float]
Call = KernelCall | fx.Node


def collectives_of(parts: PartitionedGraph, schedules: Sequence[Schedule], price: Price) -> Collectives:
    """schedules: of both halves where they run as generated kernels; none: their calls run one by one. price: seconds
    of a call that is no kernel."""
    found: list[Collective] = []
    lengths = [0.0, 0.0]
    orders: list[Sequence[Call]] = [schedule.calls for schedule in schedules]
    orders = orders or [calls(graph) for graph in (parts.forward, parts.backward) if graph is not None]
    if not any(isinstance(call, fx.Node) and communicates(call.target) for order in orders for call in order):
        return Collectives()
    for place, (half, order) in enumerate(zip((FORWARD, BACKWARD), orders, strict=False)):
        run = _Run(half, price)
        for call in order:
            run.take(call)
        found += run.found.values()
        lengths[place] = run.now_s
    return Collectives(tuple(found), *lengths)


@dataclass
class _Run:
    """Of one half."""

    half: str
    price: Price
    now_s: float = 0.0
    free_s: dict[str, float] = field(default_factory=dict)
    """Of each group when nothing is on its link any more; groups do not wait for each other."""
    found: dict[fx.Node, Collective] = field(default_factory=dict)
    arrives_s: dict[fx.Node, float] = field(default_factory=dict)
    """Of what is under way."""

    def take(self, call: Call) -> None:
        if isinstance(call, KernelCall):
            self.now_s += _kernel_seconds(call)
        elif ends_flight(call.target):
            self._wait(start_of(call))
        elif communicates(call.target):
            self._start(call)
        elif not info(call).is_free:
            self.now_s += self.price(call)

    def _start(self, node: fx.Node) -> None:
        if starts_flight(node.target) and packet_name(node.target) != "gather_start":
            self.now_s += _copying_seconds(node)
        num_bytes = taken_in(node)
        link_s = link_of(node).seconds(num_bytes)
        wire = group_of(node)
        self.free_s[wire] = max(self.now_s, self.free_s.get(wire, 0.0)) + link_s
        is_sum = is_sum_of_many(node)
        times = self.now_s, self.now_s, link_s, 0.0
        self.found[node] = Collective(self.half, _text(node), is_sum, num_bytes, *times)
        self.arrives_s[node] = self.free_s[wire]
        if not starts_flight(node.target):
            self._wait(node)

    def _wait(self, start: fx.Node) -> None:
        """Of those that have left together the first one waits for all."""
        if (arrives_s := self.arrives_s.pop(start, None)) is None:
            return
        exposed_s = max(arrives_s - self.now_s, 0.0)
        self.found[start] = replace(self.found[start], wait_s=self.now_s, exposed_s=exposed_s)
        self.now_s += exposed_s


def _copying_seconds(node: fx.Node) -> float:
    """What is summed is copied into memory of its own."""
    rates = rates_for(value_of(node.all_input_nodes[0]).device)
    return node_bytes(node) / rates.bytes_per_s + rates.op_overhead_s


def _kernel_seconds(call: KernelCall) -> float:
    rates = rates_for(value_of(call.buffers[0]).device)
    arithmetic_s = kernel_operations(call.kernel) / rates.flops_per_s(None)
    return max(arithmetic_s, bytes_of(call) / rates.bytes_per_s) + rates.op_overhead_s


def _text(node: fx.Node) -> str:
    operands = ", ".join(str(spec_of(source)) for source in node.all_input_nodes)
    rest = ", ".join(str(value) for value in node.args if not isinstance(value, fx.Node | list | tuple))
    return f"{info(node).name}({operands}{', ' * bool(rest)}{rest})"
