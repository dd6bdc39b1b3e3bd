"""reading_least: results of the program that the backward computes again instead of reading them.

A result is alive anyway, so that nothing is gained in memory if it is not kept. But what a relu gave follows from its
operand, which the backward reads for the gradient of a scale before it: there the result need not be read as well. It
is handed over all the same, for a later write to it is to raise as in eager.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import replace

from torch import fx

from aottrain.ir.analysis.reach import ancestors
from aottrain.ir.graph import info, is_size, spec_of, storage_bytes, storage_root
from aottrain.ir.ops import OpKind
from aottrain.ir.plan import PartitionPlan
from aottrain.ir.sizes.expressions import hint

_IN_CACHE = 1 << 16  # bytes: what is smaller is in a cache when it is read
_VIEWS = (OpKind.VIEW, OpKind.STRUCTURE)
_HANDED = "output: handed over for a later write to it, and computed again from what the backward reads besides"
_FOR_IT = "for a result that is computed again instead of being read"


def reading_least(
    plan: PartitionPlan,
    region: Sequence[fx.Node],
    outputs: Set[fx.Node],
    demanded: Set[fx.Node],
    copied: Set[fx.Node],
    is_quick: Callable[[Sequence[fx.Node]], bool],
    moved_bytes: Callable[[PartitionPlan], int],
) -> PartitionPlan:
    """The plan, or the one whose backward computes such outputs again, where kernels move fewer bytes so.

    region: what the backward could need, in program order; demanded: what its own calls read; copied: inputs that it
    may read through a saved copy alone; is_quick: whether to run these calls again takes no longer than to read their
    last result.
    """
    saved = {node for node in region if node.name in plan.saved}
    found = _found([node for node in region if node in outputs & saved], saved, demanded, is_quick)
    if not found:
        return plan
    given = saved.difference(found)
    needed = ancestors(demanded, stop=given) - given
    again = [node.name for node in region if node in needed and node.op == "call_function" and not is_size(node)]
    copies = needed & copied
    reasons = {
        **dict.fromkeys(again, _FOR_IT),
        **dict.fromkeys((node.name for node in copies), _FOR_IT),
        **plan.reasons,
    }
    other = replace(
        plan,
        saved=tuple(node.name for node in region if node in saved | copies),
        recomputed=tuple(again),
        reasons={**reasons, **{node.name: _HANDED for node in found}},
        saved_bytes=plan.saved_bytes + sum(map(storage_bytes, copies)),
    )
    return min(plan, other, key=moved_bytes)


def _found(
    outputs: Sequence[fx.Node],
    saved: set[fx.Node],
    demanded: Set[fx.Node],
    is_quick: Callable[[Sequence[fx.Node]], bool],
) -> list[fx.Node]:
    """Those that follow from what the backward reads besides and from what is small."""
    chosen = list[fx.Node]()
    for value in filter(is_large, outputs):
        left = {value, *chosen}
        given = saved - left
        made, needed = ancestors([value], stop=given), ancestors(demanded - left, stop=given)
        more = [node for node in made - needed if not _is_given(node, given) and info(node).kind not in _VIEWS]
        read = {storage_root(node) for node in needed if _is_given(node, given)}
        if any(_is_given(node, given) and is_large(node) and storage_root(node) not in read for node in made):
            continue
        if is_quick(more):
            chosen.append(value)
    return chosen


def _is_given(node: fx.Node, saved: Set[fx.Node]) -> bool:
    return node.op == "placeholder" or node in saved


def is_large(node: fx.Node) -> bool:
    return spec_of(node) is not None and hint(storage_bytes(node)) >= _IN_CACHE
