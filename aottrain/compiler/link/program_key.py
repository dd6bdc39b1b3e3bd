"""What the schedules of a program hang on, as one text that is the same in another process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from aottrain.compiler.options import CompileOptions
from aottrain.ir.graph import JointGraph, value_of
from aottrain.ir.ops import communicates
from aottrain.ir.tensor import TensorSpec, tensor_spec
from aottrain.measure.calls import environment
from aottrain.toolchain.kept import code_of, key_of

_CODE = ("compiler", "ir", "measure", "ops")


def schedules_key(joint: JointGraph, options: CompileOptions, defined: tuple[bool, ...]) -> str:
    """Of this program's plans the same kernels' peaks. "" where it is not said: of open sizes, which are guarded as
    schedules are made, and where other processes take part."""
    if joint.signature.num_sizes or any(communicates(node.target) for node in joint.graph.nodes):
        return ""
    device = next((spec.spec.device for spec in joint.signature.inputs), None)
    if device is None:
        return ""
    specs: dict[TensorSpec, int] = {}
    nodes = [_line(node, specs) for node in joint.graph.nodes]
    chosen = options.kernel, options.reserved_bytes, options.workspaces, options.cost, defined, joint.rng
    return key_of((code_of(*_CODE), environment(device), chosen, joint.signature, list(specs), *nodes))


def _line(node: fx.Node, specs: dict[TensorSpec, int]) -> str:
    kwargs = [(name, _text(value)) for name, value in node.kwargs.items()]
    arguments = [_text(value) for value in node.args]
    return f"{node.name} {_types(value_of(node), specs)} {node.op} {node.target} {arguments} {kwargs}"


def _types(value: Any, specs: dict[TensorSpec, int]) -> str:
    if isinstance(value, (tuple, list)):
        return f"[{' '.join(_types(item, specs) for item in value)}]"
    if isinstance(value, Tensor):
        starts = value.storage_offset() if value.layout is torch.strided else ""
        return f"{specs.setdefault(tensor_spec(value), len(specs))}+{starts}"
    return f"{type(value).__name__} {value}"


def _text(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (tuple, list)):
        return f"[{' '.join(map(_text, value))}]"
    return f"{type(value).__name__} {value}"
