"""The joint graph contracted to storages: what memory planning reasons about.

An op is a call that allocates; views are free and follow their base; an op with several results is one op with several
storages. The 5,337 nodes of a trunk of 48 transformer blocks become 1,445 ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import fx

from aottrain.compiler.graphs.measured_calls import Workspace
from aottrain.compiler.partition.comparisons import decided_once
from aottrain.ir.analysis.gradients import copied_gradient_bytes
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    InputKind,
    JointGraph,
    OutputKind,
    allocations,
    info,
    is_size,
    is_tuple,
    storage_bytes,
    storage_root,
    storage_roots,
    view_source,
)
from aottrain.ir.ops import OpKind, is_pure
from aottrain.measure.decisions import gradients_are_shared

Price = Callable[[fx.Node], float]
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Accesses:
    """The storages that ops access, as arrays: of op i the accesses from starts[i] to before starts[i + 1]."""

    starts: Array
    storages: Array
    makes: Array
    """Whether the op makes the storage; else it reads it."""


@dataclass(frozen=True)
class Op:
    """One call that allocates."""

    node: fx.Node
    reads: tuple[int, ...]
    """Storages by number; so are `writes`."""
    writes: tuple[int, ...]
    cost: float
    """Seconds."""
    fused_cost: float
    """Seconds where an op that only moves memory is computed within the op that reads it."""
    workspace: int
    """Bytes that it allocates within itself."""
    order: int
    """Its position in the joint graph, where early ops that gradient formulas made stand among late ones."""
    late: bool
    """Whether it depends on a tangent."""


@dataclass
class StorageGraph:
    """Ops and the storages that they read and write, both by number."""

    ops: list[Op] = field(default_factory=list)
    """In program order, early ones first."""
    sizes: list[int] = field(default_factory=list)
    """Bytes of each storage."""
    producers: list[int] = field(default_factory=list)
    """The op that makes each storage; -1 for an input."""
    roots: list[fx.Node] = field(default_factory=list)
    """The node of each storage."""
    at_hand: frozenset[int] = frozenset()
    """Inputs that may be read at any time at no cost."""
    must: frozenset[int] = frozenset()
    """Storages that cannot be made a second time."""
    outputs: frozenset[int] = frozenset()
    """Storages that the caller gets."""
    updates: frozenset[int] = frozenset()
    """Storages that are written to their inputs once the forward is done."""
    gradients: frozenset[int] = frozenset()
    demanded: frozenset[int] = frozenset()
    """Forward storages that the backward's own ops read."""
    copied: frozenset[int] = frozenset()
    """Inputs that the step or the caller may write to before the backward: saving one copies it."""
    dropped: frozenset[int] = frozenset()
    """Storages that the user asks not to save."""
    tangent_bytes: int = 0
    copied_gradient_bytes: int = 0
    """What is allocated once the backward is done, by what is given its gradients."""
    rerun_seconds: list[float] = field(default_factory=list)
    """By op, the seconds of a run in the backward."""

    @cached_property
    def early(self) -> range:
        return range(sum(not op.late for op in self.ops))

    # By op, as plain lists: what simulation and search go through most often.

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        return [op.reads for op in self.ops]

    @cached_property
    def writes(self) -> list[tuple[int, ...]]:
        return [op.writes for op in self.ops]

    @cached_property
    def costs(self) -> list[float]:
        return [op.cost for op in self.ops]

    @cached_property
    def workspaces(self) -> list[int]:
        return [op.workspace for op in self.ops]

    @cached_property
    def write_bytes(self) -> list[int]:
        """What each op allocates for its results."""
        return [sum(self.sizes[s] for s in op.writes) for op in self.ops]

    @cached_property
    def early_reads(self) -> list[tuple[int, ...]]:
        """What each op reads of what the forward makes, or of copies of inputs."""
        late = set().union(*(op.writes for op in self.ops if op.late))
        return [tuple(s for s in op.reads if s not in late and s not in self.at_hand) for op in self.ops]

    @cached_property
    def accesses(self) -> Accesses:
        """What each op makes, and what it reads of what is not alive anyway."""
        starts, storages, makes = [0], list[int](), list[bool]()
        for op in self.ops:
            reads = [s for s in op.reads if s not in self.at_hand]
            storages += [*op.writes, *reads]
            makes += [True] * len(op.writes) + [False] * len(reads)
            starts.append(len(storages))
        return Accesses(np.array(starts), np.array(storages, np.int32), np.array(makes, bool))

    @cached_property
    def size_array(self) -> Array:
        return np.array(self.sizes, np.int64)

    @cached_property
    def op_bytes(self) -> Array:
        """(ops, 2): of each, what it allocates for its results, and within itself."""
        return np.array([*zip(self.write_bytes, self.workspaces, strict=True)], np.int64).reshape(-1, 2)

    @cached_property
    def touches(self) -> list[tuple[int, ...]]:
        """What each op reads of those, and what it makes if it is an early one."""
        num_early = len(self.early)
        pairs = zip(self.early_reads, self.writes, strict=True)
        return [reads + writes if i < num_early else reads for i, (reads, writes) in enumerate(pairs)]

    @cached_property
    def repeatable(self) -> list[int]:
        """Storages of early ops that may be made a second time, and are not alive anyway."""
        banned = self.must | self.outputs | self.gradients
        return [s for i in self.early for s in self.ops[i].writes if s not in banned]

    @cached_property
    def forwards(self) -> dict[tuple[int, ...], tuple[Array, dict[int, int]]]:
        """What `simulation.simulate` has computed of each forward program."""
        return {}

    @cached_property
    def at_hand_flags(self) -> bytes:
        """By storage: 1 for what is at hand."""
        return bytes(s in self.at_hand for s in range(len(self.sizes)))


def contract(joint: JointGraph, price: Price, workspace: Workspace) -> StorageGraph:
    """Early ops (what does not depend on a tangent) first, in program order, then late ones."""
    graph = StorageGraph()
    number: dict[fx.Node, int] = {}
    late = descendants(joint.inputs_of(InputKind.TANGENT))
    order = {node: i for i, node in enumerate(joint.graph.nodes)}
    calls = [node for node in joint.graph.nodes if node.op == "call_function" and not is_size(node)]
    allocating = [node for node in calls if view_source(node) is None and info(node).kind is not OpKind.STRUCTURE]

    def add(root: fx.Node, size: int, producer: int) -> int:
        number[root] = len(graph.sizes)
        graph.sizes.append(size)
        graph.producers.append(producer)
        graph.roots.append(root)
        return number[root]

    roots = storage_roots(joint.graph.nodes)
    for node in joint.placeholders:
        add(node, storage_bytes(node), -1)
    for node in sorted(allocating, key=lambda node: node in late):
        index = len(graph.ops)
        reads = _distinct(number[roots[s]] for s in node.all_input_nodes if not is_size(s) and not is_tuple(s))
        writes = tuple(add(root, size, index) for root, size in allocations(node))
        seconds = price(node)
        fused = seconds if info(node).kind is OpKind.COMPUTE else 0.0
        graph.ops.append(Op(node, reads, writes, seconds, fused, workspace(node), order[node], node in late))
    _classify(graph, joint, number)
    if gradients_are_shared():
        for i in graph.gradients:
            graph.sizes[i] = 0
        graph.copied_gradient_bytes = 0
    graph.rerun_seconds = graph.costs
    return graph


def _classify(graph: StorageGraph, joint: JointGraph, number: dict[fx.Node, int]) -> None:
    inputs = list(zip(joint.placeholders, joint.signature.inputs, strict=True))
    tangents = {number[node] for node in joint.tangents}
    graph.copied = frozenset(number[node] for node, spec in inputs if spec.copied)
    graph.at_hand = frozenset(number[node] for node, _ in inputs) - graph.copied
    graph.tangent_bytes = sum(graph.sizes[i] for i in tangents)

    def storages(*kinds: OutputKind) -> frozenset[int]:
        return frozenset(number[storage_root(node)] for node in joint.outputs_of(*kinds))

    graph.outputs = storages(OutputKind.OUTPUT, OutputKind.REPLACEMENT)
    graph.updates = storages(*FORWARD_OUTPUTS) - graph.outputs
    graph.gradients = storages(OutputKind.GRADIENT)
    values = [joint.results[i] for i in joint.signature.output_indices(OutputKind.GRADIENT)]
    graph.copied_gradient_bytes = copied_gradient_bytes(joint.signature, values)
    late = {i for op in graph.ops if op.late for i in op.writes} | tangents
    reads = {i for op in graph.ops if op.late for i in op.reads} | graph.gradients
    graph.demanded = frozenset(reads - late - graph.at_hand)
    impure = {i for op in graph.ops if not is_pure(op.node.target) for i in op.writes}
    once = {number[storage_root(node)] for node in decided_once(joint) if storage_root(node) in number}
    graph.must = frozenset(impure | once | graph.copied)


def _distinct(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))
