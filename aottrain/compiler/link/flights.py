"""place_flights: collectives in two halves, so that they are under way while the graph goes on.

Sums leave in buckets, as soon as the gradients of a bucket are there; gathers are started before they are read, and
small ones that follow each other are one. All follows from the graph alone, so that all processes do the same. What is
under way together is bounded; under a budget by what the peak leaves room for.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import fx

import aottrain.ops.collectives  # noqa: F401  # makes the operators known
from aottrain.compiler.graphs.repetition import SharedValues
from aottrain.compiler.graphs.rewriting import copy_into
from aottrain.compiler.partition.costs.op_cost import link_of
from aottrain.ir.flights import verify_flights
from aottrain.ir.graph import (
    PartitionedGraph,
    calls,
    copy_meta,
    placeholders,
    required_spec,
    results,
    set_value,
    storage_root,
    value_of,
)
from aottrain.ir.ops import communicates
from aottrain.measure.rates import rates_for

UNBOUNDED = 1 << 60
MOST_BYTES, LEAST_BYTES = 25 << 20, 1 << 16  # of a bucket, and of gathers that are joined
_BUCKETS = 8  # at least, so that the first one leaves early

aten = torch.ops.aten
_parallel: Any = torch.ops.aottrain_parallel


def place_flights(
    parts: PartitionedGraph, most_bytes: int = UNBOUNDED, joins: bool = True, values: SharedValues | None = None
) -> PartitionedGraph:
    """The same program; itself where it talks to nobody. most_bytes: of a bucket, and of gathers that are started
    before they are read. joins: small gathers. values: of calls that were made before for other plans of the program.
    """
    values = SharedValues() if values is None else values
    forward = _placed(parts.forward, most_bytes, joins, values)
    backward = parts.backward
    if backward is not None:
        # Of what is saved the memory is that which the forward now makes: rows that fill up a part are held with it.
        saved = results(forward)[parts.num_forward_outputs :]
        held = placeholders(backward)[parts.signature.num_sizes :]
        given = {old: new for old, new in zip(held, saved, strict=False) if new is not None and new.op != "placeholder"}
        backward = _placed(backward, most_bytes, joins, values, given)
    if forward is parts.forward and backward is parts.backward:
        return parts
    return replace(parts, forward=forward, backward=backward)


def is_own(node: fx.Node) -> bool:
    return communicates(node.target) and node.target in (_SUM, _SCATTER, _GATHER)


_SUM, _SCATTER, _GATHER = (
    _parallel.all_sum.default, _parallel.scatter_sum.default, _parallel.gather_rows.default
)  # fmt: skip


def _is_chained(node: fx.Node) -> bool:
    """Whether it adds up, over replicas, what is cut out of another sum."""
    return node.target is _SUM and node.all_input_nodes[0].target is _SCATTER


def _bytes(node: fx.Node) -> int:
    return required_spec(node).nbytes


@dataclass
class _Placing:
    """The new graph while it is made."""

    bucket_bytes: int
    left_bytes: int
    """Of sums that are still to come."""
    least_bytes: int
    """Of a bucket but the last."""
    most_flying: int
    """Bytes of sums that are cut, whose copies are held until they have arrived."""
    values: SharedValues
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    pending: list[fx.Node] = field(default_factory=list)
    """Sums of the bucket that is being filled."""
    flying: list[list[tuple[fx.Node, fx.Node]]] = field(default_factory=list)
    """Of each bucket that has left the sums, with what is under way for them."""
    chained: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Of sums that are cut and have not arrived, the sum over replicas of what is cut out of them."""
    begun: dict[fx.Node, tuple[fx.Node, int | None]] = field(default_factory=dict)
    """Of each gather what was started for it, and where in a joined one its rows begin in each process's part."""
    landed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Of joined gathers what has arrived, each process's part in a row of its own."""

    def add(self, node: fx.Node) -> None:
        """A call that is no collective; what it reads arrives first."""
        self.bring(node.all_input_nodes)
        self.new[node] = copy_into(self.graph, node, self.new.__getitem__)

    def bring(self, needed: Sequence[fx.Node]) -> None:
        if cut := [source.all_input_nodes[0] for source in needed if source in self.chained.values()]:
            self.bring(cut)
        if any(source in self.pending for source in needed):
            self.send()
        for bucket in [b for b in self.flying if any(node in needed for node, _ in b)]:
            self.flying.remove(bucket)
            self.land(bucket)

    def sum(self, node: fx.Node) -> None:
        if self.pending and _kind(self.pending[0]) != _kind(node):
            self.send()
        self.bring(node.all_input_nodes)
        self.pending.append(node)
        self.left_bytes -= _bytes(node.all_input_nodes[0])
        # What leaves last is hidden by nothing: buckets get smaller, down to where the fixed time is most of all.
        enough = min(self.bucket_bytes, max(self.left_bytes // 2, self.least_bytes))
        if self._size(self.pending) >= enough:
            self.send()

    def chain(self, node: fx.Node) -> None:
        """A sum of what is cut out of another sum. It leaves when that has arrived, which is not waited for here."""
        (cut,) = node.all_input_nodes
        if cut in self.new:
            self.sum(node)
        else:
            self.chained[cut] = node

    def send(self) -> None:
        """The bucket leaves. Parts that are cut out of sums are read from copies, whose bytes are bounded; what was cut
        before goes on to the other replicas."""
        nodes, self.pending = self.pending, []
        if not nodes:
            return
        if nodes[0].target is _SCATTER:
            self.make_room(self._size(nodes))
        before = list(self.flying)
        self.leave(nodes)
        self.go_on(before)

    def go_on(self, buckets: Sequence[list[tuple[fx.Node, fx.Node]]]) -> None:
        """Of these buckets those arrive of which replicas add up what is cut out, and those sums leave."""
        for bucket in [b for b in buckets if any(node in self.chained for node, _ in b)]:
            self.flying.remove(bucket)
            self.land(bucket)

    def finish(self) -> None:
        """All arrives."""
        self.send()
        self.go_on(list(self.flying))
        while self.flying:
            self.land(self.flying.pop(0))

    def leave(self, nodes: Sequence[fx.Node]) -> None:
        scatters = nodes[0].target is _SCATTER
        sources = [self.new[node.all_input_nodes[0]] for node in nodes]
        target = _parallel.scatter_start.default if scatters else _parallel.sum_start.default
        start = self.values.add_call(sources[-1], target, (sources, *nodes[0].args[1:]))
        self.flying.append(
            [(node, self.values.add_call(start, operator.getitem, (start, place))) for place, node in enumerate(nodes)]
        )

    def make_room(self, num_bytes: int) -> None:
        """For copies of what is cut: the oldest ones arrive."""
        cut = [bucket for bucket in self.flying if bucket[0][0].target is _SCATTER]
        sizes = [self._size([node for node, _ in bucket]) for bucket in cut]
        while cut and sum(sizes) + num_bytes > self.most_flying:
            self.flying.remove(cut[0])
            self.land(cut.pop(0))
            sizes.pop(0)

    @staticmethod
    def _size(nodes: Sequence[fx.Node]) -> int:
        return sum(_bytes(node.all_input_nodes[0]) for node in nodes)

    def land(self, bucket: Sequence[tuple[fx.Node, fx.Node]]) -> None:
        for node, item in bucket:
            self.new[node] = self.arrived(node, item)
        if onward := [self.chained.pop(node) for node, _ in bucket if node in self.chained]:
            self.leave(onward)

    def arrived(self, old: fx.Node, value: fx.Node) -> fx.Node:
        return self.values.add_call(value, _parallel.arrived.default, (value,), old.name)

    def begin(self, bucket: Sequence[fx.Node]) -> None:
        """These gathers leave as one."""
        sources = [self.new[gather.all_input_nodes[0]] for gather in bucket]
        _, rows, world, group = bucket[0].args
        if len(bucket) == 1:
            start = self.values.add_call(sources[0], _parallel.gather_start.default, (sources[0], rows, world, group))
            self.begun[bucket[0]] = start, None
            return
        flat = [self.values.add_call(source, aten.view.default, (source, [-1])) for source in sources]
        part = self.values.add_call(flat[-1], aten.cat.default, (flat,))
        count = required_spec(part).numel
        assert isinstance(world, int)
        start = self.values.add_call(part, _parallel.gather_start.default, (part, world * count, world, group))
        offset = 0
        for gather, each in zip(bucket, flat, strict=True):
            self.begun[gather] = start, offset
            offset += required_spec(each).numel

    def gather(self, node: fx.Node) -> None:
        """Has arrived. Of joined ones the first that is read waits for all, and each is copied out of them."""
        start, offset = self.begun[node]
        if offset is None:
            self.new[node] = self.arrived(node, start)
            return
        if start not in self.landed:
            whole = self.values.add_call(start, _parallel.arrived.default, (start,))
            self.landed[start] = self.values.add_call(start, aten.view.default, (whole, [node.args[2], -1]))
        like, table = self.new[node.all_input_nodes[0]], self.landed[start]
        own, world, rows = required_spec(like), node.args[2], required_spec(node).shape[0]
        assert isinstance(world, int)
        piece = self.values.add_call(like, aten.slice.Tensor, (table, 1, offset, offset + own.numel))
        copy = self.values.add_call(like, aten.clone.default, (piece,), memory_format=torch.contiguous_format)
        shape = [world * own.shape[0], *own.shape[1:]]
        value = self.values.add_call(like, aten.view.default, (copy, shape), None if shape[0] != rows else node.name)
        if shape[0] != rows:
            value = self.values.add_call(like, aten.slice.Tensor, (value, 0, 0, rows), node.name)
        self.new[node] = value


def _kind(node: fx.Node) -> tuple[Any, ...]:
    spec = required_spec(node)
    return node.target, spec.dtype, spec.device, tuple(node.args[1:])


def _placed(
    old: fx.Graph,
    most_bytes: int,
    joins: bool,
    values: SharedValues,
    given: Mapping[fx.Node, fx.Node] | None = None,
) -> fx.Graph:
    """given: of its inputs those that another graph makes, with the node there."""
    nodes = calls(old)
    if not any(map(is_own, nodes)):
        return old
    sizes = _sizes(nodes)
    bucket, ahead = min(most_bytes, sizes.bucket), min(most_bytes, sizes.ahead)
    placing = _Placing(bucket, sizes.summed, min(bucket, sizes.least), 2 * bucket, values)
    for node in placeholders(old):
        new = placing.graph.create_node("placeholder", node.name, name=node.name)
        copy_meta(node, new)
        if given and node in given:
            set_value(new, value_of(given[node]))
        placing.new[node] = new
    begin_at = _beginnings(nodes, ahead, min(2 * ahead, sizes.ahead), sizes.small if joins else 0)
    for node in nodes:
        for joined in begin_at.get(node, ()):
            placing.begin(joined)
        if node in placing.begun:
            placing.gather(node)
        elif _is_chained(node):
            placing.chain(node)
        elif node.target in (_SUM, _SCATTER):
            placing.sum(node)
        else:
            placing.add(node)
    placing.finish()
    placing.graph.output([None if node is None else placing.new[node] for node in results(old)])
    placing.graph.lint()
    verify_flights(placing.graph, calls(placing.graph), storage_root)
    return placing.graph


class _Sizes(NamedTuple):
    """Bytes, where nothing bounds them."""

    summed: int
    """All together."""
    bucket: int
    """Of sums."""
    least: int
    """Of a bucket: below it a collective's fixed time is most of all."""
    ahead: int
    """Of gathers that are started before one is read."""
    small: int
    """Of a gather that is joined with others: to copy it out costs less than half of a collective's fixed time."""


def _sizes(nodes: Sequence[fx.Node]) -> _Sizes:
    sums = [node for node in nodes if node.target in (_SUM, _SCATTER)]
    summed = sum(_bytes(node.all_input_nodes[0]) for node in sums if not _is_chained(node))
    own = next(node for node in nodes if is_own(node) and not _is_chained(node))
    link, rates = link_of(own), rates_for(value_of(own).device)
    least = max(LEAST_BYTES, int(link.latency_s * link.bytes_per_s))
    bucket = min(MOST_BYTES, max(summed // _BUCKETS, least))
    small = int(link.latency_s * rates.bytes_per_s / 4)
    return _Sizes(summed, bucket, least, _ahead([_bytes(node) for node in nodes if node.target is _GATHER]), small)


def _ahead(gathered: Sequence[int]) -> int:
    """The largest one and two of a size such that half of all bytes are in gathers as large: however large they are,
    else nothing of theirs would be hidden."""
    before = [*accumulate(sorted(gathered, reverse=True), initial=0)]
    usual = next((b - a for a, b in pairwise(before) if 2 * b >= before[-1]), 0)
    return max(gathered, default=0) + 2 * usual


def usual_window(nodes: Sequence[fx.Node]) -> int:
    """Bytes of collectives under way at once where nothing bounds them."""
    sizes = _sizes(nodes)
    return max(sizes.bucket, sizes.ahead)


def _beginnings(
    nodes: Sequence[fx.Node], ahead_bytes: int, first_bytes: int, small_bytes: int
) -> dict[fx.Node, list[list[fx.Node]]]:
    """Before which call each gather of an input is started, in lists of those that are one: where the gathers between
    there and its own place are no more than so many bytes; the first ones at the start, where least else is held."""
    gathers = [node for node in nodes if node.target is _GATHER and node.all_input_nodes[0].op == "placeholder"]
    num_first = sum(end <= first_bytes for end in accumulate(map(_bytes, gathers)))
    parts = (gathers[:num_first], first_bytes), (gathers[num_first:], ahead_bytes)
    lists = [bucket for part, most in parts for bucket in _joined(part, min(most, MOST_BYTES), small_bytes)]
    joined = {bucket[0]: bucket for bucket in lists}
    begin_at: dict[fx.Node, list[list[fx.Node]]] = {}
    first = 0
    for place, gather in enumerate(gathers):
        while first < place and sum(map(_bytes, gathers[first + 1 : place + 1])) > ahead_bytes:
            first += 1
        if gather in joined:
            begin_at.setdefault(nodes[0] if place < num_first else gathers[first], []).append(joined[gather])
    return begin_at


def _joined(gathers: Sequence[fx.Node], ahead_bytes: int, small_bytes: int) -> list[list[fx.Node]]:
    """All gathers, in lists of those that are to be one: of one kind, each small, and from the first to the last no
    more than so many bytes of gathers. A copy of what is small costs less than the fixed time of a collective."""
    lists: list[list[fx.Node]] = []
    open_ones: dict[tuple[Any, ...], tuple[list[fx.Node], int]] = {}
    total = 0
    for gather in gathers:
        before, total = total, total + _bytes(gather)
        source = gather.all_input_nodes[0]
        if _bytes(gather) > small_bytes or not value_of(source).is_contiguous():
            lists.append([gather])
            continue
        spec = required_spec(source)
        kind = spec.dtype, spec.device, *gather.args[2:]
        if kind not in open_ones or total - open_ones[kind][1] > ahead_bytes:
            lists.append([])
            open_ones[kind] = lists[-1], before
        open_ones[kind][0].append(gather)
    return lists
