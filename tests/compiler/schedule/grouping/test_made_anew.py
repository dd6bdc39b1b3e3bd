"""What a kernel computes from what it reads anyway, instead of reading it: the same bits, and less memory moved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from aottrain.compiler.schedule.grouping import fusion, inlining
from aottrain.compiler.traffic import traffic_of
from aottrain.ir.graph import storage_bytes
from aottrain.ir.schedule import KernelCall
from aottrain.toolchain.native import find_compiler
from tests.golden.programs import Golden
from tests.golden.texts import compiled
from tests.numerics.tolerance import assert_close_as_sums
from tests.skips import NO_COMPILER

SHAPE = 8, 16, 32, 32
BYTES = 8 * 16 * 32 * 32 * 4
ROWS = 8 * 32 * 32


class Block(nn.Module):
    """The relu's result is read by the second convolution, so it is in memory in the backward."""

    def __init__(self, activation=F.relu):
        super().__init__()
        self.first, self.second = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.activation = nn.BatchNorm2d(16), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.activation(self.norm(self.first(x)))).square().mean()


class Shortcut(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.norm(self.first(x)) + x)).square().mean()


def made(module: type[nn.Module], **options):
    torch.manual_seed(0)
    return module(**options), (torch.randn(SHAPE),)


def relus_read(known) -> int:
    """How many kernels of the backward read a relu's result."""
    graph, schedule = known["decided"].fused[1].graph, known["decided"].fused[1].schedule
    relus = {node for node in graph.nodes if "relu" in node.name}
    calls = [call for call in schedule.calls if isinstance(call, KernelCall)]
    return sum(bool(relus.intersection(call.reads)) for call in calls)


def moved(known) -> int:
    schedules = [fused.schedule for fused in known["decided"].fused]
    return traffic_of(known["built"]["joint"], known["built"]["parts"], schedules)[0]


@pytest.mark.parametrize("kernel", ["cpp", "triton"])
def test_a_relus_gradient_reads_what_the_norms_reads(kernel, monkeypatch):
    monkeypatch.setattr(fusion, "found_again", lambda *given: {})  # which would find it when all is fused
    program = Golden(lambda: made(Block), {"kernel": kernel})
    now = compiled(program)
    assert relus_read(now) == 0
    writes = [
        node.name
        for call in now["decided"].fused[1].schedule.calls
        if isinstance(call, KernelCall)
        for node in call.writes
        if storage_bytes(node) == BYTES
    ]
    assert not any("threshold" in name for name in writes)  # it is made twice, for the sums and for the gradient
    monkeypatch.setattr(inlining._Finder, "made_anew_by", lambda *given: {})
    before = compiled(program)
    assert relus_read(before) >= 1 and moved(before) - moved(now) > 0.9 * BYTES


def test_what_would_be_read_instead_is_as_much():
    """The sum of two values is not made again from both to save the reading of one."""
    assert relus_read(compiled(Golden(lambda: made(Shortcut), {"kernel": "cpp"}))) >= 1


@pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
@pytest.mark.parametrize("module", [Block, Shortcut])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("budget", [1.0, 0.0])
def test_the_gradients_are_those_of_kernels_that_read_it(module, layout, training, budget, monkeypatch):
    found, reports = [], []
    for way in ("eager", "now", "before"):
        if way == "before":
            monkeypatch.setattr(inlining._Finder, "made_anew_by", lambda *given: {})
        model, (x,) = made(module)
        model = model.train(training).to(memory_format=layout)
        x = x.to(memory_format=layout).requires_grad_()
        call = model
        if way != "eager":
            call = aottrain.compile(model, capture="trace", kernel="cpp", budget=budget, on_unsupported="error")
        call(x).backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        reports += [call.report.graphs[0]] if way != "eager" else []
    eager, now, before = found
    for wanted, one, other in zip(eager, now, before, strict=True):
        assert torch.equal(one, other)
        assert_close_as_sums(one, wanted, ROWS)
    assert reports[0].predicted_peak_bytes <= reports[1].predicted_peak_bytes


@pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
def test_a_relu_of_nothing_that_is_a_number():
    model, (x,) = made(Block)
    x[0, 0, 0, 0] = torch.nan
    grads = []
    for call in (model, aottrain.compile(model, capture="trace", kernel="cpp", on_unsupported="error")):
        model.zero_grad()
        call(x).backward()
        grads.append(model.first.weight.grad.isnan())
    assert torch.equal(*grads)


def test_a_call_with_several_results_of_which_one_is_a_kernels():
    """Nothing is read beside a layer norm's gradient, whose other results nobody asked for: planning found no shape."""

    def program(x: Tensor) -> Tensor:
        return F.layer_norm(torch.logaddexp(x, x), (4,)).round()

    x = torch.randn(2, 3, 4, requires_grad=True)
    call = aottrain.compile(program, capture="trace", kernel="cpp", partition="save_all")
    (gradient,) = torch.autograd.grad(call(x).sum(), x)
    assert not gradient.any()
    assert [graph.kernel for graph in call.report.graphs] == ["cpp"]
