"""What a lowering rule says of one op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from aottrain.compiler.lowering.builder import Builder
from aottrain.compiler.lowering.places import is_elsewhere
from aottrain.ir.analysis.unchanged import once
from aottrain.ir.graph import info, is_size, spec_of, value_of
from aottrain.ir.graph import required_spec as spec
from aottrain.ir.kernels.affine import ZERO, Affine, offset_of
from aottrain.ir.kernels.kernel import Address, Instruction, Load
from aottrain.ir.kernels.numbers import LOW_PRECISION, fits
from aottrain.ir.sizes.polynomials import UndecidedError, current_facts, likely
from aottrain.ir.tensor import tensor_spec

Values = Sequence[int]
_SUPPORTED = {
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Operand:
    """A tensor that an op reads."""

    node: fx.Node
    dims: tuple[int | None, ...] = ()
    """For each of its dimensions the domain's dimension that indexes it; None where its size is 1."""
    free: bool = False
    """Whether it is read at other indices than the domain's own, so that it must be in memory before the kernel."""
    moved: bool = False
    """Of a free operand, whether each element is read about once, at a place of its own; dims then are None where the
    index is not the domain's. Where its elements are cheap to compute the kernel may do so
    (`schedule/grouping/inlining.py`)."""
    at_hand: bool = False
    """Whether the rule is one for groups that make or read the operand anyway: it reads a row for one element."""


@dataclass(frozen=True)
class Output:
    """One result."""

    dims: tuple[int | None, ...]
    """As in Operand."""
    dtype: torch.dtype
    column: str | None = None
    """The reduction over the domain's other dimensions that follows the formula, "sum" or another; None for none."""
    divisor: int = 1
    """What the column's reduction is divided by."""
    within: bool = False
    """Whether the formula's value is added up over the domain's other dimensions, which are a part of the group's rows:
    each row stores the sum of each of its parts. Nothing in the kernel reads such a result."""
    start: int | None = None
    """Of one part of the op's only result, of which each output then is one: where in it the part begins, in elements.
    Nothing in the kernel reads such a result."""


@dataclass(frozen=True)
class Rule:
    """One way to do an op in a loop nest."""

    shape: tuple[int, ...]
    """The domain that it iterates over."""
    operands: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    formula: Callable[[Builder, Values], Sequence[int]]
    """The results' values from the operands'; a free operand's value is its position, for `Builder.load`."""
    reduced: tuple[int, ...] = ()
    """Dimensions that the formula reduces, which must be the row's."""

    side_by_side: bool = False
    """Rows that are neighbours in memory may be done together: they have sums and extrema, and no other reductions."""

    @property
    def columns(self) -> bool:
        return any(output.column is not None for output in self.outputs)

    @property
    def in_parts(self) -> bool:
        """Whether it writes the parts of one result, each where the kernel has its elements."""
        return any(output.start is not None for output in self.outputs)


# From this many on, neighbours that are kept fill a vector.
NEIGHBOURS = 16
# Of rows up to this many elements as many as fill a few vectors fit into the nearest caches.
LONGEST_SIDE_BY_SIDE = 512
# Fewer elements stay in the cache, in whatever order they are read.
_MANY = 1 << 15

RuleMaker = Callable[[fx.Node], "list[Rule] | Rule | None"]
_MAKERS: dict[str, RuleMaker] = {}


def lowers(*names: str) -> Callable[[RuleMaker], RuleMaker]:
    """Register a maker of rules for overloads such as "aten.add.Tensor"."""

    def register(maker: RuleMaker) -> RuleMaker:
        for name in names:
            _MAKERS[name] = maker
        return maker

    return register


def lowered_names() -> tuple[str, ...]:
    """The overloads that have a rule."""
    return tuple(sorted(_MAKERS))


@once
def rules_for(node: fx.Node) -> list[Rule]:
    """Ways to do this call in a kernel, the preferred one first; empty where the libraries do it."""
    if node.op != "call_function":
        return []
    maker = _MAKERS.get(info(node).name)
    if maker is None or not _plain(node) or is_elsewhere(node) or _is_refused(node):
        return []
    try:
        made = maker(node)
        if made is None:
            return []
        rules = [made] if isinstance(made, Rule) else made
        if all(rule.reduced and not rule.columns and _is_scattered(rule) for rule in rules):
            return []
        rules = [rule for rule in rules if all(size > 0 for size in rule.shape)]
        if current_facts() is not None:
            for rule in rules:
                tried(rule)
    except UndecidedError:  # it would be another formula for other sizes
        return []
    return rules


def tried(rule: Rule) -> list[Instruction]:
    """What the formula of a rule adds to a kernel, at the domain's first element; a load's buffer is the operand's
    number. Raises UndecidedError where it needs a number for a size that each call has its own of."""
    nodes = [operand.node for operand in rule.operands]

    def resolve(node: fx.Node, index: Sequence[Affine]) -> tuple[int, Affine]:
        return nodes.index(node), offset_of(index, spec(node).stride)

    free = {k: operand.node for k, operand in enumerate(rule.operands) if operand.free}
    trial = Builder(index=(ZERO,) * len(rule.shape), resolve=resolve, free=free)
    values = [k if k in free else trial.emit(Load(k, Address(ZERO), spec(node).dtype)) for k, node in enumerate(nodes)]
    known = len(trial.body)
    rule.formula(trial, values)
    return trial.body[known:]


def _is_scattered(rule: Rule) -> bool:
    """Whether the elements of a row lie far apart, and neighbours are kept: each would be a load of its own. On a CPU
    the libraries do such rows side by side, and kernels those alone that have sums and extrema only."""
    if rule.side_by_side and likely(math.prod(rule.shape[d] for d in rule.reduced)) <= LONGEST_SIDE_BY_SIDE:
        return False
    operand = max((o for o in rule.operands if not o.free), key=lambda o: likely(spec(o.node).numel), default=None)
    if operand is None or spec(operand.node).device.type != "cpu" or likely(math.prod(rule.shape)) < _MANY:
        return False
    steps = [(likely(stride), likely(rule.shape[d]), d)
             for stride, d in zip(spec(operand.node).stride, operand.dims, strict=True)
             if d is not None and rule.shape[d] > 1 and stride > 0]  # fmt: skip
    _, size, nearest = min(steps, default=(0, 0, -1))
    return size >= NEIGHBOURS and nearest not in rule.reduced


def _plain(node: fx.Node) -> bool:
    """Whether all tensors of the call are strided, of supported types, and of sizes that are known."""
    value = value_of(node)
    results = list(value) if isinstance(value, (tuple, list)) else [value]
    inputs = node.all_input_nodes
    if current_facts() is not None:
        unread = _sizes_of_results(node)
        inputs = [source for source in inputs if source not in unread]
    tensors = [spec_of(source) for source in inputs]
    if any(spec is None for spec in tensors):
        return False
    values = [*results, *map(value_of, inputs)]
    if any(isinstance(v, torch.Tensor) and v.layout is not torch.strided for v in values):
        return False  # a sparse gradient
    specs = [spec for spec in tensors if spec is not None]
    if any(not spec.is_known or spec.dtype not in _SUPPORTED for spec in specs):
        return False
    own = spec_of(node)
    if own is not None and not own.is_known:
        return False
    return all(
        result is None
        or (isinstance(result, torch.Tensor) and result.layout is torch.strided and _has_fixed_layout(result))
        for result in results
    )


def _is_refused(node: fx.Node) -> bool:
    """Whether a number does not fit the result's type: eager refuses most such calls, so the libraries are asked."""
    result = spec_of(node)
    if result is None:
        return False
    names = [each.name for each in node.target._schema.arguments if "number" in str(each.type)]  # type: ignore[union-attr]
    given = _given(node)
    numbers = [given[name] for name in names if name in given]
    return any(isinstance(number, (int, float)) and not fits(number, result.dtype) for number in numbers)


def _given(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by their names."""
    names = [each.name for each in node.target._schema.arguments]  # type: ignore[union-attr]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


# Arguments that say how large a result is. Rules ask its spec.
_RESULT_SIZES = {"size", "input_sizes", "end"}


def _sizes_of_results(node: fx.Node) -> set[fx.Node]:
    """Symbolic sizes that the call takes as such arguments alone."""
    found: dict[bool, set[fx.Node]] = {True: set(), False: set()}
    for name, value in _given(node).items():
        parts = value if isinstance(value, (list, tuple)) else [value]
        found[name in _RESULT_SIZES].update(part for part in parts if isinstance(part, fx.Node) and is_size(part))
    return found[True] - found[False]


def _has_fixed_layout(result: torch.Tensor) -> bool:
    facts = current_facts()
    layout = tensor_spec(result) if facts is None else tensor_spec(result).opened(facts)
    return result.dtype in _SUPPORTED and layout.is_known


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The call's positional arguments: nodes, numbers, lists of them."""
    return node.args


def argument(node: fx.Node, name: str, position: int, default: Any = None) -> Any:
    """An argument by its schema name and position."""
    if name in node.kwargs:
        return node.kwargs[name]
    return node.args[position] if position < len(node.args) else default


def aligned(shape: Sequence[int], domain: Sequence[int]) -> tuple[int | None, ...]:
    """Dims of a tensor broadcast against the domain from the right."""
    shift = len(domain) - len(shape)
    return tuple(None if size == 1 else d + shift for d, size in enumerate(shape))


def broadcast(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The shape of tensors of these shapes together."""
    rank = max(map(len, shapes))
    padded = [(*(1 for _ in range(rank - len(shape))), *shape) for shape in shapes]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*padded, strict=True))


def moved(node: fx.Node, dims: Sequence[int | None]) -> Operand:
    """A free operand each of whose elements is read about once. dims: as in Operand, None also where it is read at
    other indices than the domain's."""
    sizes = spec(node).shape
    return Operand(node, tuple(None if size == 1 else d for size, d in zip(sizes, dims, strict=True)), True, True)


def whole(rank: int) -> tuple[int, ...]:
    return tuple(range(rank))


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which arithmetic of this type is done: low precision is computed in float32 and rounded."""
    return torch.float32 if dtype in LOW_PRECISION else dtype
