"""Programs with symbolic sizes run as generated kernels: one compile for all lengths, with eager's values and draws."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.conformance.harness import FRONTENDS
from tests.skips import NO_COMPILER

pytestmark = pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
SIZES = ((3, 9), (3, 17), (5, 5), (2, 40), (4, 2))


class Block(nn.Module):
    """Norm, attention that is written out, dropout, GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, 2, 4).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -1e9)
        mixed = F.dropout(torch.softmax(scores, -1), 0.25) @ v
        return F.gelu(self.out(mixed.transpose(1, 2).reshape(b, t, 8))) + F.dropout(x, 0.5)


def _observe(call: Any, shape: tuple[int, int], seed: int, eager: bool) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(*shape, 8, requires_grad=True)
    with aottrain.philox_eager() if eager else nullcontext():
        out = call(x)
    return [out, *torch.autograd.grad(out.square().mean(), [x, *call.parameters()])]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_one_compile_serves_all_lengths(frontend: str) -> None:
    model = Block()
    reference = copy.deepcopy(model)
    step = aottrain.compile(model, capture=frontend, dynamic=True, kernel="cpp", partition="min_cut")
    for seed, shape in enumerate(SIZES):
        pairs = zip(_observe(reference, shape, seed, True), _observe(step, shape, seed, False), strict=True)
        for eager, got in pairs:
            assert eager.stride() == got.stride()
            torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)
    (graph,) = step.report.graphs
    assert graph.kernel == "cpp" and len(graph.kernels) >= 8 and not step.report.fallbacks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dropout_draws_what_eager_does(dtype: torch.dtype) -> None:
    step = aottrain.compile(lambda x: F.dropout(x * 2, 0.25), capture="trace", dynamic=True, kernel="aten")
    x = torch.ones(9, 7, dtype=dtype)
    torch.manual_seed(0)
    with aottrain.philox_eager():
        eager = F.dropout(x * 2, 0.25)
    torch.manual_seed(0)
    torch.testing.assert_close(step(x), eager)


def test_a_row_that_would_not_fit_is_another_program() -> None:
    """Up to 16,384 elements a row of softmax is held on the stack: that is a guard."""
    step = aottrain.compile(lambda x: torch.softmax(x * 2, -1), capture="trace", dynamic=True, kernel="cpp")
    for number, length in enumerate((50, 16384, 16385, 40000, 3)):
        x = torch.randn(2, length)
        torch.testing.assert_close(step(x), torch.softmax(x * 2, -1))
        assert len(step.report.graphs) == 1 + (number >= 2)


def test_a_pool_whose_result_is_divided_stands_beside_one_whose_is_not() -> None:
    """The size of the first was compared with a symbol's polynomial."""

    def pools(x: Tensor) -> Tensor:
        return F.max_pool2d(x, 2).square().sum() + F.max_pool2d(x, 3, 1, 1).sum()

    call = aottrain.compile(pools, capture="trace", dynamic=True, kernel="cpp")
    for size in (16, 20, 22):
        x = torch.randn(2, 3, size, size, requires_grad=True)
        (wanted,) = torch.autograd.grad(pools(x), x)
        (got,) = torch.autograd.grad(call(x), x)
        torch.testing.assert_close(got, wanted)
    assert call.report.fallbacks == [] and len(call.report.graphs) == 1


def _num_tables() -> int:
    """How many tables of symbols, with all fakes of their traces, are in memory."""
    for _ in range(6):  # each collection frees what the one before left without an owner
        gc.collect()
    return sum(type(value) is ShapeEnv for value in gc.get_objects())


def test_what_a_trace_found_of_sizes_is_not_kept():
    """Torch's caches keep it for as long as the process lives."""
    before = _num_tables()
    for number in range(2, 5):
        compiled = aottrain.compile(lambda x, by=number: (x * by).softmax(-1).cumsum(0), capture="trace", dynamic=True)
        for length in (5, 6):
            compiled(torch.randn(length, 4, requires_grad=True)).sum().backward()
        del compiled
    assert _num_tables() <= before
