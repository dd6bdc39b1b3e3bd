"""The graph that autograd keeps of an eager program: its functions, and the tensors that they keep for the backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from aottrain.explain.records import INPUT, IS_SAVED, LIBRARY, SAVED, Diagram, Flow, Step
from aottrain.ir.tensor import tensor_spec
from aottrain.ir.units import format_bytes


def autograd_diagram(result: Tensor, names: Mapping[int, str]) -> Diagram:
    """Functions in the order of the forward; what they keep is counted once for each storage.

    names: of parameters, by `id`. What lies in the memory of a leaf is there anyway, and is no saved tensor.
    ValueError: `result` has no graph.
    """
    if result.grad_fn is None:
        raise ValueError("the tensor has no grad_fn: nothing that requires a gradient went into it")
    steps: list[Step] = []
    flows: dict[tuple[int, int], Flow] = {}
    number: dict[Any, int] = {}
    kept: dict[int, int] = {}
    total = 0
    functions = list(_in_order(result.grad_fn))
    leaves = [function.variable for function in functions if isinstance(getattr(function, "variable", None), Tensor)]
    state = set(map(_storage, leaves))
    for function in functions:
        number[function] = len(steps)
        steps.append(_step(function, names))
        for before, _ in function.next_functions:
            if before is not None:
                key = number[before], number[function]
                flows.setdefault(key, Flow(*key, steps[key[0]].num_bytes))
        for name, tensor in _saved(function):
            spec, storage = tensor_spec(tensor), _storage(tensor)
            if storage in state:
                continue
            if storage not in kept:
                kept[storage] = len(steps)
                total += spec.storage_bytes
                steps.append(
                    Step(name, SAVED, f"saved {name}", (), "forward", "", str(spec), spec.storage_bytes, IS_SAVED)
                )
            key = kept[storage], number[function]
            flows[key] = Flow(*key, spec.storage_bytes, IS_SAVED)
    return Diagram(f"Autograd graph, {format_bytes(total)} saved", tuple(steps), tuple(flows.values()))


def _storage(tensor: Tensor) -> int:
    """What is the same for all tensors in one piece of memory."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def _in_order(last: Any) -> Iterator[Any]:
    """Each function after all whose results it reads."""
    done: set[Any] = set()
    stack = [(last, False)]
    while stack:
        function, is_ready = stack.pop()
        if is_ready:
            yield function
        elif function not in done:
            done.add(function)
            stack.append((function, True))
            stack += [(before, False) for before, _ in reversed(function.next_functions) if before is not None]


def _step(function: Any, names: Mapping[int, str]) -> Step:
    variable = getattr(function, "variable", None)
    if isinstance(variable, Tensor):
        spec = tensor_spec(variable)
        name = names.get(id(variable), "parameter")
        return Step(name, INPUT, name, type=str(spec), num_bytes=spec.storage_bytes)
    name = function.name().removeprefix("torch::autograd::")
    label = re.sub(r"Backward\d*$", "", name) or name
    return Step(name, LIBRARY, label)


def _saved(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of each that the function keeps; none where a backward has freed them."""
    for attribute in dir(function):
        if not attribute.startswith("_saved_") and attribute != "saved_tensors":
            continue
        try:
            value = getattr(function, attribute)
        except RuntimeError:  # freed, or of a kind that Python cannot show
            continue
        values = value if isinstance(value, (tuple, list)) else [value]
        for tensor in values:
            if isinstance(tensor, Tensor):
                yield attribute.removeprefix("_saved_"), tensor
