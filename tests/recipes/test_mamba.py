"""The state-space model: chunks against the recurrence, and that no position sees the future."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.recipes.training import small

mamba, OPTIONS, (TOKENS, TARGETS) = small("mamba")


@pytest.mark.parametrize("chunk", [1, 4, 7, 30])
def test_chunks_are_the_recurrence(chunk):
    generator = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(*shape, generator=generator) for shape in ((2, 3, 13, 5), (2, 13, 4), (2, 13, 4)))
    log_decay = -torch.rand(2, 3, 13, generator=generator)
    state, expected = torch.zeros(2, 3, 4, 5), []
    for t in range(13):
        state = log_decay[:, :, t, None, None].exp() * state + b[:, None, t, :, None] * x[:, :, t, None, :]
        expected.append((c[:, None, t, None, :] @ state)[:, :, 0])
    torch.testing.assert_close(mamba.scan(x, log_decay, b, c, chunk), torch.stack(expected, dim=2))


def test_no_position_sees_the_future_and_no_chunk_shows():
    torch.manual_seed(0)
    model = mamba.build(OPTIONS)
    before = model(TOKENS)
    changed = TOKENS.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    torch.testing.assert_close(model(changed)[:, :5], before[:, :5])
    assert not torch.allclose(model(changed)[:, -1], before[:, -1])  # which a chunk later still remembers
    torch.testing.assert_close(model(TOKENS[:, :7]), before[:, :7])
    other = mamba.build(dataclasses.replace(OPTIONS, chunk=3))
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(TOKENS), before, rtol=1e-4, atol=1e-5)


def test_steps_begin_between_a_thousandth_and_a_tenth():
    mixer = mamba.build(OPTIONS).mixers[0]
    steps = torch.nn.functional.softplus(mixer.step_bias)
    assert (steps > 0.9e-3).all() and (steps < 1.1e-1).all()
