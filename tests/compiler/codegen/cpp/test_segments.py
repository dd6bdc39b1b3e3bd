"""Loops cut where a comparison of a position changes its answer, and what is the same for all of a segment."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.codegen.cpp.segments import Segment, cut_segments
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Compute, Constant, KernelIR, Position
from tests.compiler.programs import joint_of


def comparing(op: str, step: int, start: int, limit: int, size: int = 10) -> KernelIR:
    place, number = Position(Affine.of({0: step}, start)), Constant(limit, torch.int64)
    return KernelIR("k", (size,), 0, (), (place, number, Compute(op, (0, 1), torch.bool)), (), ())


def test_a_comparison_cuts_where_its_answer_changes():
    for op in ("lt", "le", "gt", "ge"):
        for step, start, limit in ((1, 0, 4), (2, -3, 4), (-1, 6, 2), (3, 0, 100), (1, 0, 0), (1, 0, 9)):
            kernel = comparing(op, step, start, limit)
            answers = {}
            segments = cut_segments(kernel, (0, 1, 2))
            for segment in segments:
                answers |= {i: segment.answers[2] for i in range(segment.start, segment.stop)}
            wanted = torch.tensor([step * i + start for i in range(10)])
            wanted = getattr(torch, op)(wanted, limit).tolist()
            assert [answers[i] for i in range(10)] == wanted
            assert len(segments) == 1 + (len(set(wanted)) - 1)


def test_many_answers_leave_the_loop_whole():
    body = [Position(Affine.of({0: 1}, 0))]
    for limit in range(1, 9):
        body += [Constant(limit, torch.int64), Compute("lt", (0, len(body)), torch.bool)]
    kernel = KernelIR("k", (10,), 0, (), tuple(body), (), ())
    assert cut_segments(kernel, range(len(body))) == [Segment(0, 10)]


def text_of(function, *args) -> str:
    (call,) = schedule(joint_of(function, *args).graph).kernels
    return render_cpp(call.kernel)


def test_a_concatenation_chooses_in_no_loop():
    text = text_of(lambda x, y: torch.cat((x, y), 1), torch.ones(64, 300), torch.ones(64, 500))
    assert text.count("#pragma omp simd") == 2
    assert "i1 = 0; i1 < 300" in text and "i1 = 300; i1 < 800" in text


def test_a_window_over_the_edge_is_read_in_any_case():
    """Its address is chosen once for a row, not whether to read each element."""
    text = text_of(lambda x: F.max_pool2d(x, 3, 2, 1), torch.ones(1, 4, 40, 40))
    loops = [line for line in text.splitlines() if "blend_" in line]
    assert loops and not any("? p0[" in line for line in text.splitlines())
