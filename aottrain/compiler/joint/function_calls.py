"""Calls of custom autograd Functions, as a trace meets them: what a replay of the forward needs to make them again.

A graph holds the operators of such a Function's forward and, apart from these, those of its backward. Autograd sees
both as one node, whose formula is Python's: a replay calls the Function itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compat import flatten_values, tree_unflatten
from aottrain.compat_dispatch import in_backward
from aottrain.compiler.capture.recording import Recorder
from aottrain.ir.values import PLAIN_TYPES

_META = "aottrain_function_call"


@dataclass(frozen=True, eq=False)
class FunctionCall:
    """One call, by nodes of the graph."""

    again: Callable[..., list[Any]]
    """Calls the Function with these tensors in the places of the operands, and gives its flat results."""
    operands: tuple[fx.Node, ...]
    """Of the tensors among its arguments."""
    results: tuple[fx.Node | None, ...]
    """Of each of its flat results; None where that is no tensor."""
    records: bool
    """Whether gradients were recorded where it was called."""


def call_of(node: fx.Node) -> FunctionCall | None:
    """The call whose forward has run this node: None outside of any, and where a call cannot be made again."""
    return node.meta.get(_META)


def is_within(node: fx.Node) -> bool:
    """Whether a custom Function's forward has run this node."""
    return _META in node.meta


@contextmanager
def functions_noted(recorder: Recorder | None) -> Iterator[None]:
    """Inside, the nodes that a custom Function's forward adds to the recorded graph are told apart by its call."""
    if recorder is None:
        yield
        return
    apply, thread, is_open = torch.autograd.Function.__dict__["apply"], threading.get_ident(), [False]

    def noted(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or is_open[0]:
            return apply.__get__(None, cls)(*args, **kwargs)
        is_open[0] = True
        try:
            last = recorder.graph._root._prev
            known = _known(recorder, cls, args, kwargs)
            result = apply.__get__(None, cls)(*args, **kwargs)
            _note(recorder, last, known, result)
        finally:
            is_open[0] = False
        return result

    function: Any = torch.autograd.Function
    function.apply = classmethod(noted)
    try:
        yield
    finally:
        function.apply = apply


Known = tuple[Callable[..., list[Any]], tuple[fx.Node, ...]]


def _known(recorder: Recorder, cls: Any, args: Any, kwargs: Any) -> Known | None:
    """What a call is made of again. None where that is more than tensors and plain values, or hangs on its caller:
    what autocast is there, and a gradient formula that makes the call. None for the class that TorchDynamo puts in the
    place of the author's: its formula was followed under no_grad, and does not say what else was."""
    leaves, tree = flatten_values((tuple(args), kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    operands = [node for node in (recorder.node_of(leaves[i]) for i in places) if node is not None]
    plain = all(isinstance(leaf, (Tensor, *PLAIN_TYPES)) for leaf in leaves) and len(operands) == len(places)
    if not plain or in_backward() or _autocasts() or cls.__module__.startswith("torch._"):
        return None
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def again(*values: Tensor) -> list[Any]:
        filled: list[Any] = list(rest)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        call_args, call_kwargs = tree_unflatten(filled, tree)
        return flatten_values(cls.apply(*call_args, **call_kwargs))[0]

    return again, tuple(operands)


def _autocasts() -> bool:
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _note(recorder: Recorder, last: fx.Node, known: Known | None, result: Any) -> None:
    call = None
    if known is not None:
        results = tuple(recorder.node_of(v) if isinstance(v, Tensor) else None for v in flatten_values(result)[0])
        call = FunctionCall(*known, results, torch.is_grad_enabled())
    node = recorder.graph._root._prev
    while node is not last:
        node.meta[_META] = call
        node = node._prev
