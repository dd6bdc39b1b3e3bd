"""Calls that are alike, as in the repeated blocks of a model: what is computed for one of them holds for all."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import fx

from aottrain.compiler.graphs.rewriting import fake_result
from aottrain.ir.graph import copy_provenance, set_value, spec_of, value_of
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


class SharedValues:
    """What new calls give for fakes, found once for calls that are alike: that takes most of the time of making one.

    Of these values nobody may ask in whose memory they lie: a view need not lie in that of what it is a view of.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def add_call(
        self, like: fx.Node, target: Any, arguments: tuple[Any, ...], name: str | None = None, **kwargs: Any
    ) -> fx.Node:
        """As `rewriting.add_call`."""
        node = like.graph.create_node("call_function", target, arguments, kwargs, name)
        copy_provenance(like, node)
        set_value(node, self._value(target, arguments, kwargs))
        return node

    def _value(self, target: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is operator.getitem:
            source, place = arguments
            return value_of(source)[place]
        try:
            key = target, _told(arguments), *((name, _told(value)) for name, value in kwargs.items())
            if key not in self._known:
                self._known[key] = fake_result(target, arguments, kwargs)
        except TypeError:  # a symbolic size, or another argument that has no hash
            return fake_result(target, arguments, kwargs)
        return self._known[key]


def _told(argument: Any) -> Hashable:
    """All that a call can read of the fake of an argument."""
    if isinstance(argument, fx.Node):
        value, spec = value_of(argument), spec_of(argument)
        if spec is None or spec.symbolic is not None or value.layout is not torch.strided:
            raise TypeError("a value that no spec tells wholly")
        return spec, value.storage_offset(), value.is_conj(), value.is_neg()
    if isinstance(argument, (tuple, list)):
        return tuple(map(_told, argument))
    return type(argument), argument  # 1 is True, and 1.0
