"""Programs that random ones were cut down to: each was silently wrong once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aottrain
import tests.numerics.test_small_programs as programs
from aottrain.compiler import pipeline as compiler
from aottrain.errors import VerificationError
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import replace_pass
from tests.numerics.test_small_programs import PLAIN, SQUARE, runs

FOUND = {
    "a write through an expand of the same size was x + (y - x)": programs.test_written_expand,
    "a write to one copy of an expanded element likewise": programs.test_written_broadcast,
    "a write through unfold loses the sign of zero": runs(
        "v0 = x0 * 1", "v0.unfold(0, 2, 2).neg_()", "v0", wanted="ran eagerly"
    ),
    "views of a base whose real strides are not the fake's": programs.test_strides_of_fakes,
    "a kernel that was traced with other strides": programs.test_group_norm,
    "a view under no_grad handed gradients on": programs.test_view_under_no_grad,
    "a view under no_grad of an input that is no leaf": runs(
        "x1[::2]; x0 * 2",
        setup=(SQUARE, "l1 = values((4, 4), torch.float32, 3).requires_grad_()", "x1 = l1 * 1"),
        grad_mode=False,
        wanted="ran eagerly",
    ),
    "what an input was computed from was let go, though no gradient reaches any input": runs(
        "with torch.no_grad(): v0 = x1.view(4, 4)", "v0.triu()", setup=(SQUARE, "x1 = x0.sin()")
    ),
    "a gradient between results was lost where none reaches an input": runs(
        "with torch.no_grad(): v0 = x0.view(4, 4)",
        "v1 = v0.cumprod(0)",
        "v1 * 2; v1",
        backward="between",
        wanted="ran eagerly",
    ),
    "a leaf that is itself a view": programs.test_leaf_that_is_a_view,
    "a view of a leaf that is itself a view, written afterwards": runs(
        "x0.movedim(-1, 0)",
        setup=("x0 = values((4, 2), torch.float32, 1).t().requires_grad_()",),
        after=("args[0].detach().add_(1)",),
    ),
    "as_strided of a view reached memory that the view does not show": runs(
        "x0.expand(2, 6)[:, 0].as_strided((2, 2), (1, 1)); x1 * x0.sum()",
        setup=("x0 = values((12,), torch.float32, 1)[::2].requires_grad_()", PLAIN.format(1, 2)),
        wanted="ran eagerly",
    ),
    "an input that the program updated had zeros added to its gradient, and -0.0 became 0.0": runs(
        "x0.reciprocal_()",
        "x0.tril()",
        setup=("l0 = values((3, 3), torch.float32, 1).requires_grad_()", "x0 = l0.sin()"),
    ),
    "what comes to a result from another one was added up before it came there": runs(
        "v0 = x0.abs().log1p()", "v0 * v0; v0", setup=(SQUARE,), backward="grad", tangents=("own", "own")
    ),
    "a check in the backward read the zeros of a tangent that never comes, which a budget's plan did not know": runs(
        "v0 = torch.normal(x0, 1.0)",
        "torch.linalg.lu_factor(torch.eye(3) * (2 + v0.sin().mean()))[0]; v0",
        plan=0.0,
        wanted="ran eagerly",
    ),
    "what an unused output saved was unpacked, though stale": programs.test_stale_unused_output,
    "attention took the strides of a fake logsigmoid for those of its kernel": programs.test_strides_of_kernels,
    "a gradient took the strides of a sum whose other part was undefined": programs.test_surviving_strides,
    "the gradient of as_strided went by strides that memory did not have": runs(
        "x0.roll(1, 2).as_strided((6,), (1,)) * 2; x0 * 2",
        setup=("x0 = values((2, 2, 4, 3), torch.float32, 1).permute(0, 3, 1, 2).requires_grad_()",),
    ),
}


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_views_of_what_took_the_place_of_a_copy_begin_where_it_begins() -> None:
    def function(x: Tensor) -> Tensor:
        v = x.sum(0)
        v.copy_(x.unbind(0)[-1])
        v.transpose(0, -1).add_(-1)
        return v

    x = torch.linspace(-2, 5, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    call = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
    torch.testing.assert_close(call(x), function(x), rtol=0, atol=0)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("groups", [0, 2])
def test_a_norm_of_a_transposed_value_gives_its_gradient_in_eagers_layout(groups) -> None:
    def function(x: Tensor) -> Tensor:
        turned = (x * x + x).mT
        return F.group_norm(turned, groups) if groups else F.batch_norm(turned, None, None, training=True)

    x = torch.linspace(-2, 5, 24).view(2, 3, 4).sin().requires_grad_()
    call = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
    tangent = torch.linspace(-1, 1, 24).view(2, 4, 3).cos()
    got, wanted = (torch.autograd.grad(target(x), x, tangent)[0] for target in (call, function))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert got.stride() == wanted.stride()


def test_a_view_that_is_noted_elsewhere_is_refused(monkeypatch) -> None:
    """Kernels go by the layouts that are noted of values: they have to be those of the graph as it is."""
    right = compiler.simplify

    def wrong(joint):
        made = right(joint)
        first = next(node for node in made.graph.nodes if node.target is torch.ops.aten.transpose.int)
        first.args = (next(iter(made.graph.nodes)), *first.args[1:])
        return made

    replace_pass(monkeypatch, "simplify", wrong)
    call = aottrain.compile(lambda x: (x[:, 1:] * 1)[1:].transpose(0, 1) * 2, capture="trace", kernel="cpp")
    with pytest.raises(VerificationError, match="is not where aten.transpose.int of"):
        call(torch.ones(4, 4))


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("to", [torch.int64, torch.int32])
def test_what_is_no_number_becomes_eagers_integer(dtype, to) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        return x.rsqrt().to(to), x.log().to(to), x.to(to), (x * 1e30).to(to)

    x = torch.tensor([-2.0, 0.0, 3.0, float("nan"), float("inf"), -float("inf")], dtype=dtype)
    for got, wanted in zip(aottrain.compile(function, capture="trace", kernel="cpp")(x), function(x), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", FOUND)
def test_found_by_fuzzing(name):
    FOUND[name]()


def test_two_equal_results_of_an_op_with_several_results_stay_two() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [F.layer_norm(x, (4,)), F.layer_norm(x, (4,))]

    with torch.no_grad():
        one, other = aottrain.compile(function, capture="trace", on_unsupported="error")(torch.randn(2, 4))
    one.add_(1)
    assert not torch.equal(one, other)


def test_a_write_into_part_of_an_expanded_input_runs_eagerly() -> None:
    def function(x: Tensor) -> Tensor:
        x[1:] = x[:-1].clone() * 2
        return x + 1

    known, got = torch.ones(1, 4).expand(2, 4), torch.ones(1, 4).expand(2, 4)
    with pytest.warns(UserWarning, match="share their memory"):
        result = aottrain.compile(function, capture="trace")(got)
    assert torch.equal(function(known), result) and torch.equal(known, got)
