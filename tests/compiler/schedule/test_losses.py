"""Losses of rows of classes: what is written of their log-probabilities, and what their kernels give."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

import aottrain
from aottrain.compiler.lowering import rules_for
from aottrain.compiler.passes.splits.losses import _is_split, split_losses
from aottrain.compiler.schedule.grouping.groups import place, start
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.graph import calls, set_value
from aottrain.ir.kernels.kernel import KernelIR
from aottrain.ir.kernels.traffic import moved_bytes
from tests.compiler.programs import joint_of, leaf
from tests.compiler.schedule.test_scheduling import library_calls, schedules
from tests.numerics.tolerance import assert_close


def test_a_losss_backward_makes_its_log_probabilities_where_it_reads_them():
    """It needs the number of rows that count, for which the log-probabilities stand among the operands, too."""

    def loss(x, target):
        return F.cross_entropy(x, target)

    n = 128
    target = torch.arange(n) % 64
    target[::3] = -100
    x = leaf(n, 64)
    _, backward, _ = schedules(loss, x, target)
    assert library_calls(backward) == []
    assert sum(moved_bytes(call.kernel) for call in backward.kernels) < 2.2 * n * 64 * 4
    call = aottrain.compile(loss, capture="trace", kernel="cpp")
    got, wanted = (torch.autograd.grad(function(x, target), x)[0] for function in (call, loss))
    assert_close(got, wanted)


def test_a_number_of_rows_alone_has_checked_targets():
    """Its loop is made of vectors, by the C++ compiler, of numbers of two widths."""

    def rows(x, target):
        return torch.ops.aten.nll_loss_forward(x, target, None, 1, -100)[1]

    x, target = torch.zeros(128, 64), torch.arange(128) % 64
    target[::3] = -100
    call = aottrain.compile(rows, capture="trace", kernel="cpp", on_unsupported="error")
    assert call(x, target) == 85
    for wrong in (64, -1):
        target[77] = wrong
        with pytest.raises(IndexError):
            call(x, target)


def kernels_of_losses(function, *args) -> list[KernelIR]:
    planned = schedule(split_losses(joint_of(function, *args)).graph)
    return [call.kernel for call in planned.kernels if any("nll_rows" in source for source in call.kernel.sources)]


def test_log_probabilities_are_not_written_for_their_loss():
    (kernel,) = kernels_of_losses(F.cross_entropy, torch.zeros(128, 64), torch.arange(128) % 64)
    assert moved_bytes(kernel) < 1.1 * 128 * 64 * 4


def test_log_probabilities_of_pixels_are_not_written_for_their_loss():
    """Nor for a function of each pixel's loss."""

    def focal(x, target):
        loss = F.cross_entropy(x, target, reduction="none")
        return ((1 - (-loss).exp()) ** 2 * loss).mean()

    x, target = leaf(2, 19, 12, 10), torch.arange(240).view(2, 12, 10) % 19
    for loss in (F.cross_entropy, focal):
        planned = schedule(split_losses(joint_of(loss, x.detach(), target)).graph)
        moved = sum(moved_bytes(call.kernel) for call in planned.kernels)
        assert library_calls(planned) == [] and moved < 1.4 * x.nbytes, (loss, moved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighs", [False, True])
def test_losses_of_pixels(weighs, reduction, layout, dtype):
    """One score that is not finite, a class of weight 0, an ignored class, and a class that there is not."""

    def loss(x, target, weight):
        each = F.cross_entropy(x, target, weight, reduction=reduction, ignore_index=3)
        return each * each.detach().exp().clamp(max=3)

    x = leaf(2, 19, 6, 10).detach().to(dtype).contiguous(memory_format=layout)
    x[1, 4, 2, 3] = -torch.inf
    x.requires_grad_()
    target, weight = torch.arange(120).view(2, 6, 10) % 19, torch.linspace(0, 3, 19).to(dtype) if weighs else None
    call = aottrain.compile(loss, capture="trace", kernel="cpp", on_unsupported="error")
    got, wanted = (function(x, target, weight) for function in (call, loss))
    assert call.report.graphs[0].kernels and not call.report.graphs[0].library_calls
    assert_close(got, wanted)
    tangent = torch.ones_like(wanted)
    assert_close(*(torch.autograd.grad(result, x, tangent)[0] for result in (got, wanted)))
    target[1, 0, 5] = 19
    with pytest.raises(IndexError):
        call(x, target, weight)


def test_a_loss_reads_one_element_of_each_row_of_what_is_in_memory():
    """A kernel that has its targets at hand, and runs through as many classes, does not read the rows for it."""

    def loss(logs, scale, target):
        return scale * target[:, None], F.nll_loss(logs, target)

    x = torch.zeros(128, 64)
    graph = split_losses(joint_of(loss, x, x + 1, torch.arange(128) % 64)).graph
    scaled, rows = (next(n for n in calls(graph) if name in str(n.target)) for name in ("aten.mul", "nll_rows"))
    group = start(0, scaled, rules_for(scaled))
    assert place(group, rows, rules_for(rows)[1]) == "a row would be read for one element"


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_a_loss_of_what_is_not_finite(reduction):
    def loss(x, target):
        return F.cross_entropy(x, target, reduction=reduction, ignore_index=3)

    target = torch.arange(12) % 8
    for value in (-torch.inf, torch.inf, torch.nan, -200.0):
        x = leaf(12, 8)
        x.data[2:5, 4] = value
        call = aottrain.compile(loss, capture="trace", kernel="cpp", on_unsupported="error")
        got, wanted = call(x, target), loss(x, target)
        assert_close(got, wanted)
        tangent = torch.ones_like(wanted)
        assert_close(*(torch.autograd.grad(result, x, tangent)[0] for result in (got, wanted)))


def _log_probability(x, target):
    return F.log_softmax(x, -1).gather(-1, target.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("shape", [(128, 64), (3, 40, 65), (1, 20000)], ids=str)
def test_a_tokens_log_probability_is_taken_where_the_row_is(shape):
    """Forward and backward read the scores, and write nothing else of their size than the gradient."""
    x, target = leaf(*shape), torch.arange(shape[0] * (shape[1] if len(shape) > 2 else 1)).view(shape[:-1]) * 7 % 61
    forward, backward, _ = schedules(_log_probability, x, target)
    assert library_calls(forward) == library_calls(backward) == []
    moved = [sum(moved_bytes(call.kernel) for call in each.kernels) for each in (forward, backward)]
    assert moved[0] < 1.3 * x.nbytes and moved[1] < 2.3 * x.nbytes
    call = aottrain.compile(_log_probability, capture="trace", kernel="cpp", on_unsupported="error")
    with torch.no_grad():
        x.view(-1)[:3] = torch.tensor([float("-inf"), 90.0, -0.0])
    got, wanted = (function(x, target) for function in (call, _log_probability))
    assert_close(got, wanted)
    for a, b in zip(torch.autograd.grad(got.sin().sum(), x), torch.autograd.grad(wanted.sin().sum(), x), strict=True):
        assert_close(a, b)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_classes_with_weights(reduction, dtype):
    """One of 0, an ignored row; the log-probabilities are not written."""

    def loss(x, target, weight):
        return F.cross_entropy(x, target, weight, reduction=reduction, ignore_index=3)

    x, target = leaf(200, 65).detach().to(dtype).requires_grad_(), torch.arange(200) % 65
    weight = torch.linspace(0, 3, 65).to(dtype)
    call = aottrain.compile(loss, capture="trace", kernel="cpp", on_unsupported="error")
    got, wanted = (function(x, target, weight) for function in (call, loss))
    assert call.report.graphs[0].kernels and not call.report.graphs[0].library_calls
    assert_close(got, wanted)
    for a, b in zip(torch.autograd.grad(got.sum(), x), torch.autograd.grad(wanted.sum(), x), strict=True):
        assert_close(a, b)
    target[5] = 65
    with pytest.raises(IndexError):
        call(x, target, weight)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=str)
@pytest.mark.parametrize("weighs", [False, True])
def test_targets_of_a_byte_pick_no_weights(weighs, dtype):
    """An index of bytes is a mask. (The graph is written down: torch's own fakes refuse the call.)"""
    graph = fx.Graph()
    values = [torch.zeros(6, 8), torch.zeros(6, dtype=dtype), torch.ones(8)][: 2 + weighs]
    operands = [graph.placeholder(name) for name, _ in zip(("x", "target", "weight"), values, strict=False)]
    for operand, value in zip(operands, values, strict=True):
        set_value(operand, value)
    call = graph.call_function(torch.ops.aten.nll_loss_forward.default, (*operands, *[None] * (not weighs), 1, -100))
    graph.call_function(operator.getitem, (call, 0))
    assert _is_split(call) == (not weighs or dtype is torch.int64)
