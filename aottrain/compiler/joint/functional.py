"""functionalize: no node mutates any more; what the program did to its inputs becomes outputs. Views stay views."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from aottrain.compat import disable_autocast
from aottrain.compiler.capture.recording import Recorder
from aottrain.compiler.joint.whole_writes import without_whole_writes
from aottrain.errors import UnsupportedError
from aottrain.ir.analysis.reach import descendants
from aottrain.ir.graph import (
    FORWARD_OUTPUTS,
    InputKind,
    JointGraph,
    OutputKind,
    OutputSpec,
    as_module,
    calls,
    copy_provenance,
    info,
    placeholders,
    spec_of,
    storage_root,
    value_of,
    view_source,
)

aten = torch.ops.aten


def functionalize(joint: JointGraph) -> JointGraph:
    """The same program without mutation. Outputs become: outputs, state updates (by primal index), gradients.

    torch's functionalization dispatch rewrites the graph op by op, with views kept: with `*_copy` ops it would not be
    bitwise equal to eager. Where whole tensors alone are written it is not asked (`whole_writes`), and graphs in which
    nothing is mutated stay as they are. Raises UnsupportedError for metadata mutation and for state that the backward
    writes.
    """
    written = [node for node in calls(joint.graph) if info(node).writes]
    if not written:
        return _with_lent(joint)
    for node in written:
        _check_written_view(node)
    examples = [value_of(node) for node in joint.placeholders]
    tensors = [value for value in examples if isinstance(value, Tensor)]
    sizes = [value for value in examples if not isinstance(value, Tensor)]
    # What autocast had cast is in the graph: what ran with it off, as the backward and islands in float32, stays so.
    with tensors[0].fake_mode, disable_autocast():  # type: ignore[attr-defined]
        graph, updated = (None if sizes else without_whole_writes(joint)) or _replayed(joint, tensors, sizes)
    return _with_lent(_with_updates(joint, graph, updated))


def _replayed(joint: JointGraph, tensors: list[Tensor], sizes: list[Any]) -> tuple[fx.Graph, list[int]]:
    """The graph as torch's functionalization has it, with the updates of inputs behind the program's outputs, and the
    positions of those inputs."""
    num_primals = first_size = joint.signature.num_primals
    updated: list[int] = []

    def run(sizes: list[Any], tensors: list[Tensor]) -> list[Tensor | None]:
        inputs: list[Any] = [*tensors[:first_size], *sizes, *tensors[first_size:]]
        torch._enable_functionalization(reapply_views=True)
        try:
            wrapped = [torch._to_functional_tensor(v) if isinstance(v, Tensor) else v for v in inputs]
            results = _Replay(as_module(joint.graph), recorder).run(*wrapped)
            results = [_unwrap(value) for value in results]
            updates = []
            for i, value in enumerate(wrapped[:num_primals]):
                torch._sync(value)
                if torch._functionalize_has_metadata_mutation(value):
                    raise UnsupportedError(f"{joint.signature.inputs[i].name} changes its shape or strides in place")
                if torch._functionalize_has_data_mutation(value):  # type: ignore[attr-defined]
                    updated.append(i)
                    updates.append(torch._from_functional_tensor(value))
        finally:
            torch._disable_functionalization()
        num_outputs = len(joint.signature.output_indices(*FORWARD_OUTPUTS))
        return [*results[:num_outputs], *updates, *results[num_outputs:]]

    recorder = None if sizes else Recorder()
    given = [value.detach() for value in tensors]
    if recorder is None:
        graph = make_fx(run)(sizes, given).graph
    else:
        for value in given:
            recorder.add_input("input", value)
        with recorder:
            outputs = run([], given)
        recorder.add_outputs(outputs)
        graph = recorder.graph
    inputs = placeholders(graph)
    for node in inputs[: len(sizes)]:
        inputs[len(sizes) + first_size].prepend(node)
    for old, new in zip(joint.placeholders, placeholders(graph), strict=True):
        new.name = new.target = old.name
    return graph, updated


def _with_updates(joint: JointGraph, graph: fx.Graph, updated: list[int]) -> JointGraph:
    signature = joint.signature
    outputs = [value for value in signature.outputs if value.kind in FORWARD_OUTPUTS]
    gradients = [value for value in signature.outputs if value.kind not in FORWARD_OUTPUTS]
    updates = [OutputSpec(OutputKind.UPDATE, signature.inputs[i].name, i) for i in updated]
    inputs = tuple(replace(value, mutated=value.mutated or i in updated) for i, value in enumerate(signature.inputs))
    changed = replace(signature, inputs=inputs, outputs=(*outputs, *updates, *gradients))
    functional = replace(joint, graph=graph, signature=changed)
    from_tangents = descendants(functional.inputs_of(InputKind.TANGENT))
    for node in functional.outputs_of(OutputKind.UPDATE):
        if node in from_tangents:
            raise UnsupportedError("the backward writes to an input or buffer")
    return functional


def _with_lent(joint: JointGraph) -> JointGraph:
    """Says which inputs are lent: not those that the backward reads itself, which eager keeps."""
    late = descendants(joint.inputs_of(InputKind.TANGENT))
    read = {storage_root(source) for node in late for source in node.all_input_nodes if source not in late}
    inputs = tuple(
        replace(value, lent=value.lent and node not in read)
        for node, value in zip(joint.placeholders, joint.signature.inputs, strict=True)
    )
    return replace(joint, signature=replace(joint.signature, inputs=inputs))


def _check_written_view(node: fx.Node) -> None:
    """Raises UnsupportedError where functionalization would bring a write back to the memory below by arithmetic: it
    sums the copies of an expanded element, x + (y - x), and the windows of an unfolded one, which rounds."""
    for position in info(node).writes:
        source = node.args[position] if position < len(node.args) else None
        for view in source if isinstance(source, (list, tuple)) else [source]:
            while isinstance(view, fx.Node):
                if view.target is aten.unfold.default or (view.target is aten.expand.default and not _keeps(view)):
                    raise UnsupportedError(f"a write through {info(view).name}, whose elements share memory")
                view = view_source(view)


def _keeps(expand: fx.Node) -> bool:
    """Whether an expand has as many elements as what it expands."""
    old, new = spec_of(expand.args[0]), spec_of(expand)  # type: ignore[arg-type]
    return old is not None and new is not None and old.numel == new.numel


def _unwrap(value: Tensor | None) -> Tensor | None:
    if value is None:
        return None
    torch._sync(value)
    return torch._from_functional_tensor(value)


class _Replay(fx.Interpreter):
    """Runs the old graph under the tracer of the new one and hands each node's provenance on."""

    def __init__(self, graph: fx.GraphModule, recorder: Recorder | None):
        super().__init__(graph, garbage_collect_values=False)
        self.recorder = recorder
        self.layouts: dict[fx.Node, Any] = {}  # of memory whose shape or strides were changed in place

    def _keep_layout(self, written: Any) -> None:
        """A functional op chooses its result's strides; an op in place keeps those of the memory that it writes."""
        for node in written if isinstance(written, (list, tuple)) else [written]:
            if not isinstance(node, fx.Node):
                continue
            root = storage_root(node)
            value, layout = self.env[root], self.layouts.get(root, value_of(root))
            torch._sync(value)
            inner = torch._from_functional_tensor(value)
            if not isinstance(layout, Tensor) or inner.stride() == layout.stride():
                continue
            torch._disable_functionalization()
            laid_out = torch.empty_strided(layout.shape, layout.stride(), dtype=inner.dtype, device=inner.device)
            copied = torch.ops.aten.copy(laid_out, inner)
            torch._enable_functionalization(reapply_views=True)
            torch._functionalize_replace(value, copied)
            torch._functionalize_commit_update(value)
            torch._sync(value)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is aten.expand.default:
            missing = len(args[1]) - args[0].dim()
            expanded = super().call_function(target, args, kwargs)
            if expanded.numel() != args[0].numel():
                return expanded
            # The same elements: through a view whose way back is exact.
            value = aten.alias(args[0]) if missing == 0 else args[0]
            for _ in range(missing):
                value = value.unsqueeze(0)
            return value
        return super().call_function(target, args, kwargs)

    def _graph(self) -> fx.Graph:
        """The new one."""
        if self.recorder is not None:
            return self.recorder.graph
        mode = get_proxy_mode()
        assert mode is not None
        return mode.tracer.graph

    def run_node(self, node: fx.Node) -> Any:
        graph = self._graph()
        last_node = graph._root._prev
        out = super().run_node(node)
        if node.op == "call_function":
            for position in info(node).writes:
                if torch.Tag.inplace_view in node.target.tags:  # type: ignore[union-attr]
                    self.layouts[storage_root(node.args[position])] = value_of(node)  # type: ignore[arg-type]
                else:
                    self._keep_layout(node.args[position] if position < len(node.args) else None)
        new = graph._root._prev
        while new is not last_node and new.op != "root":
            if new.op == "call_function":
                copy_provenance(node, new)
            new = new._prev
        return out
