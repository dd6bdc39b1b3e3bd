"""The transformer: shapes, causality, initialisation, counts, mistakes and writing."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from aottrain.config.extensions.recipes import load_recipe
from aottrain.tasks.building.build import flops_per_sample

transformer = load_recipe("transformer")
SMALL = transformer.Options(num_layers=2, width=24, num_heads=3, context=20)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return transformer.build(SMALL)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(0))


def test_an_untrained_model_knows_nothing(model):
    batch = (tokens(4, 20), tokens(4, 20).flip(1))
    assert model(batch[0]).shape == (4, 20, 256)
    assert transformer.loss(model, batch).item() == pytest.approx(math.log(256), rel=0.02)


def test_no_position_sees_the_future(model):
    model.eval()
    x = tokens(1, 20)
    changed = x.clone()
    changed[0, 12] = (changed[0, 12] + 1) % 256
    before, after = model(x), model(changed)
    assert torch.equal(before[:, :12], after[:, :12]) and not torch.equal(before[:, 12:], after[:, 12:])
    torch.testing.assert_close(model(x[:, :7]), before[:, :7])


def test_attention_is_the_textbooks(model):
    attention = model.eval().blocks[0].attention
    x = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(0))
    q, k, v = (part.view(2, 20, 3, 8).transpose(1, 2) for part in attention.qkv(x).chunk(3, dim=-1))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(attention(x), attention.out(expected.transpose(1, 2).reshape(2, 20, 24)))


def test_dropout_acts_in_training_only(model):
    x = tokens(2, 20)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_the_initialisation_is_gpt2s():
    torch.manual_seed(0)
    model = transformer.build(transformer.Options(num_layers=8, width=96))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "contract.weight"))
            assert parameter.std().item() == pytest.approx(0.02 / (4 if residual else 1), rel=0.05), name


def test_the_head_is_the_embedding(model):
    names = [name for name, parameter in model.named_parameters() if 256 in parameter.shape]
    assert names == ["token_embedding.weight"]


def test_flops_are_those_that_are_done(model):
    model.eval()
    with FlopCounterMode(display=False) as counter:
        transformer.loss(model, (tokens(3, 20), tokens(3, 20))).backward()
    # In the first block nothing before the qkv product needs a gradient but the embedding does, so all are counted.
    assert counter.get_total_flops() == 60 * transformer.flops_per_token(SMALL)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_layers": 0}, ["num_layers=0"]),
        ({"width": 25}, ["num_heads=3"]),
        ({"dropout": 1.0}, ["dropout=1.0"]),
        ({"dropout": -0.1, "context": 0}, ["context=0", "dropout=-0.1"]),
        ({"width": 2.5, "vocab_size": True}, ["width=2.5", "vocab_size=True"]),
        ({"dropout": "much"}, ["dropout='much'"]),
        ({"dropout": float("nan")}, ["dropout=nan"]),
        ({}, []),
    ],
)
def test_mistakes_are_listed_by_field(changes, named):
    options = transformer.Options(**{**SMALL.__dict__, **changes})
    assert [mistake.partition(":")[0] for mistake in options.check()] == named
    if named:
        with pytest.raises(ValueError, match=named[0].split("=")[0]):
            transformer.build(options)


def test_an_example_is_as_many_tokens_as_a_batch_has_for_it():
    batches = SimpleNamespace(batch_size=4, tokens_per_batch=80)
    assert flops_per_sample(transformer, SMALL, batches) == 20 * transformer.flops_per_token(SMALL)


def test_writing_is_repeatable_and_leaves_the_model_as_it_was(model):
    before = torch.get_rng_state()
    texts = [transformer.generate(model, b"ab", 30, 1.0, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 30
    assert model.training and torch.equal(before, torch.get_rng_state())
    assert transformer.generate(model, b"ab", 5, 0) == transformer.generate(model, b"ab", 5, 0)
    assert transformer.generate(model, b"ab", 0) == b""
    with pytest.raises(ValueError, match="prompt"):
        transformer.generate(model, b"", 5)
