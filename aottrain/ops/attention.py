"""Attention on a CPU by a C++ function of our own: two ops that are called as ATen's are, without dropout, and two for
programs that wrote attention out, with dropout.

Of a head in a lower precision everything is computed in float32, and each result rounded once: more exact than ATen's,
which rounds the probabilities and their gradients too. Where the processor multiplies tiles of bfloat16, heads of it
without a mask and dropout are as exact as ATen's, and take less than half of the time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake
from aottrain.ir.kernels.attention import scratch_floats
from aottrain.ops.native.attention import attention_sources
from aottrain.ops.native.scores import MASK_KINDS
from aottrain.ops.native.tile_attention import tile_attention_sources
from aottrain.ops.products.pieces import has_tiles
from aottrain.toolchain.cache import processor
from aottrain.toolchain.native import Source, require_all

DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
# As fast as with -O3, and compiled in a third of the time.
_TILE_FLAGS = ("-fopenmp", "-fno-trapping-math", "-std=c++17", "-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic")
_FLAGS = (*_TILE_FLAGS, "-ffp-contract=fast")
_OPTIONS = "Tensor? attn_mask=None, float? scale=None"
_RULE = "Tensor? mask, Tensor? state, *, float scale, float fill, bool safe, int draw, float keep"
_MASKS = {torch.float32: "ADDS_FLOAT", torch.bool: "FILLS"}  # another type is that of the heads

_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, float dropout_p=0.0, bool is_causal=False, *, "
    f"{_OPTIONS}) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor mixed, Tensor logsumexp, "
    f"float dropout_p, bool is_causal, *, {_OPTIONS}) -> (Tensor, Tensor, Tensor)"
)
_library.define(f"written_attention(Tensor query, Tensor key, Tensor value, {_RULE}) -> (Tensor, Tensor)")
_library.define(
    "written_attention_backward(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor mixed, "
    f"Tensor logsumexp, {_RULE}) -> (Tensor, Tensor, Tensor)"
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
    rule = _Rule(query.shape[-1] ** -0.5 if scale is None else scale, attn_mask, is_causal)
    _run("forward", (query, key, value, mixed, sums), (query, key), rule, scratch)
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
    dq, dk, dv = (
        _heads_last(x) if memory is None else memory for memory, x in zip(out, (query, key, value), strict=True)
    )
    tensors = (grad_out, query, key, value, mixed, logsumexp, dq, dk, dv)
    rule = _Rule(query.shape[-1] ** -0.5 if scale is None else scale, attn_mask, is_causal)
    _run("backward", tensors, (query, key), rule, scratch)
    return dq, dk, dv


def written_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    *,
    scale: float,
    fill: float,
    safe: bool,
    draw: int,
    keep: float,
    out: Sequence[Tensor | None] = (None, None),
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dropout(softmax(scores)) value, with query, key, value, the result and the last two as `attention` has them; of
    each row's exponentials the largest score and the logarithm of their sum without it (batch, heads, queries, 2).

    scores: query key^T * scale; with a mask of float32 plus that, with one of bool `fill` where it is True. safe: a
    query whose scores are all -inf gives zeros, not NaN. state: the (seed, offset) that the dropout's draw is made of,
    as `philox.philox_uniform` makes it; elements below `keep` stay. None: no dropout.
    """
    query, key, value = _rows(query), _rows(key), _rows(value)
    mixed = query.new_empty(query.shape) if out[0] is None else out[0]
    sums = query.new_empty(*query.shape[:3], 2, dtype=torch.float32) if out[1] is None else out[1]
    rule = _Rule(scale, mask, False, fill, safe, True, state, draw, keep)
    _run("forward", (query, key, value, mixed, sums), (query, key), rule, scratch)
    return mixed, sums


def written_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    state: Tensor | None,
    *,
    scale: float,
    fill: float,
    safe: bool,
    draw: int,
    keep: float,
    out: Sequence[Tensor | None] = (None, None, None),
    scratch: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, of a call of `written_attention`."""
    grad_out, query, key, value, mixed = (_rows(x) for x in (grad_out, query, key, value, mixed))
    dq, dk, dv = (x.new_empty(x.shape) if y is None else y for y, x in zip(out, (query, key, value), strict=True))
    rule = _Rule(scale, mask, False, fill, safe, True, state, draw, keep)
    tensors = (grad_out, query, key, value, mixed, logsumexp, dq, dk, dv)
    _run("backward", tensors, (query, key), rule, scratch)
    return dq, dk, dv


class _Rule(NamedTuple):
    """What the C++ knows as Rule and Numbers."""

    scale: float
    """Of the products of queries and keys."""
    mask: Tensor | None
    causal: bool
    """A query sees the keys up to its own number."""
    fill: float = 0.0
    """The score where a mask of bool is True."""
    safe: bool = True
    """A query that sees no key gives zeros, not NaN."""
    split: bool = False
    """The largest score of each row is returned beside the logarithm of the sum of exponentials."""
    state: Tensor | None = None
    """(seed, offset) of the dropout's draw; None: no dropout."""
    draw: int = 0
    """The number of the dropout's draw."""
    keep: float = 1.0
    """Elements of the draw below it stay."""


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
    rule: _Rule,
    scratch: Tensor | None,
) -> None:
    query, key = shapes
    batch, heads, queries, width = query.shape
    key_heads, keys = key.shape[1:3]
    threads = torch.get_num_threads()
    floats_per_thread = scratch_floats(queries, keys, width, name == "backward", query.dtype == torch.bfloat16)
    if scratch is None:
        scratch = torch.empty(
            4 * floats_per_thread * threads, dtype=torch.uint8
        )  # which lies at a multiple of 64 bytes
    threads = min(threads, scratch.numel() // (4 * floats_per_thread))
    mask, seed, position = rule.mask, 0, 0
    if rule.state is not None:
        seed, offset = rule.state.tolist()
        position = offset + rule.draw
    kind = MASK_KINDS.index("NONE" if mask is None else _MASKS.get(mask.dtype, "ADDS"))
    strides = (0,) * 4 if mask is None else mask.expand(batch, heads, queries, keys).stride()
    sizes = [batch, heads, key_heads, queries, keys, width]
    sizes += [rule.causal, kind, rule.safe, rule.split, rule.state is not None, seed, position, *strides]
    sizes += [step for x in tensors for step in x.stride()[:3]]
    addresses = (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))
    table = (ctypes.c_int64 * len(sizes))(*sizes)
    numbers = (ctypes.c_float * 4)(rule.scale, rule.fill, rule.keep, 1.0 / rule.keep)
    start = None if mask is None else mask.data_ptr()
    function = _functions(query.dtype, rule.mask is None and rule.state is None, how_tiles_multiply())[name]
    function(addresses, start, table, numbers, scratch.data_ptr(), floats_per_thread, threads)


@cache
def how_tiles_multiply() -> str:
    """What multiplies tiles of heads of bfloat16: "by the processor", or "" where it has none. Tests put "by loops" in
    its place."""
    return "by the processor" if has_tiles() and "avx512_bf16" in processor().split() else ""


def native_sources(dtype: torch.dtype, plain: bool) -> list[Source]:
    """What the attentions of this type compile at their first call. plain: those without a mask and dropout."""
    return _sources(dtype, plain, how_tiles_multiply())


def _sources(dtype: torch.dtype, plain: bool, tiles: str) -> list[Source]:
    if tiles and plain and dtype == torch.bfloat16:
        return [Source(text, _TILE_FLAGS) for text in tile_attention_sources(tiles == "by loops")]
    return [Source(text, _FLAGS) for text in attention_sources(DTYPES[dtype], plain)]


@cache
def _functions(dtype: torch.dtype, plain: bool, tiles: str) -> dict[str, Any]:
    functions = {}
    for name, library in zip(("forward", "backward"), require_all(_sources(dtype, plain, tiles)), strict=True):
        function = functions[name] = getattr(library.functions, name)
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        function.argtypes = (*[pointer] * 5, ctypes.c_int64, integer)
        function.restype = None
    return functions


_library.impl("attention", attention, "CPU")
_library.impl("attention_backward", attention_backward, "CPU")
_library.impl("written_attention", written_attention, "CPU")
_library.impl("written_attention_backward", written_attention_backward, "CPU")
ATTENTIONS: dict[str, Any] = {
    "own attention": attention,
    "own attention backward": attention_backward,
    "aottrain.written_attention.default": written_attention,
    "aottrain.written_attention_backward.default": written_attention_backward,
}


@register_fake(_library, "written_attention")
def _(query: Tensor, key: Tensor, value: Tensor, mask: Any, state: Any, **rule: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(*query.shape[:3], 2, dtype=torch.float32)


@register_fake(_library, "written_attention_backward")
def _(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **rule: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
