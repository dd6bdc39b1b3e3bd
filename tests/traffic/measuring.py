"""The memory traffic of a pattern's program, and the least that any program for it needs; nothing runs.

`moved`: bytes that kernels read and write, each element of a kernel once each way (a gather reads as many elements as
it looks up), and the whole operands and results of library calls.

`least`: what one ideal pass each way moves.
- Each input is read once in the forward and once in the backward where it is needed there; each tangent once.
- Each output, state update and gradient is written once. Views move nothing, random draws cost nothing.
- Of what the plan saves, any part may be computed again instead; the best choice counts. A value that is saved is
  written once, if it is no output, and read once.
- What follows from a sum over all rows (a batch's mean) cannot be known in the pass that adds it up: for it, what it
  needs is read once more. A matrix product or the like is such a border as well, with its operands and results.
Rows are held: a row that is read for its sum is still there afterwards.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compiler.lowering import rules_for
from aottrain.compiler.optimizers.formulas import ADAMW, LION, SGD, Formula, Segment, optimizer_step
from aottrain.compiler.schedule.groups import preferred
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    PRIMALS,
    InputKind,
    JointGraph,
    OutputKind,
    info,
    storage_bytes,
    storage_root,
    value_of,
)
from aottrain.ir.kernels.kernel import Load
from aottrain.ir.kernels.multi_tensor import Base, MultiTensorIR
from aottrain.ir.kernels.traffic import moved_bytes
from aottrain.ir.ops import OpKind
from aottrain.ir.schedule import KernelCall, Schedule
from tests.golden.programs import Golden
from tests.golden.texts import compiled
from tests.traffic.patterns import PATTERNS

BACKENDS = ("cpp", "triton")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
OPTIMIZERS: dict[str, tuple[Formula, tuple[str, ...]]] = {
    "optimizer_adamw": (ADAMW, ("exp_avg", "exp_avg_sq")),
    "optimizer_sgd": (SGD, ("momentum_buffer",)),
    "optimizer_lion": (LION, ("exp_avg",)),
}
NAMES = (*PATTERNS, *OPTIMIZERS)
_FREE = (OpKind.VIEW, OpKind.STRUCTURE, OpKind.SIZE)
# Calls that read as many elements of an operand as they give.
_LOOKS_UP = ("gather", "index", "embedding", "index_select", "nll_loss_forward", "nll_rows", "take")


@dataclass(frozen=True)
class Traffic:
    """Of one program, in bytes."""

    moved: int
    least: int
    num_kernels: int
    library_calls: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.moved / self.least


def traffic_of(name: str, dtype: str, backend: str) -> Traffic:
    """Of a pattern's forward and backward, or of an optimizer's step."""
    if name in OPTIMIZERS:
        formula, states = OPTIMIZERS[name]
        return _of_optimizer(optimizer_step(formula, (Segment(DTYPES[dtype], states),)))
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        known = compiled(Golden(functools.partial(PATTERNS[name], DTYPES[dtype]), {"kernel": backend}))
    finally:
        torch.set_num_threads(threads)
    return _of_program(known)


def _of_program(known: dict[str, Any]) -> Traffic:
    joint, parts = known["built"]["joint"], known["built"]["parts"]
    schedules = [fused.schedule for fused in known["decided"].fused]
    calls = [call for schedule in schedules for call in _working(schedule)]
    libraries = tuple(info(call).name for call in calls if isinstance(call, fx.Node))
    saved = frozenset(name for name, primal in parts.residuals if primal is None)
    sums = {call.buffers[c.buffer].name for s in schedules for call in s.kernels for c in call.kernel.columns}
    return Traffic(sum(map(_bytes_of, calls)), least_bytes(joint, saved, sums), len(calls) - len(libraries), libraries)


def _working(schedule: Schedule) -> Iterator[KernelCall | fx.Node]:
    for call in schedule.calls:
        if isinstance(call, KernelCall) or info(call).kind not in _FREE:
            yield call


def _bytes_of(call: KernelCall | fx.Node) -> int:
    if isinstance(call, KernelCall):
        return moved_bytes(call.kernel)
    results = sum(map(_bytes, _tensors(value_of(call))))
    return results + sum(_read_bytes(call, operand) for operand in call.all_input_nodes)


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
    if reader.op == "call_function" and info(reader).name.split(".")[1] in _LOOKS_UP:
        return min(whole, sum(map(_bytes, _tensors(value_of(reader))))) if operand is reader.args[0] else whole
    return whole


def least_bytes(joint: JointGraph, saved: frozenset[str], sums: Iterable[str]) -> int:
    """As the file says. sums: what kernels add up over all rows."""
    saved = frozenset(node.name for node in joint.graph.nodes if node.name in saved)
    least, changed = _with_saved(joint, saved, set(sums)), True
    while changed:
        changed = False
        for name in sorted(saved):
            other = _with_saved(joint, saved - {name}, set(sums))
            if other < least:
                least, saved, changed = other, saved - {name}, True
    return min(least, _with_saved(joint, frozenset(), set(sums)))


def _with_saved(joint: JointGraph, saved: frozenset[str], sums: set[str]) -> int:
    kept = [node for node in joint.graph.nodes if node.name in saved]
    inputs = set(joint.inputs_of(*PRIMALS, InputKind.RNG))
    forward = _Pass(inputs, sums)
    results = [*joint.outputs_of(*FORWARD_OUTPUTS), *kept]
    backward = _Pass(inputs | set(map(storage_root, kept)) | set(joint.tangents), sums)
    return forward.least(results) + backward.least(joint.outputs_of(OutputKind.GRADIENT))


@dataclass
class _Pass:
    """A forward or a backward that moves the least. leaves: what it is given."""

    leaves: set[fx.Node]
    sums: set[str]
    reads: dict[tuple[fx.Node, int], dict[tuple[Any, ...], int]] = field(default_factory=dict)
    """By what is read and how many borders come before, the parts of it that are."""
    borders: set[fx.Node] = field(default_factory=set)
    """Sums and products that are needed."""
    depths: dict[fx.Node, int] = field(default_factory=dict)

    def least(self, results: Sequence[fx.Node]) -> int:
        written = {storage_root(node): node for node in results if storage_root(node) not in self.leaves}
        for node in written:
            self._collect(node)
        own = sum(_bytes(value) for border in self.borders.difference(written) for value in _tensors(value_of(border)))
        reads = sum(min(sum(parts.values()), storage_bytes(leaf)) for (leaf, _), parts in self.reads.items())
        return reads + own + sum(map(storage_bytes, written))

    def _collect(self, target: fx.Node) -> None:
        """What the target's own loop nest reads, and the borders that it needs."""
        depth = self._depth_before(target)
        seen, stack = {target}, [target]
        while stack:
            reader = stack.pop()
            for operand in _operands(reader):
                root = storage_root(operand)
                if root in self.leaves or self._is_border(root):
                    self._read(root, depth, reader, operand)
                    if root not in self.leaves and root not in self.borders:
                        self.borders.add(root)
                        self._collect(root)
                elif root not in seen:
                    seen.add(root)
                    stack.append(root)

    def _read(self, root: fx.Node, depth: int, reader: fx.Node, operand: fx.Node) -> None:
        value = value_of(operand)
        part = (tuple(value.shape), value.stride(), value.storage_offset()) if isinstance(value, Tensor) else ()
        self.reads.setdefault((root, depth), {})[part] = _read_bytes(reader, operand)

    def _is_border(self, node: fx.Node) -> bool:
        if node.op != "call_function":
            return False
        if info(node).kind is OpKind.COMPUTE:
            return True
        call = node.args[0] if info(node).kind is OpKind.STRUCTURE else node
        rules = rules_for(call) if node.name in self.sums else ()
        return bool(rules) and preferred(call, rules)[0].columns

    def _depth_before(self, node: fx.Node) -> int:
        """How many borders follow each other before it."""
        if node in self.leaves or node.op != "call_function":
            return 0
        if node not in self.depths:
            roots = [storage_root(operand) for operand in _operands(node)]
            self.depths[node] = max((self._depth_before(r) + self._is_border(r) for r in roots), default=0)
        return self.depths[node]


def _of_optimizer(program: MultiTensorIR) -> Traffic:
    """For an element of each tensor: lists are read once before the gradients' norm is known and once after."""
    moved, reads, writes = 0, dict[tuple[str, bool], int](), dict[str, int]()
    for number, stage in enumerate(program.stages):
        kernel = stage.kernel
        loaded = {load.buffer for load in kernel.body if isinstance(load, Load)}
        for place, (parameter, base) in enumerate(zip(kernel.parameters, stage.bases, strict=True)):
            if base is Base.LIST:
                size = parameter.dtype.itemsize
                moved += size * (place in loaded) + size * parameter.written
                if place in loaded:
                    reads[parameter.name, number < program.num_measuring] = size
                if parameter.written:
                    writes[parameter.name] = size
    return Traffic(moved, sum(reads.values()) + sum(writes.values()), len(program.stages))
