"""Bugs in what pages say."""

from __future__ import annotations

from aottrain.compiler import traffic
from aottrain.explain import kernels
from aottrain.explain.pictures import Pictures
from aottrain.report import page
from aottrain.report.graph import layered
from aottrain.report.runs.drawing.curves import _Scale
from aottrain.trainer.progress import Status
from tests.planted_bugs.planting import Area, TestsOf

PAGES = Area("pages")
READ = TestsOf("tests/report/test_pages_read.py")
PAGES.edit(
    "what another kernel makes is needed",
    READ.what_goes_from_kernel_to_kernel_is_not_needed,
    kernels._needed,
    "read if makers.get(root, call) is call else 0",
    "read",
)
PAGES.edit(
    "results of library calls alone need writing",
    READ.a_kernel_between_library_calls_needs_all_that_it_moves,
    kernels._needed,
    "root in by_others or root not in by_kernels",
    "root in by_kernels",
)
PAGES.edit(
    "headings stay where they are",
    READ.a_heading_that_is_moved_up_keeps_its_look_and_closes_as_it_opens,
    page.in_order,
    'min(int(match["level"]), last + 1)',
    'int(match["level"])',
    quick=True,
)
PAGES.edit(
    "pictures are made again",
    READ.pictures_are_made_when_they_are_read_and_once,
    Pictures._all,
    "self._made, self._make = tuple(self._make()), None",
    "self._made = tuple(self._make())",
)
PAGES.edit(
    "axes of bytes are in bytes",
    READ.the_memory_of_a_run_has_one_unit_on_its_axis,
    _Scale.y_labels,
    "byte_unit([self.high])",
    "1",
)
PAGES.edit(
    "a line that is redrawn covers half a line that was printed",
    TestsOf("tests/trainer/test_progress.py").what_is_printed_stands_on_lines_of_its_own,
    Status._make_way,
    'not text.endswith("\\n")',
    "False",
)
PAGES.edit(
    "the least traffic lowers a call for each product that it leads to",
    TestsOf("tests/traffic/test_traffic.py").each_call_is_looked_at_once,
    traffic._Calls.operands,
    "node not in self._operands",
    "node is not None",
)
PAGES.edit(
    "Graphviz's places are taken whatever they are",
    TestsOf("tests/report/test_graphviz.py").what_crosses_less_is_taken,
    layered._placed_better,
    "if (_disorder(joints), wide) < cost:",
    "if wide:",
)
