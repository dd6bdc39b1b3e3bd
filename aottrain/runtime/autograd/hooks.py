"""Hooks on inputs that get no gradient from a run of a backward: eager does not come to them, and does not call them.

A program is one node for all of its inputs. Of results that do not all depend on all inputs, one alone may be taken
backward; autograd then goes on to each input, and calls its hooks, with None where the program has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from aottrain.compat import after_this_backward


@dataclass(frozen=True)
class _WhereDefined:
    """A hook that is called only with a gradient: one may come from elsewhere in the same backward."""

    hook: Callable[[Tensor], Any]

    def __call__(self, gradient: Tensor | None) -> Any:
        return None if gradient is None else self.hook(gradient)


def skip_undefined(inputs: Iterable[Tensor | None]) -> None:
    """Within a backward, and until it ends: hooks on these are not called with None."""
    for value in inputs:
        hooks = None if value is None else value._backward_hooks
        if hooks:
            _wrap(hooks)


def _wrap(hooks: dict[int, Any]) -> None:
    before = {key: hook for key, hook in hooks.items() if not isinstance(hook, _WhereDefined)}
    hooks.update((key, _WhereDefined(hook)) for key, hook in before.items())
    after_this_backward(lambda: _restore(hooks, before))


def _restore(hooks: dict[int, Any], before: dict[int, Any]) -> None:
    hooks.update((key, hook) for key, hook in before.items() if key in hooks)  # the others were removed meanwhile
