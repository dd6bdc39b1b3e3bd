"""far_reaching: values to save so that computing one again never reads many times what reading it would.

A residual stream is a chain of sums, each of which adds one saved value. Cut by bytes alone, the fewest are saved where
only what is added is, and the stream is summed anew from its beginning: for the last block from what all blocks before
it added, and either each block's norm reads all of it, or the first kernel of the backward makes the whole stream at
once and holds it. Both grow with depth.

A kernel that makes values again is priced by what it reads: time at a device's bandwidth, against that of reading the
value itself, so the ratio of the two is one of bytes, the same on every device. Registers are not priced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

import torch
from torch import fx

from aottrain.compiler.partition.costs.op_cost import is_lookup
from aottrain.ir.graph import is_size, spec_of, storage_bytes, storage_root, value_of, view_source
from aottrain.ir.sizes.expressions import hint

# So many times the bytes of the largest one alone: a value, and two of its size that were added to it.
_MOST_READ = 3


def far_reaching(
    nodes: Sequence[fx.Node], saved: Set[fx.Node], demanded: Set[fx.Node], may_save: Callable[[fx.Node], bool]
) -> set[fx.Node]:
    """Values of which each is the first that would be computed again from so much, or for whose sake alone several
    values are saved that have no fewer bytes.

    nodes: what the backward needs, in program order; saved: what it is given of that, beside the inputs; demanded:
    what it reads itself.
    """
    roots = {storage_root(node) for node in demanded}
    reads: dict[fx.Node, dict[fx.Node, int]] = {}  # of what is computed again: saved storages, with the bytes read
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op != "call_function" or node in saved or is_size(node):
            continue
        own = reads[node] = dict[fx.Node, int]()
        for source in node.all_input_nodes:
            if source in reads and not _is_at_hand(source, saved):
                taken = reads[source]
            else:
                taken = {storage_root(source): _bytes_read(node, source)}
            for leaf, size in taken.items():
                own[leaf] = max(own.get(leaf, 0), size)
        if not may_save(node) or spec_of(node) is None:
            continue
        size = hint(storage_bytes(node))
        # An input is at hand in any case.
        for_it = [read for leaf, read in own.items() if leaf.op == "call_function" and leaf not in roots]
        instead = len(for_it) > 1 and sum(for_it) >= size
        if instead or sum(own.values()) > _MOST_READ * max(size, *own.values(), 1):
            found.add(node)
            reads[node] = {node: size}
    return found


def _is_at_hand(node: fx.Node, saved: Set[fx.Node]) -> bool:
    """Whether it is a view of what is saved, or of an input."""
    root = storage_root(node)
    return root in saved or root.op == "placeholder"


def _bytes_read(node: fx.Node, source: fx.Node) -> int:
    """Of a table the rows that are looked up, of a view what it shows."""
    size = min(hint(storage_bytes(source)), _bytes(source))
    return min(size, _bytes(node)) if is_lookup(node) or view_source(node) is not None else size


def _bytes(node: fx.Node) -> int:
    value, spec = value_of(node), spec_of(node)
    if not isinstance(value, torch.Tensor) or spec is None:
        return 0
    return hint(storage_bytes(node) if spec.symbolic is not None else value.numel() * value.element_size())
