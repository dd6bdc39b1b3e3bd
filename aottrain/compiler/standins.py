"""Around a run of the user's code on stand-ins: they take the places of the real tensors, and nothing leaks out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from aottrain.compat import no_onednn, no_saved_tensor_hooks, tree_map
from aottrain.errors import UnsupportedError

CUSTOM_FUNCTION = "a custom autograd.Function"


@contextmanager
def installed(module: nn.Module, table: dict[int, Tensor]) -> Iterator[None]:
    """Inside, each parameter and buffer slot of the tree holds the stand-in of its tensor (tied ones the same).

    Raises UnsupportedError where the program puts another tensor into a slot: that would be lost with the stand-ins.
    """
    slots: list[tuple[dict[str, Any], str, Tensor]] = [
        (slot, name, value)
        for child in module.modules()
        for slot in (child._parameters, child._buffers)
        for name, value in slot.items()
        if value is not None
    ]
    # Recurrent layers keep a list of their weights, which they make anew when they see the stand-ins.
    recurrent = [(vars(child), dict(vars(child))) for child in module.modules() if isinstance(child, nn.RNNBase)]
    for slot, name, value in slots:
        slot[name] = table[id(value)]
    try:
        yield
        moved = [name for slot, name, value in slots if slot.get(name) is not table[id(value)]]
    finally:
        for slot, name, value in slots:
            slot[name] = value
        for attributes, before in recurrent:
            attributes.update(before)
    if moved:
        raise UnsupportedError(f"the program assigns another tensor to {moved[0]}")


@contextmanager
def contained() -> Iterator[None]:
    """Around every run of the user's code on stand-ins: what it would do to the world beside its inputs is refused."""
    backward, grad_mode = torch.autograd.backward, torch.is_grad_enabled()
    random_state, numpy_state = random.getstate(), numpy.random.get_state()

    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError("the program calls backward() inside")

    class NoGenerator:
        def __getattr__(self, name: str) -> None:
            raise UnsupportedError(f"the program calls {name} of torch's random generator")

    generator = torch.random.default_generator
    torch.autograd.backward = refuse
    torch.random.default_generator = NoGenerator()  # type: ignore[assignment]
    try:
        # oneDNN's LSTM keeps a workspace only while autograd records, which compiled graphs do not: it is decomposed.
        with no_saved_tensor_hooks(), no_onednn():
            yield
        if torch.is_grad_enabled() != grad_mode:
            raise UnsupportedError("the program changes the grad mode of its caller")
        if random.getstate() != random_state or str(numpy.random.get_state()) != str(numpy_state):
            raise UnsupportedError("the program draws from Python's or NumPy's random generator")
    finally:
        torch.autograd.backward = backward
        torch.random.default_generator = generator
        torch.set_grad_enabled(grad_mode)
        random.setstate(random_state)
        numpy.random.set_state(numpy_state)


@contextmanager
def swapping(table: dict[int, Tensor], notes: set[str]) -> Iterator[None]:
    """Inside, torch functions that are given a tensor of the table (by identity) see its stand-in."""
    apply = torch.autograd.Function.__dict__["apply"]

    def swapped(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Not a torch function: the mode below does not see it, and the gradient would go to the real tensor.
        notes.add(CUSTOM_FUNCTION)
        return apply.__func__(cls, *_swap(table, args), **_swap(table, kwargs))

    torch.autograd.Function.apply = classmethod(swapped)  # type: ignore[assignment,method-assign]
    try:
        with _SwapMode(table) if table else nullcontext():
            yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _swap(table: dict[int, Tensor], value: Any) -> Any:
    return tree_map(lambda leaf: table.get(id(leaf), leaf) if isinstance(leaf, Tensor) else leaf, value)


class _SwapMode(TorchFunctionMode):
    def __init__(self, table: dict[int, Tensor]):
        super().__init__()
        self.table = table

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*_swap(self.table, args), **_swap(self.table, kwargs or {}))
