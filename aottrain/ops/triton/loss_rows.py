"""Rows of logits to their cross-entropies and, in the same memory, to the gradients of the logits: one Triton kernel.

A program has a row: it goes along it once for the maximum and the sum of exponentials, which it rescales where the
maximum grows (Milakov & Gimelshein, 2018, "Online normalizer calculation for softmax", arXiv:1805.02867), and once
more for the gradients.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aottrain.ops.triton import functions as fn

_BLOCK = 4096  # elements at a time: 16 for each thread


@triton.jit
def _rounded(x, LOW: tl.constexpr):
    return fn.to_bfloat16(x).to(tl.float32) if LOW else x


@triton.jit
def triton_loss_rows(
    logits, target, losses, counted, classes, ignored,
    MEAN: tl.constexpr, LOW: tl.constexpr, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(target + row)
    counts = own != ignored
    fn.check_index(((own >= 0) & (own < classes)) | (own == ignored))
    own = tl.where((own >= 0) & (own < classes), own, 0)
    start_of_row = logits + row * classes
    lane = tl.arange(0, BLOCK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, classes, BLOCK):
        inside = start + lane < classes
        x = _rounded(tl.load(start_of_row + start + lane, mask=inside, other=float("-inf")).to(tl.float32), LOW)
        new = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(new == float("-inf"), 0.0, new)  # what is all minus infinity so far has no exponentials
        total = total * fn.exp(largest - base) + tl.sum(fn.exp(x - base), 0)
        largest = new
    log_sum = fn.log(total)
    target_logit = _rounded(tl.load(start_of_row + own).to(tl.float32), LOW)
    tl.store(losses + row, tl.where(counts, -_rounded(target_logit - largest - log_sum, LOW), 0.0))
    if WITH_GRADIENT:
        one = fn.div(tl.full((), 1.0, tl.float32), tl.load(counted)) if MEAN else tl.full((), 1.0, tl.float32)
        scale = _rounded(tl.where(counts, one, 0.0), LOW)
        for start in range(0, classes, BLOCK):
            inside = start + lane < classes
            x = _rounded(tl.load(start_of_row + start + lane, mask=inside, other=float("-inf")).to(tl.float32), LOW)
            share = fn.exp(_rounded(x - largest - log_sum, LOW)) * scale
            gradient = _rounded(tl.where(start + lane == own, share - scale, share), LOW)
            rounded = fn.to_bfloat16(gradient) if logits.dtype.element_ty == tl.bfloat16 else gradient
            tl.store(start_of_row + start + lane, rounded, mask=inside)


def loss_rows(
    logits: Tensor,
    target: Tensor,
    losses: Tensor,
    counted: Tensor,
    ignore_index: int,
    mean: bool,
    low: bool,
    with_gradient: bool,
) -> None:
    """logits: (rows, classes), contiguous, float32 or bfloat16. with_gradient: their gradient is written over them.
    target: (rows), int64. losses: (rows), float32, written. counted: 0-dim, how many rows count. mean: gradients are of
    the mean over these, else of the sum. low: logits, log-probabilities and gradients are rounded to bfloat16.

    A target that is no class fails an assertion on the device, which a later call reports.
    """
    rows, classes = logits.shape
    options = {"num_warps": 8, "enable_fp_fusion": False, "debug": True, "sanitize_overflow": False}
    if rows:
        triton_loss_rows[(rows,)](
            logits, target, losses, counted, classes, ignore_index, mean, low, with_gradient, _BLOCK, **options
        )
