"""A run whose batches differ in length: a few programs, none of them run eagerly, and one line that says so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aottrain.tasks import train
from aottrain.tasks.building import build
from aottrain.toolchain import cache

NUM_STEPS = 40


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.hidden, self.head = nn.Embedding(32, 8), nn.Linear(8, 16), nn.Linear(16, 32)

    def forward(self, tokens):
        return self.head(F.gelu(self.hidden(self.embed(tokens))))


@pytest.fixture
def lengths(monkeypatch):
    """A recipe whose batches have a length drawn from 4 to 400; gives the lengths."""
    seen = []

    def make_batch(options, batch_size, generator):
        length = int(torch.randint(4, 400, (), generator=generator))
        seen.append(length)
        tokens = torch.randint(0, 32, (batch_size, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def loss(model, batch):
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    recipe = SimpleNamespace(build=lambda options: Model(), loss=loss, make_batch=make_batch)
    monkeypatch.setattr(build, "recipe_of", lambda config: recipe)
    monkeypatch.setattr(cache, "_warned", set())
    return seen


def test_a_run_of_many_lengths_compiles_a_few_programs(tiny, left_by, lengths, capsys):
    with pytest.warns(UserWarning, match="shapes: one program serves any dimension 1 of input 0") as said:
        config = tiny("aot", trainer={"steps": NUM_STEPS}, data={"batch_size": 4})
        assert train.run(config) == 0
    summary = left_by(config).summary
    assert len(set(lengths)) > 16 and summary["fallbacks"] == 0 and summary["steps"] == NUM_STEPS
    assert len([each for each in said if "one program serves any" in str(each.message)]) <= 2  # and of evaluation


def test_losses_are_eagers(tiny, left_by, lengths, tmp_path):
    losses = []
    for engine in ("eager", "aot"):
        config = tiny(engine, trainer={"steps": 12}, data={"batch_size": 4}, output_dir=str(tmp_path / engine))
        assert train.run(config) == 0
        losses.append([float(loss) for loss in left_by(config).losses if loss])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
