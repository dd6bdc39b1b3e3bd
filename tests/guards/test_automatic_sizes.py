"""dynamic="auto": a few shapes have programs of their own, then one serves all sizes that have differed."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import aottrain
from aottrain.compiler.frontends import api
from aottrain.toolchain import cache
from tests.conformance.harness import FRONTENDS


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(8, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.out(F.gelu(self.inner(x))).flatten(0, 1), targets.flatten())


def batch(b: int, t: int) -> tuple[Tensor, Tensor]:
    return torch.randn(b, t, 8), torch.randint(0, 5, (b, t))


def compare(call: Any, model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    for one, other in zip(_gradients(call, inputs), _gradients(model, inputs), strict=True):
        assert torch.equal(one, other)


def _gradients(call: Any, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    loss = call(*inputs)
    return [loss, *torch.autograd.grad(loss, list(call.parameters()))]


@pytest.fixture(autouse=True)
def unsaid(monkeypatch):
    monkeypatch.setattr(cache, "_warned", set())


@pytest.mark.parametrize("frontend", FRONTENDS)
def test_of_200_lengths_none_runs_eagerly_and_few_are_compiled(frontend):
    model = Model()
    call = aottrain.compile(copy.deepcopy(model), capture=frontend, dynamic="auto", kernel="aten")
    lengths = random.Random(0).sample(range(2, 400), 200)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for length in lengths:
            compare(call, model, batch(3, length))
    assert not call.report.fallbacks and len(call.report.graphs) <= api._FEW_SHAPES + 1


def test_it_is_said_in_one_line_which_sizes_are_open():
    call = aottrain.compile(Model(), capture="trace", dynamic="auto", kernel="aten")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for length in range(4, 12):
            call(*batch(3, length))
    lines = [str(each.message) for each in said]
    assert len(lines) == 1 and "Model was called with 4 shapes" in lines[0]
    assert lines[0].endswith("one program serves any dimension 1 of input 0, dimension 1 of input 1")


def test_what_has_not_differed_stays_a_number():
    """The batch is open from the call on in which it differs."""
    call = aottrain.compile(lambda x: x * x.shape[0], capture="trace", dynamic="auto", kernel="aten")
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for shape in [(3, n) for n in range(4, 9)] + [(5, 4), (6, 9)]:
            x = torch.randn(*shape)
            assert torch.equal(call(x), x * shape[0])
            counts.append(len(call.report.graphs))
    assert counts == [1, 2, 3, 4, 4, 5, 5]


def test_a_few_shapes_have_programs_of_their_own():
    call = aottrain.compile(lambda x: x.sin() * 2, capture="trace", dynamic="auto", kernel="aten")
    for _ in range(3):
        for n in range(4, 4 + api._FEW_SHAPES):
            call(torch.randn(n))
    assert len(call.report.graphs) == api._FEW_SHAPES


def test_other_reasons_to_compile_open_nothing():
    """Calls that differ in a number, a type or the mode are not alike."""
    call = aottrain.compile(lambda x, n: x * n, capture="trace", dynamic="auto", kernel="aten")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(8):
            assert torch.equal(call(torch.ones(4), n), torch.full((4,), float(n)))
    assert len(call.report.graphs) == 8


def test_another_word_is_refused():
    with pytest.raises(aottrain.ConfigError, match="dynamic='often' is not known; allowed: True, False, 'auto'"):
        aottrain.compile(Model(), dynamic="often")
