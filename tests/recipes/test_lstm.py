"""The LSTM: one step by hand, and what it writes."""

from __future__ import annotations

import torch

from tests.recipes.training import small

lstm, OPTIONS, (TOKENS, _) = small("lstm")


def test_a_position_is_a_step_of_torchs_cells():
    torch.manual_seed(0)
    model = lstm.build(OPTIONS)
    x = model.token_embedding(TOKENS)
    for layer in range(2):
        cell = torch.nn.LSTMCell(16, 16)
        weights = {name.removesuffix(f"_l{layer}"): value for name, value in model.layers.named_parameters()
                   if name.endswith(f"_l{layer}")}  # fmt: skip
        cell.load_state_dict(weights)
        state, outputs = None, []
        for t in range(x.shape[1]):
            state = cell(x[:, t], state)
            outputs.append(state[0])
        x = torch.stack(outputs, dim=1)
    torch.testing.assert_close(model(TOKENS), model.head(x))


def test_it_writes():
    torch.manual_seed(0)
    model = lstm.build(OPTIONS)
    texts = [lstm.generate(model, b"ab", 12, 1.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 12
