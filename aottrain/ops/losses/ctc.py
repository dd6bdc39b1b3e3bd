"""CTC loss as ops whose results have sizes that are known before their values: Graves et al., "Connectionist temporal
classification", ICML 2006.

ATen's has a table of each example with a column for each place between the symbols of the longest target, whose length
depends on values. Here the columns of all examples follow on each other, of each as many as its target needs. The
number of targets bounds how many these are in all. What is computed is ATen's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

aten = torch.ops.aten

_LENGTHS = "Tensor input_lengths, Tensor target_lengths"
_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define(
    f"ctc_loss(Tensor log_probs, Tensor targets, {_LENGTHS}, int blank, bool zero_infinity) -> (Tensor, Tensor)"
)
_library.define(
    f"ctc_loss_backward(Tensor grad, Tensor log_probs, Tensor targets, {_LENGTHS}, Tensor loss, Tensor log_alpha, "
    "int blank, bool zero_infinity) -> Tensor"
)


def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    """As aten._ctc_loss: log_probs (time, batch, symbols) -> the loss of each example, and log_alpha (time, 2 *
    targets + batch), the examples' columns one after another, with zeros after the last."""
    lengths = input_lengths.flatten().tolist(), target_lengths.flatten().tolist()
    loss, table = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    log_alpha = table.new_zeros(log_probs.shape[0], _num_columns(log_probs, targets))
    end = 0
    for example, length in zip(table, lengths[1], strict=True):
        start, end = end, end + 2 * length + 1
        log_alpha[:, start:end] = example[:, : 2 * length + 1]
    return loss, log_alpha


def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """The gradient of log_probs."""
    lengths = input_lengths.flatten().tolist(), target_lengths.flatten().tolist()
    table = log_alpha.new_zeros(log_probs.shape[1], log_probs.shape[0], 2 * max(lengths[1], default=0) + 1)
    end = 0
    for example, length in zip(table, lengths[1], strict=True):
        start, end = end, end + 2 * length + 1
        example[:, : 2 * length + 1] = log_alpha[:, start:end]
    return aten._ctc_loss_backward.default(grad, log_probs, targets, *lengths, loss, table, blank, zero_infinity)


def _num_columns(log_probs: Tensor, targets: Tensor) -> int:
    """Of all examples. Targets have a row for each, or follow on each other."""
    return 2 * targets.numel() + log_probs.shape[1]


_library.impl("ctc_loss", _ctc_loss, "CPU")
_library.impl("ctc_loss_backward", _ctc_loss_backward, "CPU")


@register_fake(_library, "ctc_loss")
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(time, _num_columns(log_probs, targets))


@register_fake(_library, "ctc_loss_backward")
def _(grad: Tensor, log_probs: Tensor, *rest: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)
