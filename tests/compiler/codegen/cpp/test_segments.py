"""Loops cut where a comparison of a position changes its answer, and what is the same for all of a segment."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.codegen.cpp.segments import Segment, cut_segments
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Compute, Constant, KernelIR, Position
from tests.compiler.programs import joint_of, leaf
from tests.numerics.tolerance import assert_close


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


CHOSEN = {
    "stacked": lambda x: torch.stack([x, x.sin(), x * 2], 1).relu(),
    "side by side": lambda x: torch.cat([x, x.exp(), x[:3], -x]) + 1,
    "padded and added": lambda x: F.pad(x, (0, 0, 1, 0)) + F.pad(x.cos(), (0, 0, 0, 1)),
    "by rows": lambda x: torch.where(x[:, :1] > 0, x, x.tanh()),
    "by rows and elements": lambda x: torch.where(x[:, :1] > 0, torch.where(x > 0, x, -x), torch.where(x > 1, 1.0, x)),
    "by two of rows": lambda x: torch.where(x[:, :1] > 0, x, 0) + torch.where(x[:, 1:2] > 0, 0, x.square()),
    "by rows, of integers": lambda x: torch.where(x[:, :1] > 0, x.to(torch.int64), x.to(torch.int64) * 3),
    "by rows, of booleans": lambda x: torch.where(x[:, :1] > 0, x > 0, x > 1),
    "by rows, of sums": lambda x: torch.where(x.sum(1, keepdim=True) > 0, x.softmax(1), x).sum(1),
    "by many of rows": lambda x: sum(torch.where(x[:, i : i + 1] > 0, x * i, x + i) for i in range(6)),
    "of low precision": lambda x: torch.where(x[:, :1] > 0, x.bfloat16(), x.bfloat16().exp()),
    "of high precision": lambda x: torch.where(x[:, :1] > 0, x.double(), x.double().exp()),
}


@pytest.mark.parametrize("columns", [7, 100])
@pytest.mark.parametrize("name", CHOSEN)
def test_what_a_row_chooses(name, columns):
    """Infinities and NaN among what is not chosen, too."""
    function = CHOSEN[name]
    x = leaf(9, columns).detach()
    x[1, 3], x[2, 4], x[3, 5] = torch.inf, -torch.inf, torch.nan
    for value in (x, -x):
        value = value.clone().requires_grad_()
        got = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")(value)
        wanted = function(value)
        if wanted.dtype.is_floating_point:
            assert_close(got, wanted)
        else:
            finite = value.isfinite()  # to a whole number there is no right way from others
            assert torch.equal(got[finite], wanted[finite])
        if wanted.requires_grad:
            assert_close(*(torch.autograd.grad(y.sum(), value)[0] for y in (got, wanted)))


def test_each_part_of_a_concatenation_has_a_loop():
    text = text_of(lambda x, y, z: torch.stack((x, y, z), 1).exp(), *(torch.ones(8, 64) for _ in range(3)))
    assert text.count("#pragma omp simd") == 3 and text.count("} else if (") == 1
    rows = text_of(lambda x, y: torch.where(x.sum(1, keepdim=True) > 0, x, y), torch.ones(8, 64), torch.ones(8, 64))
    assert rows.count("#pragma omp simd") == 3 and rows.count("} else {") == 1  # of which one adds up
    few = text_of(lambda x, y: torch.where(x.sum(1, keepdim=True) > 0, x, y), torch.ones(9, 7), torch.ones(9, 7))
    assert "} else {" not in few


def test_a_window_over_the_edge_is_read_in_any_case():
    """Its address is chosen once for a row, not whether to read each element."""
    text = text_of(lambda x: F.max_pool2d(x, 3, 2, 1), torch.ones(1, 4, 40, 40))
    loops = [line for line in text.splitlines() if "blend_" in line]
    assert loops and not any("? p0[" in line for line in text.splitlines())
