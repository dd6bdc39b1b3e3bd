"""Bugs before the partition: capture, analysis, joint graph, functionalization, simplification."""

from __future__ import annotations

import importlib
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import aottrain.compiler.pipeline as pipeline
from aottrain import compat_dispatch, compat_dynamo, compat_dynamo_inputs
from aottrain.compiler.capture import checkpoint_regions, fakes, kernel_results, recording, substitutes
from aottrain.compiler.frontends import dynamo_checkpoints
from aottrain.compiler.graphs import simplification
from aottrain.compiler.joint import (
    analysis,
    backward,
    custom_functions,
    functional,
    joint,
    links,
    views,
    whole_writes,
)
from aottrain.guards import reaching, state
from aottrain.ir import calling
from aottrain.ops.random import mode
from aottrain.runtime.autograd import chain
from tests.planted_bugs.planting import Area, TestsOf

HERE = Area("front")
PROGRAMS = TestsOf("tests/numerics/test_small_programs.py")
SERVED = TestsOf("tests/guards/test_served_calls.py")
UNDEFINED = TestsOf("tests/compiler/partition/test_undefined.py")
KNOWN = TestsOf("tests/compiler/capture/test_known_values.py")
CAPTURE = importlib.import_module("aottrain.compiler.capture.capture")  # the package has a function of that name


HERE.attribute(
    "hidden writes of batch norm unseen",
    PROGRAMS.batch_norm_of_shared_memory,
    analysis,
    "hidden_writes",
    lambda func, args: (),
)

CAUGHT = TestsOf("tests/conformance/errors/test_caught.py")
HERE.edit(
    "errors that a backward catches unseen",
    CAUGHT.in_the_backward + "[tries-a_function]",
    backward.watched,
    "none_caught(),",
    "",
)
BACKWARDS = TestsOf("tests/conformance/errors/test_effects_of_backwards.py")
HERE.edit(
    "what a backward calls unseen",
    BACKWARDS.happen_each_time + "[a_file-a_function]",
    backward.watched,
    "audited(step.function, step.module, registered),",
    "",
)
HERE.edit(
    "random numbers that a backward draws unseen",
    BACKWARDS.happen_each_time + "[numpys_numbers-a_hook]",
    backward.watched,
    'outside_kept("philox"),',
    "",
)
HERE.edit(
    "numbers that numpy makes of numbers stay TorchDynamo's tensors",
    "tests/conformance/interfaces/test_structure.py::test_equals_eager[numbers_of_numpy-dynamo]",
    compat_dynamo_inputs.number_numpy,
    "_is_of_numpy(node) and not",
    "not _is_of_numpy(node) and not",
)
HERE.edit(
    "numpy's functions of numbers are TorchDynamo's own",
    "tests/conformance/interfaces/test_structure.py::test_equals_eager[numbers_of_numpy-dynamo]",
    compat_dynamo_inputs._number,
    "number = function(*given)",
    "number = node.target(*given).item()",
)
TENSORS = TestsOf("tests/conformance/errors/test_tensors_in_backwards.py")
HERE.edit(
    "what a backward does to tensors unseen",
    TENSORS.as_eager + "[puts_its_gradient-a_function]",
    backward.watched,
    "gradients_left(inputs),",
    "",
)
HERE.attribute(
    "a backward of the program's own unseen",
    TENSORS.a_gradient_that_the_program_asks_for + "[a_hook]",
    substitutes,
    "grad_under",
    lambda mode, args, kwargs: torch.autograd.grad(*args, **kwargs),
)
OPERATORS = TestsOf("tests/conformance/errors/test_backwards_of_operators.py")
HERE.attribute(
    "backwards of custom operators unseen",
    (OPERATORS.as_eager + "[prints-of_a_list-dynamo]", OPERATORS.as_eager + "[keeps-of_one-dynamo]"),
    backward,
    "registered_backward",
    lambda function: None,
)
HERE.edit(
    "of two guards that watch the outer one alone sees the first function",
    OPERATORS.as_eager + "[keeps-of_one-dynamo]",
    state.StateGuard.watching,
    "sys.setprofile(profiler)",
    "sys.setprofile(watch)",
)
HERE.edit(
    "errors of other threads unseen",
    CAUGHT.an_error_that_a_future_keeps,
    fakes.KernelFakes.dispatch,
    "!= self._thread",
    "is None",
)

HERE.attribute(
    "what torch tells no mode of a call left out",
    "tests/conformance/values/test_numerics.py::test_equals_eager[arguments_that_torch_tells_no_mode_of-trace]",
    substitutes,
    "all_named",
    lambda func, args, kwargs: kwargs or {},
)

HERE.attribute(
    "the fast path of attention layers left out",
    "tests/conformance/interfaces/test_objects.py::test_equals_eager[attention_in_evaluation-trace]",
    substitutes,
    "_WITH_FAST_PATH",
    (),
)

HERE.attribute(
    "results of a reentrant checkpoint that go unused get no zeros",
    "tests/conformance/gradients/test_checkpoint.py::test_equals_eager[reentrant_with_an_unused_result-trace]",
    checkpoint_regions._Together,
    "apply",
    lambda *results: results,
)

HERE.attribute(
    "a reentrant checkpoint is given what it closes over",
    "tests/compiler/partition/test_checkpoint_marks.py"
    "::test_what_a_reentrant_region_closes_over_gets_no_gradient_where_no_argument_needs_one[dynamo]",
    dynamo_checkpoints,
    "closed_over",
    lambda node: (False,) * len(node.args[1:]),
)

HERE.attribute(
    "zeros without memory added up before the trace sees it",
    UNDEFINED.a_gradient_of_zeros_without_memory_is_one_beside_another_output,
    CAPTURE,
    "RESULT_RULES",
    {func: rule for func, rule in CAPTURE.RESULT_RULES.items() if rule.__name__ != "_zeros"},
)


@HERE.bug(
    "operators that arrive whole in inference mode are taken apart by Python, as torch's tracers do",
    "tests/conformance/memory/test_aliasing.py::test_equals_eager[dropout_in_eval_is_its_input_in_inference_mode-trace]",
)
def _(patch: Any) -> None:
    for module in (CAPTURE, mode, recording):
        patch.setattr(module, "take_apart", lambda func, args, kwargs: func.decompose(*args, **kwargs))


@HERE.bug(
    "operators that arrive whole in inference mode unseen",
    "tests/conformance/memory/test_aliasing.py::test_equals_eager[dropout_in_eval_is_its_input_in_inference_mode-trace]",
)
def _(patch: Any) -> None:
    for module in (CAPTURE, mode, recording):
        patch.setattr(module, "arrived_whole", lambda *_: False)


HERE.attribute(
    "writes to shared inputs unseen",
    PROGRAMS.written_shared_memory,
    analysis,
    "_check_input_state",
    lambda *_: None,
    quick=True,
)
HERE.attribute(
    "views cut off from gradients unseen", PROGRAMS.view_under_no_grad, views, "_is_cut_off", lambda *_: False
)
HERE.attribute(
    "views of leaves whose elements share memory put together by as_strided",
    PROGRAMS.view_of_overlapping_leaf,
    views,
    "is_injective",
    lambda view: True,
)
HERE.attribute(
    "a full extremum's gradient is a product", PROGRAMS.full_extremum, joint, "spread_as_eager", lambda graph: None
)
HERE.attribute(
    "backward traced under the caller's autocast",
    PROGRAMS.autocast_backward,
    backward,
    "disable_autocast",
    torch.enable_grad,
)
HERE.attribute(
    "a program that writes in place functionalized under the caller's autocast",
    "tests/conformance/values/test_autocast.py::test_equals_eager[off_inside_a_program_that_writes_in_place-trace]",
    functional,
    "disable_autocast",
    nullcontext,
)
HERE.attribute(
    "gradients to other tensors unseen", PROGRAMS.gradient_elsewhere, joint, "_check_autograd_graph", lambda *_: []
)
HERE.attribute(
    "a leaf's view taken for no view",
    PROGRAMS.leaf_that_is_a_view,
    CAPTURE,
    "fake_of",
    lambda value, mode, static: mode.from_tensor(value.detach()),
    quick=True,
)
HERE.attribute(
    "inputs that are no leaves not copied",
    PROGRAMS.mutated_differentiable_input,
    joint,
    "enter_primals",
    lambda step, leaves, cloned: list(leaves),
)


HERE.attribute(
    "TorchDynamo called under a trace", PROGRAMS.branch_on_a_value, reaching, "enters_dynamo", lambda code: False
)


@HERE.bug("mutated inputs overlooked", SERVED.overlapping_inputs)
def _(patch: Any) -> None:
    original = analysis.analyse
    patch.setattr(pipeline, "analyse", lambda step: replace(original(step), mutated=(), replaced=()))


@HERE.bug("a mutated input that requires gradients taken for plain", PROGRAMS.mutated_differentiable_input)
def _(patch: Any) -> None:
    original = analysis.analyse
    patch.setattr(pipeline, "analyse", lambda step: replace(original(step), replaced=()))


HERE.edit(
    "an array's memory is written to by a trace",
    f"{KNOWN.memory_that_an_array_shares_is_not_known}[_read_as_an_array]",
    fakes.KernelFakes._note_known,
    "if not written.isdisjoint(self._borrowed):",
    "if False:",
)


@HERE.bug("outputs that are views taken by their fakes' strides", PROGRAMS.strides_of_fakes)
def _(patch: Any) -> None:
    original = analysis.analyse
    patch.setattr(pipeline, "analyse", lambda step: replace(original(step), viewed=frozenset()))


HERE.edit(
    "parts of a gradient are added before they come to a result",
    "tests/numerics/test_fuzz_findings.py::test_found_by_fuzzing["
    "what comes to a result from another one was added up before it came there]",
    links._parts,
    "len(parts) < count - 1 and",
    "False and",
)
HERE.edit(
    "an updated input hands zeros on",
    "tests/numerics/test_fuzz_findings.py::test_found_by_fuzzing["
    "an input that the program updated had zeros added to its gradient, and -0.0 became 0.0]",
    chain.write,
    "_Written.apply(target, value)",
    "target.copy_(value)",
)

HERE.attribute(
    "draws taken for constants", KNOWN.what_is_written_or_drawn_is_not_known, fakes, "_is_determined", lambda func: True
)
HERE.edit(
    "a gradient by running statistics in the layout of the images on a GPU",
    TestsOf(
        "tests/compiler/capture/test_fakes.py"
    ).a_batch_norm_by_running_statistics_has_a_contiguous_gradient_on_a_gpu,
    kernel_results._contiguous_in_evaluation,
    "return out if is_training else _contiguous(args, out)",
    "return out",
)
HERE.attribute("fakes with strides that kernels do not give", PROGRAMS.strides_of_kernels, fakes, "CPU_LAYOUTS", {})
HERE.attribute(
    "an argument is written whose type cannot take the result",
    "tests/compiler/capture/test_fakes.py::test_no_type_is_written_that_the_argument_cannot_take",
    kernel_results,
    "_out_of_place",
    lambda func: None,
)


@HERE.bug("requires_grad of an output turned round", PROGRAMS.two_outputs)
def _(patch: Any) -> None:
    original = analysis.analyse

    def analyse(step: Any) -> Any:
        known = original(step)
        return replace(known, computed=tuple(replace(c, requires_grad=True) for c in known.computed))

    patch.setattr(pipeline, "analyse", analyse)


HERE.attribute(
    "a write keeps the functional op's layout",
    PROGRAMS.written_layout,
    functional._Replay,
    "_keep_layout",
    lambda *_: None,
)
HERE.attribute(
    "a write through expand comes back by arithmetic",
    PROGRAMS.written_expand,
    functional._Replay,
    "call_function",
    fx.Interpreter.call_function,
)
HERE.attribute(
    "writes to shared elements let through",
    PROGRAMS.written_broadcast,
    functional,
    "_check_written_view",
    lambda node: None,
)


WHOLE_WRITES = TestsOf("tests/compiler/joint/test_whole_writes.py")
HERE.edit(
    "what reads written memory reads what was there before",
    WHOLE_WRITES.memory_and_the_result_of_a_write_are_one + "[read between]",
    whole_writes.without_whole_writes,
    "place[user] > at",
    "place[user] > at + 1",
)
HERE.edit(
    "a write after a view was taken is none to the view",
    WHOLE_WRITES.views_and_other_layouts_are_replayed + "[with a view]",
    whole_writes._memories,
    "if memories.get(node) in seen:",
    "if not seen and memories.get(node) in seen:",
)
HERE.edit(
    "a write that gives another type taken for the operator",
    WHOLE_WRITES.views_and_other_layouts_are_replayed + "[another type]",
    whole_writes._layout,
    "value.stride(), value.dtype,",
    "value.stride(),",
)


@HERE.bug("a state update dropped", PROGRAMS.buffer, quick=True)
def _(patch: Any) -> None:
    original = functional._with_updates
    patch.setattr(functional, "_with_updates", lambda known, graph, updated: original(known, graph, updated[1:]))


@HERE.bug("a needed cast dropped", PROGRAMS.cast_by_copy, quick=True)
def _(patch: Any) -> None:
    def drop(graph: Any, node: Any) -> None:
        if node.target is simplification.aten.copy.default:
            node.replace_all_uses_with(node.args[1])

    patch.setattr(simplification, "_drop_copy_into_fresh", drop)


HERE.attribute("returned copies merged", PROGRAMS.equal_outputs, simplification, "_is_result", lambda node: False)
HERE.attribute(
    "draws merged",
    PROGRAMS.two_draws,
    simplification,
    "_expression",
    lambda node: (node.target, str(node.args[2:])),
    quick=True,
)
HERE.attribute(
    "keywords ignored by merging",
    PROGRAMS.keywords,
    simplification,
    "_expression",
    lambda node: (node.target, str(node.args)),
    quick=True,
)
HERE.attribute(
    "1 and True and 1.0 merged",
    PROGRAMS.number_types,
    simplification,
    "_expression",
    lambda n: (n.target, n.args) if not any(isinstance(a, list) for a in n.args) else None,
)
HERE.attribute(
    "running statistics exchanged",
    PROGRAMS.batch_norm_in_eval,
    simplification,
    "_drop_running_statistics",
    lambda n: (
        setattr(n, "args", (*n.args[:3], n.args[4], n.args[3], *n.args[5:]))
        if "batch_norm_backward" in str(n.target)
        else None
    ),
)
HERE.attribute(
    "eager's unread draws dropped", PROGRAMS.unread_eager_draw, simplification, "is_pure", lambda target: True
)
HERE.attribute("checks taken for dead code", PROGRAMS.unread_check, simplification, "is_pure", lambda target: True)
HERE.attribute(
    "results that gradients of others pass through unseen",
    PROGRAMS.between_results,
    analysis,
    "find_links",
    lambda *_: calling.NO_LINKS,
)
HERE.attribute(
    "hooks on a result that another is made from unseen",
    PROGRAMS.hook_between_results,
    analysis,
    "find_links",
    lambda *_: calling.NO_LINKS,
)
HERE.edit(
    "a hook inside a program on its result is traced",
    "tests/conformance/gradients/test_results.py::test_equals_eager[hook_inside_on_a_view_that_is_a_result-trace]",
    analysis._check_output,
    "if value._backward_hooks:",
    "if False:",
)
HERE.edit(
    "what eager saves for a gradient that reaches no input is not watched",
    "tests/conformance/gradients/test_results.py"
    "::test_equals_eager[weight_is_written_that_a_gradient_to_such_a_leaf_needs-trace]",
    links.isolated,
    "tuple(sorted(found[0]))",
    "()",
)
HERE.edit(
    "what only one result's backward needs is watched for the other, too",
    "tests/conformance/gradients/test_results.py"
    "::test_equals_eager[detached_input_is_written_that_one_of_two_results_needs-trace]",
    links.isolated,
    "one == found[0]",
    "True",
)

CUSTOM = TestsOf("tests/compiler/joint/test_custom_functions.py")
REFUSED = CUSTOM.what_hangs_on_the_tangents_that_come_is_refused
HERE.edit(
    "a custom Function's results may go unused one by one",
    f"{REFUSED}[apart]",
    custom_functions.prepare,
    "len({each for each in found if each}) > 1",
    "False",
)
HERE.attribute(
    "a custom Function that gives no gradient goes unseen",
    f"{REFUSED}[none]",
    custom_functions,
    "_check_gradients",
    lambda node: lambda gradients, _: None,
)
HERE.attribute(
    "TorchDynamo's zeros for None are believed",
    CUSTOM.results_that_lead_nowhere_are_refused_behind_torchdynamo,
    custom_functions,
    "_is_known",
    lambda function: True,
)
HERE.edit(
    "targets of one code share one limit of programs",
    TestsOf("tests/conformance/errors/test_counting.py").targets_of_one_code_have_a_limit_each,
    compat_dynamo._limit_of_one,
    "if not others:",
    "if True:",
)

OPEN_SIZES = TestsOf("tests/conformance/guards/test_dynamic_shapes.py")
HERE.edit(
    "a dropout that drops nothing copied",
    OPEN_SIZES.a_dropout_that_drops_nothing_is_its_argument + "[0.5-False-trace]",
    compat_dispatch._of_some,
    "if not train or p == 0:",
    "if False:",
)
HERE.edit(
    "a dropout of everything in torch's Python form",
    OPEN_SIZES.a_dropout_of_everything_draws_all_the_same + "[trace]",
    compat_dispatch._of_some,
    "if p == 1:",
    "if p == 2:",
)
HERE.edit(
    "no dropout between recurrent layers of open sizes",
    OPEN_SIZES.stacked_recurrent_layers_drop_out_between_them + "[LSTM-trace]",
    compat_dispatch._layer_by_layer,
    "if not (train and dropout and num_layers > 1):",
    "if True:",
)
HERE.edit(
    "an image of an open size is computed anew where it stays as large",
    OPEN_SIZES.an_image_that_a_factor_leaves_as_large_is_copied + "[linear-1-trace]",
    compat_dispatch._to_another_size,
    "length == before for",
    "False for",
)
HERE.edit(
    "what torch has found of sizes is kept",
    "tests/compiler/link/test_open_sizes.py::test_what_a_trace_found_of_sizes_is_not_kept",
    compat_dispatch.symbolic_tracing,
    "        _forget_sizes()\n",
    "        pass\n",
)
HERE.edit(
    "the name of a symbol in a text",
    OPEN_SIZES.a_size_in_a_text_is_its_number + "[shown]",
    compat_dispatch._numbers_in_texts,
    "return getattr(_NUMBERS[symbolic](self), name)(*how)",
    "return method(self, *how)",
)
HERE.edit(
    "a size read from a stride of a gradient",
    OPEN_SIZES.a_size_in_a_custom_backward_is_not_a_stride_of_the_gradient + "[dynamo]",
    compat_dynamo_inputs.sizes_not_of_strides,
    'if stride.args[0].op == "placeholder"',
    "if False",
)
