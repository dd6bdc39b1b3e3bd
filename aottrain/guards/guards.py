"""What must still hold for a compiled program to be right for a call. Checked before every call; a miss recompiles."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from aottrain.compat import (
    autocast_state,
    default_device,
    flatten_values,
    has_function_modes,
    in_dual_level,
    is_wrapped,
    validates_distributions,
)
from aottrain.compat_dispatch import told_of_nodes
from aottrain.compat_distributed import in_parts
from aottrain.compat_dynamo_inputs import dynamic_marks, no_marks
from aottrain.errors import UnsupportedError
from aottrain.ir.tensor import is_injective
from aottrain.ir.values import PLAIN_TYPES

# Arguments that a key knows by identity; a `StateGuard` looks into them, and knows when they are gone.
BY_IDENTITY = (nn.Module, types.FunctionType)
FORWARD_MODE = "the call is inside a level of forward-mode differentiation"
NODE_HOOKS = "the call is inside torch.autograd.graph.node_creation_hook, which is shown each of eager's nodes"


def unfit_now() -> str | None:
    """Why no compiled program may serve a call that is made now, whatever its inputs are."""
    if in_dual_level():
        return FORWARD_MODE
    return NODE_HOOKS if told_of_nodes() else None


def call_key(args: Sequence[Any], kwargs: dict[str, Any], dynamic: bool = False) -> tuple[Any, list[Tensor]]:
    """Hashable description of a call's inputs and of the global state that eager's answer depends on; and its tensors.

    Sizes that may be symbolic are left out: all of the inputs' under `dynamic`, and dimensions that the caller marked.
    Raises UnsupportedError for arguments that cannot be compared by value.
    """
    if has_function_modes():
        raise UnsupportedError("the call is inside a TorchFunctionMode, which could change any function")
    if reason := unfit_now():
        raise UnsupportedError(reason)
    if parametrize._cache_enabled:
        raise UnsupportedError("the call is inside torch.nn.utils.parametrize.cached(), which would keep stand-ins")
    leaves: Sequence[Any]
    tree: Any
    if not kwargs and all(isinstance(value, Tensor) for value in args):
        leaves, tree = args, len(args)  # no nest to look into
    else:
        leaves, tree = flatten_values((tuple(args), kwargs))
    parts: list[Any] = [tree, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state()]
    parts += [torch.get_default_dtype(), default_device(), torch.are_deterministic_algorithms_enabled()]
    parts.append(validates_distributions())
    tensors = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if leaf.is_nested:
                raise UnsupportedError("an argument is a nested tensor")
            own = vars(leaf)
            if is_wrapped(leaf) or (own and not (no_marks(own) or in_parts(leaf))):  # of parts the capture says more
                raise UnsupportedError("an argument is inside torch.func, or carries attributes of its own")
            tensors.append(leaf)
            parts.append(describe(leaf, dynamic_dims(leaf, dynamic) if own or dynamic else frozenset()))
        else:
            parts.append(_constant(leaf))
    parts.append(alias_pattern(tensors))
    return tuple(parts), tensors


def dynamic_dims(tensor: Tensor, dynamic: bool) -> frozenset[int]:
    """The dimensions whose sizes may differ from call to call without another program."""
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        return frozenset()
    return frozenset(range(tensor.dim())) if dynamic else dynamic_marks(tensor)


def describe(tensor: Tensor, dynamic: frozenset[int] = frozenset()) -> tuple[Any, ...]:
    if is_lazy(tensor):
        raise UnsupportedError("a parameter or buffer gets its shape at the first call")
    if tensor.layout != torch.strided:
        return (type(tensor), tensor.layout)
    return (
        type(tensor),
        *((tensor.shape, tensor.stride()) if not dynamic else (tensor.dim(), tuple(dynamic), is_injective(tensor))),
        tensor.dtype,
        tensor.device,
        tensor.requires_grad,
        tensor.is_leaf,
        tensor.storage_offset(),
        tensor.is_inference(),
    )


def is_another(tensor: Callable[[], Tensor | None], description: tuple[Any, ...]) -> bool:
    """Whether a tensor is gone, or described otherwise."""
    value = tensor()
    return value is None or describe(value) != description


def argument_objects(args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """A call's modules, functions, dataclasses and members of enums, whose insides its key does not hold."""
    leaves = flatten_values((tuple(args), kwargs))[0]
    return [leaf for leaf in leaves if isinstance(leaf, (*BY_IDENTITY, enum.Enum)) or _is_record(leaf)]


def _constant(value: Any) -> Any:
    if isinstance(value, (*PLAIN_TYPES, numpy.number, numpy.bool_)):
        # 1, 1.0 and True are equal in Python but not to a program; nan is not equal to itself.
        return (type(value), repr(value))
    if isinstance(value, BY_IDENTITY):
        return (type(value), id(value))
    if isinstance(value, (types.MethodDescriptorType, enum.Enum)) or _is_plain_builtin(value):
        return (type(value), value)
    if _is_record(value):
        return (type(value), *(_constant(getattr(value, field.name)) for field in fields(value)))
    raise UnsupportedError(f"an argument of type {type(value).__name__} cannot be guarded by value")


def _is_plain_builtin(value: Any) -> bool:
    """Whether it is a function of C, such as torch.sin, and not a method of some object."""
    owner = getattr(value, "__self__", None)
    return isinstance(value, types.BuiltinFunctionType) and isinstance(owner, (type(None), types.ModuleType, type))


def _is_record(value: Any) -> bool:
    """Whether it is a dataclass that holds its fields and nothing else."""
    if not is_dataclass(value) or isinstance(value, type):
        return False
    return getattr(value, "__dict__", {}).keys() <= {field.name for field in fields(value)}


def alias_pattern(tensors: Sequence[Tensor]) -> tuple[tuple[int, int], ...]:
    """For each tensor the first one that is the same object, and the first one in the same storage."""
    objects: dict[int, int] = {}
    storages: dict[int, int] = {}
    pattern = []
    for i, tensor in enumerate(tensors):
        storage = tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
        pattern.append((objects.setdefault(id(tensor), i), storages.setdefault(storage, i)))
    return tuple(pattern)


def is_disjoint(primals: Sequence[Tensor], written: Sequence[int]) -> bool:
    """Whether no written primal shares its storage with another primal."""
    counts: dict[int, int] = {}
    for tensor in primals:
        key = tensor.untyped_storage()._cdata
        counts[key] = counts.get(key, 0) + 1
    return all(counts[primals[i].untyped_storage()._cdata] == 1 for i in written)
