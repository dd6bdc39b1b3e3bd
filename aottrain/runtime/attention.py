"""Attention on a CPU by a C++ function of our own: two ops that are called as ATen's are, without dropout.

Of a head in a lower precision everything is computed in float32, and each result rounded once: more exact than ATen's,
which rounds the probabilities and their gradients too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.ir.attention import scratch_floats
from aottrain.runtime.attention_source import attention_source
from aottrain.runtime.native import load

DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
# As fast as with -O3, and compiled in a third of the time.
_OPTIMISED = ("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-ffp-contract=fast")
_FLAGS = ("-fopenmp", "-fno-trapping-math", "-std=c++17", *_OPTIMISED)
_OPTIONS = "Tensor? attn_mask=None, float? scale=None"

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor mixed, Tensor logsumexp, "
    f"float dropout_p, bool is_causal, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    out: Sequence[Tensor | None] = (None, None),
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(query key^T * scale) value: (batch, heads, queries, width), (batch, key heads, keys, width) twice -> the
    result, as query, and of each row the logarithm of its sum of exponentials, float32 (batch, heads, queries).

    Each key head serves as many heads in a row. is_causal: query i sees the keys up to i. attn_mask: added to the
    scores, broadcast to (batch, heads, queries, keys), float32 or as query; a query that sees no key gives zeros.
    scale: None: 1 / sqrt(width). Without dropout. out: memory for the results, each row's elements beside each other;
    fresh where it is None. It computes in `scratch`, by as many threads as that holds, or in fresh memory.
    """
    query, key, value = _rows(query), _rows(key), _rows(value)
    mixed, sums = out
    if mixed is None:
        mixed = torch.empty_like(query) if query.is_contiguous() else _heads_last(query)
    if sums is None:
        batch, heads, queries, _ = query.shape
        sums = torch.empty(batch, queries, heads).transpose(1, 2)
    _run("forward", (query, key, value, mixed, sums), (query, key), (is_causal, attn_mask, scale), scratch)
    return mixed, sums


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    out: Sequence[Tensor | None] = (None, None, None),
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, of a call whose results were `mixed` and `logsumexp`. out, scratch: as
    those of `attention`."""
    grad_out, query, key, value, mixed = (_rows(x) for x in (grad_out, query, key, value, mixed))
    dq, dk, dv = (_heads_last(x) if given is None else given for given, x in zip(out, (query, key, value), strict=True))
    tensors = (grad_out, query, key, value, mixed, logsumexp, dq, dk, dv)
    _run("backward", tensors, (query, key), (is_causal, attn_mask, scale), scratch)
    return dq, dk, dv


def _rows(x: Tensor) -> Tensor:
    """Each row's elements beside each other."""
    return x if x.stride(3) == 1 else x.contiguous()


def _heads_last(like: Tensor) -> Tensor:
    """Memory of this shape in which the rows of all heads stand side by side: what linear layers read."""
    batch, heads, count, width = like.shape
    return like.new_empty(batch, count, heads, width).transpose(1, 2)


def _run(
    name: str,
    tensors: tuple[Tensor, ...],
    shapes: tuple[Tensor, Tensor],
    rule: tuple[bool, Tensor | None, float | None],
    scratch: Tensor | None,
) -> None:
    """rule: whether it is causal, the mask and the scale."""
    (query, key), (is_causal, mask, scale) = shapes, rule
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    threads = torch.get_num_threads()
    each = scratch_floats(queries, keys, width, name == "backward")
    if scratch is None:
        scratch = torch.empty(4 * each * threads, dtype=torch.uint8)  # which lies at a multiple of 64 bytes
    threads = min(threads, scratch.numel() // (4 * each))
    sizes = [batch, heads, key_heads, queries, keys, width, *(step for x in tensors for step in x.stride()[:3])]
    sizes += [0] * 4 if mask is None else mask.expand(batch, heads, queries, keys).stride()
    places = [*(x.data_ptr() for x in tensors), None if mask is None else mask.data_ptr()]
    table = (ctypes.c_void_p * len(places))(*places)
    wide = mask is not None and mask.dtype is torch.float32
    numbers = (ctypes.c_int64 * len(sizes))(*sizes)
    factor = width**-0.5 if scale is None else scale
    _functions(query.dtype)[name](table, numbers, factor, is_causal, wide, scratch.data_ptr(), each, threads)


@cache
def _functions(dtype: torch.dtype) -> dict[str, Any]:
    library = load(attention_source(DTYPES[dtype]), _FLAGS)
    if library is None:
        raise RuntimeError("no C++ compiler works on this machine")
    found = {name: getattr(library, name) for name in ("forward", "backward")}
    for function in found.values():
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        function.argtypes = (pointer, pointer, ctypes.c_float, integer, integer, pointer, ctypes.c_int64, integer)
        function.restype = None
    return found


_library.impl("attention", attention, "CPU")
_library.impl("attention_backward", attention_backward, "CPU")
ATTENTIONS = {"own attention": attention, "own attention backward": attention_backward}
