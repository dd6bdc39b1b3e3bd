"""Bugs to plant in the compiler, one at a time: each breaks one stage in one way.

`BUGS` maps a name to what plants it, by monkeypatch, and the check in `tests/planted_checks.py`
that has to fail while it is planted.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import aottrain.compiler as pipeline
import tests.planted_checks as checks
import tests.planted_guards as served
from aottrain.compat import CAN_UNPACK_ONE
from aottrain.compiler import analysis, api, entry, fakes, functional, joint, linking, replay, simplification
from aottrain.compiler.partition import min_cut, split, strategies, timeline, undefined
from aottrain.ir import graph, verify
from aottrain.runtime import epilogue, executor, guards, philox, program, rng, state, tables
from aottrain.runtime.program import Program

CAPTURE = importlib.import_module("aottrain.compiler.capture")  # the package has a function of that name
Plant = Callable[[Any], None]
BUGS: dict[str, tuple[Plant, Callable[[], None]]] = {}


def bug(name: str, caught_by: Callable[[], None]) -> Callable[[Plant], Plant]:
    def register(plant: Plant) -> Plant:
        BUGS[name] = plant, caught_by
        return plant

    return register


def attribute(name: str, caught_by: Callable[[], None], owner: Any, key: str, value: Any) -> None:
    """A bug that is another value of one attribute."""
    BUGS[name] = lambda patch: patch.setattr(owner, key, value), caught_by


def results_of(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])


def without_part(i: int) -> Any:
    def call_key(*given: Any) -> Any:
        key, tensors = guards.call_key(*given)
        return key[:i] + key[i + 1 :], tensors

    return call_key


def without_fact(i: int) -> Any:
    original = guards.describe
    return lambda tensor: (*original(tensor)[:i], *original(tensor)[i + 1 :])


# -- capture, analysis, joint -----------------------------------------------------------------------------------------

attribute(
    "hidden writes of batch norm unseen",
    checks.batch_norm_of_shared_memory,
    analysis,
    "hidden_writes",
    lambda func, args: (),
)
attribute(
    "writes to shared inputs unseen", checks.written_shared_memory, analysis, "_check_input_state", lambda *_: None
)
attribute("views cut off from gradients unseen", checks.view_under_no_grad, analysis, "_is_cut_off", lambda *_: False)
attribute(
    "backward traced under the caller's autocast",
    checks.autocast_backward,
    joint,
    "disable_autocast",
    torch.enable_grad,
)
attribute(
    "gradients to other tensors unseen", checks.gradient_elsewhere, joint, "_check_autograd_graph", lambda *_: None
)
attribute(
    "a leaf's view taken for no view",
    checks.leaf_that_is_a_view,
    CAPTURE,
    "_fake",
    lambda value, mode, static: mode.from_tensor(value.detach()),
)
attribute(
    "inputs that are no leaves not copied",
    checks.mutated_differentiable_input,
    joint,
    "enter_primals",
    lambda step, leaves, cloned: list(leaves),
)


@bug("mutated inputs overlooked", served.overlapping_inputs)
def _(patch: Any) -> None:
    original = analysis.analyse
    patch.setattr(pipeline, "analyse", lambda step: replace(original(step), mutated=(), replaced=()))


@bug("a mutated input that requires gradients taken for plain", checks.mutated_differentiable_input)
def _(patch: Any) -> None:
    original = analysis.analyse
    patch.setattr(pipeline, "analyse", lambda step: replace(original(step), replaced=()))


@bug("outputs that are views taken by their fakes' strides", checks.strides_of_fakes)
def _(patch: Any) -> None:
    original = analysis.analyse
    patch.setattr(pipeline, "analyse", lambda step: replace(original(step), viewed=frozenset()))


attribute("fakes with strides that kernels do not give", checks.strides_of_kernels, fakes, "_RULES", {})


@bug("requires_grad of an output turned round", checks.two_outputs)
def _(patch: Any) -> None:
    original = analysis.analyse

    def analyse(step: Any) -> Any:
        known = original(step)
        return replace(known, computed=tuple(replace(c, requires_grad=True) for c in known.computed))

    patch.setattr(pipeline, "analyse", analyse)


# -- functionalize, simplify ------------------------------------------------------------------------------------------

attribute(
    "a write keeps the functional op's layout",
    checks.written_layout,
    functional._Replay,
    "_keep_layout",
    lambda *_: None,
)
attribute(
    "a write through expand comes back by arithmetic",
    checks.written_expand,
    functional._Replay,
    "call_function",
    fx.Interpreter.call_function,
)
attribute(
    "writes to shared elements let through",
    checks.written_broadcast,
    functional,
    "_check_written_view",
    lambda node: None,
)


@bug("a state update dropped", checks.buffer)
def _(patch: Any) -> None:
    original = functional._with_updates
    patch.setattr(functional, "_with_updates", lambda known, graph, updated: original(known, graph, updated[1:]))


@bug("a needed cast dropped", checks.cast_by_copy)
def _(patch: Any) -> None:
    def drop(graph: Any, node: Any) -> None:
        if node.target is simplification.aten.copy.default:
            node.replace_all_uses_with(node.args[1])

    patch.setattr(simplification, "_drop_copy_into_fresh", drop)


attribute("returned copies merged", checks.equal_outputs, simplification, "_is_result", lambda node: False)
attribute(
    "draws merged", checks.two_draws, simplification, "_expression", lambda node: (node.target, str(node.args[2:]))
)
attribute(
    "keywords ignored by merging",
    checks.keywords,
    simplification,
    "_expression",
    lambda node: (node.target, str(node.args)),
)
attribute(
    "1 and True and 1.0 merged",
    checks.number_types,
    simplification,
    "_expression",
    lambda n: (n.target, n.args) if not any(isinstance(a, list) for a in n.args) else None,
)
attribute(
    "running statistics exchanged",
    checks.batch_norm_in_eval,
    simplification,
    "_drop_running_statistics",
    lambda n: (
        setattr(n, "args", (*n.args[:3], n.args[4], n.args[3], *n.args[5:]))
        if "batch_norm_backward" in str(n.target)
        else None
    ),
)
attribute("eager's unread draws dropped", checks.unread_eager_draw, simplification, "is_pure", lambda target: True)

# -- partition --------------------------------------------------------------------------------------------------------


def _apply_then(change: Callable[[Any], Any]) -> Plant:
    return lambda patch: patch.setattr(
        pipeline, "apply_partition", lambda j, plan: change(split.apply_partition(j, plan))
    )


def _swap(graph_of: Callable[[Any], Any], first: int, second: int) -> Callable[[Any], Any]:
    def change(parts: Any) -> Any:
        graph = graph_of(parts)
        values = results_of(graph)
        values[first], values[second] = values[second], values[first]
        graph.output_node().args = (values,)
        return parts

    return change


BUGS["two residuals swapped"] = _apply_then(_swap(lambda parts: parts.forward, -1, -2)), checks.residuals
BUGS["two gradients swapped"] = _apply_then(_swap(lambda parts: parts.backward, 0, 1)), checks.residuals
BUGS["an output returned in the place of an update"] = (
    _apply_then(_swap(lambda parts: parts.forward, 0, 1)),
    checks.buffer,
)
attribute(
    "updated state recomputed from its new value", checks.buffer, strategies, "_must_save", lambda node, demand: False
)
attribute(
    "outputs that eager saves not saved",
    checks.stale_output,
    strategies,
    "_may_save",
    lambda node: node.op == "placeholder",
)
attribute("the cut counts vertices, not bytes", checks.budget_bytes, strategies, "_weight", lambda node, demand: 1)
attribute("minimum cut at the wrong end", checks.cheapest_cut, min_cut._Network, "reaching", lambda self, sink: {sink})
attribute(
    "the knapsack rounds sizes down",
    checks.knapsack_capacity,
    checks,
    "dp",
    lambda s, v, c, r=4096: list(range(len(s))),
)
_ALLOCATIONS = timeline.allocations
attribute(
    "tuple items that nothing reads cost nothing",
    checks.peak_of_unread_items,
    timeline,
    "allocations",
    lambda node: [found for found in _ALLOCATIONS(node) if found[0] is not node or not graph.is_tuple(node)],
)
attribute(
    "views allocate in the peak model",
    checks.peak_of_views,
    timeline,
    "allocations",
    lambda node: _ALLOCATIONS(node) or [(node, graph.storage_bytes(node))],
)
attribute(
    "undefined tangents not specialised",
    checks.unused_output,
    undefined,
    "_rewrite",
    lambda graph, node, new, late: graph.node_copy(node, lambda n: new[n] or undefined._zeros(graph, n)),
)


@bug("the forward computes something else", checks.residuals)
def _(patch: Any) -> None:
    def change(parts: Any) -> Any:
        for node in parts.forward.nodes:
            if "sin" in str(node.target):
                node.target = torch.ops.aten.cos.default
        return parts

    _apply_then(change)(patch)


# -- runtime ----------------------------------------------------------------------------------------------------------


def _materialise(patch: Any) -> None:
    original = program._CompiledFunction.forward

    def forward(ctx: Any, *args: Any) -> Any:
        out = original(ctx, *args)
        ctx.set_materialize_grads(True)
        return out

    patch.setattr(program._CompiledFunction, "forward", staticmethod(forward))


def _still_versions(patch: Any) -> None:
    original = Program.__call__

    def call(self: Any, primals: Any) -> Any:
        before = [value._version for value in primals]
        out = original(self, primals)
        torch._C._autograd._unsafe_set_version_counter(tuple(primals), tuple(before))
        return out

    patch.setattr(Program, "__call__", call)


def _reused_draw(self: Any, device: Any) -> Any:
    self.state = rng.new_state(device) if self.state is None else self.state
    self.num_draws = 1
    return self.state, 0


def _without_offset(info: Any, source: Any) -> Any:
    if info.geometry is not None:
        info = replace(info, geometry=(*info.geometry[:2], 0))
    return _MAKE(info, source)


_MAKE, _VALUE = epilogue._make, executor.value_text
BUGS["undefined tangents as zeros"] = _materialise, checks.unused_output
BUGS["version counters not moved"] = _still_versions, checks.stale_input
attribute("the epilogue forgets the offset", checks.sliced_output, epilogue, "_make", _without_offset)
attribute(
    "views regenerated without their origin", checks.written_unbound, epilogue, "set_view_origin", lambda *_: None
)
attribute(
    "a view of an input made from a copy",
    checks.view_of_input,
    epilogue,
    "_make",
    lambda info, source: _MAKE(info, source).clone(),
)
attribute(
    "tangents not brought to their strides", checks.odd_tangent, program, "_coerce", lambda tangent, spec: tangent
)
if CAN_UNPACK_ONE:
    attribute(
        "what unused outputs saved is unpacked",
        checks.stale_unused_output,
        program,
        "saved_tensors",
        lambda ctx, wanted: list(ctx.saved_tensors),
    )
attribute(
    "inputs of kernels not laid out as traced",
    checks.strides_of_custom_ops,
    executor,
    "_laid_out",
    lambda node, names: [],
)
attribute("a draw number used twice", checks.two_draws, rng.PhiloxMode, "_next", _reused_draw)
attribute(
    "every call draws from one seed",
    checks.generator_state,
    program,
    "new_state",
    lambda device: torch.zeros(2, dtype=torch.int64),
)
attribute("the native draw forgets its number", checks.native_draw, philox, "_MASK64", 0)
attribute(
    "infinity loses its sign",
    checks.infinity,
    executor,
    "value_text",
    lambda v, names: "inf" if v == -float("inf") else _VALUE(v, names),
)
attribute("values live to the end", checks.value_lifetimes, executor, "_last_uses", lambda graph: {})
attribute("a replay forgets no_grad", checks.second_derivative, replay, "grad_mode_of", lambda node: True)


@bug("residuals kept after the backward", checks.residual_lifetimes)
def _(patch: Any) -> None:
    kept: list[Any] = []
    original = linking.build_runner

    def build(graph: Any, kernel: Any) -> Any:
        run = original(graph, kernel)
        return lambda inputs: kept.extend(inputs) or run(inputs)

    patch.setattr(linking, "build_runner", build)


# -- guards -----------------------------------------------------------------------------------------------------------

attribute("written inputs may overlap", served.overlapping_inputs, entry, "is_disjoint", lambda primals, written: True)
attribute("alias pattern ignored", served.same_tensor_twice, guards, "alias_pattern", lambda tensors: ())
attribute("grad mode unguarded", served.changed_grad_mode, api, "call_key", without_part(1))
attribute("autocast unguarded", served.changed_autocast, api, "call_key", without_part(3))
attribute("default type unguarded", served.changed_default_type, api, "call_key", without_part(4))
attribute("shapes unguarded", served.changed_shape, guards, "describe", without_fact(1))
attribute("strides unguarded", served.changed_strides, guards, "describe", without_fact(2))
attribute("types unguarded", served.changed_type, guards, "describe", without_fact(3))
attribute("requires_grad unguarded", served.changed_requires_grad, guards, "describe", without_fact(5))
attribute("numbers unguarded by type", served.changed_number_type, guards, "_constant", lambda value: value)
attribute(
    "training flag and attributes unguarded", served.changed_training_flag, state.StateGuard, "holds", lambda self: True
)
attribute("closures unguarded", served.changed_closure, state.StateGuard, "_visit_function", lambda *_: None)
attribute("globals unguarded", served.changed_global, state, "globals_of", lambda code: frozenset())
attribute("replaced buffers unguarded", served.replaced_buffer, tables._Alive, "holds", lambda self: True)
attribute("refusals do not count", served.state_that_changes, api.CompiledCall, "_refuse", lambda *_: None)
attribute("fallbacks uncounted", served.counted_fallback, api.CompiledCall, "_count", lambda self, error: None)

# -- the laws themselves ----------------------------------------------------------------------------------------------

attribute("the partition is not verified", checks.law_of_partition, checks, "verify_partition", lambda j, parts: None)


@bug("mutation is not seen by the law", checks.law_of_mutation)
def _(patch: Any) -> None:
    patch.setattr(verify, "info", lambda node: replace(functional.info(node), writes=()))
    patch.setattr(verify, "is_pure", lambda target: True)
