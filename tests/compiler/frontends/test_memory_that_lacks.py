"""A call that is compiled while there is no memory: the allocator's error comes out, and nobody remembers a refusal."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler import stages
from aottrain.errors import is_out_of_memory
from aottrain.toolchain.native import find_compiler

STAGES = (
    "capture", "analyse", "trace_joint", "functionalize", "simplify", "plan_partition", "apply_partition", "schedule",
    "make_kernels", "link", "describe",
)  # fmt: skip
ERRORS = (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("at", STAGES)
def test_it_is_compiled_when_it_is_called_again(capture, at, monkeypatch):
    monkeypatch.delenv("AOTTRAIN_FAULTS", raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    x = torch.randn(8, 16)
    step = aottrain.compile(model, kernel="cpp" if find_compiler() else "aten", capture=capture)
    left = list(ERRORS)

    def full(stage: str) -> None:
        if stage == at and left:
            raise left.pop()

    with stages.stages_told(full):
        for _ in ERRORS:
            error = None
            try:
                step(x)
            except Exception as raised:
                error = raised
            assert error is not None and is_out_of_memory(error)
        assert not left and not step.report.graphs
        result = step(x)
    result.sum().backward()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()])
    assert len(step.report.graphs) == 1 and not step.report.fallbacks
