"""The memory traffic of a program, in bytes, and the least that any program for it needs.

`moved`: bytes that kernels read and write, each element of a kernel once each way (a gather reads as many elements as
it looks up), and the whole operands and results of library calls.

`least`: what one ideal pass each way moves.
- Each input is read once in the forward and once in the backward where it is needed there; each tangent once. An
  input that may be written in between is read there from a copy, which is written once.
- Each output, state update and gradient is written once. Views move nothing, random draws cost nothing.
- Of what the plan saves, any part may be computed again instead; the best choice counts. A value that is saved is
  written once, if it is no output, and read once.
- What follows from a sum over all rows (a batch's mean, the norm of all gradients) cannot be known in the pass that
  adds it up: for it, what it needs is read once more. A matrix product or the like is such a border as well, with its
  operands and results.
Rows are held: a row that is read for its sum is still there afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from aottrain.compiler.lowering import Rule, rules_for
from aottrain.compiler.schedule.grouping.groups import LONGEST_HELD_ROW, preferred
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    PRIMALS,
    InputKind,
    JointGraph,
    OutputKind,
    PartitionedGraph,
    info,
    storage_bytes,
    storage_root,
    value_of,
)
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import KernelCall, Schedule
from aottrain.ir.sizes.polynomials import likely

_FREE = (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)
# Calls that read as many elements of an operand as they give.
_LOOKS_UP = ("gather", "index", "embedding", "index_select", "nll_loss_forward", "nll_rows", "take")
# Saved values of which each is tried as one that is computed again. Of more it takes long, and the plan's own count.
_MOST_TRIED = 24


def traffic_of(joint: JointGraph, parts: PartitionedGraph, schedules: Sequence[Schedule]) -> tuple[int, int]:
    """Bytes moved, and the least: of a program of fixed sizes that runs as these schedules of its parts say."""
    moved = sum(bytes_of(call) for schedule in schedules for call in working(schedule))
    saved = frozenset(name for name, primal in parts.residuals if primal is None)
    sums = {call.buffers[c.buffer].name for s in schedules for call in s.kernels for c in call.kernel.columns}
    return moved, min(least_bytes(joint, saved, sums), moved)  # of many saved values not all are tried


def working(schedule: Schedule) -> Iterator[KernelCall | fx.Node]:
    """Its kernels, and the library calls that move anything."""
    for call in schedule.calls:
        if isinstance(call, KernelCall) or info(call).kind not in _FREE:
            yield call


def bytes_of(call: KernelCall | fx.Node) -> int:
    """Read and written by a call."""
    if isinstance(call, KernelCall):
        return moved_bytes(call.kernel)
    results = sum(map(_bytes, _tensors(value_of(call))))
    return results + sum(_read_bytes(call, operand) for operand in call.all_input_nodes)


def _is_long(rule: Rule) -> bool:
    return likely(math.prod(rule.shape)) > LONGEST_HELD_ROW


def _operands(node: fx.Node) -> list[fx.Node]:
    """What it reads: of some the values of an operand do not matter, as of what a pool's gradient has the shape."""
    rules = rules_for(node) if node.op == "call_function" and info(node).kind not in _FREE else ()
    return [operand.node for operand in rules[0].operands] if rules else node.all_input_nodes


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(leaf, Tensor)]


def _bytes(value: Tensor) -> int:
    """Of its distinct elements."""
    sizes = [size for size, stride in zip(value.shape, value.stride(), strict=True) if stride]
    return math.prod(sizes) * value.element_size()


def _read_bytes(reader: fx.Node, operand: fx.Node) -> int:
    whole = sum(map(_bytes, _tensors(value_of(operand))))
    if reader.op == "call_function" and info(reader).name.partition(".")[2].partition(".")[0] in _LOOKS_UP:
        return min(whole, sum(map(_bytes, _tensors(value_of(reader))))) if operand is reader.args[0] else whole
    return whole


def least_bytes(joint: JointGraph, saved: frozenset[str], sums: Iterable[str]) -> int:
    """As the file says. sums: what kernels add up over all rows."""
    saved = frozenset(node.name for node in joint.graph.nodes if node.name in saved)
    calls = _Calls(frozenset(sums))
    least, changed = _with_saved(joint, saved, calls), len(saved) <= _MOST_TRIED
    while changed:
        changed = False
        for name in sorted(saved):
            other = _with_saved(joint, saved - {name}, calls)
            if other < least:
                least, saved, changed = other, saved - {name}, True
    return min(least, _with_saved(joint, frozenset(), calls))


def _with_saved(joint: JointGraph, saved: frozenset[str], calls: _Calls) -> int:
    kept = [node for node in joint.graph.nodes if node.name in saved]
    inputs = set(joint.inputs_of(*PRIMALS, InputKind.RNG))
    forward = _Pass(inputs, calls)
    results = [*joint.outputs_of(*FORWARD_OUTPUTS), *kept]
    backward = _Pass(inputs | set(map(storage_root, kept)) | set(joint.tangents), calls)
    least = forward.least(results) + backward.least(joint.outputs_of(OutputKind.GRADIENT))
    read = {root for root, _ in backward.reads}
    specs = zip(joint.placeholders, joint.signature.inputs, strict=True)
    return least + sum(storage_bytes(node) for node, spec in specs if spec.copied and node in read)


@dataclass
class _Calls:
    """What is asked of each call again and again: of a deep model for each border that is reached through it."""

    sums: frozenset[str]
    _operands: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = field(default_factory=dict)
    _borders: dict[fx.Node, bool] = field(default_factory=dict)

    def operands(self, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
        """What it reads, each beside the value whose memory that is."""
        if node not in self._operands:
            self._operands[node] = [(operand, storage_root(operand)) for operand in _operands(node)]
        return self._operands[node]

    def is_border(self, node: fx.Node) -> bool:
        if node not in self._borders:
            self._borders[node] = self._find_border(node)
        return self._borders[node]

    def _find_border(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if info(node).kind is OpKind.COMPUTE:
            return True
        call = node.all_input_nodes[0] if info(node).kind is OpKind.STRUCTURE else node
        is_number = all(value.numel() == 1 for value in _tensors(value_of(node)))
        rules = rules_for(call) if is_number or node.name in self.sums else ()
        if is_number and any(len(rule.reduced) == len(rule.shape) and _is_long(rule) for rule in rules[:1]):
            return True  # of all elements, of more than are held
        return bool(rules) and node.name in self.sums and preferred(call, rules)[0].columns


@dataclass
class _Pass:
    """A forward or a backward that moves the least. leaves: what it is given."""

    leaves: set[fx.Node]
    calls: _Calls
    reads: dict[tuple[fx.Node, int], dict[tuple[Any, ...], int]] = field(default_factory=dict)
    """By what is read and how many borders come before, the parts of it that are."""
    borders: set[fx.Node] = field(default_factory=set)
    """Sums and products that are needed."""
    depths: dict[fx.Node, int] = field(default_factory=dict)

    def least(self, results: Sequence[fx.Node]) -> int:
        written = {storage_root(node): node for node in results if storage_root(node) not in self.leaves}
        waiting = [*written]
        while waiting:  # not by recursion: a recurrent network's borders follow each other for thousands of steps
            waiting += self._collect(waiting.pop())
        own = sum(_bytes(value) for border in self.borders.difference(written) for value in _tensors(value_of(border)))
        reads = sum(min(sum(parts.values()), storage_bytes(leaf)) for (leaf, _), parts in self.reads.items())
        return reads + own + sum(map(storage_bytes, written))

    def _collect(self, target: fx.Node) -> list[fx.Node]:
        """Notes what the target's own loop nest reads. The borders that it needs and that no other did before."""
        depth, needed = self._depth_before(target), list[fx.Node]()
        seen, stack = {target}, [target]
        while stack:
            reader = stack.pop()
            for operand, root in self.calls.operands(reader):
                if root in self.leaves or self.calls.is_border(root):
                    self._read(root, depth, reader, operand)
                    if root not in self.leaves and root not in self.borders:
                        self.borders.add(root)
                        needed.append(root)
                elif root not in seen:
                    seen.add(root)
                    stack.append(root)
        return needed

    def _read(self, root: fx.Node, depth: int, reader: fx.Node, operand: fx.Node) -> None:
        value = value_of(operand)
        part = (tuple(value.shape), value.stride(), value.storage_offset()) if isinstance(value, Tensor) else ()
        parts = self.reads.setdefault((root, depth), {})
        parts[part] = max(parts.get(part, 0), _read_bytes(reader, operand))  # a lookup reads less than others do

    def _depth_before(self, node: fx.Node) -> int:
        """How many borders follow each other before it."""
        stack = [node]
        while stack:
            last = stack[-1]
            inner = last not in self.leaves and last.op == "call_function" and last not in self.depths
            roots = [root for _, root in self.calls.operands(last)] if inner else []
            unknown = [root for root in roots if root not in self.depths]
            if not unknown:
                before = max((self.depths[root] + self.calls.is_border(root) for root in roots), default=0)
                self.depths.setdefault(last, before)
                stack.pop()
            stack += unknown
        return self.depths[node]
