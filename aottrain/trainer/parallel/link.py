"""How fast the processes of a run talk to each other, as its plans take it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aottrain.ir.units import format_bytes, format_seconds
from aottrain.measure.links import Link, set_link
from aottrain.trainer.parallel.world import World

if TYPE_CHECKING:
    from aottrain.config.run import ParallelConfig


def take_link(world: World, config: ParallelConfig) -> str:
    """What plans are made with from now on, as a line; "" for one process. What the configuration does not say is a
    fixed model: a time that was taken here would stand in no record of decisions."""
    if world.size == 1:
        return ""
    default = Link()
    latency_s = default.latency_s if config.latency is None else config.latency
    bytes_per_s = default.bytes_per_s if config.bandwidth is None else config.bandwidth
    set_link(Link(latency_s, bytes_per_s))
    rate = f"{format_seconds(latency_s)} and {format_bytes(int(bytes_per_s))}/s between them"
    return f"{world.size} processes, planned for {rate} (parallel.latency, parallel.bandwidth)"
