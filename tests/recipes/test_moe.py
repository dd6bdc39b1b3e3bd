"""The mixture of experts: against a loop over tokens, what a full expert leaves, and the balance."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from tests.recipes.training import small

moe, OPTIONS, BATCH = small("moe")


def layer(**changes):
    torch.manual_seed(0)
    experts = moe.Experts(dataclasses.replace(OPTIONS, **changes))
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return experts


def by_tokens(experts: torch.nn.Module, x: torch.Tensor, capacity: int) -> torch.Tensor:
    """Token by token, as the texts have it; an expert's rows go to those who come first."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        taken = [0] * OPTIONS.num_experts
        for at, token in enumerate(x[row]):
            highest, chosen = experts.router(token).topk(experts.options.num_chosen)
            for weight, expert in zip(highest.softmax(dim=0), chosen.tolist(), strict=True):
                taken[expert] += 1
                if taken[expert] <= capacity:
                    hidden = F.silu(token @ experts.gate[expert]) * (token @ experts.up[expert])
                    out[row, at] += weight * (hidden @ experts.down[expert])
    return out


@pytest.mark.parametrize(("factor", "capacity"), [(4.0, 12), (1.25, 8), (0.5, 3)])
def test_it_is_what_each_token_gets_from_its_experts(factor, capacity):
    experts = layer(capacity_factor=factor)
    assert experts.options.capacity(12) == capacity
    x = torch.randn(3, 12, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(experts(x)[0], by_tokens(experts, x, capacity), rtol=1e-4, atol=1e-5)


def test_the_balance_is_one_where_experts_are_even_and_more_where_they_are_not():
    experts = layer()
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        experts.router.weight.zero_()
        assert experts(x)[1].item() == pytest.approx(1.0)
        experts.router.weight[0] = 100 * x.mean(dim=(0, 1)) / x.mean(dim=(0, 1)).square().sum()
        assert experts(x)[1].item() > 1.2


def test_the_balance_counts_while_training_alone():
    torch.manual_seed(0)
    model = moe.build(OPTIONS)
    training = moe.loss(model, BATCH).item()
    plain = moe.loss(model.eval(), BATCH).item()
    balance = model.with_balance(BATCH[0])[1].item()
    assert training == pytest.approx(plain + OPTIONS.balance * balance)
    assert plain == pytest.approx(F.cross_entropy(model(BATCH[0]).flatten(0, 1), BATCH[1].flatten()).item())


def test_no_position_sees_the_future():
    torch.manual_seed(0)
    model = moe.build(OPTIONS)
    changed = BATCH[0].clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(BATCH[0]), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])
