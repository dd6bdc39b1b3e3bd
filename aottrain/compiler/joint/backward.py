"""The backward of the program, traced: autograd runs it, and with it the Python of custom Functions and of hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_autocast
from aottrain.compat_dispatch import registered_backward
from aottrain.compiler.capture.audit import audited
from aottrain.compiler.capture.capture import CapturedStep
from aottrain.compiler.capture.substitutes import gradients_left, outside_kept
from aottrain.errors import none_caught
from aottrain.guards.state import StateGuard


@contextmanager
def watched(step: CapturedStep, inputs: Sequence[Tensor], custom_functions: Sequence[Any]) -> Iterator[None]:
    """Around torch.autograd.grad: what the user's Python does beside computing is refused as it is in the forward.

    By this thread alone: fakes of a host and of a device, on threads of their own, meet in one mode. Random numbers
    have no place in a traced backward, and neither have their generators. custom_functions: nodes of the graph.
    """
    found = [registered_backward(node._forward_cls) for node in custom_functions]
    registered = [function for function in found if function is not None]
    with (
        disable_autocast(),
        torch.autograd.set_multithreading_enabled(False),
        none_caught(),
        outside_kept("philox"),
        audited(step.function, step.module, registered),
        step.watching(),
        _state_kept(registered),
        gradients_left(inputs),
    ):
        yield


@contextmanager
def _state_kept(functions: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Of operators' backwards, which torch knows by the operator: neither front end follows the program to them."""
    if not functions:
        yield
        return
    guard = StateGuard(tuple(functions))
    try:
        with guard.watching():
            yield
        guard.check_unchanged()
    except BaseException:
        guard.clear_caches()
        guard.restore()
        raise
