"""How fast the processes of a run talk to each other, as its plans take it."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from aottrain.config.parallel import ParallelConfig
from aottrain.config.run import RunConfig
from aottrain.ir.settings.decisions import BANDWIDTH, LATENCY, SOURCES, Decision, Record
from aottrain.ir.units import format_bytes, format_seconds
from aottrain.measure.decisions import deciding
from aottrain.measure.links import Link, Talk, decide_link, set_link
from aottrain.ops.collectives import COPIES
from aottrain.trainer.parallel.replicas import members
from aottrain.trainer.parallel.world import World


@dataclass(frozen=True)
class _Wire:
    """Between the processes of one kind of group, of which the first process is in one."""

    what: str
    """They are, as a plural."""
    ranks: list[int]
    """Of the first one's group."""
    known: Mapping[str, float]
    """Figures that the configuration gives."""
    keys: str
    """Of the configuration, that give them."""
    group: Any = None
    """Of this process: torch's, None for all."""


def take_link(world: World, config: RunConfig, decisions: str | Record, device: torch.device) -> str:
    """What plans are made with from now on, as a line; "" for one process. What the configuration does not give is
    decided as `decisions` says, by the first process for all; where it measures, all of its group take part."""
    if world.size == 1:
        return ""
    if config.engine.name != "aot":  # nothing is planned
        return _processes(world)
    found = [
        Link(size=len(wire.ranks)) if len(wire.known) == 2 else _decided(world, decisions, device, wire)
        for wire in _wires(world, config.parallel)
    ]
    return f"{_processes(world)}, planned for {_set(world, config.parallel, found)}"


def assume_link(world: World, parallel: ParallelConfig) -> str:
    """For plans of processes that are not there, as a line; "" for one: what the configuration does not give is the
    fixed model's."""
    wires = _wires(world, parallel)
    text = _set(world, parallel, [Link(size=len(wire.ranks)) for wire in wires], "or the fixed model")
    return "" if world.size == 1 else f"the first of {_processes(world)}, {text}"


def _processes(world: World) -> str:
    replicas = "" if world.groups is None else f" ({world.replicas} replicas of {world.num_parts} parts)"
    return f"{world.size} processes{replicas}"


def _wires(world: World, parallel: ParallelConfig) -> list[_Wire]:
    """One where all processes are one group, else that of those with a replica and that of those with the same part."""

    def of(what: str, ranks: list[int], figures: Mapping[str, float | None], key: str, group: Any = None) -> _Wire:
        known = {name: figure for name, figure in figures.items() if figure is not None}
        return _Wire(what, ranks, known, f"parallel.{key}latency, parallel.{key}bandwidth", group)

    own = {LATENCY: parallel.latency, BANDWIDTH: parallel.bandwidth}
    if world.groups is None:
        return [of("processes", list(range(world.size)), own, "")]
    whole, alike = members(world.size, world.replicas)
    between = {LATENCY: parallel.replica_latency, BANDWIDTH: parallel.replica_bandwidth}
    return [
        of("processes", whole[0], own, "", world.groups.parts),
        of("replicas", alike[0], between, "replica_", world.groups.copies),
    ]


def _set(world: World, parallel: ParallelConfig, found: list[Link], otherwise: str = "") -> str:
    """From now on plans take what was found, but for what the configuration gives. The figures, as text."""
    links, texts = [], []
    for wire, each in zip(_wires(world, parallel), found, strict=True):
        each = replace(
            each,
            latency_s=wire.known.get(LATENCY, each.latency_s),
            bytes_per_s=wire.known.get(BANDWIDTH, each.bytes_per_s),
        )
        links.append(each)
        rate = f"{format_seconds(each.latency_s)} and {format_bytes(int(each.bytes_per_s))}/s between"
        source = wire.keys if each.decision is None else SOURCES[each.decision.source]
        source = f"{source}, {otherwise}" if otherwise else source
        texts.append(f"{rate} {'them' if wire.what == 'processes' else wire.what} ({source})")
    set_link(links[0], {COPIES: links[1]} if len(links) == 2 else {})
    return ", ".join(texts)


def _decided(world: World, decisions: str | Record, device: torch.device, wire: _Wire) -> Link:
    """The decision has the figures that are not known. Processes that are not of the first one's group wait for it."""
    hosts = world.gather(socket.gethostname())
    num_machines = len({hosts[rank] for rank in wire.ranks})
    machines = f" on {num_machines} machines" if num_machines > 1 else ""
    size = len(wire.ranks)
    key = f"{size} {wire.what} by {'gloo' if device.type == 'cpu' else 'nccl'}{machines}"
    talk, made = Talk(size, device, wire.group), list[Decision]()
    if world.is_first:
        try:
            with deciding(decisions):
                made.append(decide_link(talk, key))
        finally:
            talk.end()
    elif world.rank in wire.ranks:
        talk.follow()
    decision = world.from_first(lambda: made[0])
    assert isinstance(decision.choice, Mapping)
    default = Link()
    latency_s = decision.choice.get(LATENCY, default.latency_s)
    bytes_per_s = decision.choice.get(BANDWIDTH, default.bytes_per_s)
    own = {name: figure for name, figure in decision.choice.items() if name not in wire.known}
    return Link(latency_s, bytes_per_s, size, replace(decision, choice=own))
