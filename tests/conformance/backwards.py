"""Programs whose backward runs a formula in Python: what they do there beside computing gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function

Formula = Callable[[Tensor], Any]


def tries(g: Tensor) -> Tensor:
    """A formula that a trace must not follow into its handler, where eager has a number."""
    try:
        return g * g.norm().item()
    except Exception:
        return g * 100


def with_backward(formula: Formula) -> Callable[[Tensor], Tensor]:
    """A program whose gradient a custom Function computes by the formula."""

    class WithBackward(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> Any:
            return formula(g)

    return lambda x: WithBackward.apply(x) * 1


def with_hook(formula: Formula) -> Callable[[Tensor], Tensor]:
    """A program whose gradient a hook on a value of its own replaces."""

    def program(x: Tensor) -> Tensor:
        y = x * 2
        y.register_hook(formula)
        return y * 1

    return program


def gradients_of(program: Callable[[Tensor], Tensor], *inputs: Tensor) -> list[list[float]]:
    """The gradient of each input's copy, of a backward for each."""
    found = []
    for value in inputs:
        x = value.clone().requires_grad_()
        program(x).sum().backward()
        assert x.grad is not None
        found.append(x.grad.tolist())
    return found
