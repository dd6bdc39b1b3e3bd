"""capture: what the inputs of a call are, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.capture.replaced_ops import MUTATION_RULES, hidden_writes
from aottrain.errors import UnsupportedError
from aottrain.ir.graph import InputKind, calls, module_of, source_of
from tests.compiler.programs import captured, joint_of, leaf, targets
from tests.numerics.comparison import assert_same

aten = torch.ops.aten


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.head = nn.Linear(3, 3)
        self.head.weight = self.inner[0].weight

    def forward(self, x, flag=True):
        return self.head(self.inner(x)) if flag else x


def test_parameters_then_buffers_then_batch_each_once():
    model, x = Tied(), torch.randn(4, 3)
    step = captured(model, x)
    kinds = [value.kind for value in step.inputs]
    assert kinds == [InputKind.PARAMETER] * 5 + [InputKind.BUFFER] * 3 + [InputKind.BATCH]
    names = [value.name for value in step.inputs]
    assert names[0] == "inner.0.weight" and "head.weight" not in names and "head.bias" in names
    assert [value.requires_grad for value in step.inputs] == [True] * 5 + [False] * 4
    assert step.primals[0] is model.head.weight and step.primals[-1] is x


def test_the_step_is_the_call():
    model, x = Tied().eval(), torch.randn(4, 3)
    step = captured(model, x)
    assert_same(step.call(step.primals), model(x))
    other = [torch.zeros_like(v) if v.is_floating_point() else v for v in step.primals]
    assert torch.equal(step.call(other), torch.zeros(4, 3))
    assert model.inner[0].weight is step.primals[0] and isinstance(model.inner[0].weight, nn.Parameter)


def test_nested_arguments_and_constants():
    def function(pair, *, table, factor):
        return pair[0] * table["w"] * factor

    a, w = torch.ones(2), torch.full((2,), 3.0)
    step = captured(function, [a, None], table={"w": w, "n": 7}, factor=2)
    assert [value.name for value in step.inputs] == ["input0", "input1"]
    assert_same(step.call([w, w]), torch.full((2,), 18.0))


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(3).to_sparse(),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, device="meta"),
    ],
    ids=["sparse", "lazy conjugate", "meta"],
)
def test_inputs_that_cannot_be_described_are_refused(value):
    with pytest.raises(UnsupportedError, match="input0"):
        captured(lambda v: v * 2, value)


def test_tensor_subclasses_are_refused():
    class Mine(torch.Tensor):
        pass

    with pytest.raises(UnsupportedError, match="Mine"):
        captured(lambda v: v * 2, torch.ones(2).as_subclass(Mine))


def test_every_op_knows_its_module_and_line():
    graph = joint_of(Tied(), torch.randn(4, 3)).graph
    products = [node for node in calls(graph) if "addmm" in str(node.target)]
    assert [module_of(node) for node in products] == ["inner.0", "head"]
    places = {module_of(node) for node in calls(graph) if "batch_norm_backward" in str(node.target)}
    assert places == {"inner.1"}, "a gradient's op belongs to the module of its forward"
    assert all(source_of(node).startswith("test_capture.py:") for node in products)


def test_batch_norm_updates_are_written_out():
    found = targets(joint_of(nn.BatchNorm1d(3), torch.randn(4, 3)).graph)
    assert "aten._native_batch_norm_legit_functional.default" in found
    assert not [t for t in found if t == "aten.native_batch_norm.default"]


def test_draws_of_the_backward_are_refused():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * torch.rand_like(g)

    with pytest.raises(UnsupportedError, match="backward draws"):
        joint_of(Noisy.apply, leaf(3))


@pytest.mark.parametrize("tracked, training", [(True, True), (False, True), (True, False)])
def test_batch_norm_of_cudnn_is_traced_as_the_native_one(tracked, training):
    """On a GPU autograd records cuDNN's, whose backward reads a library's own state."""
    x, weight, bias = torch.randn(4, 3, 5, 5), torch.randn(3), torch.randn(3)
    statistics = [(torch.zeros(3), torch.ones(3)) if tracked else (None, None) for _ in range(2)]
    forward, backward = aten.cudnn_batch_norm.default, aten.cudnn_batch_norm_backward.default
    found = MUTATION_RULES[forward](forward, (x, weight, bias, *statistics[0], training, 0.1, 1e-5), {})
    leaves = [value.clone().requires_grad_() for value in (x, weight, bias)]
    wanted = F.batch_norm(leaves[0], *statistics[1], *leaves[1:], training, 0.1, 1e-5)
    assert_same(found[0], wanted)
    if tracked:
        assert_same(list(statistics[0]), list(statistics[1]))
    assert hidden_writes(forward, (x, weight, bias, *statistics[0], training)) == ((3, 4) if training else ())
    if training:
        gradient = torch.randn_like(x)
        given = (x, gradient, weight, *statistics[0], found[1], found[2], 1e-5, found[3])
        eager = torch.autograd.grad(wanted, leaves, gradient)
        assert_same(list(MUTATION_RULES[backward](backward, given, {})), list(eager))


def test_a_compiled_function_may_be_called_inside_a_call_of_it():
    """By a function that Dynamo runs as it is: its options are then set twice."""
    inner = aottrain.compile(lambda x: x * 2, kernel="aten")

    @torch.compiler.disable
    def between(x):
        return inner(x)

    outer = aottrain.compile(lambda x: between(x + 1) + 1, kernel="aten")
    x = torch.ones(3)
    for _ in range(2):
        assert_same(outer(x), (x + 1) * 2 + 1)
