"""Stacks of stacks, whose parts a kernel writes to their places in the whole."""

from __future__ import annotations

import torch
from torch import fx

from aottrain.compiler.lowering import Rule, rules_for
from aottrain.compiler.lowering.indexing import in_parts
from aottrain.compiler.lowering.rules import argument, arguments, spec


def tiled(node: fx.Node) -> list[Rule]:
    """Of stacks that are stacked, which nothing else reads, each part is written to its place in the whole."""
    if node.target is not torch.ops.aten.stack.default or not rules_for(node):
        return []
    own, rows = spec(node), arguments(node)[0]
    dim = argument(node, "dim", 1, 0) % len(own.shape)
    alike = {(len(row.args[0]), row.args[1]) for row in rows if row.target is node.target and len(row.args) == 2}
    if len(alike) != 1 or any(row.target is not node.target or len(row.users) > 1 for row in rows) or len(rows) < 2:
        return []
    parts: list[fx.Node] = [part for row in rows for part in arguments(row)[0]]
    within: int = arguments(rows[0])[1] % len(spec(rows[0]).shape)
    within += dim <= within
    if len(parts) > 8 or any(spec(part).dtype is not own.dtype for part in parts):
        return []
    kept = [d for d in range(len(own.shape)) if d not in (dim, within)]
    dims = [kept.index(d) if d in kept else None for d in range(len(own.shape))]
    count = len(parts) // len(rows)
    starts = [own.stride[dim] * i + own.stride[within] * j for i in range(len(rows)) for j in range(count)]
    return in_parts(node, parts, dims, starts)
