"""A trial run that leaves no trace: gradients, buffers and random streams are as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Whatever is drawn inside, torch's default generators go on after it from where they were."""
    cpu = torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Inside, gradients start as None; after it, gradients, buffers and random streams are those from before.

    Parameters are not copied: what runs inside must not update them.
    """
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    with preserved_rng():
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
            for parameter, grad in grads:
                parameter.grad = grad
