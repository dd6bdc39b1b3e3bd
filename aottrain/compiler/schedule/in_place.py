"""written_in_place: results that take the memory of an operand that dies there, as `a += b` would."""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import producer_of
from aottrain.ir.analysis.liveness import last_uses
from aottrain.ir.graph import results, spec_of, storage_root
from aottrain.ir.kernels.kernel import KernelIR, Load, Reduce, Store
from aottrain.ir.kernels.verify import dependents
from aottrain.ir.schedule import IN_PLACE, OUT_VARIANTS, KernelCall, touched_by, unshared_operands
from aottrain.ops.rows import SUM_MESSAGES

aten = torch.ops.aten

# Library calls whose results, or the items of whose tuple, are memory of their own, whatever their operands are.
_FRESH = (
    *OUT_VARIANTS, *IN_PLACE, aten.embedding_dense_backward.default, aten.convolution.default,
    aten.convolution_backward.default, aten.max_pool2d_with_indices_backward.default,
    SUM_MESSAGES,
)  # fmt: skip


def written_in_place(
    graph: fx.Graph, calls: Sequence[KernelCall | fx.Node], given: Set[fx.Node] = frozenset()
) -> dict[fx.Node, fx.Node]:
    """For each such result the value, made earlier in the graph, whose memory it takes.

    A kernel makes its element of that value's, and nothing reads it later; of a few library calls it is the first
    operand. What the graph is given is never overwritten, nor what it returns or a sparse tensor keeps: others may hold
    it. But kernels may write over what is `given` it to be its own, where they find nothing else, as a residual is that
    nobody else holds; what the graph returns is fresh memory then.
    """
    returned = {storage_root(node) for node in (*results(graph), *unshared_operands(graph)) if node is not None}
    last = last_uses(map(storage_root, touched_by(call)) for call in calls)
    own: set[fx.Node] = set()  # made by the graph, in memory of their own
    overwritten: dict[fx.Node, fx.Node] = {}
    for position, call in enumerate(calls):
        if not isinstance(call, KernelCall):
            root = _written_over(call) if call.target in IN_PLACE else None
            if root in own and last[root] == position and root not in returned:
                overwritten[call] = overwritten.get(root, root)
            own.update([call] if producer_of(call).target in _FRESH else ())
            continue
        dying = [node for node in call.reads if node in own and last[node] == position and node not in returned]
        left = [node for node in call.reads if node in given and last[node] == position]
        for result in call.writes:
            free = dying if result in returned else [*dying, *left]
            operand = next((node for node in free if _fits(call, result, node)), None)
            if operand is not None:
                (dying if operand in own else left).remove(operand)
                overwritten[result] = overwritten.get(operand, operand)
        own.update(call.writes)
    return overwritten


def _written_over(call: fx.Node) -> fx.Node | None:
    """The memory of a library call's first operand, where its result fits into it and no other operand lies in it."""
    operands = [operand for operand in call.args if isinstance(operand, fx.Node)]
    root = storage_root(operands[0])
    alone = [storage_root(operand) for operand in operands].count(root) == 1
    return root if alone and _lie_alike(call, operands[0], root) else None


def _fits(call: KernelCall, result: fx.Node, operand: fx.Node) -> bool:
    """Whether each element of the operand is read where the result's is written, and only there."""
    if not _lie_alike(result, operand, operand):
        return False
    read, written = (call.buffers.index(node) for node in (operand, result))
    return call.buffers.count(operand) == 1 and _is_elementwise(call.kernel, read, written)


def _lie_alike(result: fx.Node, operand: fx.Node, memory: fx.Node) -> bool:
    """Whether both are laid out alike without gaps, and the operand is all of its memory."""
    one, other, whole = spec_of(result), spec_of(operand), spec_of(memory)
    if one is None or other is None or whole is None or one.symbolic is not None or other.symbolic is not None:
        return False
    same = (one.shape, one.stride, one.dtype, one.device) == (other.shape, other.stride, other.dtype, other.device)
    return same and one.span == one.numel and one.storage_bytes == other.storage_bytes == whole.storage_bytes


def _is_elementwise(kernel: KernelIR, read: int, written: int) -> bool:
    stores: list[Store] = [store for store in kernel.stores if store.buffer == written]
    if len(stores) != 1 or any(isinstance(step, Reduce) for step in kernel.body):
        return False
    address = stores[0].address
    loads = {place: step for place, step in enumerate(kernel.body) if isinstance(step, Load) and step.buffer == read}
    # What the result is not made of may be loaded after it is stored: a compiler is told that no two buffers overlap.
    if not all(stores[0].value in dependents(kernel, place) for place in loads):
        return False
    plain = not address.indirect and all(load.guard is None and load.address == address for load in loads.values())
    return plain and {loop for loop, c in address.offset.terms if c} >= _counting(kernel)


def _counting(kernel: KernelIR) -> set[int]:
    """The loops that run more than once."""
    return {loop for loop, size in enumerate(kernel.ranges) if size > 1}
