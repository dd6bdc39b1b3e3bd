"""The backward of the program, traced: autograd runs it, and with it the Python of custom Functions and of hooks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from aottrain.compat import disable_autocast
from aottrain.compiler.capture.capture import CapturedStep
from aottrain.errors import none_caught


@contextmanager
def watched(step: CapturedStep) -> Iterator[None]:
    """Around it: the user's Python is watched as it is in the forward.

    By this thread alone: fakes of a host and of a device, on threads of their own, meet in one mode.
    """
    with none_caught(), disable_autocast(), step.watching(), torch.autograd.set_multithreading_enabled(False):
        yield
