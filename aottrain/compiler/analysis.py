"""analyse: run the captured step once on fakes and see what it writes, what its outputs alias, what needs gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from aottrain.compat import autocast_cache, tree_flatten
from aottrain.compiler.capture import CapturedStep, CaptureMode, Provenance, fake_primals
from aottrain.errors import UnsupportedError
from aottrain.ir.ops import op_info
from aottrain.ir.tensor import TensorSpec, tensor_spec


@dataclass(frozen=True)
class OutputInfo:
    """One tensor output. `alias_of`: the primal that it is (then it is returned outside the compiled function)."""

    spec: TensorSpec
    requires_grad: bool
    alias_of: int | None = None


@dataclass(frozen=True)
class Analysis:
    """outputs: the tensor leaves of the result, in order; leaves: the flat result with None in their places.

    mutated: primals whose data the call writes; out_tree rebuilds the result from its flat leaves.
    """

    outputs: tuple[OutputInfo, ...]
    leaves: tuple[Any, ...]
    is_tensor: tuple[bool, ...]
    out_tree: Any
    mutated: tuple[int, ...]
    needs_gradient: bool

    def computed_outputs(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Of a flat result, the tensors that the compiled function computes: not those that are inputs."""
        tensors = [leaf for leaf, is_tensor in zip(leaves, self.is_tensor, strict=True) if is_tensor]
        return [value for value, known in zip(tensors, self.outputs, strict=True) if known.alias_of is None]

    @property
    def computed(self) -> list[OutputInfo]:
        return [known for known in self.outputs if known.alias_of is None]


class _WatchMode(CaptureMode):
    """Capture's mode, which also notes the storage of every argument that an op writes."""

    def __init__(self, state: Tensor):
        super().__init__(state, Provenance(None))
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        writes = op_info(func).writes
        if writes:
            names = [argument.name for argument in func._schema.arguments]
            for i in writes:
                value = args[i] if i < len(args) else (kwargs or {}).get(names[i])
                for tensor in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(tensor, Tensor):
                        self.written.add(_storage_key(tensor))
        return super().__torch_dispatch__(func, types, args, kwargs)


def analyse(step: CapturedStep) -> Analysis:
    """Raises UnsupportedError where the front half has no proven treatment: see each message."""
    fake_mode = FakeTensorMode()
    primals = fake_primals(step, fake_mode)
    with fake_mode:
        state = torch.zeros(2, dtype=torch.int64, device=step.device)
        before = [_metadata(value) for value in primals]
        owners = {_storage_key(value): i for i, value in enumerate(primals)}
        with _WatchMode(state) as watch, autocast_cache(torch.is_autocast_cache_enabled()):
            result = step.call(primals)
    leaves, out_tree = tree_flatten(result)
    mutated = tuple(i for i, value in enumerate(primals) if _storage_key(value) in watch.written)
    for i, value in enumerate(primals):
        _check_state(step.inputs[i].name, before[i], value, i in mutated, torch.is_grad_enabled())
    is_tensor = tuple(isinstance(leaf, Tensor) for leaf in leaves)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    outputs = _classify_outputs(tensors, primals, owners)
    constants = tuple(None if flag else leaf for leaf, flag in zip(leaves, is_tensor, strict=True))
    needs_gradient = any(known.requires_grad for known in outputs if known.alias_of is None)
    return Analysis(outputs, constants, is_tensor, out_tree, mutated, needs_gradient)


def _classify_outputs(
    tensors: Sequence[Tensor], primals: Sequence[Tensor], owners: dict[int, int]
) -> tuple[OutputInfo, ...]:
    seen: dict[int, int] = {}
    found = []
    for position, value in enumerate(tensors):
        identity = next((i for i, primal in enumerate(primals) if value is primal), None)
        if identity is None:
            key = _storage_key(value)
            if key in owners:
                raise UnsupportedError(f"output {position} is a view of an input")
            if seen.setdefault(key, position) != position:
                raise UnsupportedError(f"outputs {seen[key]} and {position} share their memory")
            if value._is_view() and value.requires_grad:
                raise UnsupportedError(f"output {position} is a differentiable view of an intermediate value")
        found.append(OutputInfo(tensor_spec(value), value.requires_grad, identity))
    return tuple(found)


def _check_state(name: str, before: Any, value: Tensor, mutated: bool, grad_mode: bool) -> None:
    if _metadata(value) != before:
        raise UnsupportedError(f"{name} changes its shape, strides or storage in place")
    if mutated and grad_mode and value.requires_grad and not value.is_leaf:
        raise UnsupportedError(f"{name} is mutated where gradients flow through it")


def _metadata(value: Tensor) -> tuple[Any, ...]:
    return tuple(value.shape), tuple(value.stride()), value.storage_offset(), _storage_key(value), value.dtype


def _storage_key(value: Tensor) -> int:
    return value.untyped_storage()._cdata
