"""A backward under create_graph=True: the forward runs again as ordinary ops, which autograd differentiates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_autocast
from aottrain.errors import UnsupportedError
from aottrain.ir.tensor import version_of
from aottrain.runtime.autograd.chain import LinkMode

SMALL_BYTES = 1 << 16
# What gives a primal of a call again, or None where it is gone; and the version that it had.
FoundAgain = tuple[Callable[[], Tensor | None], int | None]


def found_again(program: Any, primals: Sequence[Tensor]) -> tuple[FoundAgain, ...]:
    """The primals of a call, of which its forward runs again under create_graph=True.

    Small constants are kept as long as the call's graph, for the caller may have let them go, as a batch that it made
    for this call alone. Large ones are not: a step that differentiates once has no use for their memory.
    """
    return tuple((_reference(value, program.replay is not None), version_of(value)) for value in primals)


def _reference(value: Tensor, keeps: bool) -> Callable[[], Tensor | None]:
    if value.requires_grad or not keeps or max(value.nbytes, value.untyped_storage().nbytes()) > SMALL_BYTES:
        return weakref.ref(value)
    kept = value.detach()  # not itself: where the caller adds the result to it, it leads to this very graph
    return lambda: kept


def _replayed(node: Any, stand_ins: Mapping[int, Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
    """The forward of a node, run again as ordinary ops: its primals, and its outputs, which autograd can differentiate.

    Raises UnsupportedError where the forward cannot be run again: see each message.
    """
    call = node.call
    program = call.program
    if program.replay is None:
        raise UnsupportedError(
            "create_graph=True through a program with a custom autograd.Function, updated state or rng='eager' draws, "
            "or with writes under no_grad or by detached names to what has a gradient (as in F.cosine_similarity)"
        )
    primals = []
    for reference, version in call.inputs:
        value = reference()
        if value is None or version_of(value) != version:
            raise UnsupportedError("create_graph=True needs the inputs of the forward, and one is gone or was modified")
        # A view, at which the inner differentiation below ends: the caller's hooks are for the outer one.
        primals.append(value.view_as(value) if value.requires_grad else value)
    inputs = [*primals, *program.constants, *program.symbols(call.sizes), call.state]
    return primals, program.replay(inputs, stand_ins)


def differentiable_gradients(ctx: Any, tangents: Sequence[Tensor | None], mode: LinkMode) -> list[Tensor | None]:
    """The gradients under create_graph=True. Raises UnsupportedError, as `_replayed`."""
    with disable_autocast():
        primals, outputs = _replayed(ctx, ctx.call.link_state.stand_ins(mode))
        pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None and o.requires_grad]
        indices = [i for i, value in enumerate(primals) if value.requires_grad and ctx.needs_input_grad[i + 1]]
        if not indices:
            return [None] * len(primals)
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [primals[i] for i in indices],
            [tangent for _, tangent in pairs],
            create_graph=True,
            allow_unused=True,
        )
    by_primal = dict(zip(indices, gradients, strict=True))
    return [by_primal.get(i) for i in range(len(primals))]


def differentiable_at_links(node: Any, index: int, tangent: Tensor, mode: LinkMode) -> list[list[Tensor | None]]:
    """What an output's tangent adds to the gradient at each link that it reaches first, under create_graph=True. It is
    whole in the first of a link's parts; the others are None."""
    stand_ins = node.call.link_state.stand_ins(mode)
    with disable_autocast():
        output = _replayed(node, stand_ins)[1][index]
        numbers = [n for n in dict.fromkeys(node.call.program.links.reached[index]) if n in stand_ins]
        gradients: Sequence[Tensor | None] = ()
        if numbers and output.requires_grad:
            targets = [stand_ins[number] for number in numbers]
            gradients = torch.autograd.grad(output, targets, tangent, create_graph=True, allow_unused=True)
    by_number = dict(zip(numbers, gradients, strict=False))
    reached = node.call.program.links.reached[index]
    return [
        [by_number.get(number), *[None] * (reached.count(number) - 1)]
        for number in range(len(node.call.program.links.links))
    ]
