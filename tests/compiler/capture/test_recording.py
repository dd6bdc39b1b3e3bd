"""What is recorded of a program is what torch's own tracer makes of it, node by node."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aottrain.compiler.capture.fakes import KernelFakes
from aottrain.compiler.capture.recording import Recorder, tensors_among
from aottrain.ir.graph import value_of
from aottrain.ir.text import graph_text


def _views(x: Tensor, y: Tensor) -> list[Tensor | None]:
    a, b = x.t().split(2, dim=0)[:2]
    return [a.reshape(-1), None, b.sum() + y.view(-1)[0]]


def _in_place(x: Tensor, y: Tensor) -> list[Tensor | None]:
    z = x.clone()
    z[0].mul_(2)
    torch.add(y, 1, out=z)
    torch._foreach_add_([z, y.clone()], 1.0)
    return [z, z.t_()]


def _constants(x: Tensor, y: Tensor) -> list[Tensor | None]:
    scale = torch.tensor([2.0])
    scale.mul_(3)
    flag = torch.tensor(True)
    return [x * scale if flag else y, y * torch.tensor(0.5).item()]


def _several_results(x: Tensor, y: Tensor) -> list[Tensor | None]:
    values, places = x.topk(2)
    return [values, places, *torch.var_mean(y, dim=1)]


def _with_gradients(x: Tensor, y: Tensor) -> list[Tensor | None]:
    x, y = x.requires_grad_(), y.requires_grad_()
    out = F.layer_norm(F.gelu(x @ y.t()).exp(), (4,))
    return [out, *torch.autograd.grad(out.sum(), [x, y])]


def _attention(x: Tensor, y: Tensor) -> list[Tensor | None]:
    q, k = (v.requires_grad_().view(1, 1, 4, 4) for v in (x, y))
    return list(torch.autograd.grad(F.scaled_dot_product_attention(q, k, k).sum(), [q, k]))


PROGRAMS = [_views, _in_place, _constants, _several_results, _with_gradients, _attention]


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_equals_torchs_tracer(program, mode):
    if mode is not torch.enable_grad and program in (_with_gradients, _attention):
        mode = torch.enable_grad
    with KernelFakes(), mode():
        traced = make_fx(program, decomposition_table={})(torch.empty(4, 4), torch.empty(4, 4)).graph
        recorder = Recorder()
        inputs = torch.empty(4, 4), torch.empty(4, 4)
        for name, value in zip(("x_1", "y_1"), inputs, strict=True):
            recorder.add_input(name, value)
        with recorder:
            outputs = program(*inputs)
        recorder.add_outputs(outputs)
    assert graph_text(recorder.graph) == graph_text(traced)
    for ours, theirs in zip(recorder.graph.nodes, traced.nodes, strict=True):
        assert ours.name == theirs.name and ours.target == theirs.target
        pairs = zip(tensors_among([value_of(ours)]), tensors_among([value_of(theirs)]), strict=True)
        assert all(a.stride() == b.stride() and a.storage_offset() == b.storage_offset() for a, b in pairs)


def test_values_keep_the_shape_that_they_had():
    with KernelFakes():
        x = torch.empty(2, 3)
        recorder = Recorder()
        recorder.add_input("x", x)
        with recorder:
            y = x.clone().t_()
        recorder.add_outputs([y])
    cloned, turned = [node for node in recorder.graph.nodes if node.op == "call_function"]
    assert value_of(cloned).shape == (2, 3) and value_of(turned).shape == (3, 2)


def test_a_constant_is_not_what_the_program_writes_to():
    with KernelFakes():
        recorder = Recorder()
        with recorder:
            value = torch.tensor([1.0]).add_(1)
        recorder.add_outputs([value])
    (constant,) = recorder.constants.values()
    assert constant.tolist() == [1.0]
    assert "lift_fresh_copy" in graph_text(recorder.graph)
