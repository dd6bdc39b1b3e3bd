"""Linear layer and cross-entropy as one chunked op: against eager and float64, both ways of computing its rows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from aottrain.ir.settings.decisions import ONEDNN
from aottrain.metrics.memory import watch_cpu_peak
from aottrain.ops.losses import loss_head
from aottrain.ops.products.onednn import has_onednn
from aottrain.toolchain.native import find_compiler
from tests.numerics.tolerance import assert_close, sum_error

op = torch.ops.aottrain.linear_cross_entropy.default
REDUCTIONS = {"mean": loss_head.MEAN, "sum": loss_head.SUM}
TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float64, torch.float64),
]


@pytest.fixture(params=["native", "aten"])
def rule(request, monkeypatch):
    """Both ways; the second is also what runs where there is no compiler."""
    if request.param == "aten":
        monkeypatch.setattr(loss_head, "load", lambda *_: None)
    elif find_compiler() is None:
        pytest.skip("there is no C++ compiler on this machine")
    return request.param


def inputs(rows, classes, width=24, dtype=torch.float32, bias=True):
    made = torch.Generator().manual_seed(rows + classes)
    hidden = torch.randn(rows, width, generator=made).to(dtype)
    weight = (torch.randn(classes, width, generator=made) / width**0.5).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=made)
    target[::5] = -100
    return hidden, weight, torch.randn(classes, generator=made).to(dtype) if bias else None, target


def eager(hidden, weight, bias, target, reduction="mean", softmax_dtype=None):
    """Loss, then the gradients of hidden, weight and bias."""
    leaves = [v.detach().clone().requires_grad_() for v in (hidden, weight, bias) if v is not None]
    logits = F.linear(leaves[0], leaves[1], leaves[2] if bias is not None else None)
    loss = F.cross_entropy(logits.to(softmax_dtype or logits.dtype), target, reduction=reduction)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def chunked(hidden, weight, bias, target, reduction="mean", softmax_dtype=torch.float32, chunk=16, wanted=None):
    wanted = wanted or [True, True, bias is not None]
    found = op(hidden, weight, bias, target, REDUCTIONS[reduction], -100, softmax_dtype, softmax_dtype, chunk, wanted)
    made = [found[2], *(value.to(hidden.dtype) for value in found[3:])]
    assert all(value.dtype == torch.promote_types(hidden.dtype, torch.float32) for value in found[3:])
    return [found[0], *(value for value, flag in zip(made, wanted, strict=True) if flag)]


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize("dtype, softmax_dtype", TYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_error_is_no_worse_than_eagers(rule, dtype, softmax_dtype, reduction, bias):
    given = inputs(137, 301, dtype=dtype, bias=bias)
    exact = eager(*(None if v is None else v.double() if v.is_floating_point() else v for v in given), reduction)
    wanted = eager(*given, reduction, softmax_dtype)
    got = chunked(*given, reduction, softmax_dtype)
    # Relative to a sum of as many numbers. In float64 eager's error against itself is none, so nothing else is left.
    count = sum(given[1].shape[:1] + given[0].shape[:1])
    added = sum_error(count, torch.promote_types(dtype, torch.float32)) / count**0.5
    for ours, theirs, true in zip(got, wanted, exact, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        assert error(ours, true) <= 1.5 * error(theirs, true) + torch.finfo(ours.dtype).eps + added


@pytest.mark.parametrize("rows, classes", [(1, 1), (1, 7), (16, 63), (17, 64), (63, 17), (70, 4097), (15, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_odd_sizes(rule, rows, classes, dtype):
    given = inputs(rows, classes, dtype=dtype)
    given[3][-1] = 0  # one counts
    for ours, theirs in zip(chunked(*given), eager(*given, softmax_dtype=torch.float32), strict=True):
        assert_close(ours, theirs)


def test_strides_do_not_matter(rule):
    hidden, weight, bias, target = inputs(40, 50)
    loose = hidden.t().contiguous().t(), weight.repeat(1, 2)[:, :24], bias.repeat_interleave(2)[::2]
    for ours, theirs in zip(
        chunked(*loose, target.repeat_interleave(3)[::3]), chunked(hidden, weight, bias, target), strict=True
    ):
        assert_close(ours, theirs)


def test_rows_that_do_not_count_have_no_gradient(rule):
    hidden, weight, _, target = inputs(40, 50, bias=False)
    _, gradient, _ = chunked(hidden, weight, None, target)
    assert not gradient[target == -100].any() and gradient[target != -100].any(1).all()


def test_without_a_row_that_counts_the_mean_is_nan_and_the_gradients_are_zero(rule):
    hidden, weight, bias, target = inputs(20, 30)
    for reduction in REDUCTIONS:
        got = chunked(hidden, weight, bias, torch.full_like(target, -100), reduction)
        wanted = eager(hidden, weight, bias, torch.full_like(target, -100), reduction)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wrong", [30, -1, -101, 10**12])
def test_a_target_that_is_no_class_raises_as_in_eager(rule, wrong):
    hidden, weight, bias, target = inputs(40, 30)
    target[37] = wrong
    with pytest.raises(IndexError) as theirs:
        eager(hidden, weight, bias, target)
    with pytest.raises(IndexError) as ours:
        chunked(hidden, weight, bias, target)
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30, 88.0, 1e-40])
@pytest.mark.parametrize("whole_row", [False, True])
def test_extreme_logits_come_out_as_in_eager(rule, value, whole_row):
    """The bias carries the value, or some rows where all their logits are to be extreme; one such row is ignored."""
    hidden, weight, bias, target = inputs(24, 40)
    hidden, weight = torch.zeros_like(hidden), torch.ones_like(weight)
    if whole_row:
        hidden[2:6, 0] = value
    else:
        bias[3] = value
    for ours, theirs in zip(chunked(hidden, weight, bias, target), eager(hidden, weight, bias, target), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert_close(ours, theirs)


def test_only_what_is_wanted_is_computed(rule):
    given = inputs(40, 50)
    full = chunked(*given)
    for position in range(3):
        wanted = [i == position for i in range(3)]
        loss, gradient = chunked(*given, wanted=wanted)
        assert torch.equal(loss, full[0]) and torch.equal(gradient, full[1 + position])
        found = op(*given, 1, -100, torch.float32, torch.float32, 16, wanted)
        assert [value.numel() == 0 for value in found[2:]] == [not flag for flag in wanted]
    assert torch.equal(chunked(*given, wanted=[False] * 3)[0], full[0])


def test_the_loss_does_not_depend_on_the_number_of_threads(rule):
    given = inputs(200, 300)
    one = chunked(*given)[0]
    torch.set_num_threads(2)
    assert torch.equal(chunked(*given)[0], one)


@pytest.mark.skipif(not has_onednn(), reason="this build of torch has no oneDNN")
def test_one_chunk_s_logits_are_there_at_a_time():
    hidden, weight, rows = torch.randn(192, 8), torch.randn(4096, 8), 64
    target = torch.zeros(192, dtype=torch.int64)
    with watch_cpu_peak([hidden, weight]) as peak:
        op(hidden, weight, None, target, 1, -100, torch.float32, torch.float32, rows, [True, True, False], ONEDNN)
    # Beside a chunk's logits: the gradient of the weight, one as it is summed and one of a chunk, and rows.
    assert peak.num_bytes < 4 * (rows * 4096 + 5 * weight.numel() + 3 * hidden.numel())


def test_fakes_have_the_layout_of_results():
    from torch._subclasses.fake_tensor import FakeTensorMode

    given = inputs(40, 50)
    real = op(*given, 1, -100, torch.float32, torch.float32, 16, [True, True, False])
    with FakeTensorMode() as mode:
        fakes = op(*map(mode.from_tensor, given), 1, -100, torch.float32, torch.float32, 16, [True, True, False])
    for fake, value in zip(fakes, real, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (value.shape, value.stride(), value.dtype)
