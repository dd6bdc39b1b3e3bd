"""A fault of the compiler's own, planted in each stage that makes kernels: operators run instead, and it is counted."""

from __future__ import annotations

import warnings

import pytest
import torch

import aottrain
import aottrain.compiler.pipeline as pipeline
from aottrain.compiler.link import backends, linking, programs, room
from aottrain.compiler.lowering import rules
from aottrain.compiler.schedule import order
from aottrain.compiler.schedule.grouping import units
from aottrain.errors import BudgetError, CapacityError
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import replace_pass

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")


def program(x, w):
    y = torch.nn.functional.gelu(x @ w)
    return y.softmax(-1).sum(), y.exp().mean()


def inputs():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(64, 64, generator=generator).requires_grad_() for _ in range(2)]


def gradients(function, index=None):
    given = inputs()
    out = function(*given)
    (sum(out) if index is None else out[index]).backward()
    return [*(value.detach() for value in out), *(value.grad for value in given)]


def broken(*_args, **_kwargs):
    raise KeyError("planted")


# Where each stage is called from, under the name that it has there.
STAGES = {
    "a rewrite": (pipeline, "split_norms"),
    "lowering": (rules._MAKERS, "aten.gelu.default"),
    "fusion": (order, "fuse"),
    "placing in a loop nest": (units, "place"),
    "scheduling": (programs, "schedule"),
    "what planning asks of kernels": (room, "apply_partition"),
    "rendering": (programs, "render_cpp"),
    "the choice of a backend": (pipeline, "choose_kernel"),
    "whether kernels pay": (backends, "rules_for"),
}


@pytest.fixture
def lenient(monkeypatch):
    monkeypatch.delenv("AOTTRAIN_FAULTS")
    return monkeypatch


def plant(monkeypatch, stage):
    owner, name = STAGES[stage]
    if stage == "a rewrite":
        return replace_pass(monkeypatch, name, broken)
    setter = monkeypatch.setitem if isinstance(owner, dict) else monkeypatch.setattr
    setter(owner, name, broken)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_operators_run_and_the_report_says_so(stage, capture, lenient):
    torch._dynamo.reset()
    aten = aottrain.compile(program, capture="trace", kernel="aten", budget=0.5)
    wanted = gradients(aten)
    plant(lenient, stage)
    kernel = "auto" if stage == "whether kernels pay" else "cpp"
    compiled = aottrain.compile(program, capture=capture, kernel=kernel, budget=0.5)
    with pytest.warns(UserWarning, match="a fault of aottrain"):
        got = gradients(compiled)
    assert all(map(torch.equal, got, wanted))
    (fallback,) = compiled.report.fallbacks
    assert "KeyError: 'planted'" in fallback.reason and "operators run one by one" in fallback.reason
    (graph,) = compiled.report.graphs
    assert graph.kernel == "aten" and graph.kernel_reason == fallback.reason
    assert graph.saved_bytes == aten.report.graphs[0].saved_bytes and graph.budget == 0.5


def test_in_a_backward_whose_kernels_are_made_late(lenient):
    wanted = gradients(program, 0)
    compiled = aottrain.compile(program, capture="trace", kernel="cpp")
    gradients(compiled)
    lenient.setattr(linking, "fuse_graph", broken)
    with pytest.warns(UserWarning, match="some tangents are undefined"):
        got = gradients(compiled, 0)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert len(compiled.report.fallbacks) == 1


def test_tests_see_it(monkeypatch):
    plant(monkeypatch, "lowering")
    with pytest.raises(KeyError):
        aottrain.compile(program, capture="trace", kernel="cpp")(*inputs())


SCALARS = {
    "mul": lambda t: t * 2,
    "add": lambda t: t + 1.5,
    "rsub": lambda t: 1 - t,
    "div": lambda t: 1 / t,
    "pow": lambda t: t**2,
    "where": lambda t: torch.where(t > 0, t, 0.5),
    "clamp": lambda t: t.clamp(0, 1),
    "addcmul": lambda t: torch.addcmul(t, t, t, value=2),
}


@pytest.mark.parametrize("kernel", ["cpp", "aten"])
@pytest.mark.parametrize("name", SCALARS)
def test_vmap_over_a_vector_with_a_number(name, kernel):
    """Its batching rules write a number as a tensor: `_to_copy(2, dtype)`."""
    for x in (torch.tensor([-2.0, 0.5, 3.0]), torch.tensor([1, 2, 5])):
        function = torch.vmap(SCALARS[name])
        try:
            wanted = function(x)
        except RuntimeError:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = aottrain.compile(lambda x, f=function: f(x), capture="trace", kernel=kernel)
            got = compiled(x)
        assert got.dtype == wanted.dtype
        torch.testing.assert_close(got, wanted)
        assert compiled.report.fallbacks == []


@pytest.mark.parametrize("error", [BudgetError("no plan"), RuntimeError("a fault")], ids=lambda e: type(e).__name__)
def test_looking_for_memory_refuses_only_what_does_not_fit(monkeypatch, error):
    """Another target may be within the budget; a fault is met again, and counted, where the program is built."""

    def fails(*_):
        raise error

    x = torch.ones(64, 64, requires_grad=True)
    call = aottrain.compile(lambda x: (x.sin() * x).sum(), capture="trace", kernel="aten", memory_bytes=1)
    with pytest.raises(CapacityError, match="the memory that it may have is 1 B:"):
        call(x)
    monkeypatch.setattr(pipeline, "peak_without_workspaces", fails)
    torch.testing.assert_close(call(x), (x.sin() * x).sum(), rtol=0, atol=0)
