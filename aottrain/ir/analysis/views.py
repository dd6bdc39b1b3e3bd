"""Which views a program makes, and from what.

A chain of views, as from a product to the heads of its queries, is one call where its memory was taken: where that lies
says the trace. What lies as the memory itself, as a matrix transposed twice, is that. A wait for what another process
sends is a view by its type, and a call like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from aottrain.ir.graph import info, is_size, results, spec_of, storage_root, value_of, view_source
from aottrain.ir.ops import OpKind, ends_flight
from aottrain.ir.schedule import KernelCall, Schedule, touched_by


@dataclass
class Views:
    """of: for views that are made from the memory that they lie in, the value that has it. left_out: views, and tuples
    of them, that nothing reads by now."""

    of: dict[fx.Node, fx.Node] = field(default_factory=dict)
    left_out: set[fx.Node] = field(default_factory=set)

    def touched_by(self, call: KernelCall | fx.Node) -> tuple[fx.Node, ...]:
        if isinstance(call, fx.Node):
            if call in self.left_out:
                return ()
            if call in self.of:
                return call, self.of[call]
        return touched_by(call)

    def makes(self, call: KernelCall | fx.Node) -> bool:
        """Whether the call itself is made, as the schedule has it."""
        return isinstance(call, KernelCall) or not (call in self.left_out or call in self.of)

    def text(self, node: fx.Node) -> str:
        """The statement that makes it."""
        root = self.of[node]
        spec, start = spec_of(node), _start(node) - _start(root)
        assert spec is not None
        if _lies_as(node, root):
            return f"    {node.name} = {root.name}"
        more = f", {root.name}.storage_offset() + {start}" if start else ""
        return f"    {node.name} = run_as_strided({root.name}, {spec.shape}, {spec.stride}{more})"


def short_views(graph: fx.Graph, schedule: Schedule) -> Views:
    views, read = Views(), {node for node in results(graph) if node is not None}
    returned = frozenset(read)
    for call in reversed(schedule.calls):
        if isinstance(call, KernelCall):
            read.update(call.buffers)
            continue
        is_view = view_source(call) is not None and call.op == "call_function"
        if is_view and call not in read:
            if _is_free(call):
                views.left_out.add(call)
                continue
        elif is_view and call not in returned and _is_plain(call):
            views.of[call] = storage_root(call)
            read.add(storage_root(call))
            continue
        read.update(call.all_input_nodes)
    return views


def _is_free(node: fx.Node) -> bool:
    if ends_flight(node.target):
        return False
    return info(node).kind in (OpKind.VIEW, OpKind.STRUCTURE) and not is_size(node)


def _is_plain(node: fx.Node) -> bool:
    """Whether shape, strides and start say all of it: they are known, and it has the type of its memory."""
    root = storage_root(node)
    if not _is_free(node) or spec_of(node) is None or spec_of(root) is None:
        return False
    for each in (node, root):
        value, spec = value_of(each), spec_of(each)
        if not isinstance(value, torch.Tensor) or spec is None or spec.symbolic is not None:
            return False
        if value.layout is not torch.strided or value.is_conj() or value.is_neg() or is_size(each):
            return False
    return value_of(node).dtype is value_of(root).dtype


def _lies_as(node: fx.Node, root: fx.Node) -> bool:
    one, other = spec_of(node), spec_of(root)
    assert one is not None and other is not None
    return (one.shape, one.stride) == (other.shape, other.stride) and _start(node) == _start(root)


def _start(node: fx.Node) -> int:
    return int(value_of(node).storage_offset())
