"""split_biases: a convolution's bias on a GPU becomes an addition, and its gradient a sum, which kernels share.

cuDNN's convolutions of training have no bias: ATen adds it in a pass of its own over the images, and sums its gradient
up in another. Kernels that read these images anyway do both on the way, rounded as ATen's.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import add_call, cast, is_cast, laid_out_as
from aottrain.compiler.lowering.rules import wide
from aottrain.compiler.passes.splits.calls import split_calls
from aottrain.ir.graph import JointGraph, marks_of, required_spec, spec_of
from aottrain.ir.tensor import TensorSpec

aten = torch.ops.aten

# The places of a convolution's bias, and of the list that says which gradients its backward is to give.
_BIAS, _WANTED = 2, 10


def split_biases(joint: JointGraph) -> JointGraph:
    """The same program; the graph itself where no convolution on a GPU has a bias."""
    return split_calls(joint, _has_bias, _split)


def _has_bias(node: fx.Node) -> bool:
    """Whether it is a convolution that adds one, or gives the gradient of one."""
    if node.kwargs or marks_of(node):
        return False
    if node.target is aten.convolution.default:
        has, images = node.args[_BIAS] is not None, spec_of(node)
    elif node.target is aten.convolution_backward.default:
        wanted: Any = node.args[_WANTED]
        has, images = wanted[2], spec_of(node.args[0])  # type: ignore[arg-type]
    else:
        return False
    return bool(has and images and images.device.type == "cuda" and images.symbolic is None and images.numel)


def _split(node: fx.Node) -> None:
    (_split_forward if node.target is aten.convolution.default else _split_backward)(node)


def _split_forward(node: fx.Node) -> None:
    images, weight, bias, *rest = node.args
    spec = spec_of(node)
    assert spec is not None
    with node.graph.inserting_before(node):
        alone = add_call(node, aten.convolution.default, (images, weight, None, *rest))
        places = len(_spatial(node))
        placed = [spec.shape[-places - 1], *(1 for _ in range(places))]
        total = add_call(node, aten.add.Tensor, (alone, add_call(node, aten.view.default, (bias, placed))))
        result = laid_out_as(total, node)
    if result is not None:
        node.replace_all_uses_with(result)


def _split_backward(node: fx.Node) -> None:
    gradient, wanted = node.args[0], list(node.args[_WANTED])  # type: ignore[arg-type]
    spec = spec_of(gradient)  # type: ignore[arg-type]
    assert spec is not None
    channels = len(spec.shape) - len(_spatial(node)) - 1
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    if 2 in items:
        with node.graph.inserting_before(items[2]):
            total = _summed(items[2], gradient, spec, channels)
        for user in list(items[2].users):  # what autocast casts to float32 need not be rounded before
            if is_cast(user, required_spec(total).dtype):
                user.replace_all_uses_with(total)
        with node.graph.inserting_after(total):
            items[2].replace_all_uses_with(cast(total, total, spec.dtype))
    wanted[2] = False
    with node.graph.inserting_before(node):
        others = add_call(node, node.target, (*node.args[:_WANTED], wanted))
    node.replace_all_uses_with(others)


def _summed(item: fx.Node, gradient: Any, spec: TensorSpec, channels: int) -> fx.Node:
    """In float32 at least. Of each image first, for an image's channel is a row where it is as given: channels alone
    are too few rows to keep a GPU busy."""
    dims = list(range(channels + 1, len(spec.shape)))
    each = add_call(item, aten.sum.dim_IntList, (gradient, dims), dtype=wide(spec.dtype))
    return add_call(item, aten.sum.dim_IntList, (each, [0])) if channels else each


def _spatial(node: fx.Node) -> Any:
    """Its dilations: one for each dimension of an image."""
    return node.args[5 if node.target is aten.convolution.default else 6]
