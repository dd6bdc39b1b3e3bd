"""Budgets in bytes, predictions alone: each is held, none smaller is predicted higher, also just below the peak of a
plan, and below the lowest each is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aottrain
from aottrain.errors import BudgetError
from tests.sampling import crossed
from tests.zoo import ResidualTrunk

NUM_BUDGETS = {"aten": 4, "cpp": 2}  # kernels of each are compiled


def blocks():
    return ResidualTrunk(lambda: [nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)])


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(
            *(layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()))
        )

    def forward(self, x):
        return self.stages(x).mean()


@pytest.mark.parametrize(("model", "kernel"), crossed([blocks, Images], ["aten", "cpp"], one_in=2))
def test_a_smaller_budget_is_never_predicted_higher(model, kernel):
    target, x = model(), torch.ones((64, 32) if model is blocks else (2, 4, 12, 12))

    def peak(budget):
        return aottrain.compile(target, capture="trace", kernel=kernel, budget=budget).prepare(x).predicted_peak_bytes

    highest, lowest = peak(1.0), peak(0.0)
    last, count = highest, NUM_BUDGETS[kernel]
    for i in range(count):
        budget = highest - i * (highest - lowest) // (count - 1)
        found = peak(f"{budget}B")
        assert lowest <= found <= min(budget, last)
        if budget > lowest and kernel == "aten":
            assert peak(f"{budget - 1}B") <= budget - 1
        last = found
    with pytest.raises(BudgetError):
        peak(f"{lowest - 1}B")


class Head(nn.Module):
    """Its kernels reach a lower peak than its operators: the logits of a loss head are cut in pieces."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(2048, 32)
        self.trunk = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))

    def forward(self, tokens):
        x = self.embedding(tokens)
        logits = (x + self.trunk(x)) @ self.embedding.weight.T
        return nn.functional.cross_entropy(logits, tokens)


@pytest.mark.parametrize(("model", "kernel"), crossed([blocks, Images, Head], ["aten", "cpp"], one_in=1))
def test_the_peak_that_a_refusal_names_is_the_lowest_that_is_met(model, kernel):
    example = {blocks: torch.ones(64, 32), Images: torch.ones(2, 4, 12, 12), Head: torch.arange(512)}[model]
    target = model()

    def compiled(budget):
        return aottrain.compile(target, capture="trace", kernel=kernel, budget=budget).prepare(example)

    with pytest.raises(BudgetError, match=r"the lowest peak that can be reached is .* \((\d+)B\)$") as refusal:
        compiled("100B")
    lowest = refusal.value.lowest_bytes
    assert lowest is not None and f"({lowest}B)" in str(refusal.value)
    assert compiled(f"{lowest}B").predicted_peak_bytes == lowest
    with pytest.raises(BudgetError):
        compiled(f"{lowest - 1}B")
