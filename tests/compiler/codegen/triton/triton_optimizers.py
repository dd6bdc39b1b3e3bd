"""Optimizer steps as Triton kernels against `evaluate`. Run by test_triton.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from aottrain.compiler.optimizers import AdamW
from tests.compiler.optimizers.optimizing import CASES
from tests.numerics.tolerance import assert_close
from tests.sampling import crossed

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def run(name: str, kernel: str, dtype: torch.dtype) -> tuple[list[nn.Parameter], torch.optim.Optimizer]:
    """Three steps over a whole block, parts of one, nothing, and a tensor that starts at an odd address."""
    ours, _, options = CASES[name]
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(4104, generator=generator)[1:]
    values = [torch.randn(size, generator=generator) for size in (1, 63, 5000, 0)] + [flat]
    parameters = [nn.Parameter(value.to(dtype).to(DEVICE)) for value in values]
    groups = [{"params": parameters[:2], "weight_decay": 0.0}, {"params": parameters[2:]}]
    optimizer = ours(groups, **options, clip_norm=1.0, kernel=kernel)
    for step in range(3):
        for number, parameter in enumerate(parameters):
            gradient = torch.randn(parameter.shape, generator=generator).to(dtype).to(DEVICE)
            parameter.grad = None if step == 1 and number == 1 else gradient
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize(
    ("name", "dtype"),
    crossed(["adamw", "sgd nesterov", "sgd dampening", "lion"], [torch.float32, torch.bfloat16], one_in=2),
)
def test_a_step_is_the_evaluated_one(name, dtype):
    got, wanted = run(name, "triton", dtype), run(name, "evaluate", dtype)
    assert_close(got[1].grad_norm, wanted[1].grad_norm)
    for a, b in zip(got[0], wanted[0], strict=True):
        assert_close(a.detach(), b.detach())
    for a, b in zip(got[1].state.values(), wanted[1].state.values(), strict=True):
        for key in a:
            assert_close(a[key], b[key])


def test_types_are_mixed():
    values = [torch.ones(70, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float64, torch.float16)]
    found = []
    for kernel in ("triton", "evaluate"):
        parameters = [nn.Parameter(value.clone()) for value in values]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        AdamW(parameters, lr=0.1, kernel=kernel, clip_norm=0.5).step()
        found.append([parameter.detach() for parameter in parameters])
    for got, wanted in zip(*found, strict=True):
        assert_close(got, wanted)
        assert got.mean().item() == pytest.approx(0.899, abs=1e-3)


def test_a_step_is_left_out():
    parameter = nn.Parameter(torch.ones(5, device=DEVICE))
    optimizer = AdamW([parameter], kernel="triton", skip_nonfinite=True)
    parameter.grad = torch.full((5,), torch.nan, device=DEVICE)
    optimizer.step()
    assert torch.equal(parameter.cpu(), torch.ones(5)) and optimizer.state[parameter]["step"] == 0
