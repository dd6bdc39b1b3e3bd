"""data.packing: what rows hold, that a packed loss is that of the documents alone, and that runs go on bitwise."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.cli import main
from aottrain.config.extensions.recipes import load_recipe
from aottrain.data.tokens.packing import IGNORED, packed, packed_source
from aottrain.errors import ConfigError
from aottrain.trainer.checkpoint import load
from aottrain.trainer.engines import LossModule

CONTEXT = 16
TINY = {"num_layers": 2, "width": 16, "num_heads": 2, "context": CONTEXT}
OWN = {"transformer": {"dropout": 0.0}, "llama": {"num_kv_heads": 1, "mlp_width": 24}}


def documents(*lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, length).astype(np.uint8) for length in lengths]


def all_of(rows):
    return rows.read(np.arange(len(rows)), None)


def test_every_target_is_there_once_and_rows_are_full():
    given = documents(5, 40, 1, 17, 2, 9, 30, 12, 0, 3)
    rows = packed(given, CONTEXT)
    inputs, targets, starts = all_of(rows)
    pairs = sorted(zip(inputs[targets != IGNORED].tolist(), targets[targets != IGNORED].tolist(), strict=True))
    expected = sorted(pair for one in given for pair in zip(one[:-1].tolist(), one[1:].tolist(), strict=True))
    assert pairs == expected and rows.num_targets == len(expected)
    assert len(rows) == -(-len(expected) // CONTEXT)  # no fewer rows could hold them
    places = torch.arange(CONTEXT).expand_as(starts)
    assert (starts <= places).all() and torch.equal(starts[targets == IGNORED], places[targets == IGNORED])
    again = rows.read(np.array([1, 0]), None)
    assert torch.equal(again[0], inputs[[1, 0]]) and torch.equal(again[2], starts[[1, 0]])


@pytest.mark.parametrize("name", OWN)
def test_the_loss_is_that_of_the_documents_alone_and_compiled_as_by_eager(name):
    recipe = load_recipe(name)
    torch.manual_seed(0)
    module = LossModule(recipe.build(recipe.Options(**TINY, **OWN[name])), recipe.loss, weight=recipe.weight)
    for parameter in module.parameters():  # so that what a place sees matters
        torch.nn.init.normal_(parameter, std=0.5)
    given = documents(5, 9, 17, 4, 12)
    batch = all_of(packed(given, CONTEXT))
    alone = [torch.from_numpy(one.astype(np.int64))[None] for one in given]
    losses = [F.cross_entropy(module.model(one[:, :-1])[0], one[0, 1:], reduction="sum") for one in alone]
    expected = sum(losses) / sum(one.shape[1] - 1 for one in alone)
    eager = module(*batch)
    assert torch.allclose(eager, expected, rtol=1e-5)
    assert not torch.allclose(recipe.loss(module.model, batch[:2]), expected, rtol=1e-4)  # documents that see others
    gradients = torch.autograd.grad(eager, list(module.parameters()))
    step = aottrain.compile(module, capture="trace", kernel="aten", on_unsupported="error", decisions="default")
    loss = step(*batch)
    loss.backward()
    assert torch.equal(loss, eager)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True))
    parts = [tuple(tensor[row : row + 1] for tensor in batch) for row in range(len(batch[0]))]
    shares = module.shares(parts)
    assert torch.allclose(sum(module(*part) * share for part, share in zip(parts, shares, strict=True)), eager)


def test_a_run_on_packed_documents_goes_on_bitwise(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts = [f"{i} and {i * i}. " * (1 + i % 4) for i in range(60)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    options = [f"recipe.model.{key}={value}" for key, value in TINY.items()]
    line = [*options, "data.path=data.jsonl", "data.packing=true", "debug=fast", "engine=eager", "data.order=epochs"]
    line += ["trainer.accumulate=2", "trainer.sample_bytes=0", "lr_schedule.total_steps=4"]
    assert main([*line, "trainer.steps=4", "hydra.run.dir=whole"]) == 0
    assert re.search(r"packed: 5\d documents in \d+ rows of 16, 9\d.\d% of the places", capsys.readouterr().out)
    assert main([*line, "trainer.steps=2", "hydra.run.dir=part"]) == 0
    assert main(["resume=part", "trainer.steps=4", "hydra.run.dir=rest"]) == 0
    whole, rest = (load(tmp_path / name / "checkpoints" / "step_00000004.pt").state for name in ("whole", "rest"))
    assert all(torch.equal(value, rest["model"][key]) for key, value in whole["model"].items())
    capsys.readouterr()
    (tmp_path / "one.txt").write_text("one document")
    assert main([*line, "data.path=one.txt"]) == 2
    assert "has 1 document, of which one is held out" in capsys.readouterr().err


def test_what_cannot_be_packed_is_told():
    arguments = {"source": "x", "notes": (), "held_out": 0.5, "context": 4, "tokenizer": None}
    with pytest.raises(ConfigError, match="x: no document of its held-out part has two tokens"):
        packed_source([b"abc", b"d"], vocab_size=256, **arguments)
    with pytest.raises(ConfigError, match="x: has token 122, but the model's vocab_size is 100"):
        packed_source([b"abc", b"zz"], vocab_size=100, **arguments)
