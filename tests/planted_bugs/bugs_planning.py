"""Bugs in what is planned and measured: devices that are not there, clocks, links, sweeps, keys; and in going back."""

from __future__ import annotations

from aottrain.cli.sweeping import search
from aottrain.compiler.absent import step_time
from aottrain.compiler.link import size_bounds
from aottrain.config import effect, schema
from aottrain.ir import tensor
from aottrain.ir.sizes import rising
from aottrain.measure import links, stopwatch, timings, workspaces
from aottrain.metrics.guest import Guest
from aottrain.tasks.planning import sharing
from aottrain.trainer.reliability import rollback, sentinel, spikes, undo
from tests.planted_bugs.planting import Area, TestsOf

PLANNING = Area("planning elsewhere")
SHARING = TestsOf("tests/tasks/planning/test_sharing.py")
PLANNING.edit(
    "one block is gathered at a time",
    SHARING.each_device_holds_its_part_and_two_blocks,
    sharing.State.held,
    "gathered = int((self.root + 2 * self.block) * self.width)",
    "gathered = int((self.root + self.block) * self.width)",
)
PLANNING.edit(
    "all parameters are within blocks",
    SHARING.each_device_holds_its_part_and_two_blocks,
    sharing.state_of,
    "parameters - sum(within)",
    "0",
    quick=True,
)
PLANNING.edit(
    "weights are gathered once a step",
    SHARING.exchanges_run_beside_calls,
    sharing.State.exchange_s,
    "gathers = 2 * self.parameters",
    "gathers = self.parameters",
)
PLANNING.edit(
    "exchanges come after the calls",
    SHARING.exchanges_run_beside_calls,
    sharing.whole_step,
    "max(total.seconds, exchange) + first",
    "total.seconds + exchange + first",
)
PLANNING.edit(
    "an update moves nothing of the optimizer's state",
    SHARING.the_update_reads_and_writes_what_it_must_once,
    sharing.whole_step,
    " + 2 * state.optimizer",
    "",
)
PLANNING.edit(
    "a device that waits for the host does not",
    "tests/tasks/planning/test_sharing.py::test_what_a_step_is_limited_by",
    step_time.StepTime.seconds,
    "max(self.device_s, self.launch_s)",
    "self.device_s",
)

MEASURING = Area("measuring")
DECIDING = TestsOf("tests/measure/test_decisions.py")
MEASURING.edit(
    "any two rounds agree",
    DECIDING.rounds_that_do_not_agree_are_repeated,
    stopwatch._agreeing,
    "min(other) <= (1 + AGREEMENT) * min(one)",
    "min(other) > 0",
    quick=True,
)
MEASURING.edit(
    "the first two rounds, not the best",
    DECIDING.the_two_best_rounds_of_each_candidate_agree_whenever_they_were,
    stopwatch._agreeing,
    "sorted(rounds, key=min)[:2]",
    "rounds[:2]",
)
MEASURING.edit(
    "what was kept is never contradicted",
    DECIDING.what_a_run_contradicts_is_measured_again,
    stopwatch.contradicts,
    "not _is_near(_timing",
    "not kept and _is_near(_timing",
)
MEASURING.edit(
    "what was once held against a run is so for ever",
    DECIDING.what_was_held_against_a_run_is_believed_for_an_hour,
    timings._was_held,
    "0 <= stopwatch.epoch() - at < stopwatch.HELD_SECONDS",
    "at > 0",
)
MEASURING.edit(
    "the wait of one thread is that of all",
    DECIDING.the_wait_of_all_threads_is_read_from_the_system,
    stopwatch._waited_seconds,
    "waited, counts = waited + int(wait),",
    "waited, counts = int(wait),",
)
MEASURING.edit(
    "a message costs its bytes alone",
    "tests/measure/test_links.py::test_a_message_costs_its_latency_and_its_bytes",
    links.Link.seconds,
    "self.latency_s + num_bytes",
    "num_bytes",
)
MEASURING.attribute(
    "what calls allocate is recorded by the thread that the caller's profiler sees",
    TestsOf("tests/measure/test_workspaces.py").inside_the_callers_own_profiler_they_are_as_without,
    workspaces,
    "profiling",
    lambda: False,
)

RELIABILITY = Area("reliability")
BACK, MEMORY = TestsOf("tests/trainer/test_going_back.py"), TestsOf("tests/trainer/test_out_of_memory.py")
RELIABILITY.edit(
    "going back leaves averaged weights where they are",
    BACK.averaged_weights_go_back_as_well,
    rollback.Copy.put_back,
    "job.load_state_beside(self.beside)",
    "pass",
)
RELIABILITY.edit(
    "a spike lies twice as far off",
    BACK.where_losses_hardly_differ_a_spike_is_a_share_of_them,
    spikes.Window.limit,
    "_NORMAL * median(",
    "_NORMAL * 2 * median(",
)
RELIABILITY.edit(
    "an update that is undone leaves the weights",
    MEMORY.an_update_that_is_half_done_is_undone,
    undo.BeforeStep.put_all_back,
    "tensor.copy_(copy)",
    "copy.copy_(tensor)",
    quick=True,
)
RELIABILITY.edit(
    "statistics keep what an update that is undone saw",
    MEMORY.an_update_that_is_half_done_is_undone,
    undo.BeforeStep.put_rest_back,
    "    for buffer, value in self._buffers:\n        buffer.copy_(value)\n",
    "",
)
RELIABILITY.edit(
    "checks take what share of the time they like",
    "tests/trainer/test_in_flight.py::test_its_share_of_the_time_is_bounded_and_known_beforehand",
    sentinel.Sentinel._has_time,
    "<= self.config.share * elapsed_s",
    "<= elapsed_s",
)

SETTINGS = Area("sweeps and keys")
SEARCHING, CONFIG = TestsOf("tests/cli/test_searching.py"), TestsOf("tests/config/test_config.py")
COUNTS = SEARCHING.a_search_that_goes_on_counts_what_its_journal_and_its_folders_have
SETTINGS.edit(
    "a trial that failed counts as one that finished",
    COUNTS,
    search.Search.go_on,
    "self._left -= outcome.exit_code == 0",
    "self._left -= 1",
)
SETTINGS.edit(
    "the journal does not hear of what finished",
    COUNTS,
    search.Search.go_on,
    "self._tell(trial.number, outcome)",
    "pass",
)
SETTINGS.edit(
    "a limit that is not allowed is",
    CONFIG.a_range_is_about_numbers,
    schema.Range.admits,
    "value < self.below",
    "value <= self.below",
    quick=True,
)
SETTINGS.edit(
    "a truth value is a number",
    CONFIG.a_range_is_about_numbers,
    schema.Range.admits,
    " or isinstance(value, bool)",
    "",
)
SETTINGS.edit(
    "keys of a device are read on any",
    TestsOf("tests/config/test_effect.py").a_line_names_what_was_typed_and_why,
    effect._of_device,
    'if device and device != "cuda":',
    'if device == "cuda":',
)
SETTINGS.edit(
    "a logger that fails is asked again",
    TestsOf("tests/metrics/test_other_loggers.py").a_logger_that_fails_is_said_once_and_left_alone,
    Guest._guarded,
    "self.is_gone = True",
    "pass",
)

SIZES = Area("sizes")
BOUNDS = TestsOf("tests/compiler/link/test_size_bounds.py")
SIZES.edit(
    "a budget of bytes bounds no sizes",
    "tests/compiler/link/test_size_bounds.py::test_no_program_serves_a_call_that_peaks_above_the_budget[trace-aten]",
    size_bounds.bound_sizes,
    "if _bounds_bytes(options) and (limit := plan.limit) is not None:",
    "if False:",
)
SIZES.edit(
    "sizes are bounded by twice the budget",
    BOUNDS.the_bound_is_where_the_peak_meets_the_budget,
    size_bounds.bound_sizes,
    "peak(sizes) <= limit",
    "peak(sizes) <= 2 * limit",
)
SIZES.edit(
    "a budget is planned for the call that is traced",
    BOUNDS.a_plan_is_made_for_the_largest_size_that_the_caller_names,
    size_bounds._greatest,
    "facts.hints[name] if most is None else most",
    "facts.hints[name]",
)
SIZES.edit(
    "what is larger for small sizes is bounded as the rest",
    BOUNDS.what_is_padded_up_has_a_program_for_each_size,
    size_bounds._grows,
    "return all(rises(num_bytes, least) for num_bytes in _storage_sizes(graph))",
    "return True",
)
SIZES.edit(
    "a size that is subtracted is taken to rise",
    "tests/ir/test_rising.py::test_what_may_fall_is_not_taken_to_rise",
    rising._least_of_two,
    "and left >= 0 and right >= 0:",
    "and right >= 0:",
)
SIZES.edit(
    "numbers that no memory follows from are bounded",
    BOUNDS.a_number_that_no_memory_follows_from_is_not_bounded,
    size_bounds.bound_sizes,
    "items() if name in sized}",
    "items()}",
)
SIZES.edit(
    "sizes are bounded from the planned ones on where these do not fit",
    BOUNDS.where_the_planned_sizes_do_not_fit_the_traced_ones_are_bounded,
    size_bounds._largest,
    "start = planned if fits(planned) else facts.hints",
    "start = planned",
)
SIZES.edit(
    "the peak at other sizes is that of the call that was traced",
    BOUNDS.the_report_says_the_peak_at_other_sizes,
    tensor.TensorSpec.at_hand,
    "return self if values is None else self.at(values)",
    "return self",
)
