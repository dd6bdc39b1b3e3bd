"""The BERT: what is hidden from it, and what it reads."""

from __future__ import annotations

import pytest
import torch

from tests.recipes.training import small

bert, OPTIONS, (TOKENS, POSITIONS, LABELS) = small("bert", batch_size=400)
TEXT = TOKENS.scatter(1, POSITIONS, LABELS)


def test_as_many_tokens_are_hidden_in_every_row_and_the_others_stay():
    assert POSITIONS.shape == LABELS.shape == (400, 3) and (POSITIONS.diff(dim=1) > 0).all()
    changed = TOKENS != TEXT
    assert changed.sum(dim=1).max() <= 3 and changed.scatter(1, POSITIONS, False).sum() == 0
    assert POSITIONS.float().mean().item() == pytest.approx(9.5, abs=0.6)


def test_most_are_hidden_some_replaced_some_left():
    shown = TOKENS.gather(1, POSITIONS)
    hidden, left = (shown == OPTIONS.vocab_size).float().mean(), (shown == LABELS).float().mean()
    assert hidden.item() == pytest.approx(0.8, abs=0.04) and left.item() == pytest.approx(0.1, abs=0.03)


def test_it_reads_both_sides_and_finds_what_is_asked():
    torch.manual_seed(0)
    model = bert.build(OPTIONS).eval()
    for place in (0, 19):
        changed = TOKENS[:1].clone()
        changed[0, place] = (changed[0, place] + 1) % 256
        positions = torch.tensor([[10]])
        assert not torch.equal(model(TOKENS[:1], positions), model(changed, positions))
    whole = model(TOKENS[:2], torch.arange(20).expand(2, -1))
    torch.testing.assert_close(model(TOKENS[:2], POSITIONS[:2])[1, 2], whole[1, POSITIONS[1, 2]])
    assert whole.shape == (2, 20, 256)  # no score for the token that hides
