"""classes_last: a cross-entropy whose classes come second, and last in memory, as one of rows.

`F.cross_entropy(logits.transpose(1, 2), target)` is how many write the loss of sequences. The logits lie in memory as a
layer gave them: each row of classes is in one place. As rows the loss is what all that follows knows: a head that is
computed in chunks, a loss of each row in the kernel of its softmax.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import (
    RESHAPES,
    add_call,
    cast,
    fake_result,
    is_call,
    is_cast,
    laid_out_as,
    reads_alike,
)
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, info, required_spec, spec_of
from aottrain.ir.ops import OpKind
from aottrain.ops.losses.nll import NONE

aten = torch.ops.aten

_VIEWS = (*RESHAPES, aten.unsqueeze.default)
_TURNS = (aten.permute.default, aten.transpose.int)


def classes_last(joint: JointGraph) -> JointGraph:
    """The same program; sums over rows are rounded otherwise. The graph itself where it has no such loss."""
    return split_calls(joint, lambda node: _log_softmax(node) is not None, _split)


def _log_softmax(node: fx.Node) -> fx.Node | None:
    """That of a loss of fixed size whose logits have their classes in the second dimension, and last in memory."""
    if not is_call(node, aten.nll_loss2d_forward.default) or node.kwargs or not node.users:
        return None
    specs = [spec_of(source) for source in node.all_input_nodes]
    if any(spec is None or spec.symbolic is not None or spec.numel == 0 for spec in specs):
        return None
    scores = node.args[0]
    while is_call(scores, *_VIEWS):
        scores = scores.args[0]  # type: ignore[union-attr]
    if not is_call(scores, aten._log_softmax.default) or scores.args[1] != 1:  # type: ignore[union-attr]
        return None
    assert isinstance(scores, fx.Node) and isinstance(scores.args[0], fx.Node)
    logits, losses = required_spec(scores.args[0]), required_spec(node.args[0])
    if losses.shape[:2] != logits.shape[:2] or losses.numel != logits.numel:
        return None
    return scores if logits.shape[1] > 1 and logits.stride[1] == 1 else None


def _split(loss: fx.Node) -> None:
    old = _log_softmax(loss)
    assert old is not None
    shape = required_spec(old).shape
    order = (0, *range(2, len(shape)), 1)
    num_rows = math.prod(shape) // shape[1]
    graph = loss.graph
    with graph.inserting_before(old):
        rows = _turned(old, old.args[0], order)
        flat = _viewed(old, rows, (num_rows, shape[1]))
        softmax = add_call(old, old.target, (flat or rows, 1 if flat else len(shape) - 1, *old.args[2:]))
        softmax = softmax if flat else add_call(old, aten.view.default, (softmax, [num_rows, shape[1]]))
    gradients: dict[fx.Node, fx.Node] = {}
    readers = list(_readers(old))
    for each in [user for user in readers if _log_softmax(user) is old]:
        of_rows = _loss_of_rows(each, softmax, num_rows)
        for user in readers:
            if is_call(user, aten.nll_loss2d_backward.default) and user.args[2:6] == each.args[1:]:
                with graph.inserting_before(user):
                    upstream = user.args[0] if each.args[3] != NONE else _flattened(user, user.args[0], num_rows)
                    rest = *of_rows.args[1:], user.args[6]
                    gradients[user] = add_call(user, aten.nll_loss_backward.default, (upstream, softmax, *rest))
    for user in [user for user in old.users if is_call(user, aten._log_softmax_backward_data.default)]:
        _rewrite_gradient(user, softmax, gradients, order)
    for node, made in ((old, softmax), *gradients.items()):
        if node.users:
            with graph.inserting_before(made.next):
                _stand_in(node, _as_it_was(node, made))


def _readers(value: fx.Node) -> dict[fx.Node, None]:
    """What reads a value or views of it in another shape."""
    found: dict[fx.Node, None] = {}
    for user in value.users:
        found |= _readers(user) if is_call(user, *_VIEWS) else {user: None}
    return found


def _loss_of_rows(loss: fx.Node, softmax: fx.Node, num_rows: int) -> fx.Node:
    with loss.graph.inserting_before(loss):
        target = _flattened(loss, loss.args[1], num_rows)
        made = add_call(loss, aten.nll_loss_forward.default, (softmax, target, *loss.args[2:]))
        for user in list(loss.users):
            item = add_call(user, operator.getitem, (made, user.args[1]))
            if required_spec(item).shape != required_spec(user).shape:
                item = add_call(user, aten.view.default, (item, list(required_spec(user).shape)))
            user.replace_all_uses_with(laid_out_as(item, user) or item)
    return made


def _rewrite_gradient(node: fx.Node, softmax: fx.Node, gradients: dict[fx.Node, fx.Node], order: Sequence[int]) -> None:
    """That of the log-softmax, of the loss's gradient where that alone is its own."""
    given, *rest = node.args
    source = given
    while is_call(source, *_VIEWS):
        source = source.args[0]  # type: ignore[union-attr]
    assert isinstance(given, fx.Node) and isinstance(source, fx.Node)
    with node.graph.inserting_before(node):
        rows = gradients.get(source)
        if rows is None:
            turned = add_call(node, aten.permute.default, (given, list(order)))
            shape = required_spec(softmax).shape
            rows = _viewed(node, turned, shape) or _viewed(node, _contiguous(node, turned), shape)
        made = add_call(node, node.target, (rows, softmax, 1, *rest[2:]))
        _stand_in(node, _as_it_was(node, made))


def _as_it_was(old: fx.Node, rows: fx.Node) -> fx.Node:
    """Rows of classes, where graph inserts now, in the shape of the value that they stand for."""
    first, classes, *others = required_spec(old).shape
    whole = add_call(old, aten.view.default, (rows, [first, *others, classes]))
    return add_call(old, aten.permute.default, (whole, [0, len(others) + 1, *range(1, len(others) + 1)]))


def _stand_in(old: fx.Node, new: fx.Node) -> None:
    """Use the new value, which may lie otherwise in memory; views and casts of it lie otherwise, too."""
    if required_spec(new).same_layout(required_spec(old)):
        old.replace_all_uses_with(new)
        return
    copy: fx.Node | None = None
    for user in list(old.users):
        with old.graph.inserting_before(user):
            made = _view_of(user, old, new)
            if made is not None:
                _stand_in(user, made)
            elif _is_copy(user) and required_spec(new).same_layout(required_spec(user)):
                user.replace_all_uses_with(new)
            elif reads_alike(user, {old: new}):
                user.replace_input_with(old, new)
            else:
                copy = laid_out_as(new, old) if copy is None else copy
                assert copy is not None
                user.replace_input_with(old, copy)


def _view_of(user: fx.Node, old: fx.Node, new: fx.Node) -> fx.Node | None:
    """The view or cast of the new value in the place of one of the old; None where it is neither, or the new one has no
    such view."""
    if _is_cast(user):
        return cast(user, new, required_spec(user).dtype)
    if user.op != "call_function" or info(user).kind is not OpKind.VIEW or list(user.all_input_nodes) != [old]:
        return None
    if user.target in _TURNS:
        return _turned(user, new, _dims_of(user))
    return _view(user, user.target, (new, *user.args[1:]), dict(user.kwargs))


def _is_copy(node: fx.Node) -> bool:
    """A copy that nobody outside of the program can tell from what it is of."""
    is_copied = is_call(node, aten.clone.default) and node.kwargs == {"memory_format": torch.contiguous_format}
    return is_copied and node.graph.output_node() not in node.users


def _turned(like: fx.Node, value: fx.node.Argument, order: Sequence[int]) -> fx.Node:
    """With its dimensions in this order; what was turned before is turned once, or not at all, and cast afterwards."""
    assert isinstance(value, fx.Node)
    if _is_cast(value) and len(value.users) < 2:
        return cast(value, _turned(like, value.args[0], order), required_spec(value).dtype)
    while is_call(value, *_TURNS):
        dims = _dims_of(value)
        order, value = [dims[d] for d in order], value.args[0]
        assert isinstance(value, fx.Node)
    return value if list(order) == sorted(order) else add_call(like, aten.permute.default, (value, list(order)))


def _is_cast(node: fx.Node) -> bool:
    return is_call(node, aten._to_copy.default) and is_cast(node, required_spec(node).dtype)


def _dims_of(turn: fx.Node) -> list[int]:
    """For each dimension of the result that of what is turned."""
    rank = len(required_spec(turn).shape)
    given: Any = turn.args[1:]
    if turn.target is aten.permute.default:
        return [d % rank for d in given[0]]
    dims, first, second = list(range(rank)), given[0] % rank, given[1] % rank
    dims[first], dims[second] = second, first
    return dims


def _viewed(like: fx.Node, value: fx.Node, shape: Sequence[int]) -> fx.Node | None:
    return _view(like, aten.view.default, (value, list(shape)), {})


def _view(like: fx.Node, target: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node | None:
    """None where no strides go through the memory so."""
    try:
        fake_result(target, arguments, kwargs)
    except (ValueError, RuntimeError):  # of fakes and of tensors
        return None
    return add_call(like, target, arguments, **kwargs)


def _contiguous(like: fx.Node, value: fx.Node) -> fx.Node:
    return add_call(like, aten.clone.default, (value,), memory_format=torch.contiguous_format)


def _flattened(like: fx.Node, value: fx.node.Argument, num_rows: int) -> fx.Node:
    assert isinstance(value, fx.Node)
    made = _viewed(like, value, (num_rows,)) or _viewed(like, _contiguous(like, value), (num_rows,))
    assert made is not None
    return made
