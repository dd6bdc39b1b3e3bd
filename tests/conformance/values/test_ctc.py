"""CTC loss, whose table's size depends on the lengths of the targets: one program for all lengths, eager's values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain

TIME, BATCH, SYMBOLS, LONGEST = 23, 4, 7, 6


def make(concatenated: bool):
    torch.manual_seed(0)
    x = torch.randn(TIME, BATCH, SYMBOLS).requires_grad_()
    targets = torch.randint(1, SYMBOLS, (BATCH, LONGEST))
    return x, targets.flatten() if concatenated else targets


@pytest.mark.parametrize("reduction", ("none", "mean", "sum"))
@pytest.mark.parametrize("concatenated", (False, True))
@pytest.mark.parametrize("zero_infinity", (False, True))
def test_any_lengths_by_one_program(reduction, concatenated, zero_infinity):
    def loss(x, targets, times, lengths):
        losses = F.ctc_loss(x.log_softmax(-1), targets, times, lengths, 0, reduction, zero_infinity)
        return losses.mul(2).sin()

    step = aottrain.compile(loss, capture="trace", on_unsupported="error")
    x, targets = make(concatenated)
    for lengths in ([6, 6, 6, 6], [2, 1, 0, 3], [6, 0, 1, 6]):
        if concatenated and sum(lengths) != targets.numel():
            lengths = [6, 6, 6, 6]
        for times in ([23, 23, 23, 23], [23, 9, 3, 12]):
            given = targets, torch.tensor(times), torch.tensor(lengths)
            wanted, got = loss(x, *given), step(x, *given)
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            weight = torch.ones_like(wanted)
            for a, b in zip(torch.autograd.grad(wanted, x, weight), torch.autograd.grad(got, x, weight), strict=True):
                torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True)
    assert len(step.report.graphs) == 1


def test_kernels_around_it():
    def loss(x, targets, times, lengths):
        scaled = torch.tanh(x) * x.sigmoid()
        return F.ctc_loss(scaled.log_softmax(-1), targets, times, lengths)

    x = torch.randn(60, 8, 200).requires_grad_()
    given = torch.randint(1, 200, (8, 9)), torch.full((8,), 60), torch.tensor([9, 3, 5, 1, 2, 9, 8, 4])
    step = aottrain.compile(loss, capture="trace", kernel="cpp", on_unsupported="error")
    wanted, got = loss(x, *given), step(x, *given)
    torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (got, wanted)), rtol=1e-4, atol=1e-6)
    assert step.report.graphs[0].kernels


def test_lengths_as_numbers():
    def loss(x, targets):
        return F.ctc_loss(x.log_softmax(-1), targets, (23, 20, 3, 12), (6, 1, 2, 3))

    x, targets = make(False)
    step = aottrain.compile(loss, capture="trace")
    torch.testing.assert_close(step(x, targets), loss(x, targets), rtol=0, atol=0)


def test_a_target_longer_than_its_row_is_an_error():
    def loss(x, targets, times, lengths):
        return F.ctc_loss(x.log_softmax(-1), targets, times, lengths)

    x, targets = make(False)
    step = aottrain.compile(loss, capture="trace", on_unsupported="error")
    times = torch.full((BATCH,), TIME)
    step(x, targets, times, torch.tensor([6, 1, 2, 3]))
    with pytest.raises(RuntimeError):
        step(x, targets, times, torch.tensor([7, 1, 2, 3]))


def test_targets_that_follow_on_each_other():
    """Its table has room for what the targets need, not for each example as long as all together."""

    def loss(x, targets, times, lengths):
        return F.ctc_loss(x.log_softmax(-1), targets, times, lengths)

    step = aottrain.compile(loss, capture="trace", kernel="aten", on_unsupported="error")
    x, targets = make(True)
    for lengths in ([6, 6, 6, 6], [10, 0, 9, 5], [1, 15, 5, 3]):
        given = targets, torch.full((BATCH,), TIME), torch.tensor(lengths)
        wanted, got = loss(x, *given), step(x, *given)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (got, wanted)), rtol=0, atol=0)
    assert len(step.report.graphs) == 1
    # The table is kept, for to compute it again takes as long as the loss.
    table = 4 * TIME * (2 * targets.numel() + BATCH)
    assert table <= step.report.graphs[0].saved_bytes <= table + 4 * x.numel() + 1024


def test_one_example_without_a_batch():
    def loss(x, targets, times, lengths):
        return F.ctc_loss(x.log_softmax(-1), targets, times, lengths)

    x, given = torch.randn(TIME, SYMBOLS).requires_grad_(), (torch.tensor([1, 2, 2]), torch.tensor(20), torch.tensor(3))
    step = aottrain.compile(loss, capture="trace", on_unsupported="error")
    wanted, got = loss(x, *given), step(x, *given)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (got, wanted)), rtol=0, atol=0)
