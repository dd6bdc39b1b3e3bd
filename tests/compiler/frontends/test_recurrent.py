"""Recurrent modules by the default front end: TorchDynamo leaves them to Python unless it is asked not to."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import aottrain
from tests.numerics.tolerance import assert_close


class Tagger(nn.Module):
    def __init__(self, recurrent: type[nn.RNNBase]):
        super().__init__()
        self.recurrent, self.head = recurrent(8, 6, num_layers=2), nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.recurrent(x)[0])


@pytest.mark.parametrize("recurrent", [nn.RNN, nn.GRU, nn.LSTM])
def test_a_model_with_a_recurrent_layer_is_compiled_whole(recurrent):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Tagger(recurrent), torch.randn(4, 3, 8)
    truth = copy.deepcopy(model)
    compiled = aottrain.compile(model, on_unsupported="error")
    for both in (compiled, truth):
        both(x).square().sum().backward()
    assert compiled.report.num_eager_calls == 0 and len(compiled.report.graphs) == 1
    for parameter, other in zip(model.parameters(), truth.parameters(), strict=True):
        assert_close(parameter.grad, other.grad)
