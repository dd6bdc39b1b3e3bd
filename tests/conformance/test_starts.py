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


@torch.library.custom_op("aottrain_tests::as_long_as_its_memory", mutates_args=())
def as_long_as_its_memory(x: Tensor) -> Tensor:
    return torch.ones(x.untyped_storage().nbytes() // 4)


@as_long_as_its_memory.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty((x.untyped_storage().nbytes() // 4,))


def results(x: Tensor) -> Tensor:
    y = up_to_start(x)
    return y * 2 + y.sum()


def sizes_alone(x: Tensor) -> Tensor:
    """TorchDynamo has made a constant of the size when our graph begins."""
    return torch.full((3,), float(len(up_to_start(x)))) + x.sum()


def of_a_view(x: Tensor) -> Tensor:
    return up_to_start(x[1:]).sum() + x


def of_the_memory(x: Tensor) -> Tensor:
    return x.sum() + as_long_as_its_memory(x)


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
@pytest.mark.parametrize("program", [results, sizes_alone, of_a_view, of_the_memory])
def test_sizes_that_the_fake_of_an_operator_takes_from_it_are_not_kept(program, kernel: str) -> None:
    """Without symbols, and for the starts 0 and 1 with them, nothing else would notice another start."""
    for capture, dynamic in (("dynamo", False), ("dynamo", True), ("trace", False)):
        torch._dynamo.reset()
        compiled = aottrain.compile(program, capture=capture, dynamic=dynamic, kernel=kernel)
        memory, other = torch.arange(20.0), torch.arange(12.0)
        parts = [memory[start : start + 5] for start in (2, 3, 0, 1, 4)] + [other[2:7]]
        for x in parts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it runs eagerly
                assert torch.equal(compiled(x), program(x)), (capture, dynamic, x)
        counted = sum(fallback.count for fallback in compiled.report.fallbacks)
        assert counted + len(compiled.report.graphs) >= 2, (capture, dynamic)


def test_a_start_that_is_known_is_compiled() -> None:
    torch._dynamo.reset()

    def program(x: Tensor) -> Tensor:
        return up_to_start((x * 2)[1:]).sum() + x

    compiled = aottrain.compile(program, capture="dynamo", dynamic=False, on_unsupported="error")
    assert torch.equal(compiled(torch.ones(4)), program(torch.ones(4)))
