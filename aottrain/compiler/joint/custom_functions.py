"""Custom autograd Functions with several results, in a program with several: which of their gradients are defined.

A call's backward may come from some of a program's results. The rest have no tangents, and what they alone lead to gets
no gradient; a custom Function that runs all the same is given zeros in its place, or None, and is free to do anything
with these. One trace, in which all tangents are there, knows neither. So such a Function is taken only where a gradient
comes to all of its results or to none of them, whichever tangents there are: each result that a gradient can come to at
all is reached from the same ones. To the others no gradient ever comes: the zeros for them are made of a gradient that
does, so that they are there where it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from aottrain.compiler.joint.links import Edge, edge_of
from aottrain.errors import UnsupportedError

_MESSAGE = "a custom autograd.Function with several results, of which some may go unused"


def is_custom(node: Any) -> bool:
    return isinstance(node, BackwardCFunction)


def prepare(nodes: Sequence[Any], outputs: Sequence[Tensor], links: Sequence[Tensor]) -> None:
    """Before the backward is traced. nodes: the custom Functions' in the program's graph; outputs, links: where
    gradients come from; those at links are looked at apart.

    Raises UnsupportedError where one trace cannot stand for all backwards; the trace itself does where such a Function
    gives no gradient to an input that needs one, as what lies behind it then depends on which tangents there are.
    """
    sources = [*(value for value in outputs if value.requires_grad), *links]
    if len(sources) < 2 or all(len(node._input_metadata) < 2 for node in nodes):
        return
    reached = _reached(sources, {edge_of(link) for link in links})
    for node in nodes:
        node.register_hook(_check_gradients(node))
        if len(node._input_metadata) > 1:
            found = [reached.get((node, i), 0) for i in range(len(node._input_metadata))]
            if len({each for each in found if each}) > 1 or (not all(found) and not _is_known(node._forward_cls)):
                raise UnsupportedError(_MESSAGE)
            if not all(found):
                node.apply = _with_dependent_zeros(node.apply, [bool(each) for each in found])


def _is_known(function: Any) -> bool:
    """Whether its formula is called as its author wrote it. TorchDynamo, which puts a class of its own in the place of
    one, gives it zeros where the author asked for None; with `boxed_grads_call` gradients come as a list."""
    return not function.__module__.startswith("torch._functorch.") and not getattr(function, "boxed_grads_call", False)


def _reached(sources: Sequence[Tensor], ends: set[Edge]) -> dict[Edge, int]:
    """Of each edge the sources whose gradients come to it, a bit each. ends: beyond these none goes but their own."""
    reached: dict[Edge, int] = {}
    for number, source in enumerate(sources):
        for edge in _below(edge_of(source), ends):
            reached[edge] = reached.get(edge, 0) | 1 << number
    return reached


def _below(start: Edge, ends: set[Edge]) -> Iterator[Edge]:
    seen, stack = {start}, [start]
    while stack:
        edge = stack.pop()
        yield edge
        if edge == start or edge not in ends:
            new = {following for following in edge[0].next_functions if following[0] is not None} - seen
            seen |= new
            stack += new


def _check_gradients(node: Any) -> Any:
    """What lies behind an input that gets no gradient has none from there, but for such Functions: they make zeros of
    it, which are there or not as the other tangents are."""
    following = node.next_functions

    def check(gradients: Sequence[Tensor | None], _: Any) -> None:
        for edge, gradient in zip(following, gradients, strict=True):
            if edge[0] is not None and gradient is None and any(is_custom(each) for each, _ in _below(edge, set())):
                raise UnsupportedError(f"{_MESSAGE}; another gives no gradient")

    return check


def _with_dependent_zeros(apply: Any, comes: Sequence[bool]) -> Any:
    """The node's formula, given zeros that depend on a gradient that comes in the place of those that never do."""

    def applied(*gradients: Tensor | None) -> Any:
        known = [gradient for gradient, flag in zip(gradients, comes, strict=True) if flag and gradient is not None]
        return apply(
            *(
                gradient if flag or gradient is None else _zeros_like(gradient, known)
                for gradient, flag in zip(gradients, comes, strict=True)
            )
        )

    return applied


def _zeros_like(zeros: Tensor, known: Sequence[Tensor]) -> Tensor:
    beside = next((value for value in known if value.device == zeros.device), None)
    if beside is None:
        raise UnsupportedError(_MESSAGE)
    if beside.shape != zeros.shape or beside.dtype != zeros.dtype:
        beside = torch.zeros_like(beside).sum().to(zeros.dtype).expand(zeros.shape)
    return torch.zeros_like(beside, memory_format=torch.contiguous_format)
