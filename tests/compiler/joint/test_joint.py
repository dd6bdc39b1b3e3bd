"""trace_joint: the joint graph is eager's forward and gradients, with named inputs and numbered draws."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aottrain.compiler.joint.links import _graph
from aottrain.errors import AottrainError
from aottrain.ir.graph import InputKind, OutputKind
from aottrain.ops.random.mode import PhiloxMode
from tests.compiler.programs import captured, joint_inputs, joint_of, leaf, names, run_joint, targets, traced
from tests.numerics.comparison import assert_same
from tests.numerics.programs import PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_joint_equals_eager(program):
    make, data = PROGRAMS[program]
    torch.manual_seed(3)
    model, batch = make(), data()[0]
    joint = joint_of(model, *batch)
    primals = [v.detach().clone() for v in captured(model, *batch).primals]
    inputs = joint_inputs(joint, primals)
    early, gradients = run_joint(joint, inputs)
    with PhiloxMode(torch.tensor([5, 0])):
        out = model(*batch)
        outs = [out] if isinstance(out, torch.Tensor) else list(out)
        used = [o for o in outs if o.requires_grad]
        wanted_for = [p for p in model.parameters() if p.requires_grad]
        tangents = inputs[len(inputs) - len(used) :]
        wanted = torch.autograd.grad(used, wanted_for, tangents, allow_unused=True)
    assert_same(early[: len(outs)], [o.detach() for o in outs])
    assert_same(gradients, list(wanted))


def test_placeholders_carry_names_that_people_know():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    joint = joint_of(model, torch.randn(4, 3))
    found = names(joint.placeholders)
    assert found[:2] == ["p_0_weight", "p_0_bias"] and "b_1_running_mean" in found
    assert found[-3:] == ["input0", "rng_state", "tangent0"]


def test_constants_become_inputs():
    joint = joint_of(lambda x: x * torch.tensor([1.0, 2.0]) + torch.tensor(3.0), leaf(2))
    assert [float(v.sum()) for v in joint.constants] == [3.0, 3.0]
    kinds = [value.kind for value in joint.signature.inputs]
    order = [InputKind.BATCH, InputKind.CONSTANT, InputKind.CONSTANT, InputKind.RNG, InputKind.TANGENT]
    assert kinds == order and joint.signature.num_primals == 3


def test_draws_are_numbered_in_program_order():
    joint = joint_of(lambda x: F.dropout(x, 0.5) * torch.rand(3) + torch.randn(3), leaf(3))
    draws = [n.args[1] for n in joint.graph.nodes if "philox" in str(n.target)]
    assert draws == [0, 1, 2] and joint.num_draws == 3


def test_tracing_leaves_the_generator_alone():
    before = torch.get_rng_state()
    joint_of(lambda x: F.dropout(x, 0.5), leaf(3))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_input_that_gradients_do_not_reach_has_none():
    joint = joint_of(lambda x, y: x * 2, leaf(3), leaf(3, seed=1))
    gradients = [joint.results[i] for i in joint.signature.output_indices(OutputKind.GRADIENT)]
    assert gradients[0] is not None and gradients[1] is None


def test_without_gradients_it_is_the_forward_alone():
    with torch.no_grad():
        joint = joint_of(lambda x: x.sin(), leaf(3))
    assert targets(joint.graph) == ["aten.sin.default"]
    assert not joint.signature.output_indices(OutputKind.GRADIENT)


def test_one_tangent_for_each_differentiable_output():
    joint = joint_of(lambda x: (x * 2, x.argmax(), x.sin(), x.detach() + 1), leaf(3))
    assert len(joint.inputs_of(InputKind.TANGENT)) == 2


def test_the_backward_is_traced_outside_autocast():
    x, w = torch.randn(3, 4), leaf(4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        joint = joint_of(lambda x, w: (x @ w).float().square() @ torch.ones(4, 4), x, w)
    tangent = joint.signature.inputs[-1].spec
    assert tangent.dtype == torch.bfloat16
    gradient = joint.outputs_of(OutputKind.GRADIENT)[0]
    assert gradient.meta["val"].dtype == torch.float32


@pytest.mark.parametrize(
    "function",
    [lambda x: x * float(x.detach().sum()), lambda x: x[x.detach() > 0] * 2, lambda x: x * 2 if x.sum() > 0 else x],
    ids=["item", "data-dependent shape", "branch"],
)
def test_programs_that_need_values_are_refused(function):
    with pytest.raises(Exception, match=r"(?i)data|symbol|dynamic|item|scalar|nonzero") as caught:
        traced(function, leaf(3))
    assert not isinstance(caught.value, AottrainError) or str(caught.value)


def test_paths_that_meet_again_are_walked_once():
    """Sixteen times two ways from one node to the next: 65,536 paths."""
    asked = []

    class Step:
        def __init__(self, *following):
            self.following = following

        @property
        def next_functions(self):
            asked.append(self)
            return [(step, 0) for step in self.following]

    last = Step()
    for _ in range(16):
        last = Step(Step(last), Step(last, None))
    assert len(_graph([last])) == 1 + 3 * 16
    assert len(asked) == len(set(asked)) == 1 + 3 * 16
