"""Bugs in what decides whether a program serves a call."""

from __future__ import annotations

from typing import Any

from aottrain.compiler.capture import dynamic
from aottrain.compiler.frontends import api, entry
from aottrain.guards import assigned, classes, contents, guards, reaching, state
from aottrain.guards import containers as tables
from tests.planted_bugs.planting import Area, TestsOf

HERE = Area("guards")
SERVED = TestsOf("tests/guards/test_served_calls.py")
ASKED = "tests/conformance/guards/test_assigned.py::test_a_counter_that_is_asked_for_is_a_number"
ASSIGNED = "tests/conformance/guards/test_assigned.py::test_equals_eager"


def without_part(i: int) -> Any:
    original = guards.call_key

    def call_key(*given: Any) -> Any:
        key, tensors = original(*given)
        return key[:i] + key[i + 1 :], tensors

    return call_key


def without_fact(i: int) -> Any:
    original = guards.describe
    return lambda *given: (*original(*given)[:i], *original(*given)[i + 1 :])


HERE.attribute(
    "written inputs may overlap", SERVED.overlapping_inputs, entry, "is_disjoint", lambda primals, written: True
)
HERE.attribute(
    "alias pattern ignored", SERVED.same_tensor_twice, guards, "alias_pattern", lambda tensors: (), quick=True
)
HERE.attribute("grad mode unguarded", SERVED.changed_grad_mode, api, "call_key", without_part(1))
HERE.attribute("autocast unguarded", SERVED.changed_autocast, api, "call_key", without_part(3))
HERE.attribute("default type unguarded", SERVED.changed_default_type, api, "call_key", without_part(4))
HERE.attribute("shapes unguarded", SERVED.changed_shape, guards, "describe", without_fact(1), quick=True)
HERE.attribute("strides unguarded", SERVED.changed_strides, guards, "describe", without_fact(2))
HERE.attribute("types unguarded", SERVED.changed_type, guards, "describe", without_fact(3), quick=True)
HERE.attribute("requires_grad unguarded", SERVED.changed_requires_grad, guards, "describe", without_fact(5))
HERE.attribute("numbers unguarded by type", SERVED.changed_number_type, guards, "_constant", lambda value: value)
HERE.attribute(
    "training flag and attributes unguarded", SERVED.changed_training_flag, state.StateGuard, "holds", lambda self: True
)
HERE.attribute("closures unguarded", SERVED.changed_closure, reaching.Reach, "_visit_function", lambda *_: None)
HERE.attribute("globals unguarded", SERVED.changed_global, reaching, "globals_of", lambda code: frozenset())
HERE.attribute("replaced buffers unguarded", SERVED.replaced_buffer, tables._Alive, "holds", lambda self: True)
HERE.attribute("refusals do not count", SERVED.state_that_changes, api.CompiledCall, "_refuse", lambda *_: None)
HERE.attribute(
    "fallbacks uncounted", SERVED.counted_fallback, api.CompiledCall, "_count", lambda self, error: None, quick=True
)
AUTOMATIC = TestsOf("tests/guards/test_automatic_sizes.py")
HERE.edit(
    "sizes that differ are never opened",
    (
        AUTOMATIC.it_is_said_in_one_line_which_sizes_are_open,
        "tests/trainer/test_varying_lengths.py::test_a_run_of_many_lengths_compiles_a_few_programs",
    ),
    api.CompiledCall._open_dims,
    "list(seen) if len(seen) >= _FEW_SHAPES else ()",
    "()",
    quick=True,
)
HERE.edit(
    "sizes are open from the second shape on",
    AUTOMATIC.a_few_shapes_have_programs_of_their_own,
    api.CompiledCall._open_dims,
    "len(seen) >= _FEW_SHAPES",
    "len(seen) >= 1",
)
HERE.edit(
    "sizes that have not differed are open, too",
    AUTOMATIC.what_has_not_differed_stays_a_number,
    dynamic.differing_dims,
    "if any(shapes[i][dim] != tensor.shape[dim] for shapes in others)",
    "if others",
)
HERE.edit(
    "a program of one shape serves all",
    "tests/guards/test_automatic_sizes.py::test_of_200_lengths_none_runs_eagerly_and_few_are_compiled[trace]",
    api.CompiledCall._trace,
    "None if sizes is None and not self.options.dynamic else",
    "None if sizes is None else",
)
REACHED = TestsOf("tests/guards/test_what_is_reached.py")
HERE.edit(
    "zeros of either sign are one number",
    "tests/guards/test_what_is_reached.py::test_a_zero_of_the_other_sign_or_type[0.0--0.0]",
    tables.Comparison.__init__,
    "if _has_zero(slot[2])",
    "if _has_zero(slot[2]) and False",
)
HERE.edit(
    "what stands in the place of an equal object is not looked at",
    REACHED.what_is_replaced_by_an_equal_is_the_same,
    state.StateGuard._difference,
    "and not hold_the_same(kept, now)",
    "and False",
)
CHANGING = TestsOf("tests/conformance/guards/test_changing_state.py")
HERE.edit(
    "what is refused is tried again at each call that changes a number",
    CHANGING.what_is_refused_once_is_not_traced_again,
    assigned.Settling.have_settled,
    "return before == self._asked != self._refused",
    "return self._asked != self._refused",
)
HERE.edit(
    "what is refused for a number that it changes is never tried again",
    CHANGING.what_is_refused_is_tried_again_once_its_numbers_stay_as_they_are,
    assigned.Settling.have_settled,
    "return before == self._asked != self._refused",
    "return False",
)
HERE.edit(
    "an array is its bytes",
    REACHED.how_an_array_is_read,
    contents.reader_of,
    "(value.dtype, value.shape, value.strides, content) if isinstance(value, numpy.ndarray) else content",
    "content",
)
HERE.edit(
    "a trace may draw from NumPy",
    "tests/guards/test_what_is_reached.py::test_numbers_that_numpy_draws_are_not_of_the_trace[Generator]",
    state.StateGuard.check_unchanged,
    "self._generators.check_unmoved()",
    "pass",
)
HERE.edit(
    "what a program asks of an optimizer is not looked at",
    REACHED.the_rate_of_an_optimizer_that_the_program_asks_for,
    reaching.Reach._run,
    "names & self._torchs.keys()",
    "()",
)
HERE.edit(
    "a global that comes later is not seen",
    REACHED.globals_that_are_there_later,
    reaching.Reach._visit_body,
    "for name in absent]",
    "for name in ()]",
)
HERE.edit(
    "a stand-in is of a class of its own",
    "tests/conformance/guards/test_what_stand_ins_say.py::test_a_trace_leaves_type_as_it_was",
    classes._ClassOf.__call__,
    "kind.__module__ == _STAND_INS",
    "kind.__module__ == NAME",
    quick=True,
)
HERE.edit(
    "a checkpoint's second run assigns nothing",
    f"{ASSIGNED}[in_a_checkpoint-trace]",
    assigned.Assigned._is_asked,
    "not self._running or self._twice()",
    "not self._running",
)
HERE.edit(
    "a backward reads what a call has assigned as it was before",
    f"{ASSIGNED}[hook_of_the_backward_that_reads-trace]",
    assigned.Assigned._is_asked,
    "not self._running or self._twice()",
    "self._twice()",
)
HERE.edit(
    "a buffer that a checkpoint assigns is assigned once",
    f"{ASSIGNED}[buffer_in_a_checkpoint-trace]",
    assigned.Assigned._changed,
    "has_regions and",
    "False and",
)
HERE.edit(
    "what is assigned is not asked whether it was read",
    f"{ASSIGNED}[first_call-trace]",
    assigned.Assigned.get,
    "self._read.add(key)",
    "pass",
)
HERE.edit(
    "attributes are read past their class",
    f"{ASSIGNED}[read_past_the_class-trace]",
    assigned.Assigned.run,
    "{} if self._reads_past else",
    "{} if False else",
)
HERE.edit(
    "a counter counts once",
    f"{ASSIGNED}[counter-trace]",
    assigned.Assignments.put,
    "if slot.is_step",
    "if False",
)
HERE.edit(
    "a counter may be a result",
    f"{ASKED}[as_a_result]",
    assigned.Assigned._check_counters,
    "type(leaf) is Counter",
    "False",
)
HERE.edit(
    "a state of another shape is taken for the one that was traced",
    f"{ASSIGNED}[buffer_that_is_replaced-trace]",
    assigned.Assignments.fit,
    "and self._describe() == self._expected",
    "",
)
HERE.edit(
    "a state that somebody else has, too, is replaced for both",
    f"{ASSIGNED}[buffer_that_another_module_has-trace]",
    entry.Entry.settle,
    "or not self.guard.seen.isdisjoint(self._places)",
    "",
)
HERE.edit(
    "a counter is no int",
    f"{ASKED}[its_class]",
    classes._ClassOf.__call__,
    "if kind is Counter",
    "if False",
)
HERE.edit(
    "the error of a function that refuses a counter may be caught",
    f"{ASKED}[an_error_is_caught]",
    assigned.Assigned._check_counters,
    "self._may_catch or",
    "",
)
