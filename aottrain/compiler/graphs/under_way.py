"""What a collective holds beside its inputs and results, from its start until it has arrived.

A gather reads its part of a weight. A sum that is cut reads a copy of all that it sums. Between CPUs gloo receives into
memory of its own: for a gather as much as its result, copied at the end; for a sum that is cut a second copy, made
while the first is still there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aottrain.compat_distributed import connected_by
from aottrain.ir.flights import start_of
from aottrain.ir.graph import is_tuple, required_spec, value_of
from aottrain.ir.ops import ends_flight
from aottrain.ir.sizes.expressions import hint
from aottrain.ops.collectives import rows_of_shard

_parallel: Any = torch.ops.aottrain_parallel
_GATHER, _SCATTER = _parallel.gather_start.default, _parallel.scatter_start.default
_GATHER_ALL, _SCATTER_ALL = _parallel.gather_rows.default, _parallel.scatter_sum.default


def by_gloo(device: torch.device) -> bool:
    """Whether processes are connected by gloo on this device, or would be where they are planned for."""
    return device.type == "cpu" and "gloo" in connected_by()


def held_under_way(node: fx.Node) -> tuple[list[fx.Node], int]:
    """What is touched by a start, or by what waits for it, beside operands and results: first a node that stands for
    the memory that is held meanwhile, the one that waits first, then what is read until then; and the bytes that a
    start takes for it."""
    start = start_of(node) if ends_flight(node.target) else node
    if start.target not in (_GATHER, _SCATTER):
        return [], 0
    waits = _waits(start)
    num_bytes = 0 if start is not node else _held_bytes(start)
    read = start.all_input_nodes if start.target is _GATHER else []
    return [*waits[:1], *read], num_bytes


def copies_at_start(node: fx.Node) -> int:
    """Bytes that a start needs while it is called, beside what is held until it has arrived."""
    if node.target is not _SCATTER:
        return 0
    filled = sum(_filled_bytes(node, source) for source in node.all_input_nodes if _is_copied_alone(node, source))
    return filled + (_sum_bytes(node) if by_gloo(_device(node)) else 0)


def within_collective(node: fx.Node) -> int:
    """Bytes that one that waits for what it starts holds within itself."""
    if node.target is _GATHER_ALL:
        whole = _gathered_bytes(node)
        return whole * ((whole != required_spec(node).nbytes) + by_gloo(_device(node)))
    if node.target is _SCATTER_ALL:
        (value,) = node.all_input_nodes
        return _filled_bytes(node, value) * (_is_copied_alone(node, value) + by_gloo(_device(node)))
    return 0


def _is_copied_alone(start: fx.Node, source: fx.Node) -> bool:
    """Whether a value is copied before it is put beside the others: rows fill it up, or it does not lie row by row."""
    spec = required_spec(source)
    return _filled_bytes(start, source) != spec.nbytes or not value_of(source).is_contiguous()


def _held_bytes(start: fx.Node) -> int:
    if start.target is _SCATTER:
        return _sum_bytes(start)
    return _gathered_bytes(start) if by_gloo(_device(start)) else 0


def _gathered_bytes(gather: fx.Node) -> int:
    shard, world = gather.args[0], gather.args[2]
    assert isinstance(shard, fx.Node) and isinstance(world, int)
    return world * required_spec(shard).nbytes


def _sum_bytes(start: fx.Node) -> int:
    return sum(_filled_bytes(start, source) for source in start.all_input_nodes)


def _filled_bytes(start: fx.Node, source: fx.Node) -> int:
    """Of a value that is summed, with the rows that fill it up."""
    world, spec = start.args[1], required_spec(source)
    rows = hint(spec.shape[0])
    assert isinstance(world, int)
    return spec.nbytes // max(rows, 1) * rows_of_shard(rows, world) * world


def _device(node: fx.Node) -> torch.device:
    value = value_of(node)
    return (value[0] if is_tuple(node) else value).device


def _waits(start: fx.Node) -> list[fx.Node]:
    """What waits for the start, in the order of the graph."""
    found = [user for user in start.users if ends_flight(user.target)]
    found += [wait for user in start.users for wait in user.users if ends_flight(wait.target)]
    return found
