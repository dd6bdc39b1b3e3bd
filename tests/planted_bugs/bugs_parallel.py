"""Bugs in what several processes do: collectives, what is under way, weights in parts, decisions made together."""

from __future__ import annotations

from aottrain.compiler.absent import planning
from aottrain.compiler.graphs import repetition, under_way
from aottrain.compiler.link import flights as placing
from aottrain.compiler.partition.budget import strategy
from aottrain.compiler.partition.costs import op_cost
from aottrain.compiler.passes import collectives as passes
from aottrain.data.parts import PartBatches
from aottrain.ir import flights
from aottrain.ir.analysis import views
from aottrain.ops import collectives
from aottrain.tasks import train
from aottrain.trainer import checkpoint, preparing
from aottrain.trainer.parallel import alike, shards, watch, world
from aottrain.trainer.parallel import pieces as in_pieces
from aottrain.trainer.reliability import saving
from aottrain.trainer.weights import pieces
from tests.planted_bugs.planting import Area, TestsOf

PARALLEL = Area("several processes")
BESIDE = TestsOf("tests/parallel/test_beside.py")
WORLD = TestsOf("tests/parallel/test_world.py")
LEAVING = TestsOf("tests/parallel/test_leaving.py")
PARTS = TestsOf("tests/parallel/test_parts.py")
PIECES = TestsOf("tests/parallel/test_pieces.py")
PEAKS = TestsOf("tests/parallel/test_peaks.py")
WATCH = TestsOf("tests/parallel/test_watch.py")
ALIKE = TestsOf("tests/parallel/test_alike.py")
SAME_PLANS = TestsOf("tests/scripts/test_same_plans.py")
PARALLEL.edit(
    "padding comes before the rows",
    f"{BESIDE.each_gets_its_rows_of_a_sum}[1]",
    collectives.padded,
    "[0, rows - value.shape[0]]",
    "[rows - value.shape[0], 0]",
    quick=True,
)
PARALLEL.edit(
    "a sum is read before it has arrived",
    BESIDE.sums_are_of_both_and_leave_what_they_are_given,
    collectives._all_sum,
    '_functional().wait_tensor(_functional().all_reduce_(_flat(out), "sum", _known(group)))',
    '_functional().all_reduce_(_flat(out), "sum", _known(group))',
)
PARALLEL.edit(
    "gradients of vectors stay those of one process",
    BESIDE.gradients_are_summed_in_the_backward,
    passes.reduce_gradients,
    "spec_of(value) is None",
    "len(spec_of(value).shape) < 2",
    quick=True,
)
PARALLEL.edit(
    "weights are gathered long before they are read",
    BESIDE.gathers_are_started_ahead_and_no_further,
    passes.sink_gathers,
    "min(readers, key=places.__getitem__).prepend(node)",
    "pass",
)
PARALLEL.edit(
    "no gradient is summed and cut before all are there",
    LEAVING.the_first_gradients_leave_early,
    passes.lift_sums,
    "_earliest_place(twin, node.all_input_nodes[0]).append(node)",
    "pass",
)
PARALLEL.edit(
    "a wait is left out, as a view is that nothing reads",
    f"{BESIDE.weights_are_gathered_and_gradients_cut}[0-plain-partition3-cpp]",
    views._is_free,
    "if ends_flight(node.target):",
    "if False:",
)
PARALLEL.edit(
    "each sum leaves alone",
    f"{BESIDE.sums_leave_as_soon_as_a_bucket_is_full_and_change_nothing}[600]",
    placing._Placing.sum,
    ">= enough",
    ">= 0",
)
PARALLEL.edit(
    "all gathers are started at once",
    BESIDE.gathers_are_started_ahead_and_no_further,
    placing._beginnings,
    "> ahead_bytes",
    "> ahead_bytes << 20",
)
PARALLEL.edit(
    "a part's gradient is this process's alone",
    BESIDE.weights_are_gathered_and_gradients_cut,
    shards._Gather.backward,
    "_parallel.scatter_sum(gradient, ctx.world, ctx.group)",
    "padded(gradient, rows_of_shard(len(gradient), ctx.world) * ctx.world).chunk(ctx.world)[0].clone()",
)
PARALLEL.edit(
    "each process keeps the first rows",
    f"{BESIDE.weights_are_gathered_and_gradients_cut}[1-odd-partition2-aten]",
    shards.Shards.cut,
    "first = self.world.part * count",
    "first = 0",
)
PARALLEL.edit(
    "the copy that a sum is cut out of takes no memory",
    f"{TestsOf('tests/parallel/test_peaks.py').the_peak_counts_copies_of_what_is_summed_where_weights_are_most}[aten]",
    under_way._held_bytes,
    "return _sum_bytes(start)",
    "return 0",
)
PARALLEL.edit(
    "what is under way may be read",
    TestsOf("tests/ir/test_flights.py").each_hazard_is_found,
    flights._check_free,
    "if memory in written:",
    "if memory in ():",
)
PARALLEL.edit(
    "bytes that are read are given away",
    TestsOf("tests/ir/test_flights.py").bytes_that_a_gather_still_reads_are_nobody_elses,
    flights.verify_apart,
    "if other is not memory and",
    "if other is memory and",
)
PARALLEL.edit(
    "the largest is the sum",
    WORLD.numbers_of_both,
    world.World.largest,
    "torch.distributed.ReduceOp.MAX",
    "torch.distributed.ReduceOp.SUM",
)
PARALLEL.edit(
    "buffers begin as they are in each process",
    WORLD.all_begin_with_the_weights_of_the_first,
    world.World.broadcast,
    "[*module.parameters(), *module.buffers()]",
    "module.parameters()",
)
PARALLEL.edit(
    "numbers that change places are the same weights",
    WORLD.a_weight_that_differs_in_a_bit_is_named,
    world._checksum,
    "(places * 2654435761 + 1)",
    "1",
)
PARALLEL.edit(
    "all processes see the first part",
    PARTS.parts_together_are_the_batch,
    PartBatches._part,
    "tensor[self.rank * each : (self.rank + 1) * each]",
    "tensor[:each]",
)
PARALLEL.edit(
    "all processes draw the same numbers",
    PARTS.each_process_draws_other_numbers_and_the_first_those_of_one_alone,
    preparing.start_streams,
    "elif world.rank:",
    "elif not world.size:",
)
PARALLEL.edit(
    "a sum over replicas is waited for where it is cut",
    BESIDE.what_was_cut_goes_on_to_the_other_replicas_while_more_is_cut,
    placing._Placing.chain,
    "if cut in self.new:",
    "if cut in self.pending or cut in self.new:",
)
PARALLEL.edit(
    "gradients of parts are those of this replica",
    BESIDE.gradients_of_parts_are_summed_over_replicas_too,
    passes.with_collectives,
    "joint if group is None else",
    "joint if group in (None, 'copies') else",
)
PARALLEL.edit(
    "a replica's norm counts all replicas",
    WORLD.what_replicas_add_up_and_compare_goes_to_those_with_the_same_part,
    world.World.sum_of_parts,
    "None if self.groups is None else self.groups.parts",
    "None",
)
PARALLEL.edit(
    "replicas are held by processes that lie apart",
    WORLD.replicas_are_held_by_processes_that_follow_each_other,
    world.World.part.fget,
    "self.rank % self.num_parts",
    "self.rank // self.num_copies",
)
PARALLEL.edit(
    "all groups have one link",
    TestsOf("tests/compiler/link/test_exposure.py").each_group_has_a_link_of_its_own,
    op_cost.link_of,
    "link(group_of(node))",
    "link()",
)
PARALLEL.edit(
    "what is saved fills a budget before what is under way",
    f"{PEAKS.a_budget_leaves_room_for_what_is_under_way}[aten]",
    strategy._with_room,
    "for way in ways:",
    "for way in ():",
)
PARALLEL.attribute(
    "with collectives under way a plan before a sample is overlooked",
    "tests/compiler/partition/budget/test_unscheduled.py"
    "::test_with_collectives_under_way_a_plan_that_peaks_lower_and_is_faster_takes_a_samples_place",
    strategy._KernelPeaks,
    "_sampled",
    lambda self, sample, limit: sample if self._fits(sample, limit) else None,
)
PARALLEL.edit(
    "a signal hides that another process was lost",
    TestsOf("tests/tasks/test_ending.py").a_process_that_has_lost_another_says_so_though_torchrun_ends_it,
    train._fail,
    "isinstance(error, KeyboardInterrupt | ParallelError)",
    "isinstance(error, KeyboardInterrupt)",
)
PARALLEL.edit(
    "who waits in a collective of this step does not say so",
    WATCH.who_goes_on_with_what_it_knows_says_so,
    watch.Watch._look,
    "self.answered < number <= passed",
    "self.answered < number < passed",
)
PARALLEL.edit(
    "rows that fill up a part are not counted while they are saved",
    PEAKS.the_peak_is_predicted_with_joined_gathers_under_way,
    placing._placed,
    "if given and node in given:",
    "if False:",
)
PARALLEL.edit(
    "new calls are alike wherever their operands begin in memory",
    TestsOf("tests/compiler/graphs/test_repetition.py").what_calls_share_is_what_each_of_them_gives,
    repetition._told,
    "return spec, value.storage_offset(), ",
    "return spec, ",
)
PARALLEL.edit(
    "each process's piece begins at the first row",
    PIECES.rows_are_those_that_parts_hold,
    pieces.rows_held,
    "return min(part * each, rows), ",
    "return 0, ",
    quick=True,
)
PARALLEL.edit(
    "a piece is read from its first row on",
    PIECES.each_process_reads_its_own_rows_and_no_file_without_them,
    pieces.Stored.rows,
    "piece[low - begin : high - begin]",
    "piece[: high - low]",
)
PARALLEL.edit(
    "every file is read, whose rows they are or not",
    PIECES.each_process_reads_its_own_rows_and_no_file_without_them,
    pieces.Stored.rows,
    "if max(first, piece[1]) < min(first + count, piece[2])",
    "if piece",
)
PARALLEL.edit(
    "the checksum of a piece is not compared",
    PIECES.the_one_before_is_taken_and_that_is_one_line_but_what_is_named_itself_is_an_error,
    checkpoint._fill_in,
    "_digest(piece) != sha256",
    "not _digest(piece)",
)
PARALLEL.edit(
    "pieces are looked for in any folder",
    PIECES.what_does_not_fit_together_is_damaged,
    checkpoint._fill_in,
    "if not PIECES.fullmatch(folder):",
    "if not folder:",
)
PARALLEL.edit(
    "a piece that cannot be written is passed over",
    PIECES.a_full_disk_of_one_process_is_one_line_that_names_it,
    in_pieces.FolderOfPieces._write_own,
    'return {"error": (error.strerror if isinstance(error, OSError) else None) or str(error)}',
    "return {}",
)
PARALLEL.edit(
    "pieces are written over those of a checkpoint of that step",
    PIECES.the_same_step_again_takes_another_folder_until_it_is_whole,
    in_pieces.FolderOfPieces._made,
    "mkdir(parents=True)",
    "mkdir(parents=True, exist_ok=True)",
)
PARALLEL.edit(
    "parts of a weight of another shape are taken where they have as many rows",
    PIECES.weights_of_another_shape_are_refused_though_parts_have_as_many_rows,
    shards.Shards.part_of,
    "value.shape != self.shapes[name]",
    "value.ndim != len(self.shapes[name])",
)
PARALLEL.edit(
    "a piece is waited for though the run ends",
    PIECES.a_piece_that_never_comes_is_not_waited_for_where_the_run_ends,
    saving.Saving.__exit__,
    "if isinstance(error, KeyboardInterrupt) or _is_lost(error):",
    "if isinstance(error, KeyboardInterrupt):",
)
PARALLEL.edit(
    "a step without memory is planned as if it talked to nobody",
    f"{SAME_PLANS.what_is_said_to_others_is_planned_for_without_memory_too}[shard]",
    planning.trace_step,
    "placed(functional_program(step, analysis, log, linked=True)[1], options.reduce_over, log.run)",
    "functional_program(step, analysis, log, linked=True)[1]",
)
PARALLEL.edit(
    "of processes that are planned for the memory of gloo is not counted",
    WORLD.processes_that_are_planned_for_are_connected_as_they_would_be,
    world.imagined,
    "imagined_processes(size, GLOO)",
    "imagined_processes(size)",
    quick=True,
)
PARALLEL.edit(
    "of the settings of many processes those of the second alone are compared",
    ALIKE.every_process_names_each_setting_once_with_both_sides,
    alike._differences,
    "in enumerate(everyones))",
    "in enumerate(everyones[:2]))",
    quick=True,
)
PARALLEL.edit(
    "the first process ends before the others have read its settings",
    ALIKE.the_first_process_stays_until_the_others_have_read,
    alike.check_settings,
    "if world.is_first:",
    "if not world.is_first:",
)
