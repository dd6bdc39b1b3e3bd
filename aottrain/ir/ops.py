"""All that is known about one ATen op, in one table: read by partition, cost, simplification and verification.

Most of it follows from the op's schema (does it alias, does it write); the table holds what schemas do not say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from aottrain.ir.sizes.expressions import SizeExpression

aten = torch.ops.aten


class OpKind(Enum):
    """What an op is to the partitioner and to the cost model."""

    VIEW = "view"  # shares its input's storage: costs nothing, saved through its base
    RANDOM = "random draw"  # a pure function of (seed, draw number): recomputable at no saved byte
    EFFECT = "effect"  # uses eager's generator, asserts, checks or communicates: runs once, in program order
    COMPUTE = "matrix product"  # dominated by arithmetic: matrix products, convolutions, attention
    CHEAP = "pointwise or reduction"  # dominated by memory traffic
    STRUCTURE = "structure"  # picks an item of a tuple
    SIZE = "size"  # integer arithmetic on sizes: costs nothing, computed where it is read


@dataclass(frozen=True)
class OpInfo:
    """What is known about one overload."""

    name: str
    kind: OpKind
    label: str
    """How reports call the op's class, e.g. "convolution"."""
    view_of: int | None
    """Position of the argument whose storage the output shares; None for ops that allocate."""
    writes: tuple[int, ...]
    """Positions of the arguments that the schema says are written."""
    raises: bool = False
    """Whether values may make it raise, so that it must run in any case; running it again changes nothing."""

    @property
    def is_free(self) -> bool:
        """Whether a call costs nothing and allocates nothing."""
        return self.kind in (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)


def _family(label: str, *names: str) -> Iterator[tuple[str, str]]:
    return ((name, label) for name in names)


# Packets whose time is dominated by arithmetic, with the word that reports use.
_COMPUTE: dict[str, str] = dict(
    [
        *_family("matrix product", "mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot"),
        *_family("matrix product", "_int_mm", "_scaled_mm", "_grouped_mm", "linear", "matmul", "einsum"),
        *_family("linear and cross-entropy", "linear_cross_entropy"),
        *_family("convolution", "convolution", "convolution_backward", "_convolution", "mkldnn_convolution"),
        *_family("convolution", "cudnn_convolution", "convolution_overrideable"),
        *_family("attention", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"),
        *_family("attention", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *_family("attention", "_flash_attention_forward", "_efficient_attention_forward"),
        *_family("attention", "_scaled_dot_product_flash_attention_backward", "_flash_attention_backward"),
        *_family("attention", "_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward"),
        *_family("attention", "_scaled_dot_product_cudnn_attention_backward"),
        *_family("attention", "_scaled_dot_product_flash_attention_for_cpu_backward"),
        *_family("attention", "written_attention", "written_attention_backward"),
        *_family("recurrence", "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "mkldnn_rnn_layer", "_cudnn_rnn"),
        *_family("recurrence", "ctc_loss", "ctc_loss_backward", "lstm_layer", "lstm_layer_backward"),
        *_family("factorisation", "linalg_cholesky_ex", "linalg_inv_ex", "_linalg_svd", "_linalg_eigh", "linalg_qr"),
        *_family("factorisation", "linalg_lu_factor_ex", "_linalg_solve_ex", "linalg_eig", "linalg_lstsq"),
        *_family("factorisation", "linalg_polar", "linalg_matrix_sqrth"),
        *_family("sort", "sort", "topk", "kthvalue", "median", "unique_dim", "_unique2", "cdist", "_cdist_forward"),
        *_family("window", "adaptive_max_pool2d", "adaptive_max_pool3d", "max_pool3d_with_indices"),
        *_family("window", "fractional_max_pool2d", "fractional_max_pool3d"),
        *_family("running extremum", "cummax", "cummin"),
        *_family("gather from all processes", "gather_rows"),
        *_family("transform", "_fft_c2c", "_fft_r2c", "_fft_c2r"),
    ]
)

# Attention without dropout carries torch's tag and draws nothing; capture refuses the form that draws.
_GENERATOR = "draw from eager's generator"
_USES_GENERATOR = ("eager_draw", "get_rng_state", "set_rng_state", "manual_seed")

# Do nothing but raise where a value is not as it should be, though some return a token; what returns nothing at all is
# one by its schema.
_CHECK = "check of values"
_CHECKS = ("_functional_assert_async", "_functional_assert_scalar")
# Libraries whose ops talk to other processes: each side must make the same calls.
COMMUNICATION = "communication"
# But for what may run again (all sides do so, since they plan alike), and for the end of what was started.
_REPEATED = ("gather_rows", "arrived")
_PARALLEL = "aottrain_parallel"
_COMMUNICATING = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "symm_mem", "_dtensor",
                  _PARALLEL)  # fmt: skip
# Observe the program from outside and change nothing that it computes.
_OBSERVING = ("profiler",)

# Ops of torch that compute something and raise for some values of what is named here: an index or class outside of what
# there is, a number outside of a range, a matrix without such factors. Those of other libraries are taken to be alike.
_RAISING: dict[str, str] = dict(
    [
        *_family("index", "index", "index_select", "gather", "take", "embedding", "index_put", "index_add"),
        *_family("index", "index_copy", "index_fill", "index_reduce", "put", "scatter", "scatter_add"),
        *_family("index", "masked_scatter", "max_unpool2d", "max_unpool3d", "searchsorted", "scatter_reduce"),
        *_family("index", "lu_unpack", "_embedding_bag", "_embedding_bag_forward_only", "embedding_dense_backward"),
        *_family("index", "sum_messages"),
        *_family("index", "adaptive_max_pool2d_backward", "nll_loss_backward", "nll_loss2d_backward"),
        *_family("class", "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "linear_cross_entropy"),
        *_family("class", "nll_rows", "multilabel_margin_loss_forward", "ctc_loss", "_ctc_loss"),
        *_family("number", "binary_cross_entropy", "histc", "histogram", "_histogramdd_bin_edges", "bincount"),
        *_family("number", "segment_reduce", "repeat_interleave", "_pack_padded_sequence"),
        *_family("matrix", "cholesky", "cholesky_inverse", "linalg_cholesky_ex", "linalg_inv_ex", "_linalg_solve_ex"),
        *_family("matrix", "linalg_lu_factor_ex", "linalg_ldl_factor_ex", "_linalg_eigh", "linalg_eig", "_linalg_svd"),
        *_family("matrix", "_linalg_eigvals", "linalg_eigvals", "linalg_lstsq"),
        *_family("matrix", "linalg_polar", "linalg_matrix_sqrth"),  # none of torch 2.13
    ]
)
# Of integers they raise where the divisor is 0; of others they do not.
_DIVIDING = ("div.Tensor_mode", "div.Scalar_mode", "floor_divide", "remainder", "fmod", "__rdiv__", "__rfloordiv__")
_OWN = ("aten", "prims", "aottrain", "aottrain_parallel", "prim", *_OBSERVING)

# Ops that share their input's storage though their schema does not say so.
_HIDDEN_VIEWS = {
    **{"_unsafe_view": 0, "lift_fresh": 0, "_reshape_alias": 0},
    **{"unsafe_split": 0, "unsafe_split_with_sizes": 0},
}

# Operators that give zeros.
ZEROS = {"zeros", "new_zeros", "zeros_like"}

# Ops that update an argument in place though their schema denies it. Capture replaces them by functional forms.
HIDDEN_MUTATIONS: dict[str, tuple[int, ...]] = {
    "native_batch_norm": (3, 4),
    "cudnn_batch_norm": (3, 4),
    "miopen_batch_norm": (3, 4),
    "batch_norm_update_stats": (1, 2),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
    "_batch_norm_with_update": (3, 4),
    "_native_batch_norm_legit": (3, 4),
}


# By the identity of an overload, which lives as long as its operator: its hash would be computed by Python code.
KNOWN: dict[int, tuple[Any, OpInfo]] = {}


def op_info(target: Any) -> OpInfo:
    """Of a call_function target: an OpOverload, a size expression, or operator.getitem."""
    known = KNOWN.get(id(target))
    if known is None:
        known = target, _op_info(target)
        if hasattr(target, "_schema"):
            KNOWN[id(target)] = known
    return known[1]


@cache
def _op_info(target: Any) -> OpInfo:
    schema = getattr(target, "_schema", None)
    if schema is None:
        if isinstance(target, SizeExpression):
            return OpInfo(str(target), OpKind.SIZE, "size", None, ())
        name = getattr(target, "__name__", str(target))
        return OpInfo(name, OpKind.STRUCTURE, name, 0 if name == "getitem" else None, ())
    packet = schema.name.split("::")[-1]
    namespace = schema.name.split("::")[0]
    writes = tuple(i for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write)
    view_of = _HIDDEN_VIEWS.get(packet)
    if view_of is None and not writes:
        view_of = _aliased_argument(schema)
    if effect := _effect(target, packet, namespace, writes):
        kind, label = OpKind.EFFECT, effect
    elif namespace == "aottrain" and packet.startswith("philox_"):
        kind, label = OpKind.RANDOM, "random draw"
    elif view_of is not None:
        kind, label = OpKind.VIEW, "view"
    elif packet in _COMPUTE:
        kind, label = OpKind.COMPUTE, _COMPUTE[packet]
    else:
        kind, label = OpKind.CHEAP, packet
    raises = kind is not OpKind.EFFECT and (packet in _RAISING if namespace in _OWN else view_of is None)
    return OpInfo(str(target), kind, label, view_of, writes, raises)


def _effect(target: Any, packet: str, namespace: str, writes: tuple[int, ...]) -> str:
    """Why a call must run, once and in its turn, though nothing may read its result; empty where it need not."""
    if packet in _USES_GENERATOR or (torch.Tag.nondeterministic_seeded in target.tags and packet not in _COMPUTE):
        return _GENERATOR
    if namespace in _COMMUNICATING and packet not in _REPEATED:
        return COMMUNICATION
    if namespace in _OBSERVING:
        return ""
    return _CHECK if packet in _CHECKS or not (target._schema.returns or writes) else ""


def divides(target: Any) -> bool:
    """Whether it raises where it is to divide an integer by 0."""
    return str(target).removeprefix("aten.").startswith(_DIVIDING)


def _aliased_argument(schema: Any) -> int | None:
    returned: set[str] = set()
    for value in schema.returns:
        if value.alias_info is not None:
            returned |= set(value.alias_info.before_set)
    for i, argument in enumerate(schema.arguments):
        alias = argument.alias_info
        # "a -> *" is how the schemas of split, unbind and the like say that each item of their list is a view.
        if alias is not None and (returned & set(alias.before_set) or "*" in alias.after_set):
            return i
    return None


def packet_name(target: Any) -> str:
    """The name that all overloads of an operator share, as "add"; "" where the target is no operator."""
    schema = getattr(target, "_schema", None)
    return "" if schema is None else schema.name.split("::")[-1]


@cache
def without_writing(target: Any) -> Any:
    """The overload of ATen's that gives what this one writes to its first argument, as add for add_; None for all
    others."""
    name = packet_name(target)
    if not name.endswith("_") or target.namespace != "aten":
        return None
    return overload_of(getattr(torch.ops.aten, name[:-1], None), argument_types(target))


def overload_of(packet: Any, types: Sequence[str]) -> Any:
    """The overload whose arguments have these types; None without one. pow_.Scalar has the types of pow.Tensor_Scalar,
    not of pow.Scalar."""
    overloads = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return next((overload for overload in overloads if argument_types(overload) == types), None)


def argument_at(call: Any, position: int) -> Any:
    """What a node gives for the argument that stands there in its operator's schema, by its place or by its name; None
    where it gives nothing."""
    if position < len(call.args):
        return call.args[position]
    return call.kwargs.get(call.target._schema.arguments[position].name)


def argument_types(target: Any) -> list[str]:
    return [str(argument.type) for argument in target._schema.arguments]


def hidden_mutation(target: Any) -> tuple[int, ...]:
    """Positions of arguments that the op mutates in training mode though its schema denies it."""
    schema = getattr(target, "_schema", None)
    return () if schema is None else HIDDEN_MUTATIONS.get(schema.name.split("::")[-1], ())


def is_pure(target: Any) -> bool:
    """True where running the op again on the same values gives the same values and has no effect."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return isinstance(target, SizeExpression) or getattr(target, "__name__", "") == "getitem"
    op = op_info(target)
    return not op.writes and op.kind is not OpKind.EFFECT


def communicates(target: Any) -> bool:
    """Whether it talks to other processes."""
    return getattr(target, "namespace", "") in _COMMUNICATING and not ends_flight(target)


def starts_flight(target: Any) -> bool:
    """Whether what it gives is under way, not to be touched before it has arrived."""
    return getattr(target, "namespace", "") == _PARALLEL and str(target).endswith("_start.default")


def ends_flight(target: Any) -> bool:
    """Whether it waits for what is under way in its argument's memory, and gives that."""
    return getattr(target, "namespace", "") == _PARALLEL and str(target).endswith(".arrived.default")


def uses_generator(target: Any) -> bool:
    """Whether it draws from, reads or sets eager's random generator."""
    return op_info(target).label == _GENERATOR


def flop_formula(target: Any) -> Callable[..., int] | None:
    """The op's FLOP formula (arguments as tensors, `out_val=` the output), or None: torch's own, but for attention
    and our own ops.

    torch has none for attention on a CPU, and that of torch 2.11 fails where heads of keys and values are shared. Its
    formulas of products fail where a call says of which type the result is to be.
    """
    packet = getattr(target, "overloadpacket", None)
    return _FLOPS.get(getattr(packet, "__name__", "")) or flop_registry.get(packet)


def _product_flops(left: Any, right: Any, *_: Any, **__: Any) -> int:
    return 2 * left.numel() * right.shape[-1]


def _added_product_flops(_: Any, left: Any, right: Any, *__: Any, **___: Any) -> int:
    return _product_flops(left, right)


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """query of (batch, heads, time, width): the scores, and their product with the values. Masked ones count too."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(grad_out: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products for each of the forward's two, and the scores once more, which no kernel keeps."""
    return 2 * query[..., 0].numel() * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1])


def _loss_head_flops(hidden: Any, weight: Any, *arguments: Any, **_: Any) -> int:
    """The product, and one more for each of the two large gradients that are computed."""
    output_mask = arguments[7]
    return 2 * hidden.numel() * weight.shape[0] * (1 + output_mask[0] + output_mask[1])


_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_FLOPS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mm", "bmm"), _product_flops),
    **dict.fromkeys(("addmm", "baddbmm"), _added_product_flops),
    **{f"_scaled_dot_product_{kernel}": _attention_flops for kernel in _ATTENTION},
    **{f"_scaled_dot_product_{kernel}_backward": _attention_backward_flops for kernel in _ATTENTION},
    "written_attention": _attention_flops,
    "written_attention_backward": _attention_backward_flops,
    "linear_cross_entropy": _loss_head_flops,
}
