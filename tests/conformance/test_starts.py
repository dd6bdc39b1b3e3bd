"""Where in its memory an input starts: TorchDynamo guards it where the program asks, and only if it sees that."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aottrain

STARTS = ((5, 2), (7, 3), (6, 4), (6, 0))


@torch.compiler.allow_in_graph
def asking(x: Tensor) -> Tensor:
    return x.sin() + x.storage_offset()


@torch.compiler.allow_in_graph
def counting(x: Tensor) -> Tensor:
    return x + x.as_strided((1,), (1,), 1)


@torch.library.custom_op("aottrain_tests::up_to_start", mutates_args=())
def up_to_start(x: Tensor) -> Tensor:
    return torch.arange(float(x.storage_offset() + 1))


@up_to_start.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.storage_offset() + 1,))


@pytest.mark.parametrize(("function", "dynamic"), [(asking, False), (counting, True)])
def test_what_dynamo_does_not_follow_asks_for_it(function: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    torch._dynamo.reset()
    compiled = aottrain.compile(lambda x: function(x) * 2, capture="dynamo", dynamic=dynamic)
    memory = torch.arange(20.0)
    for size, start in STARTS[-2:]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it runs eagerly
            assert torch.equal(compiled(memory[start : start + size]), function(memory[start : start + size]) * 2)
    (fallback,) = compiled.report.fallbacks
    assert "does not follow asks where in memory" in fallback.reason and fallback.source.startswith("test_starts.py:")


def test_sizes_may_hang_on_it() -> None:
    """With symbolic sizes the start is a symbol, too: of one program, for all starts but 0 and 1."""
    torch._dynamo.reset()

    def program(x: Tensor) -> Tensor:
        y = up_to_start(x)
        return F.layer_norm(y, y.shape) * 2

    compiled = aottrain.compile(program, capture="dynamo", dynamic=True, on_unsupported="error")
    memory = torch.arange(20.0)
    for size, start in STARTS[:3]:
        x = memory[start : start + size]
        assert torch.equal(compiled(x), program(x))
    assert len(compiled.report.graphs) == 1
