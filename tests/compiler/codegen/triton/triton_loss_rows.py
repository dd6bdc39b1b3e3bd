"""The loss head's rows by Triton, interpreted on a CPU, against the ops that they stand for. Run by test_triton.py."""

from __future__ import annotations

import pytest
import torch

from aottrain.ops.losses import loss_head
from aottrain.ops.losses.loss_head import MEAN, SUM, _aten_rule, _Rows, _triton_rows
from aottrain.ops.triton import loss_rows
from tests.numerics.tolerance import assert_close
from tests.sampling import crossed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
F32, BF16 = torch.float32, torch.bfloat16


def both(logits, target, softmax_dtype=F32, reduction=MEAN, ignored=-100, wanted=True):
    """(losses, gradients) by Triton, which writes to the logits, and by ATen."""
    found = []
    logits, target = logits.to(DEVICE), target.to(DEVICE)
    counted = (target != ignored).sum().to(F32)
    for rule in (_triton_rows, _aten_rule):
        losses = torch.full((len(logits),), 7.0, device=DEVICE)
        given = logits.clone()
        gradient = rule(given, losses, _Rows(target, reduction, ignored, counted, softmax_dtype, wanted))
        assert wanted or torch.equal(given, logits)
        found.append((losses, gradient))
    return found


@pytest.mark.parametrize(
    ("classes", "reduction", "dtype", "softmax_dtype"),
    crossed([1, 7, 4096, 5001], [MEAN, SUM], [F32, BF16], [F32, BF16], one_in=4),
)
def test_rows_are_eagers(classes, reduction, dtype, softmax_dtype):
    made = torch.Generator().manual_seed(classes)
    logits = (3 * torch.randn(5, classes, generator=made)).to(dtype)
    target = torch.randint(0, classes, (5,), generator=made)
    target[1] = -100
    (losses, gradient), (wanted_losses, wanted) = both(logits, target, softmax_dtype, reduction)
    assert_close(losses.to(softmax_dtype), wanted_losses.to(softmax_dtype))
    assert gradient.dtype is wanted.dtype
    assert_close(gradient.to(softmax_dtype), wanted.to(softmax_dtype))  # one rounding of a log-probability, as above


def test_infinities_and_nans_come_out_the_same():
    inf, nan = float("inf"), float("nan")
    rows = [[0, inf, 1], [-inf] * 3, [nan, 1, 2], [-inf, 0, 1], [-inf, -inf, 3]]
    (losses, gradient), (wanted_losses, wanted) = both(torch.tensor(rows, dtype=F32), torch.tensor([1, 1, 1, 0, 2]))
    assert_close(losses, wanted_losses)
    assert_close(gradient, wanted)


def test_a_row_that_starts_with_minus_infinity_for_a_whole_block():
    logits = torch.full((2, 9000), -torch.inf)
    logits[:, 8999] = 2.0
    logits[1, 5000] = 1.0
    (losses, gradient), (wanted_losses, wanted) = both(logits, torch.tensor([8999, 5000]))
    assert_close(losses, wanted_losses)
    assert_close(gradient, wanted)


def test_no_gradient_leaves_the_logits():
    both(torch.randn(3, 10), torch.tensor([1, 2, 3]), wanted=False)


def test_no_row_counts():
    (losses, gradient), (wanted_losses, wanted) = both(torch.randn(2, 10), torch.tensor([-100, -100]))
    assert torch.equal(losses, wanted_losses) and torch.equal(gradient.abs(), wanted.abs())


@pytest.mark.skipif(DEVICE.type == "cuda", reason="a device reports a failed assertion later, and is then unusable")
def test_a_target_that_is_no_class_fails():
    with pytest.raises(Exception, match="index out of range"):
        both(torch.randn(2, 10), torch.tensor([3, 10]))


def test_the_whole_op_takes_it_on_cuda(monkeypatch):
    """Chosen for the device and the types alone."""
    hidden, target = torch.empty(2, 3, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    assert loss_head._triton_rule(hidden, target, F32) is None
    monkeypatch.setattr(loss_head, "has_triton", lambda: True)
    if DEVICE.type == "cuda":
        given = hidden.new_empty(2, 3, device=DEVICE), target.new_empty(2, device=DEVICE)
        assert loss_head._triton_rule(*given, F32) is _triton_rows
        assert loss_head._triton_rule(given[0].double(), given[1], F32) is None


def test_a_target_is_checked_on_the_device_and_nothing_is_contracted(monkeypatch):
    """The interpreter knows none of the options that decide it."""
    found = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *given, **options: found.append((grid, options))

    monkeypatch.setattr(loss_rows, "triton_loss_rows", Kernel())
    given = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), torch.zeros(3), torch.tensor(3.0)
    loss_rows.loss_rows(*given, ignore_index=-100, mean=True, low=False, with_gradient=True)
    ((grid, options),) = found
    assert grid == (3,) and options["debug"] and not options["enable_fp_fusion"]
    assert options["num_warps"].bit_count() == 1  # Triton takes powers of two alone
