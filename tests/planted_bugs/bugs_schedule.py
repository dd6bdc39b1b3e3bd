"""Bugs in what becomes one kernel, where its results lie, and what is done by an op of our own in a few ops' place."""

from __future__ import annotations

from aottrain.compiler.codegen.cpp import work
from aottrain.compiler.link import programs
from aottrain.compiler.lowering import builder
from aottrain.compiler.passes import choose_layouts as layouts
from aottrain.compiler.passes import chunk_loss_heads as loss_head
from aottrain.compiler.passes import fuse_attention as attention
from aottrain.compiler.passes import join_sums, widen_convolutions
from aottrain.compiler.passes.layouts import regions, rewriting
from aottrain.compiler.passes.rows import classes_last as rows_of_classes
from aottrain.compiler.passes.splits import complexes
from aottrain.compiler.passes.splits import losses as split_losses
from aottrain.compiler.passes.splits import norms as split_norms
from aottrain.compiler.passes.splits import products as split_products
from aottrain.compiler.passes.splits import softmaxes as split_softmaxes
from aottrain.compiler.schedule import demand, in_place, kernels, memory, padding, products, simplification
from aottrain.compiler.schedule.grouping import again, cheap, computed, fusion, groups, inlining, units
from aottrain.ir import schedule as ir_schedule
from aottrain.ir.analysis import placement
from aottrain.ops.losses import loss_head as loss_head_op
from aottrain.ops.native import tiles as native_tiles
from aottrain.ops.products import libraries, pieces
from aottrain.runtime import arena, launch, open_arena
from tests.planted_bugs.planting import Area, TestsOf

SMALL = "tests/compiler/codegen/test_small_kernels.py::test_evaluated[{}]"
SCHEDULES = Area("scheduling")
FUSED = TestsOf("tests/compiler/schedule/test_scheduling.py")
SCHEDULES.edit(
    "a group depends on itself through a product",
    FUSED.what_depends_on_a_product_of_its_own_group_is_another_kernel,
    units.Dependencies.allows,
    "return all(",
    "return True or all(",
)
SCHEDULES.edit(
    "a group that moves forgets what came after its first call",
    FUSED.a_group_that_moves_brings_what_all_its_calls_need,
    units.Dependencies.needs,
    "range(len(self.ancestors))",
    "range(other.number)",
)
SCHEDULES.edit(
    "views of views stay where a group was",
    tuple(f"{FUSED.views_of_views_move_with_what_they_view}[{name}]" for name in ("part", "larger")),
    fusion._move,
    "made += value.users",
    "made += value.users if value in other.values else ()",
)
SCHEDULES.edit(
    "another element of a group's value is read as its own",
    FUSED.another_element_of_the_groups_value_is_refused,
    groups._place,
    "if position is not None and _position(operand, layout, index) != position:",
    "if position is None and _position(operand, layout, index) is None:",
    quick=True,
)
SCHEDULES.edit(
    "a sum over rows is read by its own rows",
    FUSED.a_reader_of_a_sum_over_rows_is_in_another_kernel,
    groups._place,
    "if layout.root in group.columns:",
    "if False:",
    quick=True,
)
SCHEDULES.edit(
    "nothing is fused",
    FUSED.a_chain_is_one_kernel_each_way_and_saves_one_tensor,
    units.joins,
    "if isinstance(placed, Placement):",
    "if placed is None:",
    quick=True,
)
SCHEDULES.edit(
    "effects in any order",
    FUSED.effects_keep_their_order_whatever_is_fused_around_them,
    fusion._fuse,
    "sources |= {dependencies.unit_of[effect] for effect in effects[-1:]}",
    "pass",
)
SCHEDULES.edit(
    "loops merged that are two",
    SMALL.format("heads"),
    kernels._merge,
    "if not all(same(p.coefficient(before), p.coefficient(loop) * loops[loop]) for p in affines):",
    "if not any(same(p.coefficient(before), p.coefficient(loop) * loops[loop]) for p in affines):",
)
SCHEDULES.edit(
    "a sum's divisor is forgotten",
    SMALL.format("variance"),
    kernels._column,
    "output.dtype, whole, output.divisor)",
    "output.dtype, whole, 1)",
)
SCHEDULES.edit(
    "what may raise does not run where nothing reads it",
    FUSED.what_nothing_reads_runs_only_where_it_may_raise,
    demand.needed,
    "*filter(may_raise, calls(graph)), ",
    "",
    quick=True,
)
SCHEDULES.edit(
    "rows are read for one element of each",
    "tests/compiler/schedule/test_losses.py::test_a_loss_reads_one_element_of_each_row_of_what_is_in_memory",
    groups._place,
    "if operand.at_hand and ",
    "if False and ",
    quick=True,
)
SCHEDULES.edit(
    "what nothing reads runs",
    FUSED.what_nothing_reads_runs_only_where_it_may_raise,
    demand.read_by,
    "return [operand for operand in operands if operand in read]",
    "return operands",
)

SCHEDULES.edit(
    "nothing is computed where it is read",
    "tests/compiler/schedule/grouping/test_inlining.py::test_the_bits_are_those_of_eager",
    inlining.inline,
    "if made and (",
    "if len(made) > 99 and (",
)
SCHEDULES.edit(
    "an index through two dimensions is divided by twice the number",
    "tests/compiler/schedule/grouping/test_inlining.py::test_the_bits_are_those_of_eager",
    computed._part_of,
    "b.constant(term.every",
    "b.constant(2 * term.every",
)
SCHEDULES.edit(
    "a place that values say has no loops",
    "tests/compiler/schedule/grouping/test_inlining.py::test_the_bits_are_those_of_eager",
    builder.Builder.at,
    "if not values or plain != ZERO:",
    "if not values:",
)
SCHEDULES.edit(
    "sums of channels come before their groups' rows",
    "tests/compiler/passes/test_split_norms.py::test_sums_of_examples_channels_are_made_in_the_rows_of_their_groups",
    split_norms._move_behind,
    "and following in norms",
    "and following not in norms and not norms",
)
SCHEDULES.edit(
    "a value is made anew from more than it has",
    "tests/compiler/schedule/grouping/test_made_anew.py::test_what_would_be_read_instead_is_as_much",
    inlining._Finder.made_anew_by,
    "more <= (0 if value in self.settled",
    "more <= (1 << 40 if value in self.settled",
)
SCHEDULES.edit(
    "nothing is made anew",
    "tests/compiler/schedule/grouping/test_made_anew.py::test_a_relus_gradient_reads_what_the_norms_reads",
    inlining._Finder.made_anew_by,
    "if made is not None and more",
    "if made is None and more",
)
SCHEDULES.edit(
    "a recurrence is looked through by each way",
    "tests/compiler/schedule/grouping/test_inlining.py::test_a_recurrence_is_looked_through_once_and_not_by_each_way",
    cheap._missing,
    "root in settled or root in seen",
    "root in settled",
)

PADDED = TestsOf("tests/compiler/schedule/test_padding.py")
SCHEDULES.edit(
    "rows in padding are read where they are not",
    f"{PADDED.values_are_those_of_eager}[cpp-rows in the middle]",
    padding._index,
    "return tuple(p + Affine((), -sum(c * starts.get(loop, 0) for loop, c in p.terms)) for p in found)",
    "return tuple(found)",
)
SCHEDULES.edit(
    "rows in more padding than there are rows",
    f"{PADDED.other_rows_are_kernels_of_their_own}[most is padding]",
    padding._padded,
    "if math.prod(wide.ranges) > _MOST_PADDING * math.prod(rows.ranges):",
    "if False:",
)
SCHEDULES.edit(
    "rows of padding are zeros, whatever they are padded with",
    f"{PADDED.values_are_those_of_eager}[cpp-a number other than zero]",
    padding._body,
    "body.append(Constant(instruction.other, instruction.dtype))",
    "body.append(Constant(0, instruction.dtype))",
)
SCHEDULES.edit(
    "rows of padding are computed, if from nothing",
    PADDED.rows_of_padding_are_filled_and_skipped,
    work.skipping_of,
    "if guard is None or levels[guard] is not Level.ROW or kernel.sums:",
    "if True:",
)
SIMPLER = TestsOf("tests/compiler/schedule/test_simplification.py")
SCHEDULES.edit(
    "another type's number is not rounded",
    SIMPLER.another_type_rounds,
    simplification._without_held,
    "rounds[1] in halves[rounds[0]]",
    "halves[rounds[0]]",
)
SCHEDULES.edit(
    "an exponential of rounded numbers is not rounded",
    SIMPLER.what_a_type_holds_is_not_rounded_again,
    simplification._halves_of,
    '("where", "neg", "abs")',
    '("where", "neg", "abs", "exp")',
)
SCHEDULES.edit(
    "an unrounded number is compared with the rounded one's bound",
    SIMPLER.what_is_compared_with_a_number_is_not_rounded,
    simplification._bound,
    "rounded = held(_of_bits(bits), half)",
    "rounded = _of_bits(bits)",
)
SCHEDULES.edit(
    "numbers are compared unrounded for whether they are equal",
    SIMPLER.a_comparison_with_no_number_and_one_for_equality_are_left,
    simplification._compares,
    "instruction.op not in _AT_MOST + _BELOW",
    "False",
)
SCHEDULES.edit(
    "a bound says nothing, however large it is",
    f"{SIMPLER.where_a_bound_says_nothing_a_value_is_compared_itself}[1.0-0.0-False-le]",
    simplification._unbounded,
    "bound.value <= limit.value",
    "limit.value == limit.value",
)
SCHEDULES.edit(
    "what a kernel reads elsewhere counts as memory that is not there",
    "tests/compiler/schedule/grouping/test_again.py::test_what_a_kernel_reads_elsewhere_it_reads_besides",
    again.found_again,
    "for root in _read(group)",
    "for root in group.reads",
)

ARENAS = Area("arenas")
MEMORY = TestsOf("tests/compiler/schedule/test_memory.py")
ARENAS.edit(
    "overlap in the arena is not found",
    MEMORY.overlap_is_found,
    placement.verify_offsets,
    "if start < offsets[other] + sizes[other] and offsets[other] < end:",
    "if start < offsets[other] and offsets[other] < end:",
    quick=True,
)
ARENAS.edit(
    "an arena in which nothing is shared",
    MEMORY.an_arena_is_at_least_what_is_alive_at_once_and_little_more,
    placement.first_fit,
    "if other_first <= final and first <= other_last:",
    "if True:",
    quick=True,
)
ARENAS.edit(
    "an arena is for two calls at once",
    "tests/compiler/schedule/test_in_place.py::test_calls_in_flight_have_arenas_of_their_own",
    arena._lease,
    "_idle.remove(arena)\n",
    "pass\n",
)
ARENAS.edit(
    "a block that is still referred to is used again",
    MEMORY.a_retained_graph_keeps_its_values_while_other_calls_run,
    arena.residual,
    "if storage_use_count(storage) == 1:",
    "if storage_use_count(storage) >= 1:",
)
ARENAS.edit(
    "blocks are never used again",
    "tests/compiler/schedule/test_in_place.py::test_a_block_that_nothing_refers_to_is_used_again",
    arena.residual,
    "if storage_use_count(storage) == 1:",
    "if storage_use_count(storage) == 0:",
)
OPEN = TestsOf("tests/runtime/test_open_arena.py")
ARENAS.edit(
    "a layout for open sizes is not checked",
    OPEN.layouts_that_overlap_are_stopped,
    open_arena.open_layouts,
    "verify_offsets(offsets, sizes, born, last)",
    "pass",
)
ARENAS.edit(
    "a layout for open sizes is planned at every call",
    OPEN.a_size_is_planned_once,
    open_arena._BySizes.__call__,
    "if found is not None:",
    "if False:",
)
ARENAS.edit(
    "residuals of open sizes lie where those of another call do",
    OPEN.a_retained_graph_keeps_its_values_while_other_sizes_run,
    arena.slab,
    "if storage_use_count(s) == 1)",
    "if storage_use_count(s) >= 1)",
    quick=True,
)
ARENAS.edit(
    "memory for residuals of open sizes is never used again",
    OPEN.a_large_arena_serves_small_calls,
    arena.slab,
    "if storage_use_count(s) == 1)",
    "if storage_use_count(s) == 0)",
)
ARENAS.edit(
    "results lie in the arena",
    MEMORY.what_is_returned_is_never_used_again,
    memory.find_lives,
    "escaping = {memory_of(node) for node in values[:num_outputs] if node is not None}",
    "escaping = set()",
)
ARENAS.edit(
    "what another program keeps stays",
    "tests/compiler/schedule/test_in_place.py::test_what_another_holder_keeps_goes_before_a_run",
    arena.begin,
    "if idle > _MOST_IDLE:",
    "if idle < 0:",
)
ARENAS.edit(
    "an operand that is read later is written over",
    "tests/compiler/schedule/test_in_place.py::test_what_is_read_later_keeps_its_memory",
    in_place.written_in_place,
    "node in own and last[node] == position and node not in returned",
    "node in own and node not in returned",
    quick=True,
)
ARENAS.edit(
    "a result is written over",
    "tests/compiler/link/test_retention.py::test_what_is_returned_or_given_is_not_written_over",
    in_place.written_in_place,
    "last[node] == position and node not in returned",
    "last[node] == position",
)
_WRITTEN_OVER = TestsOf("tests/runtime/test_written_over.py")
ARENAS.edit(
    "a residual that others hold is written over",
    f"{_WRITTEN_OVER.a_retained_graph_can_be_taken_backward_again}[{{}}]",
    launch._written_over,
    "if {ALONE.format(operand.name)} else",
    "if True else",
)
ARENAS.edit(
    "a residual that is a result as well is written over",
    _WRITTEN_OVER.only_what_no_other_result_lies_in_may_be_written_over,
    programs._residuals_of_its_own,
    "count[root] == 1",
    "count[root]",
)
ARENAS.edit(
    "what hangs on no operand is written over one",
    "tests/compiler/schedule/test_in_place.py::test_a_result_is_written_over_what_it_is_made_of",
    in_place._is_elementwise,
    "if not all(stores[0].value in dependents(kernel, place) for place in loads):",
    "if False:",
)
ARENAS.edit(
    "items of a tuple keep their memory",
    "tests/compiler/schedule/test_in_place.py::test_a_convolutions_gradient_is_written_over_by_what_alone_reads_it",
    in_place.written_in_place,
    "producer_of(call).target in _FRESH",
    "call.target in _FRESH",
)
ARENAS.edit(
    "an operand that is read elsewhere is written over",
    "tests/compiler/schedule/test_in_place.py::test_what_is_read_at_another_place_keeps_its_memory",
    in_place._is_elementwise,
    "load.guard is None and load.address == address",
    "load.guard is None",
)
ARENAS.edit(
    "nothing is written in place",
    "tests/compiler/link/test_retention.py::test_a_sum_is_written_over_an_operand_that_dies",
    in_place._fits,
    "return call.buffers.count(operand) == 1 and _is_elementwise(call.kernel, read, written)",
    "return False",
)

ARENAS.edit(
    "a row is added to memory that the rows lie in",
    "tests/compiler/passes/test_order_scatters.py::test_rows_are_added_in_place_where_nothing_else_sees_it[added_to_itself-0]",
    in_place._written_over,
    "return root if alone and",
    "return root if",
)
ARENAS.edit(
    "what a sparse gradient keeps is written over",
    "tests/compiler/schedule/test_sparse_gradients.py::test_gradients_are_eagers_and_stay[alone]",
    ir_schedule._keeps_operands,
    "return is_sparse or",
    "return",
)

HEADS = Area("loss head")
LOSSES = TestsOf("tests/compiler/passes/test_chunk_loss_heads.py")
RULES = TestsOf("tests/ops/losses/test_loss_head.py")
HEADS.edit(
    "only the first chunk counts",
    LOSSES.the_answer_is_eagers_within_rounding,
    loss_head_op._linear_cross_entropy,
    "for start in range(0, rows, chunk):",
    "for start in range(0, min(rows, chunk), chunk):",
)
ROWS = TestsOf("tests/compiler/passes/test_classes_last.py")
HEADS.edit(
    "who reads logits by their strides reads rows",
    ROWS.as_rows_the_answer_is_the_same,
    rows_of_classes._stand_in,
    "reads_alike(user, {old: new})",
    "user.args",
)
HEADS.edit(
    "another loss of the same target has the first one's gradient",
    ROWS.as_rows_the_answer_is_the_same + "[two losses]",
    rows_of_classes._split,
    "user.args[2:6] == each.args[1:]",
    "user.args[2] is each.args[1]",
)
HEADS.edit(
    "classes that lie across memory become rows, too",
    ROWS.what_stays,
    rows_of_classes._log_softmax,
    "logits.stride[1] == 1",
    "logits.stride[1] > 0",
)
HEADS.edit(
    "logits that are read elsewhere are not kept",
    LOSSES.what_is_not_taken_and_why,
    loss_head._check_alone,
    "_require(not others,",
    "_require(True,",
)
HEADS.edit(
    "class weights are overlooked",
    LOSSES.what_is_not_taken_and_why,
    loss_head._log_softmax,
    '_require(weights is None, "its classes are weighted")',
    "pass",
)
HEADS.edit(
    "a region of the user's is taken apart",
    LOSSES.regions_of_checkpoint_are_left_to_the_user,
    loss_head._check_alone,
    "_require(not marks_of(node),",
    "_require(True,",
)
HEADS.edit(
    "gradients are kept that are larger than the logits",
    LOSSES.it_is_done_where_it_saves_memory,
    loss_head._rows_of_chunk,
    "_require(chunk * classes + kept * width < 2 * rows * classes,",
    "_require(True,",
)
HEADS.edit(
    "a gradient that nobody asks for is made",
    LOSSES.only_the_gradients_that_are_asked_for,
    loss_head._rewrite,
    "[node is not None for node in gradients.nodes]",
    "[True for node in gradients.nodes]",
)

HEADS.edit(
    "rows that are ignored count",
    "tests/compiler/schedule/test_losses.py::test_a_number_of_rows_alone_has_checked_targets",
    split_losses._shares,
    "aten.ne.Scalar, (target, ignore)",
    "aten.ge.Scalar, (target, ignore)",
)

ATTENTION = Area("attention")
WRITTEN = TestsOf("tests/compiler/passes/test_fuse_attention.py")
VALUES = WRITTEN.values_and_gradients_are_those_of_eager
ATTENTION.edit(
    "attention gives way to products that are hardly faster",
    WRITTEN.the_op_stays_where_products_are_little_faster_and_take_more_memory,
    attention._is_faster,
    "share=_AS_FAST if model == ONE_OP else 1.0",
    "share=1.0",
)
ATTENTION.edit(
    "a quotient scales as its inverse",
    f"{VALUES}[scaled]",
    attention._Path.climb,
    "number if node.target in _PRODUCTS else 1.0 / number",
    "number",
)
ATTENTION.edit(
    "what a mask fills is minus infinity always",
    f"{VALUES}[filled_with_little]",
    attention._Path.climb,
    "self.fill, self.filled = float(fill), True",
    'self.fill, self.filled = float("-inf"), True',
)
ATTENTION.edit(
    "double precision by a kernel of single",
    WRITTEN.other_types_stay,
    attention._written,
    "spec.dtype is torch.float32 and spec.device",
    "spec.dtype.is_floating_point and spec.device",
)
ATTENTION.edit(
    "dropout of weights is forgotten",
    f"{VALUES}[causal]",
    attention._written,
    '{"draw": 0, "keep": 1.0} if drop is None else {"draw": drop.draw, "keep": drop.keep}',
    '{"draw": 0, "keep": 1.0}',
)

ATTENTION.edit(
    "without a clock scores are kept at any size",
    f"{WRITTEN.without_a_clock_it_is_the_op_where_scores_are_large}[16-128-1]",
    attention._is_faster,
    "ONE_OP if keeps",
    "PRODUCTS if keeps",
)

LAYOUTS = Area("layouts")
IMAGES = TestsOf("tests/compiler/passes/test_choose_layouts.py")
LAYOUTS.edit(
    "results keep the layout inside",
    IMAGES.results_and_gradients_have_eagers_strides_and_values,
    rewriting.Rewriting._result,
    "new = self._as_before(node)",
    "return self.new[node]",
)
LAYOUTS.edit(
    "measured times are overlooked",
    IMAGES.the_decision_is_by_measured_times,
    layouts._prefer,
    "is_worth_it = times[best].seconds <= (1 - _GAIN) * times[AS_GIVEN].seconds",
    "is_worth_it = True",
)
LAYOUTS.edit(
    "copies between layouts cost nothing",
    IMAGES.what_copies_between_layouts_take_counts,
    layouts._Chooser._total,
    "each += [self._copies[self._copy_key(*copy)].times[CHANNELS_LAST] for copy in copies]",
    "pass",
)
LAYOUTS.edit(
    "what is read across memory beside images costs nothing",
    IMAGES.what_is_read_beside_images_in_another_layout_costs_a_copy,
    layouts._Chooser._total,
    "across = across_reads(self.laid, laid)",
    "across = []",
)
SCHEDULES.edit(
    "a row's loops are in the order of its result",
    "tests/compiler/codegen/cpp/test_tiles.py::"
    "test_the_loops_of_a_row_are_in_the_order_of_what_is_read_again_and_again",
    kernels._order_of_row,
    "(load.address.offset, 2)",
    "(load.address.offset, 0)",
)
SCHEDULES.edit(
    "the loops that parts of a row are added up over may come first",
    "tests/compiler/schedule/test_sums_over_rows.py::test_the_loops_that_parts_of_a_row_are_added_up_over_come_last",
    kernels._ordered,
    "inner_order.sort(key=lambda loop: loop in group.summed)",
    "pass",
)
LAYOUTS.edit(
    "channels last are channels first",
    IMAGES.a_block_is_a_few_kernels_and_no_change_of_layout_between_convolutions,
    rewriting.channels_last,
    "return channels * height * width, 1, channels * width, channels",
    "return channels * height * width, height * width, width, 1",
)

LAYOUTS.edit(
    "grouped convolutions are in channels_last on a GPU",
    IMAGES.without_a_clock_grouped_convolutions_stay_as_they_are_on_a_gpu,
    layouts._model_prices,
    " if weight.shape[1] == 1 else (0, None)",
    "",
)
LAYOUTS.edit(
    "depthwise convolutions of halves cost the same in either layout on a GPU",
    IMAGES.without_a_clock_grouped_convolutions_stay_as_they_are_on_a_gpu,
    layouts._model_prices,
    " if weight.dtype in LOW_PRECISION else 0",
    " * 0",
)
LAYOUTS.edit(
    "casts are in eager's layout alone",
    IMAGES.casts_take_any_layout,
    rewriting.is_pointwise,
    "or info(node).name in _UNTAGGED",
    "or info(node).name in _UNTAGGED - {'aten._to_copy.default'}",
)
LAYOUTS.edit(
    "cuDNN is taken to turn images of any channels around",
    IMAGES.without_a_clock_cudnn_turns_around_what_is_for_tensor_cores,
    layouts._is_for_tensor_cores,
    "return images.shape[1] * images.dtype.itemsize % 16 == 0",
    "return True",
)
LAYOUTS.edit(
    "the prices of the two layouts are exchanged",
    IMAGES.a_region_is_worth_its_borders,
    regions.cheapest_regions,
    "(cut.number(node), _LAID, given), (_GIVEN, cut.number(node), in_channels_last)",
    "(cut.number(node), _LAID, in_channels_last), (_GIVEN, cut.number(node), given)",
)
LAYOUTS.edit(
    "rows that are an image in channels_last keep that layout",
    TestsOf("tests/compiler/passes/test_widen_convolutions.py").results_and_gradients_have_eagers_strides_and_values,
    widen_convolutions._narrowed,
    "if required_spec(narrow).stride == required_spec(old).stride:",
    "if True:",
)

PRODUCTS = Area("products")
PRODUCTS.edit(
    "a split softmax's gradient lacks its sum",
    TestsOf("tests/compiler/passes/test_split_softmaxes.py").a_long_softmax_over_the_first_dimension,
    split_softmaxes._backward,
    "add_call(node, aten.mul.Tensor, (shares, total))",
    "add_call(node, aten.mul.Tensor, (shares, product))",
)
PRODUCTS.edit(
    "targets that do not count have a gradient where rows lie across memory",
    TestsOf("tests/compiler/passes/test_split_softmaxes.py").rows_that_lie_across_memory,
    split_softmaxes._of_targets,
    "(target, ignore)",
    "(target, -1)",
)
SPLIT_PRODUCTS = TestsOf("tests/compiler/passes/test_split_products.py")
PRODUCTS.edit(
    "a sum of few products lacks its last term",
    SPLIT_PRODUCTS.narrow_products_are_sums_of_few_terms,
    split_products._split,
    "range(1, terms)",
    "range(1, terms - 1)",
)
PRODUCTS.edit(
    "a split product lies otherwise than the library's",
    SPLIT_PRODUCTS.narrow_products_are_sums_of_few_terms,
    split_products._split,
    "placed = laid_out_as(result, node)",
    "placed = result",
)
SUMS = TestsOf("tests/compiler/passes/test_join_sums.py")
REPEATING = TestsOf("tests/numerics/test_fuzz.py").random_programs_that_repeat
PRODUCTS.edit(
    "a term that a sum has twice is added once",
    (
        f"{SUMS.gradients_are_eagers}[same_rows_twice]",
        *(f"{REPEATING}[{seed}]" for seed in (700008, 700018, 700023)),
    ),
    join_sums._only_here,
    "times[term] == 1 and len(term.users) == 1",
    "len(term.users) == 1",
)
COMPLEX = TestsOf("tests/compiler/passes/test_split_complex.py").values_strides_and_gradients_are_eagers
PRODUCTS.edit(
    "a conjugate's imaginary part has the sign of the other one's",
    (f"{COMPLEX}[torch.float32-conjugate_table]", f"{COMPLEX}[torch.float64-rotary]"),
    complexes._parts,
    "(aten._conj.default, aten._conj_physical.default)",
    "()",
)
PRODUCTS.edit(
    "a view of a conjugate is taken for the number itself",
    f"{COMPLEX}[torch.float32-lazily_conjugate_view]",
    complexes._parts,
    "is_conjugate, node = False, operand",
    "is_conjugate, node = value_of(origin).is_conj(), operand",
)
PRODUCTS.edit(
    "products that hang on other tangents are one",
    SUMS.what_lies_side_by_side_hangs_on_tangents_or_nothing_of_it_does,
    join_sums._join,
    "kind = transposed, *(",
    "kind = transposed, *(0 * ",
)
PRODUCTS.edit(
    "transposed left operands are multiplied by oneDNN whatever it takes",
    TestsOf("tests/compiler/schedule/test_products.py").what_multiplies_transposed_operands_is_asked_for_them,
    products._chosen,
    "if decision.choice == ONEDNN:",
    "if True:",
)
PIECES = TestsOf("tests/ops/products/test_pieces.py")
PRODUCTS.edit(
    "a product of what is not finite is left as it is",
    PIECES.what_is_not_finite_is_aten_s,
    pieces.own_product,
    "return _by_aten(left, right, bias, out, adds)",
    "pass",
)
PRODUCTS.attribute(
    "all terms of a product are added one after the other",
    "tests/ops/products/test_pieces.py::test_sums_of_many_terms_of_one_sign",
    native_tiles,
    "FEW",
    1 << 20,
)
PRODUCTS.edit(
    "what multiplies transposed operands of bfloat16 is not asked for them",
    TestsOf("tests/compiler/schedule/test_own_products.py").each_form_of_bfloat16_is_asked_for,
    products._narrow_choice,
    "TRANSPOSED if _is_transposed(node) else PLAIN",
    "PLAIN",
)
PRODUCTS.edit(
    "a loss head's weight has the gradient of its last rows",
    PIECES.the_loss_head_s_products,
    loss_head_op._Gradients._add_by_own,
    "adds = part.start > 0",
    "adds = False",
)
PRODUCTS.edit(
    "what products compute in is not counted",
    TestsOf("tests/compiler/schedule/test_own_products.py").the_predicted_peak_counts_what_they_compute_in,
    ir_schedule.copied_bytes,
    "if is_own_product(library):",
    "if is_own_product(library):\n        return 0\n    if False:",
)
PRODUCTS.edit(
    "the times of products are overlooked",
    TestsOf("tests/compiler/schedule/test_own_products.py").the_fastest,
    libraries.fastest,
    "return best if",
    "return ATEN if",
)
PRODUCTS.attribute(
    "tiles of float32 are taken where they win by little",
    TestsOf("tests/compiler/schedule/test_own_products.py").tiles_of_float32_are_taken_where_they_win_by_much,
    libraries,
    "_CLEARLY_FASTER",
    1.05,
)
SCHEDULES.attribute(
    "sums are made of rows that lie across memory",
    "tests/compiler/schedule/test_sums_over_rows.py::test_sums_over_images_go_along_memory",
    groups,
    "_LEAST_ALONG",
    1 << 60,
)
