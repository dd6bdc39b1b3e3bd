"""A program makes each view by one call, from the memory that it lies in."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aottrain.runtime import launch
from tests.golden.programs import Golden
from tests.golden.texts import compiled
from tests.numerics.tolerance import assert_close


def heads(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    parts = (x @ weight).relu().split(8, dim=-1)
    query, key, value = (part.view(2, 16, 2, 4).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def made(start: int = 0):
    rows = torch.randn(start + 2, 16, 8)[start:].requires_grad_()
    return heads, (rows, torch.randn(8, 24).requires_grad_())


def test_a_chain_of_views_is_one_call():
    known = compiled(Golden(made, {"kernel": "cpp"}))
    for fused in known["decided"].fused:
        text, _ = launch.render(fused.graph, fused.schedule, fused.launches, fused.memory)
        assert "run_as_strided" in text
        returned = text.rsplit("return", 1)[1]
        for line in text.splitlines():
            if any(f"= aten_{name}" in line for name in ("view", "transpose", "split", "t_default")):
                assert line.split("=")[0].strip() in returned  # eager's own kind of view, for the caller


def test_views_lie_where_they_did_in_memory_that_starts_elsewhere():
    import aottrain

    call = aottrain.compile(heads, capture="trace", kernel="cpp", on_unsupported="error")
    for start in (0, 3):
        _, arguments = made(start)
        result = call(*arguments)
        result.square().sum().backward()
        found = [argument.grad for argument in arguments]
        fresh = [argument.detach().requires_grad_() for argument in arguments]
        wanted = heads(*fresh)
        wanted.square().sum().backward()
        assert_close(result, wanted)
        for got, right in zip(found, fresh, strict=True):
            assert_close(got, right.grad)
