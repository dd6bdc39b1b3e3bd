"""Bugs in what is saved and what is recomputed, and in the prediction of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

import aottrain.compiler.pipeline as pipeline
from aottrain.compiler.graphs.algorithms import min_cut
from aottrain.compiler.joint import functional
from aottrain.compiler.link import timeline
from aottrain.compiler.partition import late_gradients, split, strategies, undefined
from aottrain.compiler.partition.again import outputs, quick
from aottrain.compiler.partition.budget import kept, strategy
from aottrain.compiler.passes import pair_complex
from aottrain.compiler.passes.rows import order_scatters, sum_messages
from aottrain.compiler.passes.splits import norms, stacks
from aottrain.compiler.schedule import layouts
from aottrain.explain import late
from aottrain.ir import graph
from aottrain.ir.analysis import gradients
from aottrain.ir.plan import PartitionPlan
from aottrain.toolchain import kept as files
from tests.planted_bugs.planting import Area, Plant, TestsOf

HERE = Area("partition")
PROGRAMS = TestsOf("tests/numerics/test_small_programs.py")


def results_of(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])


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


HERE.plant("two residuals swapped", PROGRAMS.residuals, _apply_then(_swap(lambda parts: parts.forward, -1, -2)))
HERE.plant("two gradients swapped", PROGRAMS.residuals, _apply_then(_swap(lambda parts: parts.backward, 0, 1)))
HERE.plant(
    "an output returned in the place of an update",
    PROGRAMS.buffer,
    _apply_then(_swap(lambda parts: parts.forward, 0, 1)),
)
HERE.attribute(
    "updated state recomputed from its new value",
    PROGRAMS.buffer,
    strategies,
    "_must_save",
    lambda node, demand: False,
    quick=True,
)
HERE.attribute(
    "outputs that eager saves not saved",
    PROGRAMS.stale_output,
    strategies,
    "_may_save",
    lambda node: node.op == "placeholder",
)
HERE.attribute(
    "the cut counts vertices, not bytes",
    PROGRAMS.budget_bytes,
    strategies,
    "_weight",
    lambda node, demand: 1,
    quick=True,
)
HERE.attribute(
    "minimum cut at the wrong end",
    PROGRAMS.cheapest_cut,
    min_cut._Network,
    "reaching",
    lambda self, sink: {sink},
    quick=True,
)
_ALLOCATIONS = timeline.allocations
HERE.attribute(
    "tuple items that nothing reads cost nothing",
    PROGRAMS.peak_of_unread_items,
    timeline,
    "allocations",
    lambda node: [found for found in _ALLOCATIONS(node) if found[0] is not node or not graph.is_tuple(node)],
)
HERE.attribute(
    "views allocate in the peak model",
    PROGRAMS.peak_of_views,
    timeline,
    "allocations",
    lambda node: _ALLOCATIONS(node) or [(node, graph.storage_bytes(node))],
    quick=True,
)
HERE.attribute(
    "undefined tangents not specialised",
    PROGRAMS.unused_output,
    undefined,
    "_rewrite",
    lambda graph, node, new, late: graph.node_copy(node, lambda n: new[n] or undefined._zeros(graph, n)),
)
HERE.edit(
    "what lies beside an undefined part is dropped with it",
    TestsOf("tests/compiler/partition/test_undefined.py").what_lies_beside_values_of_the_forward_is_zeros_there,
    undefined._holds_more,
    'not in ("cat", "stack")',
    "not in ()",
)
HERE.edit(
    "what is left of a sum is taken to begin where the sum would",
    "tests/compiler/partition/test_undefined.py::test_a_part_of_the_other_gradient_is_read_where_it_lies[cpp]",
    undefined._lie_alike,
    " and start_of(value_of(term)) == start_of(value_of(total)) is not None",
    "",
)
HERE.attribute(
    "values are compared with their extrema a second time",
    "tests/compiler/partition/test_comparisons.py::test_the_backward_compares_nothing_again",
    strategies,
    "decided_once",
    lambda joint: frozenset(),
)
_WRITTEN = "tests/conformance/memory/test_lifetimes.py"
HERE.attribute(
    "the backward reads inputs that eager does not keep",
    f"{_WRITTEN}::test_equals_eager[made_from_an_input_that_is_written_before_the_backward-trace]",
    functional,
    "_with_lent",
    lambda joint: replace(
        joint,
        signature=replace(joint.signature, inputs=tuple(replace(each, lent=False) for each in joint.signature.inputs)),
    ),
)
_UNSCHEDULED = "tests/compiler/partition/budget/test_unscheduled.py"
HERE.edit(
    "the bound of a plan's peak counts what is saved twice",
    f"{_UNSCHEDULED}::test_the_bound_is_below_the_peak_of_kernels_and_of_operators",
    timeline.least_peak_bytes,
    "sum(saved.values())",
    "2 * sum(saved.values())",
)
HERE.attribute(
    "every candidate plan is scheduled",
    f"{_UNSCHEDULED}::test_they_spare_most_schedules",
    strategy._KernelPeaks,
    "_least_peak",
    lambda self, number: self._peak(number),
)
_UNBOUNDED = TestsOf(
    "tests/compiler/partition/budget/test_fused_prices.py"
).a_budget_never_peaks_above_what_runs_without_one
HERE.edit(
    "a budget knows nothing of the plan that runs without one",
    f"{_UNBOUNDED}[Gates-shape0]",
    strategies.plan_family,
    "_of_kernels(demand, fusion)",
    "None",
)
HERE.attribute(
    "the plan that runs without a budget counts by its small kernels within one",
    f"{_UNBOUNDED}[Sines-shape1]",
    PartitionPlan,
    "runs_without_a_budget",
    False,
)
HERE.attribute(
    "a gradient that is copied into .grad counts once",
    "tests/compiler/link/test_retention.py::test_a_gradient_that_autograd_copies_counts_twice[0.0-trace]",
    gradients,
    "_becomes_grad",
    lambda gradient, leaf: True,
)
_KEPT = TestsOf("tests/compiler/partition/budget/test_kept.py")
HERE.attribute(
    "peaks of another process are believed unseen",
    _KEPT.wrong_peaks_change_no_plan,
    strategy._KernelPeaks,
    "_is_confirmed",
    lambda self, number: True,
)
HERE.edit(
    "a family of plans is taken as it is kept",
    (f"{_KEPT.a_wrong_family_is_searched_anew}[aten-twice]", f"{_KEPT.a_wrong_family_is_searched_anew}[cpp-twice]"),
    kept._read,
    "if family and family == tuple(points) else None",
    "if family else None",
)
HERE.edit(
    "kept plans are read under another program's name",
    _KEPT.a_file_of_another_name_is_not_read,
    files._checksum,
    "key.encode() + contents",
    "contents",
)
HERE.edit(
    "kept peaks are believed whatever was answered for them",
    _KEPT.peaks_that_hang_on_another_answer_are_not_believed,
    kept.KeptPeaks.agrees,
    "found.get((each.kind, each.key), each).choice == each.choice",
    "True",
)
HERE.edit(
    "peaks by a busy machine's answers are kept",
    _KEPT.answers_of_a_busy_machine_are_not_kept,
    kept.KeptPeaks.keep,
    'each.source in ("measured", "cache") and _is_plain(each.choice)',
    "_is_plain(each.choice)",
)
HERE.edit(
    "a field of a report is found at each read",
    "tests/explain/test_late.py::test_it_is_found_once_at_the_first_read",
    late.Late.__getattr__,
    "return self.__dict__[name]",
    "return self.__dict__.pop(name) if find is None else find()",
)
HERE.edit(
    "a group norm's statistics are made again",
    "tests/compiler/passes/test_choose_layouts.py::test_group_norms_are_kernels[dtype0-True]",
    strategies.min_cut,
    "alone(node)} | few",
    "alone(node)}",
)
HERE.edit(
    "a group's sums lack the weight",
    "tests/compiler/passes/test_choose_layouts.py::test_group_norms_are_kernels[dtype0-True]",
    norms._gradients_by_examples,
    "(scaled, [3])",
    "(sums, [3])",
)


@HERE.bug("the forward computes something else", PROGRAMS.residuals)
def _(patch: Any) -> None:
    def change(parts: Any) -> Any:
        for node in parts.forward.nodes:
            if "sin" in str(node.target):
                node.target = torch.ops.aten.cos.default
        return parts

    _apply_then(change)(patch)


LATE = TestsOf("tests/compiler/partition/test_late_gradients.py")
HERE.edit(
    "no gradient waits for the end",
    LATE.of_few_rows_large_gradients_wait,
    split.apply_partition,
    "late_gradients(backward, ",
    "(lambda *rest: None)(backward, ",
)
HERE.edit(
    "gradients wait whatever the peak is",
    LATE.where_the_peak_is_elsewhere_the_order_stays,
    late_gradients.late_gradients,
    "> (1 - _GAIN) *",
    "> 10 *",
)

AGAIN = TestsOf("tests/compiler/partition/test_outputs_again.py")
HERE.edit(
    "a result that is computed again is not handed over",
    AGAIN.a_later_write_to_it_raises_as_in_eager,
    split.apply_partition,
    "node not in direct and node in needed",
    "node not in direct and node in needed - handed",
)
HERE.edit(
    "a copy that is read for a result is not saved",
    AGAIN.what_may_be_written_before_is_saved_for_it,
    outputs.reading_least,
    "node in saved | copies",
    "node in saved",
)
HERE.edit(
    "exponentials are quick on a CPU",
    AGAIN.only_where_it_takes_no_longer,
    quick.is_quick,
    "cheap_rule(node)",
    "node",
)
HERE.edit(
    "roundings are quick on a CPU",
    AGAIN.only_where_it_takes_no_longer,
    quick._is_rounded,
    "itemsize != 2",
    "itemsize",
)
SCATTERS = TestsOf("tests/compiler/passes/test_order_scatters.py")
HERE.edit(
    "few embeddings take all rows",
    SCATTERS.the_gradient_of_few_embeddings_is_made_of_sums,
    order_scatters._sum_rows,
    "(rows, apart, 0.0)",
    "(rows, apart, 1.0)",
)
HERE.edit(
    "several indices are one though nothing says that each is in range",
    SCATTERS.an_index_that_is_out_of_range_raises_though_its_row_is_none_such,
    order_scatters._was_looked_up,
    "and user < node",
    "",
)
HERE.edit(
    "of several indices the first counts columns",
    SCATTERS.rows_by_several_indices,
    order_scatters._number_of_row,
    "aten.mul.Scalar, (number, size)",
    "aten.mul.Scalar, (number, 1)",
)
COMPLEX = TestsOf("tests/compiler/passes/test_pair_complex.py")
HERE.edit(
    "a conjugate of pairs is the pairs",
    COMPLEX.values_and_gradients_are_eagers,
    pair_complex._conjugate,
    "not x.is_conjugate",
    "x.is_conjugate",
)
HERE.edit(
    "a product by a conjugate matrix of pairs is one by the other",
    COMPLEX.values_and_gradients_are_eagers,
    pair_complex._multiplied_matrices,
    "turned = imaginary if left.is_conjugate else",
    "turned = imaginary if False else",
)
HERE.edit(
    "a real number times infinite pairs is infinite in both parts",
    COMPLEX.what_is_not_finite_is_eagers,
    pair_complex._multiplied,
    "operator, (part, nothing)",
    "aten.zeros_like.default, (part,)",
)
HERE.edit(
    "reals begin where complex numbers do, counted in these",
    COMPLEX.the_reals_of_complex_numbers_are_read_by_kernels,
    layouts.layout_of,
    "base.storage_offset() * (1 + are_reals)",
    "base.storage_offset()",
)
MESSAGES = TestsOf("tests/compiler/passes/test_sum_messages.py")
HERE.edit(
    "messages are not scaled",
    MESSAGES.messages_are_summed_as_eager_does,
    sum_messages._replace,
    "arguments = flat, source, scale, target",
    "arguments = flat, source, None, target",
)
HERE.edit(
    "rows of index_select count from the end",
    MESSAGES.a_number_outside_raises_as_in_eager,
    sum_messages._looked_up,
    "(values, 0, source):\n            wraps = False",
    "(values, 0, source):\n            wraps = True",
)
HERE.edit(
    "messages that are read again are summed alone",
    MESSAGES.what_stays_as_it_is,
    sum_messages._is_read_by,
    "len(readers) == 1",
    "True",
)
HERE.edit(
    "parts of a stack in another order",
    "tests/compiler/passes/test_views_first.py::test_values_and_gradients_are_eagers[packed heads]",
    stacks.lay_out_parts,
    "in arguments(joined)[0]]",
    "in arguments(joined)[0][::-1]]",
)
