"""The programs that flow through the compiler: fx graphs inside frozen wrappers that say what each input and output is.

This is the only module that reads or writes `node.meta`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any

import torch
from torch import fx

from aottrain.ir.analysis.reach import descendants
from aottrain.ir.analysis.unchanged import once
from aottrain.ir.ops import KNOWN, OpInfo, OpKind, argument_at, divides, op_info
from aottrain.ir.shown import Shown
from aottrain.ir.sizes.expressions import SizeExpression, hint, is_symbolic
from aottrain.ir.sizes.polynomials import current_facts
from aottrain.ir.tensor import TensorSpec, tensor_spec


class InputKind(Enum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    CONSTANT = "constant"  # a tensor that the program made from Python numbers while it was traced
    SIZE = "size"  # a symbol: an integer that the inputs' shapes have at each call
    TANGENT = "tangent"
    RNG = "rng"


class Mark(IntEnum):
    """What the user says of a value inside torch.utils.checkpoint. Of two marks the greater wins."""

    MUST_RECOMPUTE = 0
    PREFER_RECOMPUTE = 1
    PREFER_SAVE = 2
    MUST_SAVE = 3


# For each checkpointed region around an op, the outermost first, its number and its mark on the op's values.
Marks = tuple[tuple[int, Mark], ...]

# The modules whose calls an op is within, the outermost first: path, and which of its runs this is, from 0.
ModuleStack = tuple[tuple[str, int], ...]

PRIMALS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.BATCH, InputKind.CONSTANT)


class OutputKind(Enum):
    OUTPUT = "output"
    REPLACEMENT = "differentiable update"  # new value of an input through which gradients flow
    UPDATE = "state update"
    GRADIENT = "gradient"
    # Where gradients of some results pass through another, until the graph is planned: see `compiler.joint.links`.
    TOTAL = "gradient at a link"
    LINKED = "value of a link"


FORWARD_OUTPUTS = (OutputKind.OUTPUT, OutputKind.REPLACEMENT, OutputKind.UPDATE)


@dataclass(frozen=True)
class InputSpec:
    """One flat input."""

    kind: InputKind
    name: str
    spec: TensorSpec
    requires_grad: bool = False
    mutated: bool = False
    """The program's epilogue writes it, so its old value dies with the call."""
    lent: bool = False
    """Eager keeps values made from it, not itself: writes before the backward (`x.data.add_(1)`) change no gradient."""
    leaf: bool = False  # a backward puts its gradient into `.grad`

    @property
    def copied(self) -> bool:
        """Whether the backward may read it through a saved copy alone."""
        return self.mutated or self.lent


@dataclass(frozen=True)
class OutputSpec:
    """One flat output."""

    kind: OutputKind
    name: str
    target: int
    """Of an update or a replacement: the index of the primal that it is written to. Of a gradient: the index of its
    primal. Of an output: its position among the computed outputs. Of a link's total or value: the link's number."""


@dataclass(frozen=True)
class GraphSignature:
    """What each placeholder and each output of a joint graph is, in order: primals, sizes, rng, tangents."""

    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]

    def input_indices(self, *kinds: InputKind) -> list[int]:
        return [i for i, value in enumerate(self.inputs) if value.kind in kinds]

    def output_indices(self, *kinds: OutputKind) -> list[int]:
        return [i for i, value in enumerate(self.outputs) if value.kind in kinds]

    @property
    def num_primals(self) -> int:
        return sum(value.kind in PRIMALS for value in self.inputs)

    @property
    def num_sizes(self) -> int:
        return sum(value.kind is InputKind.SIZE for value in self.inputs)


@dataclass(frozen=True)
class JointGraph(Shown):
    """One program (primals, sizes, rng, tangents) -> (outputs, state updates, gradients); callable on flat tensors."""

    graph: fx.Graph
    signature: GraphSignature
    num_draws: int = 0
    constants: tuple[torch.Tensor, ...] = ()
    rng: str = "philox"
    """Or "eager": each draw advances torch's generator once."""
    defined: tuple[bool, ...] = ()
    """Which tangents the gradients follow from; () where all of them."""

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor | None]:
        return list(fx.Interpreter(as_module(self.graph)).run(*inputs))

    @property
    def placeholders(self) -> list[fx.Node]:
        return placeholders(self.graph)

    @property
    def results(self) -> list[fx.Node | None]:
        return results(self.graph)

    @property
    def tangents(self) -> list[fx.Node]:
        """The inputs that are defined tangents."""
        tangents = self.inputs_of(InputKind.TANGENT)
        return [node for node, flag in zip(tangents, self.defined or (True,) * len(tangents), strict=True) if flag]

    def inputs_of(self, *kinds: InputKind) -> list[fx.Node]:
        nodes = self.placeholders
        return [nodes[i] for i in self.signature.input_indices(*kinds)]

    def outputs_of(self, *kinds: OutputKind) -> list[fx.Node]:
        """Distinct nodes among the outputs of these kinds (an output that is a constant None is left out)."""
        values = self.results
        nodes = [values[i] for i in self.signature.output_indices(*kinds)]
        return list(dict.fromkeys(node for node in nodes if node is not None))

    def effects(self) -> tuple[list[fx.Node], list[fx.Node]]:
        """The calls that run though nothing may read them, in program order: the forward's, and the backward's, which
        are those that depend on a tangent."""
        in_backward = descendants(self.inputs_of(InputKind.TANGENT))
        effects = effects_of(self.graph)
        return [node for node in effects if node not in in_backward], [node for node in effects if node in in_backward]

    def with_graph(self, graph: fx.Graph) -> JointGraph:
        return replace(self, graph=graph)


@dataclass(frozen=True)
class PartitionedGraph(Shown):
    """Law: forward(primals, sizes, rng) -> (outputs, updates, residuals);
    backward(sizes, residuals, tangents) -> gradients.
    """

    forward: fx.Graph
    backward: fx.Graph | None
    residuals: tuple[tuple[str, int | None], ...]
    """Of each residual its name in the joint graph and, where it is an unmutated primal, that primal's index."""
    signature: GraphSignature
    num_draws: int
    constants: tuple[torch.Tensor, ...] = ()
    defined: tuple[bool, ...] = ()
    """Which tangents the backward is for; () where it is for all. The others are undefined."""

    @property
    def tangents(self) -> list[fx.Node]:
        """The inputs of the backward that are defined tangents."""
        if self.backward is None:
            return []
        tangents = placeholders(self.backward)[self.signature.num_sizes + len(self.residuals) :]
        return [node for node, flag in zip(tangents, self.defined or (True,) * len(tangents), strict=True) if flag]

    @property
    def num_forward_outputs(self) -> int:
        """Outputs and state updates, without the residuals that follow them."""
        return len(self.signature.output_indices(*FORWARD_OUTPUTS))


def as_module(graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule over a graph whose calls are all free functions."""
    return fx.GraphModule(torch.nn.Module(), graph)


def placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def devices_of(graph: fx.Graph) -> set[torch.device]:
    """The devices of the graph's values."""
    values = [value_of(node) for node in graph.nodes]
    tensors = [t for v in values for t in (v if isinstance(v, (tuple, list)) else [v]) if isinstance(t, torch.Tensor)]
    return {tensor.device for tensor in tensors}


def results(graph: fx.Graph) -> list[fx.Node | None]:
    """The output node's values, in order."""
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def info(node: fx.Node) -> OpInfo:
    return known[1] if (known := KNOWN.get(id(node.target))) is not None else op_info(node.target)


def effects_of(graph: fx.Graph) -> list[fx.Node]:
    """The calls that run once each, in program order, whether anything reads their results or not."""
    return [node for node in calls(graph) if info(node).kind is OpKind.EFFECT]


def may_raise(node: fx.Node) -> bool:
    """Whether values may make it raise, though it is no effect: then it runs, whether anything reads its result or not,
    and may run again."""
    spec = spec_of(node)
    is_integer = spec is not None and not (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return info(node).raises or (is_integer and divides(node.target))


def value_of(node: fx.Node) -> Any:
    """The example (fake) value of a node: a tensor, a tuple of tensors, or None where unknown."""
    return node.meta.get("val")


def set_value(node: fx.Node, value: Any) -> None:
    node.meta["val"] = value
    node.meta.pop("aottrain_spec", None)  # of the value before


def spec_of(node: fx.Node) -> TensorSpec | None:
    """The static type of a node's value, with polynomials inside `open_sizes`, with a call's numbers inside `sizes_at`;
    None where it is not one tensor."""
    spec = node.meta.get("aottrain_spec")
    if spec is None:
        value = value_of(node)
        if not isinstance(value, torch.Tensor):
            return None
        spec = node.meta["aottrain_spec"] = tensor_spec(value)
    if spec.symbolic is None:
        return spec
    facts = current_facts()
    return spec.at_hand() if facts is None else spec.opened(facts)


def required_spec(node: Any) -> TensorSpec:
    """Of a value that is known to be one tensor."""
    spec = spec_of(node)
    assert spec is not None
    return spec


def is_tuple(node: fx.Node) -> bool:
    return isinstance(value_of(node), (tuple, list))


def is_size(node: fx.Node) -> bool:
    """Whether the value is a symbolic number: free to compute, and no tensor to save. What a pass has made of symbols
    may have no value yet."""
    return isinstance(node.target, SizeExpression) or is_symbolic(value_of(node))


def readers_of(node: fx.Node) -> list[fx.Node]:
    """What reads it, through whatever views."""
    readers: list[fx.Node] = []
    for user in node.users:
        is_part = user.op == "call_function" and info(user).kind in (OpKind.VIEW, OpKind.STRUCTURE)
        readers += readers_of(user) if is_part else [user]
    return readers


def view_source(node: fx.Node) -> fx.Node | None:
    """The node whose storage this one shares by being a view of it (or an item of a tuple of views)."""
    if node.op != "call_function":
        return None
    op = info(node)
    if op.kind is OpKind.STRUCTURE:
        source = node.args[0]
        return source if isinstance(source, fx.Node) and view_source(source) is not None else None
    if op.view_of is None:
        return None
    source = argument_at(node, op.view_of)
    return source if isinstance(source, fx.Node) else None


@once
def storage_root(node: fx.Node) -> fx.Node:
    """The node that allocated the storage in which this node's value lives (a placeholder for views of inputs)."""
    source = view_source(node)
    while source is not None:
        node, source = source, view_source(source)
    return node


def storage_roots(nodes: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """`storage_root` of each of the nodes, which stand in program order."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = view_source(node)
        roots[node] = node if source is None else roots.get(source) or storage_root(source)
    return roots


def storage_bytes(node: fx.Node) -> int:
    """Bytes of the storage that a tensor node lives in; 0 for tuples and non-tensors."""
    spec = spec_of(node)
    return 0 if spec is None else spec.storage_bytes


def allocations(node: fx.Node) -> list[tuple[fx.Node, int]]:
    """The storages that a call makes, with their bytes: its own, or those of the items of its tuple. An item that
    nothing reads dies with the tuple, when the last item is taken."""
    if node.op != "call_function" or info(node).kind in (OpKind.STRUCTURE, OpKind.SIZE):
        return []
    if view_source(node) is not None:  # there is none where a number is "viewed", as in the conjugate of 1j
        return []
    if not is_tuple(node):
        return [(node, storage_bytes(node))]
    users = [user for user in node.users if user.op == "call_function"]
    items = [(user, storage_bytes(user)) for user in users]
    read = {user.args[1] for user in users}
    unread = [leaf for i, leaf in enumerate(value_of(node)) if i not in read and isinstance(leaf, torch.Tensor)]
    return [*items, (node, sum(hint(leaf.untyped_storage().nbytes()) for leaf in unread))] if unread else items


def module_of(node: fx.Node) -> str:
    """Path of the module in whose forward the op (or the op that this is the gradient of) was written."""
    stack = module_stack_of(node)
    return stack[-1][0] if stack else ""


def module_stack_of(node: fx.Node) -> ModuleStack:
    return node.meta.get("aottrain_modules", ())


def source_of(node: fx.Node) -> str:
    """'file.py:line' of the user's line that made the op, or ''."""
    return str(node.meta.get("aottrain_source", ""))


def set_provenance(node: fx.Node, modules: ModuleStack, source: str, grad_mode: bool) -> None:
    node.meta["aottrain_modules"], node.meta["aottrain_source"] = modules, source
    node.meta["aottrain_grad_mode"] = grad_mode


def grad_mode_of(node: fx.Node) -> bool:
    """Whether the user's code recorded gradients where it called this op."""
    return bool(node.meta.get("aottrain_grad_mode", True))


def set_in_backward(node: fx.Node) -> None:
    node.meta["aottrain_in_backward"] = True


def made_in_backward(node: fx.Node) -> bool:
    """Whether a gradient formula, or a hook on a gradient, called this op; it need not depend on a tangent."""
    return bool(node.meta.get("aottrain_in_backward", False))


def set_marks(node: fx.Node, marks: Marks) -> None:
    node.meta["aottrain_marks"] = marks


def marks_of(node: fx.Node) -> Marks:
    return node.meta.get("aottrain_marks", ())


def copy_provenance(source: fx.Node, target: fx.Node) -> None:
    """All that is known of the user's code behind an op, for an op that does its work in another program."""
    for key in ("modules", "source", "grad_mode", "marks", "in_backward"):
        key = f"aottrain_{key}"
        if key in source.meta:
            target.meta[key] = source.meta[key]


def copy_meta(source: fx.Node, target: fx.Node) -> None:
    target.meta.clear()  # fx does more where an attribute is set
    target.meta.update(source.meta)
