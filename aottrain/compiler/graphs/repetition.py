"""Calls that are alike, as in the repeated blocks of a model: what is computed for one of them holds for all."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from torch import fx

from aottrain.ir.graph import spec_of, value_of
from aottrain.ir.tensor import TensorSpec

T = TypeVar("T")


class Kinds:
    """Of calls: two have the same key where they run the same op on arguments of the same layout and values, and where
    the same of them are one tensor, which is read once."""

    def __init__(self) -> None:
        self._specs: dict[TensorSpec, int] = {}

    def key(self, node: fx.Node) -> Hashable:
        """None for a call that is like no other, as far as is known."""
        try:
            kwargs = [(name, self._part(value)) for name, value in node.kwargs.items()]
            key = node.target, len(node.all_input_nodes), self._part(node), self._part(node.args), *kwargs
            hash(key)
        except TypeError:  # a symbolic size, or another argument that has no hash
            return None
        return key

    def _part(self, value: Any) -> Hashable:
        if isinstance(value, fx.Node):
            spec = spec_of(value)
            if spec is not None:
                return "tensor", self._specs.setdefault(spec, len(self._specs))
            items = value_of(value)
            if isinstance(items, (tuple, list)):
                return "items", len(value.users)
            return value  # a size, say
        if isinstance(value, (tuple, list)):
            return tuple(map(self._part, value))
        return type(value), value  # 1 is True, and 1.0


def once_for_alike(function: Callable[[fx.Node], T]) -> Callable[[fx.Node], T]:
    """The function, called once for calls that are alike."""
    kinds = Kinds()
    results: dict[Hashable, T] = {}

    def of(node: fx.Node) -> T:
        key = kinds.key(node)
        if key is None:
            return function(node)
        if key not in results:
            results[key] = function(node)
        return results[key]

    return of
