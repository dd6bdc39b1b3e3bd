"""fuse_attention: attention that a program wrote out, or that ATen writes out where it has dropout, as one op.

As products, softmax and dropout the scores of all heads are in memory, and as much again is kept for the backward. One
op (`ops.attention.written_attention`) has a block of scores at a time, and computes it again in the backward. The form
that is matched is softmax(scale * query key^T, plus or filled by a mask) value, in float32 on a CPU, where values are
as wide as keys.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx

import aottrain.ops.attention  # noqa: F401  # defines operators
import aottrain.ops.random.philox  # noqa: F401  # defines operators
from aottrain.compiler.graphs.measured_calls import call_of
from aottrain.compiler.graphs.rewriting import add_call, is_call, laid_out_as
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.ir.graph import JointGraph, calls, marks_of, spec_of
from aottrain.ir.kernels.attention import keeps_more_than_it_computes_in
from aottrain.ir.settings.decisions import ONE_OP, PRODUCTS, Timing
from aottrain.ir.tensor import TensorSpec
from aottrain.measure.calls import OpCall
from aottrain.measure.decisions import decide
from aottrain.measure.timings import sums_timed
from aottrain.toolchain.native import find_compiler

aten, own = torch.ops.aten, torch.ops.aottrain

_SOFTMAXES = (aten._softmax.default, aten._safe_softmax.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
# The op that keeps no scores stays where the products take this share of its time or more: clocks differ by as much.
_AS_FAST = 0.9


def fuse_attention(joint: JointGraph) -> JointGraph:
    """The same program, whose attention rounds otherwise than eager's. The graph itself where none is written out in a
    form that is known, or its products alone take less time; both are measured."""
    if not any(node.target in _SOFTMAXES for node in calls(joint.graph)) or find_compiler() is None:
        return joint
    graph = copy_graph(joint.graph)
    fused = [_fuse(written) for node in list(calls(graph)) if (written := _match(node)) is not None]
    if not any(fused):
        return joint
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


@dataclass(frozen=True)
class _Backward:
    """The backward of attention that is written out."""

    softmax: fx.Node
    """The gradient of the softmax's input."""
    gradient: fx.Node  # of the result
    start: fx.Node
    """The first of the products in the program."""
    products: tuple[fx.Node, ...]
    query: fx.Node | None
    """The product that is the query's gradient, where it is asked for; so are `key` and `value`."""
    key: fx.Node | None
    value: fx.Node | None


@dataclass(frozen=True)
class _Written:
    """Attention that is written out.

    Of the products' operands, (batches, queries, width) is the query, (batches, width, keys) the key, (batches, keys,
    width) the value; batches are those of batch and head.
    """

    softmax: fx.Node
    scores: fx.Node
    """The product of query and key, which is scaled and masked as `rule` says before the softmax."""
    result: fx.Node
    """The product of weights and value."""
    mask: fx.Node | None
    state: fx.Node | None
    rule: dict[str, Any]
    """Arguments of `written_attention` by name."""
    backward: _Backward | None


class _Unlike(Exception):
    """It is not of the form that is looked for."""


def _require(condition: object) -> None:
    if not condition:
        raise _Unlike


def _match(node: fx.Node) -> _Written | None:
    if node.target not in _SOFTMAXES:
        return None
    try:
        return _written(node)
    except _Unlike:
        return None


def _written(softmax: fx.Node) -> _Written:
    spec, dim = _spec(softmax), softmax.args[1]
    rank = len(spec.shape)
    _require(spec.dtype is torch.float32 and spec.device.type == "cpu" and spec.numel and rank in (3, 4))
    _require(dim in (-1, rank - 1) and not softmax.kwargs and softmax.args[2:] in ((), (False,)))
    path = _Path(softmax)
    scores = path.climb()
    derived = [user for user in softmax.users if is_call(user, aten._softmax_backward_data.default)]
    _require(len(derived) <= 1 and all(user.args[1] is softmax for user in derived))
    drop, weights = _dropped(softmax, derived)
    weights, transposed = _weights(weights, derived)
    result = _only_user(weights, transposed, aten.bmm.default)
    _require(result.args[0] is weights and not any(map(marks_of, (softmax, scores, result))))
    _require(_is_of_heads(spec.shape, scores, weights, result))
    rule = {"scale": path.scale, "fill": path.fill, "safe": softmax.target is aten._safe_softmax.default}
    rule |= {"draw": 0, "keep": 1.0} if drop is None else {"draw": drop.draw, "keep": drop.keep}
    factor, state = (None, None) if drop is None else (drop.factor, drop.state)
    backward = _backward(derived[0], (scores, result), path, factor, transposed) if derived else None
    _require(backward is not None or transposed is None)
    return _Written(softmax, scores, result, path.mask, state, rule, backward)


def _is_of_heads(shape: tuple[int, ...], scores: fx.Node, weights: fx.Node, result: fx.Node) -> bool:
    """Whether the products have the softmax's batches, rows and columns, so that no view between them groups elements
    otherwise and no mask repeats them; and values are as wide as keys."""
    *batches, queries, keys = shape
    count, width = math.prod(batches), _spec(scores.args[0]).shape[2]
    expected = (count, queries, keys), (count, queries, keys), (count, queries, width)
    return width > 0 and tuple(_spec(node).shape for node in (scores, weights, result)) == expected


@dataclass
class _Path:
    """What is between a product and its softmax."""

    softmax: fx.Node
    scale: float = 1.0
    mask: fx.Node | None = None
    fill: float = 0.0
    filled: bool = False
    steps: list[tuple[Any, float]] = field(default_factory=list)
    """The scalings, each an op and its number, the last first."""

    def climb(self) -> fx.Node:
        """The product. Each value on the way is read once; what is updated in place is viewed in between."""
        node: Any = _below_views(self.softmax.args[0])
        masked = node
        if is_call(node, aten.masked_fill.Scalar):
            node, self.mask, fill = _arguments(_read_once(node))
            _require(isinstance(fill, (int, float)) and _spec(self.mask).dtype is torch.bool)
            self.fill, self.filled = float(fill), True
        elif is_call(node, aten.add.Tensor):
            left, right = _arguments(_read_once(node))
            node, self.mask = (left, right) if _leads_to_product(left) else (right, left)
            _require(_spec(self.mask).dtype is torch.float32 and len(_spec(self.mask).shape) <= 4)
        _require(self.mask is None or _spec(masked).shape == _spec(self.softmax).shape)
        node = _below_views(node)
        while is_call(node, *_PRODUCTS, *_QUOTIENTS):
            source, number = _arguments(_read_once(node))
            _require(isinstance(number, (int, float)) and number)
            self.steps.append((node.target, number))
            self.scale *= number if node.target in _PRODUCTS else 1.0 / number
            node = _below_views(source)
        _require(is_call(node, aten.bmm.default))
        return _read_once(node)


def _below_views(node: Any) -> Any:
    while is_call(node, *_VIEWS):
        node = _read_once(node).args[0]
    return node


def _leads_to_product(node: Any) -> bool:
    while is_call(node, *_VIEWS, *_PRODUCTS, *_QUOTIENTS):
        node = node.args[0]
    return is_call(node, aten.bmm.default)


@dataclass(frozen=True)
class _Drop:
    """The dropout of a softmax."""

    factor: fx.Node
    """What each weight is multiplied by: 0, or 1 / keep where its random number is below keep."""
    state: fx.Node
    draw: int
    keep: float


def _dropped(softmax: fx.Node, derived: Sequence[fx.Node]) -> tuple[_Drop | None, fx.Node]:
    """The dropout of a softmax, and the weights: what it gives, or the softmax itself."""
    users = [user for user in softmax.users if user not in derived]
    if len(users) != 1 or not is_call(users[0], aten.mul.Tensor):
        return None, softmax
    left, right = _arguments(users[0])
    factor = right if left is softmax else left
    _require(is_call(factor, aten.div.Scalar))
    cast, keep = _arguments(factor)
    _require(is_call(cast, aten._to_copy.default) and _spec(factor).dtype is torch.float32)
    below = cast.args[0]
    _require(is_call(below, aten.lt.Scalar) and below.args[1] == keep and isinstance(keep, float) and 0.0 < keep < 1.0)
    drawn = below.args[0]
    _require(is_call(drawn, own.philox_uniform.default) and _spec(drawn).dtype is torch.float32)
    state, draw, size = _arguments(drawn)
    _require(tuple(size) == _spec(softmax).shape and isinstance(state, fx.Node))
    return _Drop(factor, state, draw, keep), users[0]


def _weights(node: fx.Node, derived: Sequence[fx.Node]) -> tuple[fx.Node, fx.Node | None]:
    """The weights as the product reads them, and their transpose as the value's gradient does."""
    while True:
        users = [user for user in node.users if user not in derived]
        if len(users) != 1 or not is_call(users[0], *_VIEWS):
            break
        node = users[0]
    transposed = [user for user in users if is_call(user, aten.transpose.int) and _swaps(user, 1, 2)]
    _require(len(_spec(node).shape) == 3 and len(users) == 1 + len(transposed) <= 2)
    return node, transposed[0] if transposed else None


def _only_user(node: fx.Node, beside: fx.Node | None, *targets: Any) -> fx.Node:
    users = [
        user for user in node.users if user is not beside and not is_call(user, aten._softmax_backward_data.default)
    ]
    _require(len(users) == 1 and is_call(users[0], *targets))
    return users[0]


def _backward(
    derived: fx.Node,
    forward: tuple[fx.Node, fx.Node],
    path: _Path,
    factor: fx.Node | None,
    transposed: fx.Node | None,
) -> _Backward:
    """derived: the gradient of the softmax's input; forward: the products; transposed: the weights, transposed."""
    (query, key), (_, value) = map(_arguments, forward)
    node: Any = derived.args[0]
    if factor is not None:
        _require(is_call(node, aten.mul.Tensor) and factor in node.args)
        node = next((operand for operand in _arguments(_read_once(node)) if operand is not factor), None)
    node = _below_views(node)
    _require(is_call(node, aten.bmm.default))
    weights = _read_once(node)
    gradient, other = _arguments(weights)
    _require(_is_transpose(other, value) and isinstance(gradient, fx.Node))
    of_value = None
    if transposed is not None:
        of_value = _only_user(transposed, None, aten.bmm.default)
        _require(of_value.args[0] is transposed and of_value.args[1] is gradient)
    node = derived
    if path.filled:
        node = _only_user(node, None, aten.masked_fill.Scalar)
        _require(node.args[1] is path.mask and node.args[2] == 0)
    for target, number in path.steps:
        node = _only_user(node, None, target)
        _require(node.args[1] == number)
    while len(node.users) == 1 and is_call(next(iter(node.users)), *_VIEWS):
        node = next(iter(node.users))
    of_query = of_key = None
    for user in node.users:
        _require(is_call(user, aten.bmm.default))
        left, right = _arguments(user)
        if left is node and _is_transpose(right, key):
            of_query = user
        else:
            _require(right is node and _is_transpose(left, query))
            of_key = user
    products = tuple(product for product in (weights, of_value, of_query, of_key) if product is not None)
    start = weights if of_value is None else min(weights, of_value)
    return _Backward(derived, gradient, start, products, of_query, of_key, of_value)


def _fuse(written: _Written) -> bool:
    """Put the op in the place of the products, where it is faster."""
    scores, result, backward = written.scores, written.result, written.backward
    shape = _spec(written.softmax).shape
    batch, heads, queries, keys = shape if len(shape) == 4 else (1, *shape)
    width = _spec(result).shape[-1]
    rest = written.mask, written.state
    with scores.graph.inserting_before(result):
        query = _heads(scores.args[0], (batch, heads, queries, width))
        key = _heads(scores.args[1], (batch, heads, keys, width), transposed=True)
        value = _heads(result.args[1], (batch, heads, keys, width))
        forward = add_call(result, own.written_attention.default, (query, key, value, *rest), None, **written.rule)
        mixed, sums = (add_call(result, operator.getitem, (forward, i)) for i in range(2))
        replacements = {result: _laid_out(mixed, result)}
    fused_calls, product_calls = [forward], [scores, written.softmax, result]
    if backward is not None:
        with scores.graph.inserting_before(backward.start):
            gradient = _heads(backward.gradient, (batch, heads, queries, width))
            arguments = (gradient, query, key, value, mixed, sums, *rest)
            like = backward.start
            call = add_call(like, own.written_attention_backward.default, arguments, None, **written.rule)
            for number, old in enumerate((backward.query, backward.key, backward.value)):
                if old is not None:
                    item = add_call(like, operator.getitem, (call, number))
                    replacements[old] = _laid_out(item, old, transposed=number == 1)
        fused_calls.append(call)
        product_calls += [*backward.products, backward.softmax]
    if None in replacements.values() or not _is_faster(fused_calls, product_calls):
        return False  # nothing reads the new calls
    for old, new in replacements.items():
        assert new is not None
        old.replace_all_uses_with(new)
    return True


def _heads(node: Any, shape: tuple[int, ...], transposed: bool = False) -> fx.Node:
    """What a product reads as (batch, heads, rows, width): as it was before it was copied for the product, where its
    rows are whole in memory. transposed: the product reads (batches, width, rows)."""
    order = (*shape[:2], shape[3], shape[2]) if transposed else shape
    best, up = None, node
    while True:
        spec = _spec(up)
        if spec.numel != _spec(node).numel:
            break
        if spec.shape == order and spec.stride[2 if transposed else 3] == 1:
            best = up
        if not is_call(up, *_VIEWS, aten.clone.default):
            break
        up = up.args[0]
    if best is None:
        best = add_call(node, aten.view.default, (node, list(order)))
    if not transposed:
        return best
    if is_call(best, aten.transpose.int) and _swaps(best, 2, 3):
        return _arguments(best)[0]
    return add_call(best, aten.transpose.int, (best, 2, 3))


def _laid_out(value: fx.Node, old: fx.Node, transposed: bool = False) -> fx.Node | None:
    """(batch, heads, rows, width) as the product `old` gave it."""
    batch, heads, rows, width = _spec(value).shape
    flat = add_call(value, aten.view.default, (value, [batch * heads, rows, width]))
    if transposed:
        flat = add_call(value, aten.transpose.int, (flat, 1, 2))
    return laid_out_as(flat, old)


def _is_faster(fused_nodes: Sequence[fx.Node], product_nodes: Sequence[fx.Node]) -> bool:
    """Than the products and the softmax. What mask and dropout take on either side is left out, but for our mask."""
    fused_calls = [_without_dropout(call) for call in map(call_of, fused_nodes) if call is not None]
    product_calls = [call for call in map(call_of, product_nodes) if call is not None]
    names = [call.plain_text for call in fused_calls]
    if None in names or len(fused_calls) + len(product_calls) < len(fused_nodes) + len(product_nodes):
        return False
    measure = partial(sums_timed, {ONE_OP: fused_calls, PRODUCTS: product_calls})
    shapes = [_spec(operand).shape for operand in _arguments(fused_nodes[0])[:2]]
    model = ONE_OP if keeps_more_than_it_computes_in(*shapes) else PRODUCTS
    prefer = partial(_prefer, share=_AS_FAST if model == ONE_OP else 1.0)
    return decide("written attention", " and ".join(map(str, names)), model, measure, prefer).choice == ONE_OP


def _prefer(times: Mapping[str, Timing], share: float) -> str:
    return ONE_OP if times[PRODUCTS].seconds > share * times[ONE_OP].seconds else PRODUCTS


def _without_dropout(call: OpCall) -> OpCall:
    return replace(call, args=(*call.args[:-1], None), kwargs={**call.kwargs, "draw": 0, "keep": 1.0})


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _read_once(node: Any) -> fx.Node:
    _require(isinstance(node, fx.Node) and len(node.users) == 1 and not node.kwargs)
    return node


def _is_transpose(node: Any, source: Any) -> bool:
    return is_call(node, aten.transpose.int) and node.args[0] is source and _swaps(node, 1, 2)


def _swaps(node: fx.Node, first: int, second: int) -> bool:
    rank = len(_spec(node).shape)
    return {dim % rank for dim in _arguments(node)[1:]} == {first, second}


def _spec(node: Any) -> TensorSpec:
    spec = spec_of(node) if isinstance(node, fx.Node) else None
    _require(spec is not None and spec.symbolic is None)
    assert spec is not None
    return spec
