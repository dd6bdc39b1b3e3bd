"""How the next token is chosen, for every recipe that writes."""

from __future__ import annotations

import math

import pytest
import torch

from recipes import llama, transformer
from recipes._sampling import next_token

LOGITS = torch.tensor([[1.0, 4.0, 2.0, 3.0]])


def draws(temperature: float, top_k: int | None, count: int = 300) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    rows = LOGITS.expand(count, -1)
    return next_token(rows, temperature, generator, top_k).flatten().tolist()


def test_only_the_likeliest_are_drawn():
    assert {*draws(1.0, 2)} == {1, 3} and {*draws(1.0, 3)} == {1, 2, 3}
    assert {*draws(1.0, None)} == {*draws(1.0, 9)} == {0, 1, 2, 3}
    assert {*draws(1.0, 1)} == {*draws(0, None)} == {*draws(1e-320, None)} == {1}


def test_they_are_drawn_as_often_as_their_logits_say():
    drawn = draws(2.0, 2, 20_000)
    expected = (torch.tensor([4.0, 3.0]) / 2.0).softmax(dim=0)[0].item()
    assert drawn.count(1) / len(drawn) == pytest.approx(expected, abs=0.02)  # 6 standard deviations


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_nothing_is_drawn_from_logits_that_are_not_finite(wrong):
    logits = LOGITS.clone() if wrong != -math.inf else torch.full_like(LOGITS, wrong)
    logits[0, 2] = wrong
    for temperature in (0, 0.8):
        with pytest.raises(FloatingPointError, match="the model's logits are not finite"):
            next_token(logits, temperature)


def test_a_token_may_be_ruled_out():
    assert next_token(torch.tensor([[-math.inf, 0.0, -math.inf]]), 1.0).item() == 1


@pytest.mark.parametrize("recipe", [transformer, llama])
def test_after_bytes_follow_bytes_though_a_model_has_more_tokens(recipe):
    options = recipe.Options(num_layers=1, width=16, num_heads=2, context=8, vocab_size=2000)
    if hasattr(options, "num_kv_heads"):
        options = recipe.Options(**{**options.__dict__, "num_kv_heads": 1})
    torch.manual_seed(0)
    model = recipe.build(options)
    generator = torch.Generator().manual_seed(0)
    assert len(recipe.generate(model, b"ab", 20, 1.0, generator)) == 20
    tokens = recipe.generate(model, [1, 2], 20, 1.0, generator, top_k=1900)
    assert len(tokens) == 20 and max(tokens) > 255
