"""What waits for a sum over all rows computes again what the sum was made of, and nothing is written for it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aottrain
from aottrain.compiler.schedule.grouping import fusion
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import leaf
from tests.numerics.tolerance import assert_close_as_sums

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
ROWS, WIDTH = 256, 128
BYTES = ROWS * WIDTH * 4


def standardised(x: Tensor) -> Tensor:
    centred = x - x.mean()
    return centred / (centred.square().mean().sqrt() + 1e-8)


def lengths_of_channels(x: Tensor) -> Tensor:
    """As ConvNeXt V2's: of an activation."""
    x = F.gelu(x)
    return x + x * (x.square().sum(0, keepdim=True).sqrt() / ROWS)


def drawn(x: Tensor) -> Tensor:
    """The mask is drawn again."""
    x = F.dropout(x, 0.25)
    return x / x.square().mean()


def is_a_result(x: Tensor) -> tuple[Tensor, Tensor]:
    """What is in memory anyway is read."""
    y = x * 3
    return y, y / y.square().sum()


PROGRAMS = {each.__name__: each for each in (standardised, lengths_of_channels, drawn, is_a_result)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_without(name, monkeypatch):
    x, function = leaf(ROWS, WIDTH), PROGRAMS[name]

    def run() -> tuple[list[Tensor], int]:
        compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
        torch.manual_seed(0)
        given = compiled(x)
        results = [given] if isinstance(given, Tensor) else list(given)
        report = compiled.report if hasattr(compiled.report, "traffic") else compiled.report.graphs[0]
        gradients = torch.autograd.grad(results, [x], [torch.linspace(-1, 1, r.numel()).view_as(r) for r in results])
        return [*results, *gradients], report.traffic.moved

    with monkeypatch.context() as patch:
        patch.setattr(fusion, "found_again", lambda graph, found: {})
        wanted, before = run()
    got, after = run()
    for one, other in zip(got, wanted, strict=True):
        assert_close_as_sums(one, other, ROWS)
    assert after < before if name != "is_a_result" else after <= before


def test_what_a_kernel_reads_elsewhere_it_reads_besides():
    """Of a causal convolution's gradient, one tap's part follows from what the others' are made of: it is not written
    beside it."""

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        sequences = x.view(4, ROWS // 4, WIDTH)
        padded = [F.pad(sequences, (0, 0, 3 - i, 0)) for i in range(4)]
        return F.silu(sum(padded[i][:, : ROWS // 4] * weight[i] for i in range(4)))

    x, weight = leaf(ROWS, WIDTH), leaf(4, WIDTH)
    compiled = aottrain.compile(convolved, kernel="cpp", capture="trace", on_unsupported="error")
    given, wanted = compiled(x, weight), convolved(x, weight)
    for one, other in zip(
        torch.autograd.grad(given.square().sum(), [x, weight]),
        torch.autograd.grad(wanted.square().sum(), [x, weight]),
        strict=True,
    ):
        assert_close_as_sums(one, other, ROWS)
    # Read twice and written once; and in the backward what is read, what its kernels share, and the result.
    assert compiled.report.graphs[0].traffic.moved < 7.5 * BYTES
