"""Eager PyTorch with each repeated block under torch.utils.checkpoint: what people write by hand to save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def repeated_modules(module: nn.Module) -> list[nn.Module]:
    """The outermost repetition: children of one class, at least two, in an nn.ModuleList or nn.Sequential.

    In the order of the modules; blocks within blocks are left alone, and so are repetitions without parameters.
    """
    children = list(module.children())
    same = len(children) > 1 and len({type(child) for child in children}) == 1
    if isinstance(module, nn.ModuleList | nn.Sequential) and same and any(True for _ in module.parameters()):
        return children
    return [block for child in children for block in repeated_modules(child)]


def checkpointed(module: nn.Module, blocks: Sequence[nn.Module]) -> Callable[..., torch.Tensor]:
    """`module` as a function in which `blocks` keep their inputs alone, and run again in the backward.

    Between calls the module is as it was: evaluation and checkpoint files see nothing of it.
    """

    def call(*batch: torch.Tensor) -> torch.Tensor:
        with _forwards_checkpointed(blocks):
            return module(*batch)

    return call


@contextmanager
def _forwards_checkpointed(blocks: Sequence[nn.Module]) -> Iterator[None]:
    before = [vars(block).get("forward") for block in blocks]
    try:
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        yield
    finally:
        for block, forward in zip(blocks, before, strict=True):
            vars(block).pop("forward", None)
            if forward is not None:
                block.forward = forward
