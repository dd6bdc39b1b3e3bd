"""chunk_loss_heads: a linear layer followed by cross-entropy as one op, which computes it in chunks of rows.

The op gives the loss, and also the gradients for an upstream gradient of 1. The backward multiplies them by the real
one. So neither the logits nor the log-probabilities are saved, or are ever whole in memory.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, laid_out_as
from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.passes.rows.classes_last import classes_last
from aottrain.ir.graph import JointGraph, calls, info, marks_of, module_of, required_spec, source_of, spec_of
from aottrain.ir.settings.decisions import ATEN
from aottrain.ir.tensor import TensorSpec
from aottrain.ir.units import format_bytes
from aottrain.ops.losses import loss_head as _op  # defines the op
from aottrain.ops.products.libraries import chosen_library

aten = torch.ops.aten

_LAYOUT = (aten.view.default, aten._unsafe_view.default)  # rows of the last dimension stay rows
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
_RESULTS = ("loss", "num_counted", "unit_hidden", "unit_weight", "unit_bias")  # of the op
# Logits of a chunk, in bytes, and the fewest rows. On a CPU they stay in the cache, unless the weights would then be
# read too often for what is computed with them; a GPU is kept busy by larger products.
_CHUNKS = {"cpu": (8 << 20, 256), "cuda": (256 << 20, 1024)}


@dataclass(frozen=True)
class Layer:
    """A call of a linear layer."""

    product: fx.Node
    hidden: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    transposed: bool
    """Whether the layer's weight is the transpose of `weight`, as where autocast casts what was transposed."""


@dataclass(frozen=True)
class Gradients:
    """What the backward makes of the logits' gradient; None where nobody asks for it."""

    upstream: fx.Node
    """The gradient of the loss."""
    hidden: fx.Node | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None

    @property
    def nodes(self) -> tuple[fx.Node | None, ...]:
        return self.hidden, self.weight, self.bias


@dataclass(frozen=True)
class LossHead:
    """One cross-entropy of the program."""

    loss: fx.Node
    reason: str = ""
    """Why it stays whole; "" where it is computed in chunks."""
    layer: Layer | None = None
    """None where it stays whole."""
    gradients: Gradients | None = None
    """None where the loss is not differentiated."""
    chunk: int = 0
    """Rows of a chunk."""
    softmax_dtype: torch.dtype = torch.float32
    """What log-probabilities are rounded to."""

    def __str__(self) -> str:
        location = ", ".join(part for part in (module_of(self.loss), source_of(self.loss)) if part)
        title = f"cross-entropy{f' ({location})' if location else ''}"
        if self.layer is None:
            return f"{title}: whole: {self.reason}"
        logits = required_spec(self.layer.product)
        rows, classes = logits.shape
        small = self.chunk * classes * logits.dtype.itemsize
        return (
            f"{title}: in {-(-rows // self.chunk)} chunks of {self.chunk} of {rows} rows: "
            f"{format_bytes(small)} of logits at a time instead of {format_bytes(logits.nbytes)}"
        )


class _Unfit(Exception):
    """Why a cross-entropy is not computed in chunks."""


def find_loss_heads(joint: JointGraph, rows: int | None = None) -> tuple[LossHead, ...]:
    """Every cross-entropy of the functional joint graph, with the decision about it.

    rows: of a chunk; None: as many as a model of caches says, and only where that saves memory.
    """
    return tuple(_examine(node, rows) for node in calls(joint.graph) if node.target in _LOSSES)


def chunk_loss_heads(joint: JointGraph, heads: Sequence[LossHead]) -> JointGraph:
    """The same program with those of the heads that fit computed in chunks. `heads` are of this graph."""
    if not any(head.layer for head in heads):
        return joint
    graph = copy_graph(joint.graph)
    # The copy has the same nodes in the same order, but maybe other names.
    new = dict(zip(joint.graph.nodes, graph.nodes, strict=True))
    for head in heads:
        if head.layer is not None:
            _rewrite(graph, head, head.layer, new)
    remove_dead_code(graph)
    graph.lint()
    return joint.with_graph(graph)


def with_chunked_heads(joint: JointGraph) -> tuple[JointGraph, tuple[str, ...]]:
    """The program with each head in chunks that fits, and a line about each; losses become ones of rows where more fit
    then."""
    heads, rows = find_loss_heads(joint), classes_last(joint)
    of_rows = heads if rows is joint else find_loss_heads(rows)
    if sum(head.layer is not None for head in of_rows) > sum(head.layer is not None for head in heads):
        joint, heads = rows, of_rows
    return chunk_loss_heads(joint, heads), tuple(map(str, heads))


def _examine(loss: fx.Node, rows: int | None) -> LossHead:
    try:
        log_softmax = _log_softmax(loss)
        chain, layer = _layer(log_softmax)
        _check_alone(loss, log_softmax, chain)
        gradients = _gradients(loss, log_softmax, layer)
        _check_types(layer, gradients)
        chunk = _rows_of_chunk(layer, gradients, rows)
        return LossHead(loss, "", layer, gradients, chunk, required_spec(log_softmax).dtype)
    except _Unfit as refusal:
        return LossHead(loss, str(refusal))


def _log_softmax(loss: fx.Node) -> fx.Node:
    scores, target, weights, reduction, _ = loss.args
    _require(loss.target is aten.nll_loss_forward.default, "its classes are not the last dimension")
    _require(weights is None, "its classes are weighted")
    _require(reduction in (_op.MEAN, _op.SUM), "its losses are not reduced")
    assert isinstance(scores, fx.Node) and isinstance(target, fx.Node)
    if scores.target is aten._to_copy.default:  # under autocast on CUDA: a log-softmax in bfloat16, a loss in float32
        scores = scores.args[0]
    assert isinstance(scores, fx.Node)
    _require(scores.target is aten._log_softmax.default, f"its scores are those of {_name(scores)}")
    _require(spec_of(scores) is not None and len(required_spec(scores).shape) == 2, "it is of a single example")
    _require(scores.args[1] in (1, -1), "its classes are not the last dimension")
    return scores


def _layer(log_softmax: fx.Node) -> tuple[list[fx.Node], Layer]:
    """The values from the layer's result to the log-softmax, the last first; and the layer."""
    chain = [log_softmax]
    node = log_softmax.args[0]
    while isinstance(node, fx.Node) and node.target in (*_LAYOUT, aten._to_copy.default):
        chain.append(node)
        node = node.args[0]
    _require(_num_casts(chain) <= 1, "its logits are rounded twice")
    assert isinstance(node, fx.Node)
    _require(node.target in (aten.mm.default, aten.addmm.default), f"its logits are those of {_name(node)}")
    _require(not node.kwargs, "the product of its layer is scaled")
    hidden, columns = node.args[-2:]
    bias = node.args[0] if node.target is aten.addmm.default else None
    assert isinstance(hidden, fx.Node) and isinstance(columns, fx.Node)
    weight = _transposed(columns)
    _require(not any(required_spec(value).symbolic for value in (node, hidden, columns)), "its sizes are symbolic")
    _require(required_spec(node).shape == required_spec(log_softmax).shape, "its rows are not those of the layer")
    _require(
        bias is None or (isinstance(bias, fx.Node) and len(required_spec(bias).shape) == 1), "its layer adds a matrix"
    )
    return [*chain, node], Layer(node, hidden, weight or columns, bias, weight is None)  # type: ignore[arg-type]


def _gradients(loss: fx.Node, log_softmax: fx.Node, layer: Layer) -> Gradients | None:
    softmaxes = [node for node in log_softmax.users if node.target is aten._log_softmax_backward_data.default]
    if not softmaxes:
        return None
    gradient = softmaxes[0].args[0]
    assert isinstance(gradient, fx.Node)
    if gradient.target is aten._to_copy.default and loss.args[0] is not log_softmax:
        _require(len(gradient.users) == 1, "its log-probabilities have another gradient")
        gradient = gradient.args[0]
    assert isinstance(gradient, fx.Node)
    same = gradient.target is aten.nll_loss_backward.default and gradient.args[1:6] == loss.args
    _require(len(softmaxes) == 1 and same and len(gradient.users) == 1, "its log-probabilities have another gradient")
    upstream = gradient.args[0]
    _require(isinstance(upstream, fx.Node) and required_spec(upstream).shape == (), "its gradient is not one number")
    chain = [node := softmaxes[0]]
    while len(node.users) == 1 and (user := next(iter(node.users))).target in (*_LAYOUT, aten._to_copy.default):
        chain.append(node := user)
    _require(_num_casts(chain) <= 1, "the gradient of its logits is rounded twice")
    _require(_same_type(node, layer.product), "the gradient of its logits has another type than they")
    assert isinstance(upstream, fx.Node)
    return _readers(node, layer, upstream)


def _readers(gradient: fx.Node, layer: Layer, upstream: fx.Node) -> Gradients:
    """The three results that the gradient of the logits may be read for, and nothing else."""
    readers: dict[str, fx.Node] = {}
    for user in gradient.users:
        kind, node = "", user
        if user.target is aten.mm.default and user.args[0] is gradient and _is_weight(user.args[1], layer):
            kind = "hidden"
        elif _transposed(user) is gradient and len(user.users) == 1:
            node = next(iter(user.users))
            if node.target is aten.mm.default and node.args == (user, layer.hidden):
                kind = "weight"
        elif user.target is aten.sum.dim_IntList and user.args[1:] == ([0], True) and not user.kwargs:
            kind = "bias" if layer.bias is not None else ""
        _require(kind and kind not in readers, f"the gradient of its logits is also read by {_name(user)}")
        readers[kind] = node
    return Gradients(upstream, **readers)


def _check_alone(loss: fx.Node, log_softmax: fx.Node, chain: list[fx.Node]) -> None:
    """Whether nothing but the loss and its gradient reads the logits."""
    scores = loss.args[0]
    assert isinstance(scores, fx.Node)
    backward = {scores: aten.nll_loss_backward.default}
    # The gradient of a log-softmax reads its result, and so does that of the loss where it is not cast in between.
    readers = {loss, *(user for user in log_softmax.users if user.target is aten._log_softmax_backward_data.default)}
    for node in chain if scores is log_softmax else [scores, *chain]:
        kind = "log-probabilities" if node in (scores, log_softmax) else "logits"
        others = [user for user in node.users if user not in readers and user.target is not backward.get(node)]
        _require(not others, f"its {kind} are also read by {_name(others[0])}" if others else "")
        _require(not marks_of(node), "it is inside torch.utils.checkpoint")
        softmaxes = readers.difference({loss}) if node is scores and scores is not log_softmax else set()
        readers = {node, *softmaxes}


def _check_types(layer: Layer, gradients: Gradients | None) -> None:
    dtype = required_spec(layer.product).dtype
    _require(dtype.is_floating_point, f"its logits are {dtype}")
    # What a caller's loss scaling keeps from underflow is lost where the upstream gradient is multiplied in afterwards.
    scaled = dtype is torch.float16 and gradients is not None
    _require(not scaled, "gradients in float16 need the upstream gradient before they are rounded")


def _rows_of_chunk(layer: Layer, gradients: Gradients | None, rows_asked: int | None) -> int:
    """Rows at a time; refuses where the logits are hardly larger than a chunk, or than what is kept in their place."""
    logits, width = required_spec(layer.product), required_spec(layer.hidden).shape[1]
    rows, classes = logits.shape
    if rows_asked is not None:
        return rows_asked
    _require(logits.device.type in _CHUNKS, f"no size of chunk is known for {logits.device.type}")
    num_bytes, fewest = _CHUNKS[logits.device.type]
    most = max(num_bytes // (max(classes, 1) * logits.dtype.itemsize), fewest)
    num_chunks = -(-rows // most)
    _require(num_chunks > 1, f"its logits are no more than one chunk ({format_bytes(logits.nbytes)})")
    chunk = min(-(-rows // num_chunks // 16) * 16, most)
    # The log-probabilities and their gradient, against a chunk of logits and the gradients that the forward leaves.
    kept = 0 if gradients is None else (rows if gradients.hidden else 0) + (classes if gradients.weight else 0)
    _require(chunk * classes + kept * width < 2 * rows * classes, "the gradients to keep are larger than the logits")
    return chunk


def _rewrite(graph: fx.Graph, head: LossHead, layer: Layer, new: dict[fx.Node, fx.Node]) -> None:
    gradients = head.gradients
    loss = new[head.loss]
    has_gradient = [False] * 3 if gradients is None else [node is not None for node in gradients.nodes]
    dtype = required_spec(new[head.loss.args[0]]).dtype  # type: ignore[index]
    hidden, weight, bias = new[layer.hidden], new[layer.weight], None if layer.bias is None else new[layer.bias]
    with graph.inserting_before(loss):
        if layer.transposed:
            weight = add_call(new[layer.product], aten.t.default, (weight,), "loss_head_weight")
        types = head.softmax_dtype, dtype
        rule = (*types, head.chunk, has_gradient, _library(required_spec(hidden)))
        arguments = (hidden, weight, bias, loss.args[1], loss.args[3], loss.args[4], *rule)
        op = torch.ops.aottrain.linear_cross_entropy.default
        fused = add_call(new[layer.product], op, arguments, "loss_head")
        items = [add_call(fused, operator.getitem, (fused, i), name) for i, name in enumerate(_RESULTS)]
    for user in list(loss.users):
        user.replace_all_uses_with(items[int(user.args[1])])  # type: ignore[arg-type]
    if gradients is None:
        return
    for old, unit in zip(gradients.nodes, items[2:], strict=True):
        if old is None:
            continue
        result = _untransposed(new[old])
        # As late as it is read: until then there is one copy of a gradient as large as the weight, not two.
        with graph.inserting_before(next(node for node in graph.nodes if node in result.users)):
            if required_spec(result).shape != required_spec(unit).shape:
                unit = add_call(result, aten.view.default, (unit, list(required_spec(result).shape)), "unit_view")
            scaled = add_call(result, aten.mul.Tensor, (unit, new[gradients.upstream]), "scaled")
            # Rounded once, as the product that it stands for.
            if required_spec(result).dtype != required_spec(scaled).dtype:
                scaled = add_call(result, aten._to_copy.default, (scaled,), dtype=required_spec(result).dtype)
            scaled = laid_out_as(scaled, result) or scaled
        result.replace_all_uses_with(scaled)


def _library(hidden: TensorSpec) -> str:
    """What does its products: decided once, for each run of the program."""
    return chosen_library(hidden.dtype) if hidden.device.type == "cpu" else ATEN


def _untransposed(node: fx.Node) -> fx.Node:
    """The node, or what it is after being transposed twice and read in no other way."""
    while True:
        if len(node.users) != 1 or _transposed(once := next(iter(node.users))) is not node or len(once.users) != 1:
            return node
        twice = next(iter(once.users))
        if _transposed(twice) is not once:
            return node
        node = twice


def _transposed(node: Any) -> fx.Node | None:
    """What this is the transpose of; None where it is no transpose of a matrix."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    swaps = node.target is aten.t.default
    swaps |= node.target is aten.transpose.int and {d % 2 for d in node.args[1:]} == {0, 1}  # type: ignore[operator]
    swaps |= node.target is aten.permute.default and list(node.args[1]) in ([1, 0], [-1, -2])  # type: ignore[arg-type]
    source = node.args[0]
    return source if swaps and isinstance(source, fx.Node) and len(required_spec(source).shape) == 2 else None


def _is_weight(node: Any, layer: Layer) -> bool:
    if layer.transposed:
        node = _transposed(node)
    while node is not layer.weight:
        node = _transposed(_transposed(node))
        if node is None:
            return False
    return True


def _num_casts(nodes: Sequence[fx.Node]) -> int:
    return sum(node.target is aten._to_copy.default for node in nodes)


def _same_type(first: fx.Node, second: fx.Node) -> bool:
    a, b = required_spec(first), required_spec(second)
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _name(node: fx.Node) -> str:
    if node.op == "call_function":
        return info(node).name.removeprefix("aten.")
    return "the caller" if node.op == "output" else f"the input {node.name}"


def _require(holds: Any, reason: str) -> None:
    if not holds:
        raise _Unfit(reason)
