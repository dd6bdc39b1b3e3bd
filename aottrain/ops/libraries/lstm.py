"""A layer of an LSTM by oneDNN, as eager runs it on a CPU: one operator forward and one backward.

ATen's op keeps what its backward reads only while autograd records, and its fake does not say how much that is. Here it
is always kept, and its size is found by one run on zeros for each set of sizes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_modes
from aottrain.compat_dispatch import register_fake

aten = torch.ops.aten

_WEIGHTS = "Tensor input, Tensor weight0, Tensor weight1, Tensor weight2, Tensor weight3, Tensor hx, Tensor cx"
_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    f"lstm_layer({_WEIGHTS}, bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, "
    "bool has_biases, bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.define(
    f"lstm_layer_backward({_WEIGHTS}, Tensor output, Tensor hy, Tensor cy, Tensor? grad_output, Tensor? grad_hy, "
    "Tensor? grad_cy, bool reverse, int mode, int hidden_size, int num_layers, bool has_biases, bool train, "
    "bool bidirectional, int[] batch_sizes, bool batch_first, Tensor workspace) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _lstm_layer(*args: Any) -> tuple[Tensor, ...]:
    """As aten.mkldnn_rnn_layer: input (time, batch, features) -> output, hidden, cell, workspace (bytes)."""
    # Of parameters themselves the results would have a history, which keeps the workspace as long as they live.
    tensors = [value.detach() for value in args[:7]]
    with torch.enable_grad():
        results: tuple[Tensor, ...] = aten.mkldnn_rnn_layer.default(*tensors, *args[7:])
    return results


def _lstm_layer_backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients of the first seven arguments, of their types. ATen's two of biases are one tensor; here two."""
    gradients = aten.mkldnn_rnn_layer_backward.default(*args)
    results = [gradient.to(value.dtype) for gradient, value in zip(gradients, args, strict=False)]
    results[4] = results[4].clone()
    return tuple(results)


_library.impl("lstm_layer", _lstm_layer, "CPU")
_library.impl("lstm_layer_backward", _lstm_layer_backward, "CPU")


@register_fake(_library, "lstm_layer")
def _(*args: Any) -> tuple[Tensor, ...]:
    value = args[0]
    tensors = tuple((tuple(map(int, v.shape)), v.dtype) for v in args[:7])
    num_bytes = _workspace_bytes(tensors, args[7], tuple(args[8]), *args[9:])
    output = value.new_empty(*value.shape[:2], args[10])
    states = (state.new_empty(state.shape) for state in args[5:7])
    return output, *states, value.new_empty(num_bytes, dtype=torch.uint8)


@register_fake(_library, "lstm_layer_backward")
def _(*args: Any) -> tuple[Tensor, ...]:
    value, first, second, bias = args[0], args[1], args[2], args[3]
    biases = (bias.new_empty(first.shape[0]) for _ in range(2))
    states = (state.new_empty(state.shape) for state in args[5:7])
    return value.new_empty(value.shape), first.new_empty(first.shape), second.new_empty(second.shape), *biases, *states


@cache
def _workspace_bytes(tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...], *options: Any) -> int:
    """What a layer of these sizes keeps, asked of the library."""
    with disable_modes():
        zeros = [torch.zeros(shape, dtype=dtype) for shape, dtype in tensors]
        return _lstm_layer(*zeros, options[0], list(options[1]), *options[2:])[3].numel()
