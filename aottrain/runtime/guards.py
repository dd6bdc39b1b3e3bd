"""What must still hold for a compiled program to be right for a call. Checked before every call; a miss recompiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.compat import autocast_state, tree_flatten
from aottrain.errors import UnsupportedError


def call_key(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """Hashable description of a call's inputs and of the global state that eager's answer depends on; and its tensors.

    Raises UnsupportedError for arguments that cannot be compared by value.
    """
    leaves, tree = tree_flatten((tuple(args), kwargs))
    parts: list[Any] = [tree, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()]
    parts += [torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()]
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            parts.append(_describe(leaf))
        else:
            parts.append(_constant(leaf))
    return tuple(parts), tensors


def _describe(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return (type(tensor), tensor.layout)
    return (
        type(tensor),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.storage_offset(),
    )


def _constant(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        # 1, 1.0 and True are equal in Python but not to a program; nan is not equal to itself.
        return (type(value), repr(value))
    raise UnsupportedError(f"an argument of type {type(value).__name__} cannot be guarded by value")


class StateGuard:
    """The module tree that a program was compiled for: the same parameters, buffers, submodules and training flags."""

    def __init__(self, module: nn.Module | None):
        self.slots: list[tuple[dict[str, Any], str, Any]] = []
        self.modes: list[tuple[nn.Module, bool]] = []
        self.sizes: list[tuple[dict[str, Any], int]] = []
        self.tensors: list[tuple[Tensor, tuple[Any, ...]]] = []
        for child in [] if module is None else module.modules():
            self.modes.append((child, child.training))
            for table in (child._parameters, child._buffers, child._modules):
                self.sizes.append((table, len(table)))
                self.slots += [(table, name, value) for name, value in table.items()]
        for _, _, value in self.slots:
            if isinstance(value, Tensor):
                self.tensors.append((value, _describe(value)))

    def holds(self) -> bool:
        return (
            all(module.training is flag for module, flag in self.modes)
            and all(table.get(name) is value for table, name, value in self.slots)
            and all(len(table) == size for table, size in self.sizes)
            and all(_describe(tensor) == known for tensor, known in self.tensors)
        )
