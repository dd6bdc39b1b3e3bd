"""Bugs in what runs: the autograd function, the epilogue, operators one by one, random numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from aottrain.compat import CAN_UNPACK_ONE
from aottrain.compiler.frontends import memory_guards
from aottrain.compiler.joint import function_calls, replay
from aottrain.compiler.link import linking
from aottrain.compiler.lowering import rules
from aottrain.compiler.lowering.elementwise import pointwise
from aottrain.ir import graph
from aottrain.ops import pools
from aottrain.ops.random import mode as rng
from aottrain.ops.random import philox
from aottrain.runtime import epilogue, executor, program
from aottrain.runtime.autograd import call, chain, double_backward, hooks
from aottrain.runtime.cuda import cuda_graphs
from aottrain.runtime.program import Program
from aottrain.toolchain.native import find_compiler
from tests.planted_bugs.planting import Area, TestsOf

HERE = Area("runtime")
PROGRAMS = TestsOf("tests/numerics/test_small_programs.py")
RUNS = TestsOf("tests/runtime/test_program.py")
GRAPHS = TestsOf("tests/runtime/cuda/test_cuda_graphs.py")


def layout_of(node: fx.Node) -> Any:
    return getattr(graph.value_of(node), "layout", None)


def _one(node: fx.Node) -> Any:
    """The rule of a copy: of a number it makes 1."""
    if isinstance(node.args[0], fx.Node):
        return _COPY(node)
    return pointwise.pointwise(node, [], lambda b, v: b.constant(1, pointwise.spec(node).dtype))


if find_compiler() is not None:
    _COPY = rules._MAKERS["aten._to_copy.default"]
    HERE.plant(
        "a number in a tensor's place is taken for another",
        PROGRAMS.number_for_a_tensor,
        lambda patch: patch.setitem(rules._MAKERS, "aten._to_copy.default", _one),
    )


def _materialise(patch: Any) -> None:
    original = program._CompiledFunction.forward

    def forward(ctx: Any, *args: Any) -> Any:
        out = original(ctx, *args)
        ctx.set_materialize_grads(True)
        return out

    patch.setattr(program._CompiledFunction, "forward", staticmethod(forward))


HERE.edit(
    "a warning takes the place of an error",
    tuple(f"tests/conformance/errors/test_values_that_raise.py::test_an_error_after_a_warning_is_eagers[{capture}]"
          for capture in ("trace", "dynamo")),
    program._applied,
    "if raised is None:",
    "if True:",
)  # fmt: skip


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


def _without_offset(info: Any, *given: Any) -> Any:
    if info.geometry is not None:
        info = replace(info, geometry=(*info.geometry[:2], 0))
    return _MAKE(info, *given)


_MAKE, _VALUE = epilogue._make, executor.value_text
HERE.plant("undefined tangents as zeros", PROGRAMS.unused_output, _materialise)
HERE.plant("version counters not moved", PROGRAMS.stale_input, _still_versions)
HERE.attribute(
    "the epilogue forgets the offset", PROGRAMS.sliced_output, epilogue, "_make", _without_offset, quick=True
)
HERE.attribute(
    "views regenerated without their origin", PROGRAMS.written_unbound, epilogue, "set_view_origin", lambda *_: None
)
HERE.attribute(
    "a view of an input made from a copy",
    PROGRAMS.view_of_input,
    epilogue,
    "_make",
    lambda *given: _MAKE(*given).clone(),
)
HERE.attribute(
    "tangents not brought to their strides",
    PROGRAMS.odd_tangent,
    program,
    "_coerce",
    lambda tangent, spec, sizes: tangent,
)
LINKS, HOOKS = TestsOf("tests/runtime/test_chain.py"), TestsOf("tests/runtime/test_hooks.py")
HERE.attribute(
    "what a link is a view of is not looked at",
    f"{LINKS.what_a_link_is_a_view_of_is_looked_at}[nested-retain_grad-0]",
    epilogue,
    "_bases",
    lambda *_: [],
)
HERE.edit(
    "of what a link is a view of, the next alone is looked at",
    f"{LINKS.what_a_link_is_a_view_of_is_looked_at}[nested-hook-0]",
    epilogue._bases,
    "bases.append(chain[info.index])",
    "pass",
)
HERE.edit(
    "hooks before a link's node are not counted",
    f"{LINKS.hooks_before_nodes_are_eagers}[linked-0]",
    chain.LinkState._decide,
    "or self.has_prehooks",
    "",
)
HERE.attribute(
    "hooks are called with None",
    f"{HOOKS.hooks_see_what_they_see_in_eager}[backwards0-False-False]",
    program,
    "skip_undefined",
    lambda inputs: None,
)
HERE.attribute(
    "hooks stay as they were wrapped",
    HOOKS.hooks_are_the_users_own_afterwards,
    hooks,
    "_restore",
    lambda *_: None,
)
HERE.edit(
    "results of one node",
    f"{HOOKS.hooks_see_what_they_see_in_eager}[backwards1-False-False]",
    Program._with_own_node,
    "not self._has_several_results",
    "not value.output_nr",
)
if CAN_UNPACK_ONE:
    HERE.attribute(
        "what unused outputs saved is unpacked",
        PROGRAMS.stale_unused_output,
        program,
        "saved_tensors",
        lambda ctx, wanted: list(ctx.saved_tensors),
    )
HERE.edit(
    "complex numbers are drawn with twice the variance",
    "tests/ops/test_random_types.py::test_numbers_as_eager_or_its_error[torch.complex64-philox_eager]",
    rng.PhiloxMode.normal,
    " * math.sqrt(0.5)",
    "",
)
HERE.edit(
    "numbers are drawn of types that eager does not draw",
    "tests/ops/test_random_types.py::test_numbers_as_eager_or_its_error[torch.int64-philox_eager]",
    rng.PhiloxMode.drawn,
    "check_types(func, args, kwargs)",
    "pass",
)
HERE.edit(
    "an exponential number may be 0",
    "tests/ops/test_random_types.py::test_exponential_numbers_are_above_zero[torch.float32]",
    rng._exponential_,
    ".clamp_(max=-torch.finfo(draw_type).eps / 2)",
    "",
)
HERE.edit(
    "drawn numbers are a view of more",
    "tests/ops/test_random_types.py::test_drawn_results_are_views_of_nothing[torch.float64-trace]",
    philox._fill,
    "    return out",
    "    return torch.cat([out.view(-1), out.view(-1)])[: out.numel()].view(size)",
)
HERE.edit(
    "a pool's gradient added to the places of another window",
    "tests/ops/test_pools.py::test_gradients_are_scattered_as_they_are_gathered[1-(5, 9, 7)]",
    pools.max_pool_scatter,
    "window[1], *step",
    "window[0], *step",
)
HERE.edit(
    "a layout that fake tensors do not show is taken for dense",
    "tests/compiler/frontends/test_opaque_layouts.py::"
    "test_the_layout_of_results_and_gradients_is_eagers[dynamo-same_layout]",
    memory_guards.UnlikeFakes.reason,
    "self._is_opaque = any(args[i].is_mkldnn for i in self._indices)",
    "self._is_opaque = False",
)
HERE.attribute("a draw number used twice", PROGRAMS.two_draws, rng.PhiloxMode, "_next", _reused_draw, quick=True)
HERE.attribute(
    "every call draws from one seed",
    PROGRAMS.generator_state,
    program,
    "new_state",
    lambda device: torch.zeros(2, dtype=torch.int64),
)
HERE.attribute("the native draw forgets its number", PROGRAMS.native_draw, philox, "_MASK64", 0)
HERE.attribute(
    "infinity loses its sign",
    PROGRAMS.infinity,
    executor,
    "value_text",
    lambda v, names: "inf" if v == -float("inf") else _VALUE(v, names),
    quick=True,
)
HERE.attribute(
    "values live to the end",
    "tests/runtime/test_executor.py::test_values_die_at_their_last_use",
    executor,
    "freed_after",
    lambda last, kept: {},
    quick=True,
)
HERE.attribute("a replay forgets no_grad", PROGRAMS.second_derivative, replay, "grad_mode_of", lambda node: True)
HERE.attribute(
    "a replay has no history of what is written unrecorded",
    RUNS.create_graph_sees_what_a_functional_graph_does_not_hold + "[cosine_similarity]",
    replay,
    "UNRECORDED_WRITE",
    "",
)
HERE.attribute(
    "nobody sees that state is written before the backward that needs it",
    "tests/conformance/memory/test_written_state.py::test_equals_eager[updated_twice_before_the_backward-trace]",
    call.Call,
    "check_written",
    lambda *_: None,
)
HERE.attribute(
    "a replay calls a custom Function without its caller's autocast",
    RUNS.create_graph_is_refused_where_a_replay_would_be_wrong + "[_cubed_under_autocast]",
    function_calls,
    "_autocasts",
    lambda: False,
)
HERE.attribute(
    "a replay reads what a program has updated",
    RUNS.create_graph_through_a_program_that_updates_state + "[1]",
    double_backward,
    "_kept",
    lambda value, *_: (value.detach(), None),
)


HERE.attribute(
    "inputs that are only detached go in attached",
    PROGRAMS.detached_input,
    linking,
    "_cut_off",
    lambda *_: frozenset(),
)


@HERE.bug("a dense gradient is all of its sum with a sparse one", PROGRAMS.sparse_and_dense)
def _(patch: Any) -> None:
    original = linking.build_runner

    def build(graph: fx.Graph, kernel: Any) -> Any:
        for node in graph.nodes:
            parts = [part for part in node.all_input_nodes if layout_of(part) is torch.strided]
            if str(node.target).startswith("aten.add") and len(parts) < len(node.all_input_nodes):
                node.replace_all_uses_with(parts[0])
        return original(graph, kernel)

    patch.setattr(linking, "build_runner", build)


@HERE.bug("residuals kept after the backward", PROGRAMS.residual_lifetimes)
def _(patch: Any) -> None:
    kept: list[Any] = []
    original = linking.build_runner

    def build(graph: Any, kernel: Any) -> Any:
        run = original(graph, kernel)
        return lambda inputs: kept.extend(inputs) or run(inputs)

    patch.setattr(linking, "build_runner", build)


@HERE.bug("a replay hands out its own memory, which the next one writes", GRAPHS.what_a_call_returned_is_left_alone)
def _(patch: Any) -> None:
    def copied(self: Any) -> dict[int, Any]:
        return {id(place): kept for places, sources in self._whole for place, kept in zip(places, sources, strict=True)}

    patch.setattr(cuda_graphs._Recording, "_copied", copied)
