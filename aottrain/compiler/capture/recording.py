"""Recorder: what runs under it, op by op, as an fx graph. For programs of fixed sizes.

It does for them what torch's make_fx does, with a third of its layers: no proxies, no patched modules, no symbols.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import snapshot_fake
from torch.fx.node import map_aggregate
from torch.utils.weak import WeakTensorKeyDictionary

from aottrain.compat import TorchDispatchMode
from aottrain.compat_dispatch import arrived_whole, take_apart
from aottrain.counted import tell
from aottrain.ir.graph import set_value

aten = torch.ops.aten

_DEVICE = torch.ops.prim.device.default  # a question, no work
_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class Recorder(TorchDispatchMode):
    """Innermost of the modes but for the fakes: it sees what the others make of the user's ops."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        # Tensors that are neither inputs nor computed, by the target of their node.
        self.constants: dict[str, Tensor] = {}
        # By identity and weakly: whether the program has dropped a tensor of its own must stay visible.
        self._nodes = WeakTensorKeyDictionary()
        self._num_calls = 0

    def add_input(self, name: str, value: Tensor) -> None:
        self._note(value, self.graph.placeholder(name))

    def add_outputs(self, values: Iterable[Tensor | None]) -> None:
        self.graph.output([self._argument(value) for value in values])

    def node_of(self, value: Tensor) -> fx.Node | None:
        """Whose value it is: of an input, or of what has been recorded."""
        return self._nodes.get(value)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _DEVICE:
            return func(*args, **kwargs)
        leaves = list(tensors_among((args, kwargs)))
        if any(type(leaf) not in _PLAIN and leaf not in self._nodes for leaf in leaves):
            return NotImplemented  # a subclass is to unwrap itself first
        if arrived_whole(func, args, kwargs):
            with self:
                return take_apart(func, args, kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            return func(*args, **kwargs)  # of a constant: the number that comes of it is in the arguments of later ops
        # The program may write to what it makes of a constant, and the constant must stay what it is.
        target = aten.lift_fresh_copy.default if func is aten.lift_fresh.default else func
        node_args, node_kwargs = map_aggregate((args, kwargs), self._argument)
        name = self.graph._target_to_str(target.overloadpacket.__name__)
        # fx looks through the arguments of a new node for symbols, which takes longer than all else that it does.
        node = self.graph.create_node("call_function", target, name=name)
        node.args = node_args
        if node_kwargs:
            node.kwargs = node_kwargs
        out = func(*args, **kwargs)
        self._note(out, node)
        self._num_calls += 1
        tell("operations", self._num_calls)
        return out

    def _note(self, value: Any, node: fx.Node) -> None:
        """This is the node's value; of a list each item is a node of its own."""
        set_value(node, map_aggregate(value, _kept))
        if isinstance(value, Tensor):
            self._nodes[value] = node
        elif isinstance(value, (tuple, list)):
            for i, item in enumerate(value):
                self._note(item, self.graph.call_function(operator.getitem, (node, i)))

    def _argument(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = self._nodes.get(value)
        return self._constant(value) if node is None else node

    def _constant(self, value: Tensor) -> fx.Node:
        target = next((target for target, constant in self.constants.items() if constant is value), None)
        if target is None:
            target = f"_tensor_constant{len(self.constants)}"
            self.constants[target] = value
        node = self.graph.create_node("get_attr", target)
        set_value(node, value)
        return node


def _kept(value: Any) -> Any:
    """As it is now: a later op may change its shape, and it holds what autograd remembers."""
    return snapshot_fake(value) if isinstance(value, Tensor) else value


def tensors_among(values: Any) -> Iterator[Tensor]:
    """Of the arguments of an op: lists, tuples and dictionaries are looked into."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)):
            yield from tensors_among(value)
