"""Functions of torch that look at values to raise, to warn, or for the size of a rarely needed result: compiled for the
values that they are meant for, bitwise eager's with gradients; for others eager answers, or raises."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from tests.conformance.harness import leaf, normal

WHOLE, REAL = torch.tensor([1, 2, 1, 3]), torch.tensor([0.5, 1.0, 2.0, 0.25])
BINS = torch.tensor([2, 0, 1, 2])
SIDES, WINDOW = normal(4, 2, seed=3), torch.hann_window(2)
TARGETS, LENGTHS = torch.tensor([[1, 2, 3], [3, 1, 2]]), ((6, 5), (3, 2))


def lstsq(driver):
    return lambda x: torch.linalg.lstsq(x, SIDES, driver=driver)[:2]


PROGRAMS = {
    "cov": torch.cov,
    "cov, by weights": lambda x: torch.cov(x, correction=0, fweights=torch.tensor([1, 2, 1]), aweights=REAL[:3]),
    "cov, by a method": lambda x: x.cov(correction=2),
    "corrcoef": torch.corrcoef,
    "lstsq, gels": lstsq("gels"),
    "lstsq, gelsy": lstsq("gelsy"),
    "lstsq, gelsd": lstsq("gelsd"),
    "stft": lambda x: torch.stft(x.exp(), 2, 1, return_complex=True),
    "stft of a window": lambda x: torch.stft(x * 2, 2, 1, window=WINDOW, return_complex=False),
    "bincount": lambda x: x.sum(0) * BINS.bincount(minlength=3) / torch.bincount(BINS, REAL, 3),
    "bincount, by doubles": lambda x: x.sum(0) * torch.bincount(BINS, weights=x[:, 0].detach().double(), minlength=3),
    "ctc_loss": lambda x: F.ctc_loss(x.reshape(6, 2, 1).expand(6, 2, 4).cumsum(-1).log_softmax(-1), TARGETS, *LENGTHS),
}


def outcome(function):
    x = leaf(4, 3, seed=1)
    results = function(x)
    results = results if isinstance(results, tuple) else (results,)
    sum((value.abs() if value.is_complex() else value).sum() for value in results if value.requires_grad).backward()
    return [*(value.detach() for value in results), x.grad]


@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_eager(name):
    compiled = aottrain.compile(PROGRAMS[name], capture="trace", kernel="aten")
    wanted, got = outcome(PROGRAMS[name]), outcome(compiled)
    for one, other in zip(wanted, got, strict=True):
        if "gelsy" in name:  # whose pivots eager does not choose twice alike
            torch.testing.assert_close(one, other)
        else:
            assert torch.equal(one, other)
        assert one.stride() == other.stride()
    assert compiled.report.fallbacks == []


def test_what_a_weight_may_not_be_raises_as_in_eager():
    def program(x, w):
        return torch.cov(x, fweights=w)

    compiled = aottrain.compile(program, capture="trace")
    x = normal(2, 4)
    assert torch.equal(compiled(x, WHOLE), program(x, WHOLE))
    for wrong in (-WHOLE, WHOLE * 0):
        with pytest.raises(RuntimeError) as eager:
            program(x, wrong)
        with pytest.raises(RuntimeError) as got:
            compiled(x, wrong)
        assert str(got.value) == str(eager.value)
    assert compiled.report.fallbacks == []


@pytest.mark.filterwarnings("ignore:cov")
def test_what_eager_warns_of_eager_answers():
    def program(x, w):
        return torch.cov(x, fweights=w)

    compiled = aottrain.compile(program, capture="trace")
    few = torch.tensor([1, 0, 0, 0])
    compiled(normal(2, 4), WHOLE)
    assert torch.equal(compiled(normal(2, 4), few).isnan(), program(normal(2, 4), few).isnan())
    assert compiled.report.num_fallbacks == 1


def test_a_number_beyond_the_counts():
    def program(x, numbers):
        return x.exp() * numbers.bincount(minlength=3).sum(), numbers.bincount(minlength=3)

    compiled = aottrain.compile(program, capture="trace", kernel="aten")
    for numbers in (BINS, BINS + 3, BINS):
        assert all(map(torch.equal, program(normal(3), numbers), compiled(normal(3), numbers)))
    with pytest.raises(RuntimeError, match="non-negative"):
        compiled(normal(3), -BINS)
    assert compiled.report.num_fallbacks == 1 and len(compiled.report.graphs) == 1


def test_a_matrix_without_full_rank():
    compiled = aottrain.compile(lstsq("gelsd"), capture="trace")
    x = normal(4, 3)
    compiled(x)
    flat = torch.ones(4, 3)
    wanted, got = lstsq("gelsd")(flat), compiled(flat)
    assert all(map(torch.equal, wanted, got)) and got[1].shape == (0,)
    assert compiled.report.num_fallbacks == 1
