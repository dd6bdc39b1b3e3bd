"""widen_products: a product of halves on a GPU whose result is a gradient in float32 gives it in float32 at once.

Under autocast eager rounds such a product to bfloat16, and then casts it to the type of the weight. A library sums in
float32 in either case: without the rounding and the cast nothing is written twice, and the gradient is nearer to the
exact one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, is_cast
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, marks_of, required_spec, spec_of

aten = torch.ops.aten

_WIDE: dict[Any, Any] = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}
_VIEWS = (aten.t.default, aten.transpose.int, aten.permute.default, aten.view.default, aten._unsafe_view.default)
_HALVES = (torch.bfloat16, torch.float16)


def widen_products(joint: JointGraph) -> JointGraph:
    """The same program up to rounding; the graph itself where it has no such product."""
    if not any(map(_chain, calls(joint.graph))):
        return joint
    graph = copy_graph(joint.graph)
    for cast in list(calls(graph)):
        if chain := _chain(cast):
            product, *views = chain
            with graph.inserting_before(cast):
                value = add_call(cast, _WIDE[product.target], (*product.args, torch.float32))
                for view in views:
                    value = add_call(cast, view.target, (value, *view.args[1:]))
            cast.replace_all_uses_with(value)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def _chain(cast: fx.Node) -> list[fx.Node]:
    """The product and the views of it that a cast reads, which nothing else does; empty where the call is another."""
    if not is_cast(cast, torch.float32) or [user.op for user in cast.users] != ["output"]:
        return []
    chain = [cast]
    while chain[-1].target not in _WIDE:
        source = chain[-1].args[0]
        if not isinstance(source, fx.Node) or source.target not in (*_VIEWS, *_WIDE):
            return []
        if len(source.users) != 1 or marks_of(source):
            return []
        chain.append(source)
    spec, product = required_spec(cast), chain[-1]
    made = spec_of(product)
    wide = made is not None and made.dtype in _HALVES and made.device.type == "cuda" and made.symbolic is None
    same_layout = spec.stride == required_spec(chain[1]).stride
    return chain[:0:-1] if wide and same_layout and not product.kwargs else []
