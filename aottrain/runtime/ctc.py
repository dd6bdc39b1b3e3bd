"""CTC loss as ops whose results have sizes that are known before their values: Graves et al., "Connectionist temporal
classification", ICML 2006.

ATen's has a table with a column for each place between the symbols of the longest target, which is found among the
values; here it has as many as the longest target that there could be. What is computed is ATen's, bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """As aten._ctc_loss: log_probs (time, batch, symbols) -> the loss of each example, and log_alpha (batch, time, 2 *
    longest + 1), of which columns that no target reaches are zero."""
    lengths = input_lengths.tolist(), target_lengths.tolist()
    loss, known = aten._ctc_loss.default(log_probs, targets, *lengths, blank, zero_infinity)
    columns = _columns(targets)
    if known.shape[2] == columns:
        return loss, known
    log_alpha = known.new_zeros(*known.shape[:2], columns)
    log_alpha[:, :, : known.shape[2]] = known
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
    lengths = input_lengths.tolist(), target_lengths.tolist()
    known = log_alpha[:, :, : 2 * max(lengths[1], default=0) + 1].contiguous()
    return aten._ctc_loss_backward.default(grad, log_probs, targets, *lengths, loss, known, blank, zero_infinity)


def _columns(targets: Tensor) -> int:
    """Targets have a row for each example, or follow on each other."""
    return 2 * targets.shape[-1] + 1


_library.impl("ctc_loss", _ctc_loss, "CPU")
_library.impl("ctc_loss_backward", _ctc_loss_backward, "CPU")


@torch.library.register_fake("aottrain::ctc_loss")
def _(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> tuple[Tensor, Tensor]:
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty(batch), log_probs.new_empty(batch, time, _columns(targets))


@torch.library.register_fake("aottrain::ctc_loss_backward")
def _(grad: Tensor, log_probs: Tensor, *rest: object) -> Tensor:
    return log_probs.new_empty(log_probs.shape)
