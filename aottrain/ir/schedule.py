"""The order in which a graph's kernels and library calls run."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import info, spec_of, storage_root, value_of
from aottrain.ir.kernels.attention import scratch_floats
from aottrain.ir.kernels.columns import scratch_bytes
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.tiles import num_pieces, product_scratch_bytes

aten = torch.ops.aten

# Library calls that can write to memory of the caller's, and the overload that does so.
OUT_VARIANTS: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}

# Those that may write their result over their first operand, and the overload that does so.
IN_PLACE: dict[Any, Any] = {
    aten.index_add.default: aten.index_add_.default,
    aten.scatter_add.default: aten.scatter_add_.default,
}

# Functions of our own that stand in for a call of ATen's, as `Schedule.libraries` names them.
OWN_CUMSUM, OWN_LOGCUMSUMEXP = "own cumsum", "own logcumsumexp"
OWN_INDEX_ADD, OWN_SCATTER_ADD = "own index_add", "own scatter_add"
OWN_EMBEDDING_GRADIENT = "own embedding_dense_backward"
OWN_PRODUCT, OWN_BIASED_PRODUCT = "own product", "own product with bias"
# Attention that is a function of our own from the start.
WRITTEN = ("aottrain.written_attention.default", "aottrain.written_attention_backward.default")


@dataclass(frozen=True)
class KernelCall:
    """A kernel and the graph's buffers that are its arguments, parameter by parameter."""

    kernel: KernelIR
    buffers: tuple[fx.Node, ...]

    @property
    def reads(self) -> tuple[fx.Node, ...]:
        return tuple(n for n, p in zip(self.buffers, self.kernel.parameters, strict=True) if not p.written)

    @property
    def writes(self) -> tuple[fx.Node, ...]:
        return tuple(n for n, p in zip(self.buffers, self.kernel.parameters, strict=True) if p.written)


# Ops that count positions from the start of a storage: what they read may not lie in the middle of an arena.
_BY_STORAGE = ("aten.as_strided.default", "aten.as_strided_scatter.default", "aten.as_strided_copy.default")


def unshared_operands(graph: fx.Graph) -> set[fx.Node]:
    """Operands that share no memory: those of ops that count positions in a storage, and those that a sparse tensor
    keeps as its indices and values."""
    return {source for node in graph.nodes if _keeps_operands(node) for source in node.all_input_nodes}


def _keeps_operands(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    value = value_of(node)
    is_sparse = isinstance(value, torch.Tensor) and value.layout is not torch.strided
    return is_sparse or info(node).name in _BY_STORAGE


def touched_by(call: KernelCall | fx.Node) -> tuple[fx.Node, ...]:
    """What a call reads or writes. A library call's node is its result, too."""
    return call.buffers if isinstance(call, KernelCall) else (call, *call.all_input_nodes)


@dataclass(frozen=True)
class Schedule:
    """The kernels and library calls of one graph, in the order in which they run."""

    calls: tuple[KernelCall | fx.Node, ...]
    """A node runs through ATen; views are among them."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Of a call, by its name, why it is not one kernel with its producer."""
    libraries: Mapping[fx.Node, tuple[str, str]] = field(default_factory=dict)
    """Of calls that another library than ATen's own choice does: which, and why."""
    placed: frozenset[fx.Node] = frozenset()
    """Convolutions whose results are written to planned memory."""
    in_place: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    """Results of kernels, and of calls in IN_PLACE, that take the memory of an operand, with that operand."""

    def written(self, call: fx.Node) -> tuple[fx.Node, ...]:
        """What a library call can write to planned memory: its result, or the items of its tuple."""
        if call in self.placed or (call.target in OUT_VARIANTS and call not in self.libraries):
            return (call,)
        if is_own_scan(self.library(call)) or is_own_product(self.library(call)):
            return (call,)
        return items_in_rows(call) if is_own_attention(self.library(call)) else ()

    def library(self, call: fx.Node) -> str:
        """Which one does it, where that is not ATen's own choice."""
        given = self.libraries.get(call)
        if given is not None:
            return given[0]
        name = info(call).name
        return name if name in WRITTEN else ""

    def memory_of(self, node: fx.Node) -> fx.Node:
        """The value for which the node's memory was taken."""
        root = storage_root(node)
        return self.in_place.get(root, root)

    @property
    def kernels(self) -> tuple[KernelCall, ...]:
        return tuple(call for call in self.calls if isinstance(call, KernelCall))


@dataclass(frozen=True)
class MemoryPlan:
    """Where the buffers of a schedule live; those that it does not name are fresh memory."""

    offsets: Mapping[fx.Node, int]
    """Of temporaries in the arena, in bytes."""
    residuals: frozenset[fx.Node]
    """Buffers that live until the backward is done with them."""
    arena_bytes: int
    max_live_bytes: int
    """The least that any arena for all these can have."""
    scratch: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """By position of a call the offset and size of its scratch memory in the arena."""
    spans: Mapping[fx.Node | int, tuple[int, int]] = field(default_factory=dict)
    """Of each value and each scratch memory in the arena the first and the last call that touches it."""
    holder: object = field(default_factory=object)
    """Whose memory it is: the same for all graphs of a program."""


def is_own_attention(library: str) -> bool:
    return library.startswith("own attention") or library in WRITTEN


def is_own_scan(library: str) -> bool:
    return library in (OWN_CUMSUM, OWN_LOGCUMSUMEXP)


def is_own_product(library: str) -> bool:
    return library in (OWN_PRODUCT, OWN_BIASED_PRODUCT)


def adds_rows(library: str) -> bool:
    return library in (OWN_INDEX_ADD, OWN_SCATTER_ADD, OWN_EMBEDDING_GRADIENT)


def items_in_rows(call: fx.Node) -> tuple[fx.Node, ...]:
    """The items of a tuple that are read, each by its number once; none where a head's rows are not whole in memory."""
    items = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    specs = [spec for item in items.values() if (spec := spec_of(item)) is not None]
    plain = all(spec.strides[3:] in ((), (1,)) for spec in specs)
    return tuple(items.values()) if plain and len(specs) == len(call.users) else ()


def scratch_of(schedule: Schedule, call: KernelCall | fx.Node) -> int:
    """Bytes of scratch memory of all threads together during one call, where it can be planned."""
    if isinstance(call, KernelCall):
        return scratch_bytes(call.kernel) * torch.get_num_threads()
    library = schedule.library(call)
    computes = is_own_attention(library) or is_own_product(library)
    return copied_bytes(call, library) if computes and schedule.written(call) else 0


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a matrix, or its transpose, has its elements one after the other."""
    (rows, columns), (down, across) = shape, stride
    return (across == 1 and down == columns) or (down == 1 and across == rows)


def copied_bytes(node: fx.Node, library: str) -> int:
    """What is copied for a product by oneDNN: a left operand that is not contiguous, a right one that is a part of a
    matrix. A product by its transpose copies its right operand so, and once that copy is gone its result, into the
    layout that its readers expect. Of attention and products of our own what the threads compute in."""
    if not library or is_own_scan(library) or adds_rows(library):
        return 0
    operands = [spec for source in node.args if isinstance(source, fx.Node) and (spec := spec_of(source)) is not None]
    if is_own_attention(library):
        backward = "backward" in library
        query, key = operands[backward : backward + 2]
        sizes = query.shape[2], key.shape[2], query.shape[3]
        floats = scratch_floats(*sizes, backward, query.dtype == torch.bfloat16)
        return 4 * floats * torch.get_num_threads()
    left, right = operands[-2:]
    if is_own_product(library):
        narrow, sizes = left.dtype == torch.bfloat16, (left.shape[0], left.shape[1], right.shape[1])
        return product_scratch_bytes(*sizes, torch.get_num_threads(), num_pieces(left.dtype), narrow)
    if library == "onednn transposed":
        left, right = right, left  # transposed, which leaves a dense one dense
        result = spec_of(node)
        copied = left.nbytes if left.stride[0] != 1 else 0
    else:
        copied, result = left.nbytes if left.stride[-1] != 1 else 0, None
    copied += 0 if is_dense(right.shape, right.stride) else right.nbytes
    return max(result.nbytes if result is not None else 0, copied)
