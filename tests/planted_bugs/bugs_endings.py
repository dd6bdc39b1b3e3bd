"""Bugs in what a run does where memory runs out, and where a signal comes while a call is compiled."""

from __future__ import annotations

import sys

from aottrain import errors
from aottrain.compiler import stages
from aottrain.ir.settings import files
from aottrain.measure import workspaces
from aottrain.runtime import faults
from aottrain.toolchain import ending, frames, native, threads
from aottrain.trainer.reliability import saving, undo
from tests.planted_bugs.planting import Area, TestsOf

LACKING = Area("memory that lacks")
MEMORY = TestsOf("tests/trainer/test_out_of_memory.py")
AGAIN = TestsOf("tests/compiler/frontends/test_memory_that_lacks.py")
LACKING.edit(
    "what oneDNN raises without a reason is no lack of memory",
    MEMORY.what_allocators_raise_is_told_from_other_errors,
    errors.is_likely_out_of_memory,
    "any(text in str(error) for text in LIBRARY_TEXTS)",
    "False",
)
LACKING.edit(
    "what oneDNN raises without a reason is told as a lack of memory",
    (
        MEMORY.what_allocators_raise_is_told_from_other_errors,
        "tests/trainer/test_verification.py::test_a_check_that_a_library_refuses_is_not_told_as_a_lack_of_memory",
    ),
    errors.is_out_of_memory,
    "any(text in str(error) for text in ALLOCATOR_TEXTS)",
    "any(text in str(error) for text in (*ALLOCATOR_TEXTS, *LIBRARY_TEXTS))",
    quick=True,
)
LACKING.edit(
    "a trace that found no memory is a refusal of the program",
    f"{AGAIN.it_is_compiled_when_it_is_called_again}[analyse-trace]",
    stages.StageLog.trace,
    "if is_out_of_memory(error):\n            raise",
    "pass",
)
LACKING.edit(
    "kernels that found no memory are a fault of the compiler",
    f"{AGAIN.it_is_compiled_when_it_is_called_again}[schedule-trace]",
    faults.Faults.note,
    "isinstance(error, _FOR_CALLER) or is_out_of_memory(error)",
    "isinstance(error, _FOR_CALLER)",
)
LACKING.edit(
    "what a compiler could not do for lack of memory is remembered",
    "tests/toolchain/test_compilers.py::test_what_lacked_memory_is_tried_again",
    native.lacks_memory,
    "any(words in text for words in _NO_MEMORY)",
    "False",
)
LACKING.edit(
    "a call whose memory was not there is never measured again",
    "tests/measure/test_workspaces.py::test_what_found_no_memory_is_measured_the_next_time",
    workspaces._measure,
    "isinstance(peak, Exception) and not is_out_of_memory(peak)",
    "isinstance(peak, Exception)",
)
LACKING.edit(
    "a thread that never begins counts as begun",
    "tests/toolchain/test_threads.py::test_one_that_never_begins_is_an_allocator_s_error",
    threads._Begun.wait,
    "if not super().wait(_BEGIN_S) and not super().wait(_ONCE_MORE_S):",
    "if False:",
)
LACKING.edit(
    "a checkpoint's thread that did not start is waited for",
    "tests/trainer/reliability/test_saving.py::test_without_memory_for_a_thread_it_is_written_at_once",
    saving.Saving._start,
    "return False",
    "return True",
)
if sys.version_info >= (3, 11) and sys.platform == "linux":
    LACKING.attribute(
        "frames are mapped where memory is short",
        "tests/toolchain/test_frames.py::test_calls_go_deeper_without_another_piece",
        frames,
        "_call",
        lambda function, args, kwargs: function(*args, **kwargs),
    )

SIGNALS = Area("signals while a call compiles")
ENDING = TestsOf("tests/trainer/reliability/test_ending.py")
SIGNALS.edit(
    "Ctrl-C in somebody's loop is raised wherever it comes",
    f"{ENDING.python_s_own_ctrl_c_is_raised_where_it_can_be}[in_a_hook]",
    ending.Ending.ask,
    "is_here = is_plain(frame)",
    "is_here = True",
)
SIGNALS.edit(
    "Ctrl-C in somebody's loop is forgotten where the block ends",
    f"{ENDING.python_s_own_ctrl_c_is_raised_where_it_can_be}[in_a_dispatch]",
    ending.Ending.leave,
    "not self._is_raised or not _is_underway()",
    "False",
)
SIGNALS.edit(
    "a handler of the program's own is replaced while a call compiles",
    ENDING.python_s_own_ctrl_c_is_raised_where_it_can_be,
    ending.deferred,
    "not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler",
    "not is_main",
)
SIGNALS.edit(
    "handlers stay when a block ends",
    ENDING.python_s_own_ctrl_c_is_raised_where_it_can_be,
    ending.handled_by,
    "for signum, handler in previous.items():\n                    signal.signal(signum, handler)",
    "pass",
)
SIGNALS.edit(
    "nobody hears the signal by which handlers look again",
    f"{ENDING.python_s_own_ctrl_c_is_raised_where_it_can_be}[in_a_backward]",
    ending.handled_by,
    "own = {LOOK: look, **handlers}",
    "own = {LOOK: signal.SIG_IGN, **handlers}",
)
SIGNALS.attribute(
    "a signal is raised while a process starts that nobody knows yet",
    f"{ENDING.it_is_raised_when_what_was_called_from_below_has_ended}[in_the_start_of_a_process-2]",
    ending,
    "_STARTS_A_PROCESS",
    frozenset(),
)

OTHERS = Area("files of others")
OTHERS.edit(
    "a checkpoint's values are taken as they are",
    "tests/trainer/reliability/test_held.py::test_a_rung_names_no_program_but_those_that_a_run_goes_down_to[changes0]",
    saving._is_rung,
    'name == "kernel" and change in ("aten", "eager")',
    'name == "kernel"',
)
OTHERS.edit(
    "a save writes where a link leads",
    "tests/trainer/test_damage.py::test_nothing_is_written_where_a_link_leads[step_00000040.pt]",
    files.write_whole,
    "temporary.unlink(missing_ok=True)  # a link of another's would lead elsewhere",
    "pass",
)
OTHERS.edit(
    "a whole number that no float holds is read",
    "tests/cli/test_files_of_others.py::test_whatever_is_in_a_file_it_is_read_or_refused[table.json]",
    files._whole,
    "if len(digits) > sys.float_info.max_10_exp:",
    "if False:",
)
OTHERS.edit(
    "an alias counts as one value",
    "tests/cli/test_files_of_others.py::test_aliases_stand_for_no_more_values_than_a_person_writes[a: &a [1, *a]]",
    files._num_values,
    "known[id(node)] = math.inf",
    "known[id(node)] = 1",
)
OTHERS.edit(
    "what an error names is printed as it is",
    "tests/cli/test_files_of_others.py::test_names_of_others_do_not_steer_the_terminal",
    files.printable,
    "if character.isprintable() or character in kept",
    "if True",
)
OTHERS.edit(
    "a run that raises keeps what its step drew",
    "tests/trainer/reliability/test_bad_numbers.py::"
    "test_a_run_that_raises_has_moved_nothing_and_names_the_tensor[forward-eager-fp32-1]",
    undo.BeforeStep.put_rest_back,
    "self.random.put_back()",
    "pass",
)
