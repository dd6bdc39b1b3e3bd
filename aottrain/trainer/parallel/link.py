"""How fast the processes of a run talk to each other, as its plans take it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace

import torch

from aottrain.config.run import ParallelConfig, RunConfig
from aottrain.ir.settings.decisions import BANDWIDTH, LATENCY, SOURCES, Decision, Record
from aottrain.ir.units import format_bytes, format_seconds
from aottrain.measure.decisions import deciding
from aottrain.measure.links import Link, Talk, decide_link, set_link
from aottrain.trainer.parallel.world import World


def take_link(world: World, config: RunConfig, decisions: str | Record, device: torch.device) -> str:
    """What plans are made with from now on, as a line; "" for one process. What the configuration does not give is
    decided as `decisions` says, by the first process for all; where it measures, all take part."""
    if world.size == 1:
        return ""
    if config.engine.name != "aot":  # nothing is planned
        return f"{world.size} processes"
    given = {LATENCY: config.parallel.latency, BANDWIDTH: config.parallel.bandwidth}
    known = {name: figure for name, figure in given.items() if figure is not None}
    found = Link() if len(known) == len(given) else _decided(world, decisions, device, known)
    latency_s, bytes_per_s = known.get(LATENCY, found.latency_s), known.get(BANDWIDTH, found.bytes_per_s)
    set_link(Link(latency_s, bytes_per_s, world.size, found.decision))
    source = "parallel.latency, parallel.bandwidth" if found.decision is None else SOURCES[found.decision.source]
    rate = f"{format_seconds(latency_s)} and {format_bytes(int(bytes_per_s))}/s between them"
    return f"{world.size} processes, planned for {rate} ({source})"


def assume_link(world: World, parallel: ParallelConfig) -> str:
    """For plans of processes that are not there, as a line; "" for one: what the configuration does not give is the
    fixed model's."""
    default = Link()
    found = Link(parallel.latency or default.latency_s, parallel.bandwidth or default.bytes_per_s, world.size)
    set_link(found)
    if world.size == 1:
        return ""
    rate = f"{format_seconds(found.latency_s)} and {format_bytes(int(found.bytes_per_s))}/s between them"
    return f"the first of {world.size} processes, {rate} (parallel.latency, parallel.bandwidth, or the fixed model)"


def _decided(world: World, decisions: str | Record, device: torch.device, known: Mapping[str, float]) -> Link:
    """The decision has the figures that are not known."""
    num_machines = len(set(world.gather(socket.gethostname())))
    machines = f" on {num_machines} machines" if num_machines > 1 else ""
    key = f"{world.size} processes by {'gloo' if device.type == 'cpu' else 'nccl'}{machines}"
    talk, made = Talk(world.size, device), list[Decision]()
    if world.is_first:
        try:
            with deciding(decisions):
                made.append(decide_link(talk, key))
        finally:
            talk.end()
    else:
        talk.follow()
    decision = world.from_first(lambda: made[0])
    assert isinstance(decision.choice, Mapping)
    default = Link()
    latency_s = decision.choice.get(LATENCY, default.latency_s)
    bytes_per_s = decision.choice.get(BANDWIDTH, default.bytes_per_s)
    own = {name: figure for name, figure in decision.choice.items() if name not in known}
    return Link(latency_s, bytes_per_s, world.size, replace(decision, choice=own))
