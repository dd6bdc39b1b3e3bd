"""The backward of the program, traced: autograd runs it, and with it the Python of custom Functions and of hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from aottrain.compat import disable_autocast
from aottrain.compiler.capture.audit import audited
from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.capture.substitutes import gradients_left, outside_kept
from aottrain.errors import none_caught


@contextmanager
def watched(step: CapturedStep, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Around torch.autograd.grad: what the user's Python does beside computing is refused as it is in the forward.

    By this thread alone: fakes of a host and of a device, on threads of their own, meet in one mode. Random numbers
    have no place in a traced backward, and neither have their generators.
    """
    with (
        disable_autocast(),
        torch.autograd.set_multithreading_enabled(False),
        none_caught(),
        outside_kept("philox"),
        audited(step.function, step.module),
        step.watching(),
        gradients_left(inputs),
    ):
        yield
