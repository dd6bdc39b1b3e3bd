"""The whole compiler path on a tiny model, in a few seconds: start here after a change."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 16)
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, tokens):
        self.steps += 1
        x = self.embedding(tokens)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def train(model, call, draws):
    torch.manual_seed(1)
    data = torch.Generator().manual_seed(2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(5):
        tokens = torch.randint(13, (4, 8), generator=data)
        with draws():
            loss = call(tokens)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), {name: value.detach() for name, value in model.state_dict().items()}


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


@pytest.mark.parametrize("options", [{"partition": "save_all"}, {}, {"budget": 0.4}, {"budget": 0.0}], ids=str)
def test_the_whole_path(options):
    torch.manual_seed(0)
    model = Tiny()
    compiled = copy.deepcopy(model)
    call = aottrain.compile(compiled, capture="trace", on_unsupported="error", **options)
    losses, state = train(compiled, call, Nothing)
    wanted_losses, wanted_state = train(model, model, aottrain.philox_eager)
    assert torch.equal(losses, wanted_losses) and losses[-1] < losses[0]
    assert state.keys() == wanted_state.keys() and float(state["steps"]) == 5.0
    for name, value in wanted_state.items():
        assert torch.equal(state[name], value), name
    (report,) = call.report.graphs
    assert call.report.num_fallbacks == 0 and report.mode == "train" and report.num_draws == 1
    assert [stage.name for stage in report.stages][:3] == ["capture", "analyse", "trace_joint"]
    assert report.predicted_peak_bytes > report.saved_bytes
    assert report.saved_bytes > 0


def test_a_name_that_the_package_lacks_is_an_attribute_error():
    assert not hasattr(aottrain, "nothing")
    with pytest.raises(AttributeError, match="module 'aottrain' has no attribute 'nothing'"):
        aottrain.nothing  # noqa: B018
