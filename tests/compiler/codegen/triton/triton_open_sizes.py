"""Kernels whose sizes each call has its own of: interpreted, against eager, at random sizes. Run by test_triton.py."""

from __future__ import annotations

import copy
import logging
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from aottrain.compiler.codegen.triton import tiles
from tests.conformance import harness
from tests.conformance.harness import FRONTENDS
from tests.numerics.dynamic_fuzzing import check, generate
from tests.sampling import WHOLE

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_LENGTHS, NUM_PROGRAMS = 6, 3


class Block(nn.Module):
    """Norm, attention that is written out, dropout, GELU, cross-entropy: rows, sums over rows, draws."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, 2, 4).transpose(1, 2) for part in self.mix(self.norm(x)).chunk(3, -1))
        mask = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        mixed = torch.softmax((q @ k.transpose(-1, -2)).masked_fill(mask, -1e9), -1) @ v
        y = F.gelu(self.out(mixed.transpose(1, 2).reshape(b, t, 8))) + F.dropout(x, 0.5)
        return y, F.cross_entropy(y.flatten(0, 1), torch.arange(b * t, device=x.device) % 8) + y.sum(1).square().mean()


def observe(call: Any, shape: tuple[int, int], seed: int, eager: bool) -> list[Tensor]:
    torch.manual_seed(seed)
    x = torch.randn(*shape, 8, device=DEVICE, requires_grad=True)
    with aottrain.philox_eager() if eager else nullcontext():
        y, loss = call(x)
    return [y, loss, *torch.autograd.grad(loss, [x, *call.parameters()])]


def lengths(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Random batches and lengths; the first is traced, and shorter than most."""
    rng = random.Random(seed)
    return [(3, 9), *((rng.randint(2, 4), rng.randint(2, 40)) for _ in range(count - 1))]


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_one_compile_serves_random_lengths(frontend: str) -> None:
    torch.manual_seed(0)
    model = Block().to(DEVICE)
    reference = copy.deepcopy(model)
    step = aottrain.compile(model, capture=frontend, dynamic=True, kernel="triton", partition="min_cut")
    for seed, shape in enumerate(lengths(NUM_LENGTHS)):
        for eager, got in zip(observe(reference, shape, seed, True), observe(step, shape, seed, False), strict=True):
            assert eager.stride() == got.stride()
            torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)
    (graph,) = step.report.graphs
    assert graph.kernel == "triton" and len(graph.kernels) >= 8 and not step.report.fallbacks


def test_rows_longer_than_what_was_traced_are_swept() -> None:
    """A row of 7 elements is traced; one of 1,000 takes several steps, and its sums are eager's."""
    step = aottrain.compile(
        lambda x: torch.softmax(x, -1) * x.amax(-1, keepdim=True), capture="trace", dynamic=True, kernel="triton"
    )
    for rows, length in ((5, 7), (3, 1000), (2, 256), (6, 257), (4, 3)):
        x = torch.randn(rows, length, device=DEVICE, requires_grad=True)
        y = step(x)
        wanted = torch.softmax(x, -1) * x.amax(-1, keepdim=True)
        torch.testing.assert_close(y, wanted)
        tangent = torch.randn_like(wanted)
        got, right = (torch.autograd.grad(out, x, tangent)[0] for out in (y, wanted))
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)
    assert len(step.report.graphs) == 1 and step.report.graphs[0].kernel == "triton"


def test_draws_and_sizes_are_arguments_of_one_kernel() -> None:
    step = aottrain.compile(lambda x: F.dropout(x.sin(), 0.3), capture="trace", dynamic=True, kernel="triton")
    for shape in ((6, 40), (5, 7)):
        x = torch.randn(*shape, device=DEVICE)
        torch.manual_seed(0)
        got = step(x)
        torch.manual_seed(0)
        with aottrain.philox_eager():
            torch.testing.assert_close(got, F.dropout(x.sin(), 0.3))
    (graph,) = step.report.graphs
    assert graph.kernel == "triton"


def test_many_short_rows_share_a_program() -> None:
    """Four rows at a time: where they are not a multiple of four, too, and where a row is longer than a step."""
    step = aottrain.compile(lambda x: torch.softmax(x.sin(), -1), capture="trace", dynamic=True, kernel="triton")
    for rows, length in ((1100, 5), (7, 300)):
        x = torch.randn(rows, length, device=DEVICE)
        torch.testing.assert_close(step(x), torch.softmax(x.sin(), -1))
    (graph,) = step.report.graphs
    assert graph.kernel == "triton" and len(graph.kernels) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_rows_take_more_rows_a_program_where_there_are_more(dtype: torch.dtype, monkeypatch: Any) -> None:
    """With few programs, so that few rows are enough; against float64."""
    monkeypatch.setattr(tiles, "BUSY_PROGRAMS", 3)
    norm = nn.LayerNorm(24, device=DEVICE, dtype=dtype)
    exact = copy.deepcopy(norm).double()
    step = aottrain.compile(norm, capture="trace", dynamic=True, kernel="triton")
    for rows in (5, 150, 33, 2):
        x = torch.randn(rows, 24, device=DEVICE, dtype=dtype, requires_grad=True)
        tangent, wide = torch.randn_like(x), x.detach().double().requires_grad_()
        got = torch.autograd.grad(step(x), [x, *norm.parameters()], tangent)
        right = torch.autograd.grad(exact(wide), [wide, *exact.parameters()], tangent.double())
        for a, b in zip(got, right, strict=True):
            tolerance = 1e-4 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * b.abs().max().item())
    (graph,) = step.report.graphs
    assert graph.kernel == "triton"


def test_an_index_out_of_range_is_found_at_every_size() -> None:
    if DEVICE.type == "cuda":
        return  # a failed assertion there ends the process's use of the device
    step = aottrain.compile(lambda x, i: x.sin()[i] * 2, capture="trace", dynamic=True, kernel="triton")
    for rows in (5, 9, 3):
        x = torch.randn(rows, 4)
        i = torch.tensor([0, rows - 1, -rows])
        torch.testing.assert_close(step(x, i), x.sin()[i] * 2)
        with pytest.raises(IndexError, match="out of (range|bounds)"):
            step(x, torch.tensor([0, rows, 1]))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=WHOLE) for seed in range(1, NUM_PROGRAMS))])
@pytest.mark.skipif(harness.GENERATED != "triton", reason="CPU programs: only where Triton is interpreted")
def test_random_programs_at_random_sizes(seed: int) -> None:
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    _, kernels, wrong = check(generate(7000 + seed), kernel="triton")
    assert not wrong and kernels
