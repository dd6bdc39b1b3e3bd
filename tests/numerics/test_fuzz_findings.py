"""Programs that random ones were cut down to: each was silently wrong once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aottrain
import tests.planted_checks as checks
from aottrain import compiler
from aottrain.compiler.rewriting import fake_result
from aottrain.ir.graph import value_of, view_source
from aottrain.runtime.native import find_compiler
from tests.numerics.fuzz_checking import check, legal
from tests.numerics.fuzzing import generate
from tests.planted_checks import PLAIN, SQUARE, runs

FOUND = {
    "a write through an expand of the same size was x + (y - x)": checks.written_expand,
    "a write to one copy of an expanded element likewise": checks.written_broadcast,
    "a write through unfold loses the sign of zero": runs(
        "v0 = x0 * 1", "v0.unfold(0, 2, 2).neg_()", "v0", wanted="ran eagerly"
    ),
    "views of a base whose real strides are not the fake's": checks.strides_of_fakes,
    "a kernel that was traced with other strides": checks.group_norm,
    "a view under no_grad handed gradients on": checks.view_under_no_grad,
    "a view under no_grad of an input that is no leaf": runs(
        "x1[::2]; x0 * 2",
        setup=(SQUARE, "l1 = values((4, 4), torch.float32, 3).requires_grad_()", "x1 = l1 * 1"),
        grad_mode=False,
        wanted="ran eagerly",
    ),
    "a leaf that is itself a view": checks.leaf_that_is_a_view,
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
    "what an unused output saved was unpacked, though stale": checks.stale_unused_output,
    "attention took the strides of a fake logsigmoid for those of its kernel": checks.strides_of_kernels,
    "a gradient took the strides of a sum whose other part was undefined": checks.surviving_strides,
    "the gradient of as_strided went by strides that memory did not have": runs(
        "x0.roll(1, 2).as_strided((6,), (1,)) * 2; x0 * 2",
        setup=("x0 = values((2, 2, 4, 3), torch.float32, 1).permute(0, 3, 1, 2).requires_grad_()",),
        wanted="ran eagerly",
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


@pytest.mark.parametrize("first", [0, 20, 1360])
def test_every_view_lies_where_its_op_puts_it(first, monkeypatch) -> None:
    """Kernels go by the layouts that are noted of values: they have to be those of the graph as it is."""
    graphs = []
    for stage in ("simplify", "split_norms"):
        made = getattr(compiler, stage)
        monkeypatch.setattr(compiler, stage, lambda *args, made=made: graphs.append(made(*args)) or graphs[-1])
    for seed in range(first, first + 20):
        check(legal(generate(seed)), kernel="cpp")
    views = 0
    for joint in graphs:
        for node in joint.graph.nodes:
            if view_source(node) is None or not isinstance(value_of(node), Tensor):
                continue
            known, again = value_of(node), fake_result(node.target, node.args, node.kwargs)
            assert (known.shape, known.stride(), known.storage_offset(), known.dtype) == (
                (again.shape, again.stride(), again.storage_offset(), again.dtype)
            ), f"{node.format_node()}"
            views += 1
    assert views > 100


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
