"""aottrain.bisect names the stage, and the node, that first differs from eager. Each bug here is planted."""

import runpy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compiler.bisect import bisection
from aottrain.compiler.codegen.cpp import text as cpp_text
from aottrain.compiler.graphs.simplification import simplify
from aottrain.compiler.schedule import kernels, order
from aottrain.ir.kernels.kernel import Constant
from aottrain.ir.plan import PartitionPlan
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import replace_pass

aten = torch.ops.aten


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return F.dropout(self.last(self.norm(self.first(x)).relu()), 0.3).sum()


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net()


def test_a_right_compiler_has_no_guilty_stage(net):
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert aottrain.bisect(net, (torch.randn(6, 4),), budget=0.3).stage is None
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())


def swap(target, other):
    def plant(joint):
        for node in joint.graph.nodes:
            if node.target is target:
                node.target = other
        return joint

    return plant


@pytest.mark.parametrize(
    ("attribute", "stage"), [("trace_joint", "joint"), ("functionalize", "functional"), ("simplify", "simplified")]
)
def test_a_wrong_op_is_found_in_its_stage(net, monkeypatch, tmp_path, attribute, stage):
    plant = swap(aten.relu.default, aten.abs.default)
    right = simplify if attribute == "simplify" else getattr(bisection, attribute)
    if attribute == "simplify":
        replace_pass(monkeypatch, attribute, lambda joint: plant(right(joint)))
    else:
        monkeypatch.setattr(bisection, attribute, lambda *args: plant(right(*args)))
    found = aottrain.bisect(net, (torch.randn(6, 4),), folder=tmp_path)
    assert found.stage == stage and "output 0" in found.what
    if stage == "simplified":  # the rung before has the same node names
        assert "abs(" in found.node and found.module == "" and found.source.startswith("test_bisection.py")
        assert (tmp_path / "reproduce.py").exists()
        saved = runpy.run_path(str(tmp_path / "reproduce.py"))
        assert not torch.equal(saved["again"], saved["saved"]["expected"])


def test_a_wrong_split_is_found(net, monkeypatch):
    right = bisection.apply_partition

    def swapped(joint, plan: PartitionPlan):
        parts = right(joint, plan)
        output = parts.backward.output_node()
        first, second, *rest = output.args[0]
        output.args = ([second, first, *rest],)
        return parts

    monkeypatch.setattr(bisection, "apply_partition", swapped)
    found = aottrain.bisect(net, (torch.randn(6, 4),))
    assert found.stage == "partitioned" and found.what.startswith("gradient of first.")


def test_a_wrong_kernel_is_found(net):
    def scaled(graph, examples):
        def run(*inputs):
            return [v * 1.5 if isinstance(v, torch.Tensor) and v.is_floating_point() else v for v in graph(*inputs)]

        return run

    found = aottrain.bisect(net, (torch.randn(6, 4),), kernel=scaled)
    assert found.stage == "kernel" and "kernel" in str(found)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_kernels_agree_and_a_wrongly_compiled_one_is_named(monkeypatch):
    def program(x):
        return F.softmax(x.tanh() @ x.t(), dim=-1).exp()

    x = torch.randn(6, 6, requires_grad=True)
    assert aottrain.bisect(program, (x,), kernel="cpp").stage is None
    right = cpp_text._function
    wrong = {"tanh": "sin"}
    monkeypatch.setattr(cpp_text, "_function", lambda op, args, kind: right(wrong.get(op, op), args, kind))
    found = aottrain.bisect(program, (x,), kernel="cpp")
    assert found.stage == "kernel" and found.what == "output 0"
    assert found.node.startswith("forward_kernel_") and "(tanh)" in found.node


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("settings", [{"kernel": "auto"}, {"kernel": "cpp", "budget": 0.3}])
def test_the_kernels_are_those_that_a_compile_makes(monkeypatch, settings):
    """auto makes them for this much work, and a budget makes smaller ones."""

    def program(x):
        for _ in range(3):
            x = F.softmax(x.tanh() @ x, dim=-1)
        return x

    x = torch.randn(400, 400, requires_grad=True)
    compiled = aottrain.compile(program, capture="trace", **settings)
    compiled(x)
    wanted = compiled.report.graphs[0].kernels
    ran = []
    right = bisection.make_kernels
    monkeypatch.setattr(bisection, "make_kernels", lambda plan: ran.append(right(plan)) or ran[-1])
    assert aottrain.bisect(program, (x,), **settings).stage is None
    assert wanted and tuple(call.kernel.name for part in ran[0] for call in part.schedule.kernels) == wanted


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_a_wrong_loop_nest_is_found_before_anything_is_compiled(monkeypatch):
    def program(x):
        return x.sin() * 2

    right = kernels.lower
    monkeypatch.setattr(order, "lower", lambda group, name: _doubled(right(group, name)))
    found = aottrain.bisect(program, (torch.randn(6, 6),), kernel="cpp")
    assert found.stage == "scheduled" and found.what == "output 0"


def _doubled(call):
    """With twice its constants."""
    body = tuple(
        replace(part, value=2 * part.value) if isinstance(part, Constant) else part for part in call.kernel.body
    )
    return replace(call, kernel=replace(call.kernel, body=body))


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
@pytest.mark.parametrize("change", [{}, {"reserved_bytes": 3000}, {"cost": "measured", "workspaces": True}], ids=str)
def test_the_plan_that_runs_is_the_one_that_is_bisected(monkeypatch, kernel, change):
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(16, 16), torch.nn.GELU())))
    x = torch.randn(64, 16)
    least = aottrain.compile(net, capture="trace", budget=0.0, kernel=kernel, **change)
    options = {"budget": f"{least.prepare(x).predicted_peak_bytes + 2000}B", "kernel": kernel, **change}
    ran = aottrain.compile(net, capture="trace", **options).prepare(x)
    plans, right = [], bisection.apply_partition
    monkeypatch.setattr(bisection, "apply_partition", lambda joint, plan: plans.append(plan) or right(joint, plan))
    assert aottrain.bisect(net, (x,), **options).stage is None
    assert {value.name for value in ran.saved} == set(plans[-1].saved)
    assert {value.name for value in ran.recomputed} == set(plans[-1].recomputed)
