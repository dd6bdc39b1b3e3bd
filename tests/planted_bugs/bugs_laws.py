"""Bugs in the laws that hold after each stage, and in what asks them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import aottrain.compiler.pipeline as pipeline
from aottrain.compiler import stages
from aottrain.compiler.joint import functional
from aottrain.compiler.optimizers import formulas
from aottrain.compiler.schedule import kernels, memory
from aottrain.ir import verify
from tests.planted_bugs.planting import Area, TestsOf

HERE = Area("laws")
PROGRAMS = TestsOf("tests/numerics/test_small_programs.py")

HERE.attribute(
    "all expressions are one to the law", PROGRAMS.law_of_partition, verify._Expressions, "of", lambda self, nodes: []
)


@HERE.bug("mutation is not seen by the law", PROGRAMS.law_of_mutation)
def _(patch: Any) -> None:
    patch.setattr(verify, "info", lambda node: replace(functional.info(node), writes=()))
    patch.setattr(verify, "is_pure", lambda target: True)


ASKED = TestsOf("tests/compiler/test_laws_are_asked.py")
LAWS = TestsOf("tests/ir/test_verify.py")


def nothing(*_: Any) -> None:
    """In the place of a check."""


HERE.attribute(
    "nobody asks whether a whole program keeps the laws",
    (
        ASKED.a_broken_program_stops_before_the_partition,
        ASKED.a_broken_rewrite_stops_before_the_partition,
    ),
    pipeline,
    "_verify_whole",
    nothing,
    quick=True,
)
HERE.edit(
    "a kernel that writes nothing is no fault to the law",
    LAWS.a_kernel_that_writes_nothing,
    verify.verify_schedule,
    '_require(writes, f"{name} writes nothing")',
    "pass",
)
HERE.edit(
    "what nothing has made may be read",
    LAWS.a_kernel_that_comes_before_what_it_reads,
    verify.verify_schedule,
    "_require(node in made, ",
    "_require(True, ",
    quick=True,
)
HERE.attribute(
    "nobody asks the first law",
    f"{ASKED.a_broken_program_stops_before_the_partition}[simplify-with_a_late_output]",
    pipeline,
    "verify_joint",
    nothing,
)
HERE.attribute(
    "nobody asks the second law",
    f"{ASKED.a_broken_program_stops_before_the_partition}[simplify-with_a_write]",
    pipeline,
    "verify_functional",
    nothing,
)
HERE.attribute(
    "nobody asks whether the halves compute the whole",
    ASKED.a_broken_partition_stops_before_its_kernels,
    pipeline,
    "verify_partition",
    nothing,
    quick=True,
)
HERE.attribute(
    "nobody asks where views lie",
    ASKED.a_view_that_lies_elsewhere_stops_before_its_kernels,
    pipeline,
    "verify_views",
    nothing,
)
HERE.attribute("nobody asks for overlap", ASKED.offsets_that_overlap_are_stopped, memory, "verify_offsets", nothing)
HERE.attribute(
    "nobody asks whether a kernel stays within its memory",
    ASKED.a_kernel_that_reaches_outside_is_stopped,
    kernels,
    "verify_kernel",
    nothing,
    quick=True,
)
HERE.attribute(
    "nobody asks whether an optimizer's blocks meet",
    ASKED.an_optimizer_whose_blocks_could_meet_is_stopped,
    formulas,
    "verify_multi_tensor",
    nothing,
)
HERE.edit(
    "stages run unchecked",
    (ASKED.a_broken_program_stops_before_the_partition, ASKED.a_broken_partition_stops_before_its_kernels),
    stages.StageLog.run,
    "if check is not None:",
    "if check is None and out is None:",
)
HERE.edit(
    "rewrites run unchecked",
    ASKED.a_broken_rewrite_stops_before_the_partition,
    pipeline.rewrite,
    "check=lambda made: _verify_whole(made.joint)",
    "check=None",
)
HERE.edit(
    "the law lets state be read after its update",
    LAWS.a_plan_that_recomputes_from_updated_state,
    verify._verify_residuals,
    "if original in copied:",
    "if False:",
)
HERE.edit(
    "the law does not compare gradients",
    LAWS.two_gradients_swapped,
    verify.verify_partition,
    "expressions.of(results(parts.backward)) == expressions.of(expected_gradients)",
    "True",
)
HERE.edit(
    "nobody asks what is cast by one call",
    "tests/compiler/passes/test_join_casts.py::test_casts_of_other_values_stop_before_their_kernels",
    pipeline._cut,
    'log.run("join_casts", join_casts, parts, check=law)',
    'log.run("join_casts", join_casts, parts)',
)
HERE.edit(
    "the law does not compare effects",
    "tests/ir/test_verify.py::test_an_op_with_an_effect_in_the_backward",
    verify.verify_partition,
    "_require(pure,",
    "_require(True,",
)
HERE.edit(
    "the law lets draws repeat",
    LAWS.a_repeated_draw_number,
    verify.verify_functional,
    "number not in draws",
    "True",
)
HERE.edit(
    "constants that print alike are one to the law",
    LAWS.another_constant_in_a_half,
    verify._Expressions._part,
    "return type(value), repr(value)",
    "return None",
)
