"""On which device the kernels of a program run, and which of its values lie elsewhere: numbers on the host."""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakKeyDictionary

import torch
from torch import fx

from aottrain.ir.graph import value_of

CPU = torch.device("cpu")
# By the graph and the number of its nodes: it may grow.
_asked: WeakKeyDictionary[fx.Graph, tuple[int, frozenset[torch.device]]] = WeakKeyDictionary()


def devices_of_kernels(graph: fx.Graph) -> frozenset[torch.device]:
    """The devices of what is read and computed. Numbers of a CPU, which have no dimensions, do not count beside one
    other device: what reads or makes them runs op by op, and torch hands them to a device's kernels as arguments."""
    known = _asked.get(graph)
    if known is None or known[0] != len(graph.nodes):
        known = _asked[graph] = len(graph.nodes), _devices(graph)
    return known[1]


def inputs_devices(graph: fx.Graph) -> frozenset[torch.device]:
    """The devices of all that a program is given."""
    given = (node for node in graph.nodes if node.op == "placeholder")
    return frozenset(tensor.device for node in given for tensor in _tensors(node))


def is_elsewhere(node: fx.Node) -> bool:
    """Whether a call reads or makes values where no kernel of its program runs."""
    tensors = [tensor for each in (node, *node.all_input_nodes) for tensor in _tensors(each)]
    devices = {tensor.device for tensor in tensors}
    if len(devices) != 1:
        return len(devices) > 1
    if devices != {CPU} or any(tensor.dim() for tensor in tensors):
        return False  # in a program with values on several devices no kernels are generated
    return CPU not in devices_of_kernels(node.graph)


def _devices(graph: fx.Graph) -> frozenset[torch.device]:
    read = [node for node in graph.nodes if node.users or node.op != "placeholder"]
    tensors = [tensor for node in read for tensor in _tensors(node)]
    found = frozenset(tensor.device for tensor in tensors)
    numbers_alone = not any(tensor.dim() for tensor in tensors if tensor.device == CPU)
    return found - {CPU} if len(found - {CPU}) == 1 and numbers_alone else found


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    value = value_of(node)
    for one in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(one, torch.Tensor):
            yield one
