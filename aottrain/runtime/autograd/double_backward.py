"""A backward under create_graph=True: the forward runs again as ordinary ops, which autograd differentiates."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import disable_autocast
from aottrain.errors import UnsupportedError
from aottrain.ir.tensor import version_of
from aottrain.runtime.autograd.chain import LinkMode

SMALL_BYTES = 1 << 16
# Of a primal of a call: itself, or None where it is gone; what stands for it then; and the version that it had.
FoundAgain = tuple[Callable[[], Tensor | None], Tensor | None, int | None]


@dataclass(frozen=True)
class Replay:
    """The forward as differentiable ops."""

    run: Callable[[Sequence[Tensor | None], Mapping[int, Tensor]], Sequence[Tensor]]
    """(the forward's inputs, tensors that take the places of links, by number) -> outputs."""
    read: frozenset[int]
    """The primals that it reads, or writes; None may stand for others."""
    written: frozenset[int]
    """The primals that the program updates: they are other values by then."""


class _WithHistory(torch.autograd.Function):
    """A tensor of its own with a value's history: what is written to the value later is no part of that."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, tangent: Tensor) -> Tensor:
        return tangent


def found_again(program: Any, primals: Sequence[Tensor]) -> tuple[FoundAgain, ...]:
    """The primals of a call, of which its forward runs again under create_graph=True.

    Small ones are kept as long as the call's graph, for the caller may have let them go, as a batch that it made for
    this call alone, and so are values that the program replaces. Large ones are not: a step that differentiates once
    has no use for their memory.
    """
    replay: Replay | None = program.replay
    if replay is None:
        return tuple((weakref.ref(value), None, None) for value in primals)
    cut_off = program.cut_off
    return tuple((weakref.ref(v), *_kept(v, i, replay, i in cut_off)) for i, v in enumerate(primals))


def _kept(value: Tensor, index: int, replay: Replay, is_detached: bool) -> tuple[Tensor | None, int | None]:
    is_written = index in replay.written
    version = None if is_written else version_of(value)
    if index not in replay.read or (value.requires_grad and value.is_leaf):
        return None, version
    if max(value.nbytes, value.untyped_storage().nbytes()) > SMALL_BYTES:
        return None, version
    if is_written:
        return value.detach().clone(), version
    if is_detached or not value.requires_grad:
        return value.detach(), version
    with torch.enable_grad():
        return _WithHistory.apply(value), version


def _found(found: FoundAgain, is_written: bool) -> Tensor:
    itself, kept, version = found
    if is_written and kept is not None:
        return kept.clone()  # the forward writes to it
    value = None if is_written else itself()
    value = kept if value is None else value
    if value is None or (version is not None and version_of(value) != version):
        raise UnsupportedError("create_graph=True needs the inputs of the forward, and one is gone or was modified")
    # A view, at which the inner differentiation below ends: the caller's hooks are for the outer one.
    return value.view_as(value) if value.requires_grad else value


def _replayed(node: Any, stand_ins: Mapping[int, Tensor]) -> tuple[list[Tensor | None], Sequence[Tensor]]:
    """The forward of a node, run again as ordinary ops: its primals, and its outputs, which autograd can differentiate.

    Raises UnsupportedError where the forward cannot be run again: see each message.
    """
    call = node.call
    program = call.program
    if program.replay is None:
        raise UnsupportedError(
            "create_graph=True through a program that draws by rng='eager', or updates what gradients come to; or with "
            "a custom autograd.Function, or writes under no_grad, where results depend on each other; or with "
            "a Function that is called under autocast or with objects, or that TorchDynamo has followed"
        )
    read, written = program.replay.read, program.replay.written
    primals = [_found(found, i in written) if i in read else None for i, found in enumerate(call.inputs)]
    inputs = [*primals, *program.constants, *program.symbols(call.sizes), call.state]
    return primals, program.replay.run(inputs, stand_ins)


def differentiable_gradients(ctx: Any, tangents: Sequence[Tensor | None], mode: LinkMode) -> list[Tensor | None]:
    """The gradients under create_graph=True. Raises UnsupportedError, as `_replayed`."""
    with disable_autocast():
        primals, outputs = _replayed(ctx, ctx.call.link_state.stand_ins(mode))
        pairs = [(o, t) for o, t in zip(outputs, tangents, strict=True) if t is not None and o.requires_grad]
        required = [i for i, value in enumerate(primals) if value is not None and value.requires_grad]
        indices = [i for i in required if ctx.needs_input_grad[i + 1]]
        if not indices:
            return [None] * len(primals)
        gradients = torch.autograd.grad(
            [output for output, _ in pairs],
            [primals[i] for i in indices],  # type: ignore[misc]
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
