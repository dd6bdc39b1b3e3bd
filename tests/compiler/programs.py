"""Joint graphs of small functions, for the tests of single stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aottrain.compiler.pipeline as pipeline
from aottrain.compiler.capture.capture import capture
from aottrain.compiler.joint.analysis import analyse
from aottrain.compiler.joint.joint import trace_joint
from aottrain.compiler.pipeline import functional_joint
from aottrain.ir.graph import InputKind, JointGraph, OutputKind, PartitionedGraph
from aottrain.runtime.executor import aten_runner


def traced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> JointGraph:
    """The joint graph before functionalization."""
    step = captured(function, *args, **kwargs)
    return trace_joint(step, analyse(step))


def joint_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> JointGraph:
    """The functional, simplified joint graph."""
    step = captured(function, *args, **kwargs)
    return functional_joint(step, analyse(step))


def captured(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    module = function if isinstance(function, nn.Module) else None
    return capture(function, module, args, kwargs)


def joint_inputs(joint: JointGraph, primals: Any, seed: int = 5) -> list[Tensor]:
    """Primals, constants, the rng state, and a tangent for each differentiable output."""
    signature = joint.signature
    state = torch.tensor([seed, 0])
    tangents = []
    for i in signature.input_indices(InputKind.TANGENT):
        spec = signature.inputs[i].spec
        tangent = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
        tangents.append(tangent.copy_(torch.linspace(-3, 5, spec.numel).cos().view(spec.shape)))
    return [*[v.detach() for v in primals], *joint.constants, state, *tangents]


def run_joint(joint: JointGraph, inputs: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """(outputs and updates, gradients) of the joint graph run whole."""
    with torch.no_grad():
        values = joint(*inputs)
    gradients = set(joint.signature.output_indices(OutputKind.GRADIENT))
    return [v for i, v in enumerate(values) if i not in gradients], [values[i] for i in sorted(gradients)]


def run_parts(parts: PartitionedGraph, inputs: list[Tensor]) -> tuple[list[Any], list[Any]]:
    """(outputs and updates, gradients) of the forward, then the backward."""
    num_early = len(parts.signature.inputs) - len(parts.signature.input_indices(InputKind.TANGENT))
    with torch.no_grad():
        values = aten_runner(parts.forward)(list(inputs[:num_early]))
        count = len(values) - len(parts.residuals)
        outputs, residuals = values[:count], values[count:]
        gradients = [] if parts.backward is None else aten_runner(parts.backward)([*residuals, *inputs[num_early:]])
    return outputs, gradients


def leaf(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def names(nodes: Any) -> list[str]:
    return [node.name for node in nodes]


def targets(graph: Any) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == "call_function"]


def replace_pass(patch: pytest.MonkeyPatch, name: str, run: Callable[[JointGraph], Any]) -> None:
    """The pipeline with another rewrite under this name, which is always made."""
    assert any(each.name == name for each in pipeline.PASSES), name
    patch.setattr(
        pipeline,
        "PASSES",
        tuple(replace(each, run=run, when=lambda _: True) if each.name == name else each for each in pipeline.PASSES),
    )
