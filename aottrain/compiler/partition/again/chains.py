"""ends_of_chains: values to save so that recompute does not lead through many reductions.

Pointwise work is recomputed within the kernel that needs it. A chain of norms and softmaxes is not. The backward needs
its last reduction first. So each would be computed from the start of the chain, or all of them at once before the
backward begins: then they are held, in no fewer bytes than if they had been saved.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import torch
from torch import fx

from aottrain.compiler.lowering import rules_for
from aottrain.compiler.schedule.grouping.groups import preferred
from aottrain.ir.analysis.liveness import last_uses
from aottrain.ir.graph import info, is_size, spec_of, storage_root, storage_roots, value_of
from aottrain.ir.ops import OpKind
from aottrain.ir.sizes.expressions import hint

# Reductions one after the other that may lie between what is saved and what is computed from it again: those of one
# residual branch, as a norm and what it feeds.
_DEEPEST = 2
# Results of the size of their input, but each element of them depends on a whole row of it.
_ROWWISE = {
    "_softmax", "_log_softmax", "native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update_functional", "cumsum", "cumprod", "logcumsumexp",
}  # fmt: skip
_OF_BATCH = "aottrain.batch_spread.default"
_STATISTICS = ("aten.var_mean.correction", _OF_BATCH)
# Of the elements that statistics are of: they are kept where they are at most one in so many.
_CONDENSED = 128
# Of what a reduction reads, how much is looked through for another one.
_MOST_CALLS = 32


def ends_of_chains(nodes: Sequence[fx.Node], needed: Set[fx.Node], kept: Set[fx.Node]) -> set[fx.Node]:
    """Values to keep: each is all that the rest of the forward reads of what came before, and deep in a chain.

    nodes: the forward, in program order; needed: what the backward could need; kept: what is never computed again.
    """
    roots = storage_roots(nodes)
    # Of each storage's node its last reader; itself, where there is none.
    last = last_uses(
        [roots[node], *(roots.get(source) or storage_root(source) for source in node.all_input_nodes)] for node in nodes
    )
    final = max((i for i, node in enumerate(nodes) if node in needed and _reduces(node)), default=-1)
    ends: set[fx.Node] = set()
    depth: dict[fx.Node, int] = {}
    open_values: set[fx.Node] = set()  # computed, and read further down; without what is kept
    for i, node in enumerate(nodes):
        if i >= final:
            break
        if node.op == "placeholder" or is_size(node) or node in kept:
            depth[node] = 0
            continue
        sources = [depth[source] for source in node.all_input_nodes if source in depth]
        depth[node] = max(sources, default=0) + _reduces(node)
        root = roots[node]
        if root.op != "placeholder" and root not in kept and isinstance(value_of(root), torch.Tensor):
            open_values.add(root)
        open_values = {value for value in open_values if last[value] > i}
        if len(open_values) == 1:
            (value,) = open_values
            if depth[value] >= _DEEPEST and value in needed:
                ends.add(value)
                depth = dict.fromkeys(depth, 0)
                open_values = set()
    return ends


def _reduces(node: fx.Node) -> bool:
    """Whether an element of the result depends on many of the input."""
    if node.op != "call_function" or info(node).kind is not OpKind.CHEAP:
        return False
    if info(node).name.split(".")[1] in _ROWWISE:
        return True
    value = value_of(node)
    largest = max((_num_elements(value_of(source)) for source in node.all_input_nodes), default=0)
    return _num_elements(value) < largest


def condenses(node: fx.Node) -> bool:
    """Whether it takes passes of its own over all that it reads, and gives hardly any bytes: the statistics of a group
    or batch norm, or a sum that is complete only when all rows are done. Of norms of rows statistics are made again in
    the kernels of their gradients, which hold these rows anyway."""
    if node.op != "call_function" or not (info(node).name in _STATISTICS or _ends_pass(node)):
        return False
    return _num_elements(value_of(node)) * _CONDENSED <= _num_elements(value_of(node.all_input_nodes[0]))


def ends_chain(node: fx.Node) -> bool:
    """Whether a call that runs once ends a chain. A batch norm's statistics do not, nor do sums: what is normalised
    after them would be computed again for each convolution's gradient, and written for it."""
    return info(node).name != _OF_BATCH and not _ends_pass(node)


def _ends_pass(node: fx.Node) -> bool:
    """Whether it is a reduction over all rows, or one along other dimensions than what it reads was reduced along."""
    rules = rules_for(node)
    if not rules or not rules[0].reduced:
        return False
    if preferred(node, rules)[0].columns:
        return True
    own, stack, seen = rules[0], [operand.node for operand in rules[0].operands], set[fx.Node]()
    while stack and len(seen) < _MOST_CALLS:
        value = stack.pop()
        made = rules_for(value) if value not in seen and spec_of(value) is not None else []
        seen.add(value)
        if not made or made[0].shape != own.shape:
            continue
        if made[0].reduced and made[0].reduced != own.reduced and len(own.shape) == len(spec_of(value).shape):  # type: ignore[union-attr]
            return True
        stack += [operand.node for operand in made[0].operands]
    return False


def _num_elements(value: object) -> int:
    """Of the largest tensor; of symbolic sizes in the call that is traced: the plan is no reason for a guard."""
    values = value if isinstance(value, (tuple, list)) else [value]
    return max((hint(leaf.numel()) for leaf in values if isinstance(leaf, torch.Tensor)), default=0)
