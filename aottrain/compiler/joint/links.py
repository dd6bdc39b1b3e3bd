"""links: results through which gradients of other results pass, and the program's backward cut apart at them.

Of `return hidden, loss` the loss's gradient goes through `hidden`. Eager adds up there what comes from the loss and
from the caller, runs the caller's hooks on the sum and goes on with what they return; one autograd node for both
results would hide it. So each result whose gradient passes through a link gets a node of its own
(`runtime.autograd.chain`). As long as no gradient at a link is observed, that node hands its tangent on, and the
program's backward runs as a whole. Where one is, cuts of it run: from one tangent to the gradients that it has at the
next links, and from all totals to the primals.

Links are numbered. In the traced program each has a tangent of its own, added up with the others there: so what has
passed through a link is known from what has not, whatever is rewritten later. It is dropped before planning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compiler.graphs.simplification import copy_graph, remove_dead_code
from aottrain.compiler.partition.split import backward_graph
from aottrain.compiler.partition.undefined import copied, specialise_backward
from aottrain.errors import UnsupportedError, is_out_of_memory
from aottrain.ir.analysis.reach import ancestors
from aottrain.ir.calling import NO_LINKS, Link, Links, OutputInfo, ResultSource
from aottrain.ir.graph import (
    GraphSignature,
    InputKind,
    JointGraph,
    OutputKind,
    OutputSpec,
    PartitionedGraph,
    placeholders,
    results,
    spec_of,
)
from aottrain.ir.tensor import tensor_spec, version_of

_AS_IT_IS_NOW = "a gradient that reaches no input needs an input or a result as it is now"
Edge = tuple[Any, int]  # a node of autograd's graph, and which of its outputs


def find_links(
    outputs: Sequence[OutputInfo], tensors: Sequence[Tensor], computed: Sequence[Tensor], replaced: Sequence[Tensor]
) -> Links:
    """tensors: of the result, as `outputs` says; computed: the fresh tensors that the program returns for them;
    replaced: inputs that it has updated and that gradients flow through."""
    values = [*computed, *replaced]
    candidates: dict[Edge, Link] = {}
    for i, value in enumerate(replaced):
        if value.grad_fn is not None:
            candidates[edge_of(value)] = Link(-1, len(computed) + i, tensor_spec(value))
    for i, (info, value) in enumerate(zip(outputs, tensors, strict=True)):
        whole = info.geometry is None and info.split is None
        if value.grad_fn is None or (whole and info.source is ResultSource.PRIMAL):
            continue
        candidates.setdefault(edge_of(value), Link(i, info.index if whole else -1, tensor_spec(value)))
    reached = [_first_reached(value, candidates) for value in values]
    links = [edge for edge in candidates if any(edge in edges for edges in reached)]
    if not links:
        return NO_LINKS
    numbers = {edge: i for i, edge in enumerate(links)}
    reached_links = tuple(tuple(sorted(numbers[edge] for edge in edges)) for edges in reached)
    return Links(tuple(candidates[edge] for edge in links), reached_links)


def isolated(
    values: Sequence[Tensor],
    leaves: Sequence[Tensor],
    replaced: Sequence[Tensor],
    primals: Sequence[Tensor],
    results: Sequence[Tensor],
) -> tuple[set[int], tuple[int, ...]]:
    """(The values that require gradients, none of which comes to a leaf: made of views that were made under no_grad;
    the primals that are watched, see `Analysis`).

    replaced: other tensors that gradients flow through; primals, results: all that a caller can write to. A program has
    no backward of what leads to no leaf, where eager's may raise: UnsupportedError where it does, or will once the
    caller writes. Where gradients of inputs come from each result, and the backward of each passes such nodes as save
    the same inputs, these are watched instead: the program's backward is one, whichever results it starts from.
    """
    sources = [value for value in (*values, *replaced) if value.grad_fn is not None]
    following = _graph([value.grad_fn for value in sources])
    live = _reaching(following, {id(leaf) for leaf in leaves})
    # Nodes that compute something that no leaf needs: they, and those before them, unpack for it what they have saved.
    vain = [node for node, nodes in following.items() if node not in live or not live.issuperset(nodes)]
    watched: tuple[int, ...] = ()
    if vain:
        held = _held(vain, sources, leaves, {value.untyped_storage()._cdata for value in (*primals, *results)})
        numbers = {node: {_counted_as(value, primals) for value in values} for node, values in held.items()}
        reached = [_graph([source.grad_fn]) for source in sources]
        found = [{number for node in vain if node in nodes for number in numbers[node]} for nodes in reached]
        watched = tuple(sorted(found[0]))
        alike = all(one == found[0] for one in found) and all(source.grad_fn in live for source in sources)
        if any(found) and (-1 in watched or not alike):
            # Eager's backward would raise once that has changed; a program has nothing that could.
            raise UnsupportedError(_AS_IT_IS_NOW)
    return {i for i, value in enumerate(values) if value.grad_fn is not None and value.grad_fn not in live}, watched


def saved_state(
    sources: Sequence[Tensor], leaves: Sequence[Tensor], primals: Mapping[int, Tensor]
) -> tuple[tuple[int, ...], ...]:
    """Of each source those of these primals, which the program writes, that its backward has saved as they are in the
    end, by number; () where there are none at all.

    To be asked last: it moves versions.
    """
    graphs = [{} if value.grad_fn is None else _graph([value.grad_fn]) for value in sources]
    storages = {value.untyped_storage()._cdata for value in primals.values()}
    found: dict[Any, list[Tensor]] = {}
    for node in _reaching({node: nodes for graph in graphs for node, nodes in graph.items()}, set(map(id, leaves))):
        try:
            saved = list(_saved_tensors(node))
        except RuntimeError:  # it was written to since: eager's backward raises, and so will the trace
            continue
        found[node] = [value for value in saved if value.untyped_storage()._cdata in storages]
    numbers = [*primals, -1]  # the last: of what is none of them
    tensors = list(primals.values())
    counted = {node: {numbers[_counted_as(value, tensors)] for value in values} for node, values in found.items()}
    by_source = [{i for node in graph for i in counted.get(node, ())} - {-1} for graph in graphs]
    return tuple(tuple(sorted(each)) for each in by_source) if any(by_source) else ()


def _held(
    vain: Sequence[Any], sources: Sequence[Tensor], leaves: Sequence[Tensor], storages: set[int]
) -> dict[Any, list[Tensor]]:
    """What each node has saved that lies in one of these storages. UnsupportedError: eager's backward raises."""
    try:
        saved = {node: list(_saved_tensors(node)) for node in vain}
        ones = [torch.ones_like(source) for source in sources]
        torch.autograd.backward(sources, ones, retain_graph=True)
    except Exception as error:  # what it saved was written to, or the backward of a user's own Function raises
        if is_out_of_memory(error):
            raise
        raise UnsupportedError(f"the backward of a result that reaches no input: {error}") from error
    for leaf in leaves:
        leaf.grad = None
    return {node: [value for value in saved[node] if value.untyped_storage()._cdata in storages] for node in vain}


def _counted_as(value: Tensor, primals: Sequence[Tensor]) -> int:
    """The primal whose version the value has, as it is that, a view of it, or it without its history; else -1."""
    for i, primal in enumerate(primals):
        before = version_of(primal)
        if before is not None and value.untyped_storage()._cdata == primal.untyped_storage()._cdata:
            torch.autograd.graph.increment_version(value)
            if version_of(primal) != before:
                return i
    return -1


def _saved_tensors(node: Any) -> Iterator[Tensor]:
    """What a node has saved. Raises RuntimeError where that has been written to since."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    for value in [getattr(node, name) for name in names] + [getattr(node, "saved_tensors", ())]:
        yield from (part for part in (value if isinstance(value, tuple) else (value,)) if isinstance(part, Tensor))


def _graph(sources: Sequence[Any]) -> dict[Any, list[Any]]:
    """Of each node that gradients of the sources come to, the nodes that it hands gradients to."""
    following: dict[Any, list[Any]] = {}
    stack = list(sources)
    while stack:
        node = stack.pop()
        if node not in following:
            following[node] = [receiver for receiver, _ in node.next_functions if receiver is not None]
            stack += following[node]
    return following


def _reaching(following: dict[Any, list[Any]], leaves: set[int]) -> set[Any]:
    """The nodes from which gradients come to one of the leaves, which are given by their ids."""
    preceding: dict[Any, list[Any]] = {}
    for node, nodes in following.items():
        for receiver in nodes:
            preceding.setdefault(receiver, []).append(node)
    stack = [node for node in following if id(getattr(node, "variable", None)) in leaves]
    live = set(stack)
    while stack:
        new = [node for node in preceding.get(stack.pop(), ()) if node not in live]
        live.update(new)
        stack += new
    return live


def edge_of(value: Tensor) -> Edge:
    """Where a gradient of the value arrives."""
    return value.grad_fn, value.output_nr


def _first_reached(value: Tensor, candidates: dict[Edge, Link]) -> list[Edge]:
    """The candidates that a gradient of the value comes to first; each once for every path into it."""
    edges: list[Edge] = []
    if value.grad_fn is None:
        return edges
    seen, stack = {value.grad_fn}, [value.grad_fn]
    while stack:
        for edge in stack.pop().next_functions:
            if edge in candidates:
                edges.append(edge)
            elif edge[0] is not None and edge[0] not in seen:
                seen.add(edge[0])
                stack.append(edge[0])
    return edges


class LinkedTensors:
    """The links of one trace, and, once it has been taken backward, the whole gradient at each."""

    def __init__(self, links: Sequence[Link], analysis: Any, leaves: Sequence[Any], outputs: Sequence[Tensor]):
        results = [leaf for leaf, is_tensor in zip(leaves, analysis.is_tensor, strict=True) if is_tensor]
        self.tensors = [results[link.output] if link.output >= 0 else outputs[link.computed] for link in links]
        self.totals: list[Tensor | None] = [None] * len(links)
        for i, tensor in enumerate(self.tensors):
            tensor.register_hook(lambda gradient, i=i: self.totals.__setitem__(i, gradient))


def linked_signature(signature: GraphSignature, num_links: int) -> GraphSignature:
    kinds = OutputKind.TOTAL, OutputKind.LINKED
    added = [OutputSpec(kind, f"link{i}", i) for kind in kinds for i in range(num_links)]
    return replace(signature, outputs=(*signature.outputs, *added))


def without_values(joint: JointGraph) -> JointGraph:
    """Without the links' values among the outputs: only a replay of the forward needs them."""
    return _without(joint, (OutputKind.LINKED,), 0)


def without_links(joint: JointGraph) -> JointGraph:
    """The program that is planned: no link has a tangent of its own. Raises UnsupportedError where a rewrite has led a
    gradient past a link."""
    num_links = len(joint.signature.output_indices(OutputKind.TOTAL))
    if not num_links:
        return joint
    _check_totals(joint, num_links)
    return _without(joint, (OutputKind.TOTAL,), num_links)


def _without(joint: JointGraph, kinds: Sequence[OutputKind], num_tangents: int) -> JointGraph:
    signature, graph = joint.signature, copy_graph(joint.graph)
    kept = [i for i, value in enumerate(signature.outputs) if value.kind not in kinds]
    if num_tangents:
        inputs = placeholders(graph)
        num_held = len(inputs) - len(joint.inputs_of(InputKind.TANGENT))
        defined = [True] * (len(inputs) - num_held - num_tangents) + [False] * num_tangents
        graph = specialise_backward(graph, num_held, defined)
    values = results(graph)
    graph.output_node().args = ([values[i] for i in kept],)
    if num_tangents:
        remove_dead_code(graph)  # not before checks that nothing reads are anchored, which `simplify` does
    for node in placeholders(graph)[len(signature.inputs) - num_tangents :]:
        graph.erase_node(node)
    graph.lint()
    inputs_kept = signature.inputs[: len(signature.inputs) - num_tangents]
    changed = replace(signature, inputs=inputs_kept, outputs=tuple(signature.outputs[i] for i in kept))
    return replace(joint, graph=graph, signature=changed)


def _check_totals(joint: JointGraph, num_links: int) -> None:
    tangents = joint.inputs_of(InputKind.TANGENT)[-num_links:]
    totals = _outputs(joint, OutputKind.TOTAL)
    gradients = [node for node in _outputs(joint, OutputKind.GRADIENT) if node is not None and node not in totals]
    past = ancestors(gradients, stop={node for node in totals if node is not None})
    if any(tangent in past and tangent not in totals for tangent in tangents):
        raise UnsupportedError("gradients of one result pass through another, and they are no longer told apart")


def _outputs(joint: JointGraph, kind: OutputKind) -> list[fx.Node | None]:
    values = joint.results
    return [values[i] for i in joint.signature.output_indices(kind)]


@dataclass
class CutBackward:
    """The backward of a planned program, cut at its links."""

    joint: JointGraph
    """The program with links."""
    parts: PartitionedGraph
    cut: fx.Graph | None = None
    """The cut backward for all tangents; made at the first use."""

    def graph(self, defined: Sequence[bool], counts: Sequence[int]) -> fx.Graph:
        """(sizes, residuals, tangents, totals at links) -> (what has come to each link, gradients).

        What comes in as a link's total goes on from there; what comes to a link ends there. counts: how many values of
        each result to return: 0 is None; several of a link are the parts that autograd adds up there, in their order.
        """
        if self.cut is None:
            self.cut = self._cut()
        num_held = self.parts.signature.num_sizes + len(self.parts.residuals)
        graph = copy_graph(specialise_backward(self.cut, num_held, defined))
        gradients: list[fx.Node | None] = []
        for node, count in zip(results(graph), counts, strict=True):
            gradients += _parts(node, count) if count else [None]
        graph.output_node().args = (gradients,)
        remove_dead_code(graph)
        return graph

    def _cut(self) -> fx.Graph:
        joint = self.joint.with_graph(copy_graph(self.joint.graph))
        totals, gradients = _outputs(joint, OutputKind.TOTAL), _outputs(joint, OutputKind.GRADIENT)
        tangents = joint.inputs_of(InputKind.TANGENT)[-len(totals) :]
        onward_by_total = {total: tangent for total, tangent in zip(totals, tangents, strict=True) if total is not None}
        for total, tangent in onward_by_total.items():
            if total is not tangent:
                # What reads it counts on its strides.
                onward_by_total[total] = onward = _laid_out(total, tangent)
                for user in list(total.users):
                    if user.op == "call_function":
                        user.replace_input_with(total, onward)
        gradients = [node if node is None else onward_by_total.get(node, node) for node in gradients]
        by_name = {node.name: node for node in joint.graph.nodes}
        residuals = [by_name[name] for name, _ in self.parts.residuals]
        return backward_graph(joint, residuals, [*totals, *gradients], joint.effects()[1])


def _parts(total: fx.Node | None, count: int) -> list[fx.Node | None]:
    """`count` parts of a sum, as they were added up from the left; None for those that the sum does not have."""
    parts: list[fx.Node | None] = []
    while len(parts) < count - 1 and total is not None and total.target is torch.ops.aten.add.Tensor:
        rest, last = total.args[:2]
        if total.kwargs or not (_is_part(rest, total) and _is_part(last, total)):
            break
        parts.append(last)  # type: ignore[arg-type]
        total = rest  # type: ignore[assignment]
    parts = [total, *reversed(parts)]
    return parts + [None] * (count - len(parts))


def _is_part(term: Any, total: fx.Node) -> bool:
    term_spec, sum_spec = (spec_of(node) if isinstance(node, fx.Node) else None for node in (term, total))
    if term_spec is None or sum_spec is None:
        return False
    return term_spec.same_shape(sum_spec) and term_spec.dtype is sum_spec.dtype


def _laid_out(total: fx.Node, tangent: fx.Node) -> fx.Node:
    expected, actual = spec_of(total), spec_of(tangent)
    if expected is None or actual is None or expected.same_layout(actual):
        return tangent
    with total.graph.inserting_after(total):
        place = total.graph.call_function(torch.ops.aten.alias.default, (tangent,))
    with total.graph.inserting_before(place):
        new = copied(total.graph, total, tangent)
    total.graph.erase_node(place)
    return new
