"""A model that writes by programs for few lengths: as eager does; one that looks ahead runs eagerly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aottrain
from aottrain.tasks.building.writing import NOT_CAUSAL, FewLengths
from recipes import lstm, transformer
from recipes._sampling import continuation

compiled = partial(aottrain.compile, capture="trace", kernel="aten")


class Counting(nn.Module):
    """Logits of each token from the sum of those up to it; ahead: of all of them. named: beside other results."""

    def __init__(self, ahead: bool = False, named: bool = False):
        super().__init__()
        self.embedding, self.ahead, self.named, self.lengths = nn.Embedding(8, 8), ahead, named, set()

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        logits = hidden.sum(dim=1, keepdim=True).expand_as(hidden) if self.ahead else hidden.cumsum(dim=1)
        return SimpleNamespace(logits=logits) if self.named else logits


def write(model, num_tokens=40):
    def next_logits(tokens):
        result = model(tokens)
        return getattr(result, "logits", result)[:, -1]

    return continuation(model, next_logits, [1, 2, 3], num_tokens, 1.0, torch.Generator().manual_seed(0), None)


@pytest.mark.parametrize("named", [False, True])
def test_it_writes_as_eager_by_a_program_of_each_power_of_two(named):
    torch.manual_seed(0)
    model = Counting(named=named)
    writer = FewLengths(model, compiled, None)
    assert write(writer) == write(model)
    assert [len(writer.report.graphs), writer.report.num_eager_calls] == [3, 0]  # 16, 32 and 64 tokens


def test_a_model_that_looks_ahead_runs_eagerly_and_is_counted():
    torch.manual_seed(0)
    model = Counting(ahead=True)
    writer = FewLengths(model, compiled, None)
    with pytest.warns(UserWarning, match="runs this call eagerly: what stands behind a token") as said:
        text = write(writer)
    assert Path(said[0].filename).is_relative_to(Path(aottrain.__file__).parent)  # so that the log has it as ours
    assert text == write(model) and [fallback.reason for fallback in writer.report.fallbacks] == [NOT_CAUSAL]


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_say_nothing_of_what_stands_behind(number, recwarn):
    """Of weights that a run has spoilt, all; of a model that rules a token out, that token's."""
    torch.manual_seed(0)
    model = Counting().eval()
    with torch.no_grad():
        model.embedding.weight[:, slice(None) if number != number else slice(1)] = number
        writer = FewLengths(model, compiled, None).eval()
        tokens = torch.arange(5)[None]
        assert torch.equal(writer(tokens).nan_to_num(), model(tokens).nan_to_num())
    assert writer.report.num_eager_calls == 0 and not [each for each in recwarn if "behind" in str(each.message)]


def test_a_prompt_whose_length_fits_proves_nothing():
    torch.manual_seed(0)
    model = Counting(ahead=True).eval()
    writer = FewLengths(model, compiled, None).eval()
    with torch.no_grad():
        writer(torch.ones(1, 16, dtype=torch.int64))
        assert writer.is_causal is None
        tokens = torch.arange(17)[None] % 8
        with pytest.warns(UserWarning, match="what stands behind"):
            assert torch.equal(writer(tokens), model(tokens))


@pytest.mark.parametrize("recipe", [transformer, lstm])
def test_no_program_is_longer_than_the_model_reads(recipe):
    torch.manual_seed(0)
    small = {"num_heads": 2} if recipe is transformer else {}
    model = recipe.build(recipe.Options(num_layers=1, width=16, context=20, **small))
    writer = FewLengths(model, compiled, 20)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    pairs = zip((model, writer), generators, strict=True)
    texts = [recipe.generate(one, b"The ", 30, 0.8, generator) for one, generator in pairs]
    assert texts[0] == texts[1] and model.training
    assert [len(writer.report.graphs), writer.report.num_eager_calls] == [2, 0]  # 16 and 20 tokens


def test_other_calls_are_the_models_own():
    model = Counting().eval()
    writer = FewLengths(model, compiled, None).eval()
    tokens = torch.ones(2, 3, 4, dtype=torch.int64)
    assert torch.equal(writer(tokens), model(tokens)) and not writer.report.graphs
    writer.train()
    assert torch.equal(writer(tokens[0]), model(tokens[0])) and not writer.report.graphs
    assert writer.embedding is model.embedding
