"""Tensors in oneDNN's own layout, of which no fake tensor knows: they run eagerly, counted, with eager's results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import aottrain
from tests.conformance.harness import FRONTENDS


def there_and_back(x: Tensor) -> Tensor:
    return (x.to_mkldnn() * 2).to_dense()


def same_layout(x: Tensor) -> Tensor:
    return torch.relu(x)


@pytest.mark.parametrize("function", [there_and_back, same_layout])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_the_layout_of_results_and_gradients_is_eagers(frontend, function):
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    x = (x if function is there_and_back else x.to_mkldnn()).requires_grad_()
    call = aottrain.compile(function, capture=frontend)
    with pytest.warns(UserWarning, match="runs this call eagerly"):
        got = call(x)
    want = function(x)
    assert got.layout is want.layout and torch.equal(got.to_dense(), want.to_dense())
    (wanted,) = torch.autograd.grad(want.to_dense().sum(), x)
    (found,) = torch.autograd.grad(got.to_dense().sum(), x)
    assert found.layout is wanted.layout and torch.equal(found.to_dense(), wanted.to_dense())
    assert call.report.num_fallbacks
