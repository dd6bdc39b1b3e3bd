"""trace_joint: forward and backward of the captured step as one fx program over flat tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from aottrain.compat import flatten_values
from aottrain.compiler.capture.capture import CapturedStep, CaptureMode, Provenance, enter_primals, fake_primals
from aottrain.compiler.capture.fakes import KernelFakes
from aottrain.compiler.capture.recording import Recorder
from aottrain.compiler.capture.substitutes import CUSTOM_FUNCTION
from aottrain.compiler.capture.torch_settings import autocast_cache
from aottrain.compiler.joint.analysis import Analysis
from aottrain.compiler.joint.backward import watched
from aottrain.compiler.joint.custom_functions import is_custom, prepare
from aottrain.compiler.joint.extrema import spread_as_eager
from aottrain.compiler.joint.function_calls import functions_noted
from aottrain.compiler.joint.links import LinkedTensors, linked_signature
from aottrain.compiler.joint.replay import UNRECORDED_WRITE, writes_unrecorded
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import GraphSignature, InputKind, InputSpec, JointGraph, OutputKind, OutputSpec, placeholders
from aottrain.ir.tensor import TensorSpec, tensor_spec

_HALVES = (torch.float16, torch.bfloat16)


def trace_joint(step: CapturedStep, analysis: Analysis, linked: bool = False) -> JointGraph:
    """Inputs: primals, sizes, (seed, offset), then one tangent for each differentiable output. Outputs: the computed
    outputs, then one gradient (or None) for each primal that requires one. Without gradients it is the forward alone.

    linked: with one more tangent for each link, then the gradient there, and the link's value, after all other outputs.

    Backward is traced with autocast off, as eager's backward runs outside the caller's autocast block.
    Raises UnsupportedError where the program needs values (data-dependent Python) or tensors that are not its inputs.
    """
    provenance = Provenance(step.module)
    fake_mode = KernelFakes(shape_env=step.shape_env)
    recorder = Recorder() if step.shape_env is None else None
    modes: list[CaptureMode] = []
    target_indices = [i for i, spec in enumerate(step.inputs) if spec.requires_grad] if analysis.needs_gradient else []
    specs_out = [output.spec for output in analysis.computed] + [step.inputs[i].spec for i in analysis.replaced]
    flags = [output.requires_grad for output in analysis.computed] + [True] * len(analysis.replaced)
    differentiable = [i for i, flag in enumerate(flags) if flag]
    links = analysis.links.links if linked and target_indices else ()
    caches_casts = torch.is_autocast_cache_enabled()

    def joint(
        sizes: list[torch.SymInt], leaves_in: list[Tensor], state: Tensor, tangents: list[Tensor]
    ) -> list[Tensor | None]:
        with CaptureMode(state, provenance, step.rng) as mode:
            modes.append(mode)
            with provenance.watching(), autocast_cache(caches_casts), functions_noted(recorder):
                primals = enter_primals(step, leaves_in, analysis.replaced)
                leaves, _ = flatten_values(step.call(primals))
            outputs = [*analysis.computed_outputs(leaves), *(primals[i] for i in analysis.replaced)]
            gradients: Sequence[Tensor | None] = ()
            at_links = LinkedTensors(links, analysis, leaves, outputs)
            if target_indices:
                custom_functions = _check_autograd_graph(outputs, leaves_in, step)
                prepare(custom_functions, outputs, at_links.tensors)
                with watched(step, [*leaves_in, *primals], custom_functions):
                    gradients = torch.autograd.grad(
                        [*(outputs[i] for i in differentiable), *at_links.tensors],
                        # Links, too: autograd runs nothing, and so no hook, on a way that ends at no input.
                        [*(leaves_in[i] for i in target_indices), *at_links.tensors],
                        grad_outputs=tangents,
                        allow_unused=True,
                    )[: len(target_indices)]
                mode.indexing.check()
        return [*outputs, *gradients, *at_links.totals, *at_links.tensors]

    primals = fake_primals(step, fake_mode)
    with fake_mode:
        state = torch.zeros(2, dtype=torch.int64, device=step.device)
        tangent_specs = [*(specs_out[i] for i in differentiable), *(link.spec for link in links)]
        if not target_indices:
            tangent_specs = []
        tangents = [spec.empty(step.sizes) for spec in tangent_specs]
        specs = [tensor_spec(value) for value in tangents]
        try:
            if recorder is not None:
                provenance.graph = recorder.graph
                graph, constants = _record(joint, primals, state, tangents, recorder)
            else:
                module = make_fx(joint)(list(step.sizes.values()), primals, state, tangents)
                graph, constants = module.graph, dict(module.named_buffers())
        except AssertionError as error:
            raise _explain(error) from error
    spread_as_eager(graph)
    if writes_unrecorded(graph):
        step.notes.add(UNRECORDED_WRITE)
    lifted = _lift_constants(graph, constants, fake_mode)
    _move_after_primals(graph, len(step.sizes))
    signature = linked_signature(_signature(step, analysis, target_indices, specs, lifted), len(links))
    _name_placeholders(graph, signature)
    return JointGraph(graph, signature, modes[-1].num_draws, tuple(lifted), step.rng)


def _record(
    joint: Callable[..., Sequence[Tensor | None]],
    primals: Sequence[Tensor],
    state: Tensor,
    tangents: Sequence[Tensor],
    recorder: Recorder,
) -> tuple[fx.Graph, Mapping[str, Any]]:
    """The program without sizes, and the tensors that it makes of Python numbers, by name."""
    for name, values in (("primals", primals), ("state", [state]), ("tangents", tangents)):
        for value in values:
            recorder.add_input(f"{name}_1", value)
    with recorder:
        outputs = joint([], primals, state, tangents)
    recorder.add_outputs(outputs)
    return recorder.graph, recorder.constants


def _check_autograd_graph(outputs: Sequence[Tensor], leaves: Sequence[Tensor], step: CapturedStep) -> list[Any]:
    """The nodes of custom Functions. Refuses gradients that flow to tensors other than inputs: they would be lost."""
    leaf_ids = {id(leaf) for leaf in leaves}
    stack = [output.grad_fn for output in outputs if output.grad_fn is not None]
    custom_functions = []
    seen = set(stack)
    while stack:
        node = stack.pop()
        if is_custom(node):
            step.notes.add(CUSTOM_FUNCTION)
            custom_functions.append(node)
        if node.name().startswith("ProdBackward") and node._input_metadata[0].dtype in _HALVES:
            # Eager looks for zeros, and divides by the factor where there is none; a trace cannot look.
            raise UnsupportedError("the gradient of prod in half precision")
        if hasattr(node, "variable") and id(node.variable) not in leaf_ids and not _is_forgotten(node):
            raise UnsupportedError("a gradient flows to a tensor that is not an input of the program")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return custom_functions


def _is_forgotten(node: Any) -> bool:
    """Whether the leaf of an AccumulateGrad is one that the program made itself and dropped: then autograd alone holds
    it, as it does the leaf made here, and its gradient cannot be asked for."""
    made: Any = torch.ones((), requires_grad=True).add(1).grad_fn
    hooks = node.variable._backward_hooks or node.variable._post_accumulate_grad_hooks
    return not hooks and _num_references(node) <= _num_references(made.next_functions[0][0])


def _num_references(node: Any) -> int:
    return sys.getrefcount(node.variable)


def _lift_constants(graph: fx.Graph, values: Mapping[str, Any], fake_mode: KernelFakes) -> list[Tensor]:
    """Make inputs, after the primals, of the tensors that the traced code made from Python numbers."""
    placeholders_by_name: dict[str, fx.Node] = {}
    constants: list[Tensor] = []
    nodes = list(graph.nodes)
    first_after_primals = next(node for node in nodes if node.op == "placeholder" and node.name.startswith("state"))
    for node in nodes:
        if node.op != "get_attr":
            continue
        if node.target not in placeholders_by_name:
            value = values[node.target]
            if isinstance(value, FakeTensor) or not isinstance(value, Tensor):
                raise UnsupportedError(f"the program makes a constant of type {type(value).__name__}")
            with graph.inserting_before(first_after_primals):
                placeholders_by_name[node.target] = graph.placeholder(f"constant{len(constants)}")
            # TorchDynamo's trace around ours has left a fake of its own mode.
            placeholders_by_name[node.target].meta["val"] = fake_mode.from_tensor(value, static_shapes=True)
            constants.append(value)
        node.replace_all_uses_with(placeholders_by_name[node.target])
        graph.erase_node(node)
    return constants


def _move_after_primals(graph: fx.Graph, num_sizes: int) -> None:
    """Sizes come first while tracing, so that a shape is not read from a tensor; in a signature primals are first."""
    inputs = placeholders(graph)
    state = next(node for node in inputs if node.name.startswith("state"))
    for node in inputs[:num_sizes]:
        state.prepend(node)


def _explain(error: AssertionError) -> Exception:
    text = str(error)
    if "convert all Tensors to FakeTensors" in text:
        return UnsupportedError("the function reads a tensor that is neither an argument nor a parameter or buffer")
    return error


def _signature(
    step: CapturedStep,
    analysis: Analysis,
    target_indices: Sequence[int],
    specs: Sequence[Any],
    constants: Sequence[Tensor],
) -> GraphSignature:
    inputs = [replace(spec, mutated=i in analysis.replaced) for i, spec in enumerate(step.inputs)]
    inputs += [InputSpec(InputKind.CONSTANT, f"constant{i}", tensor_spec(v)) for i, v in enumerate(constants)]
    number = TensorSpec((), (), torch.int64, step.device, 0)
    inputs += [InputSpec(InputKind.SIZE, name, number) for name in step.sizes]
    seed = torch.empty(2, dtype=torch.int64)
    inputs.append(InputSpec(InputKind.RNG, "rng_state", replace(tensor_spec(seed), device=step.device)))
    inputs += [InputSpec(InputKind.TANGENT, f"tangent{i}", spec) for i, spec in enumerate(specs)]
    outputs = [OutputSpec(OutputKind.OUTPUT, f"output{i}", i) for i in range(len(analysis.computed))]
    outputs += [OutputSpec(OutputKind.REPLACEMENT, step.inputs[i].name, i) for i in analysis.replaced]
    outputs += [OutputSpec(OutputKind.GRADIENT, step.inputs[i].name, i) for i in target_indices]
    return GraphSignature(tuple(inputs), tuple(outputs))


def _name_placeholders(graph: fx.Graph, signature: GraphSignature) -> None:
    """Placeholders carry the names that people know: parameter paths, input numbers."""
    prefix = {InputKind.PARAMETER: "p_", InputKind.BUFFER: "b_"}
    nodes = [node for node in graph.nodes if node.op == "placeholder"]
    for node, spec in zip(nodes, signature.inputs, strict=True):
        name = prefix.get(spec.kind, "") + "".join(c if c.isalnum() else "_" for c in spec.name)
        node.name = node.target = graph._graph_namespace.create_name(name, None)
