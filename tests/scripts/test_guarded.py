"""scripts/guarded.py: what leaves its tensor ends the process, and nothing of ours does."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "guarded.py"
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None,
    reason="tensors are guarded on Linux, by what a C compiler makes",
)
# Of 60 floats, whose last 16 bytes of an alignment are free.
TENSOR = """
import ctypes, torch

def element(i):
    return ctypes.c_float.from_address(x.data_ptr() + 4 * i)

x = torch.zeros(60)
"""
# Calls that are measured for a budget run on made-up inputs: the numbers of places in a window, and LAPACK's pivots.
BUDGET = """
import torch, aottrain
import torch.nn.functional as F

indices, offsets = torch.arange(12), torch.tensor([0, 3, 7, 12])

def f(x, a, b):
    bags = F.embedding_bag(indices, x.reshape(-1, 4) * 2, offsets, mode="sum", include_last_offset=True)
    pooled = F.max_pool2d(x * 2, 3, 2, 1, ceil_mode=True).relu()
    solved = torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b) + torch.linalg.solve(a, b)
    return bags.sum() + pooled.sum() + solved.sum()

compiled = aottrain.compile(f, kernel="cpp", budget=0.2, on_unsupported="error")
for layout in (torch.contiguous_format, torch.channels_last):
    x = torch.rand(2, 8, 15, 16).to(memory_format=layout).requires_grad_()
    a, b = (torch.rand(6, 6) + 6 * torch.eye(6)).requires_grad_(), torch.rand(6, 2, requires_grad=True)
    compiled(x, a, b).backward()
    assert x.grad.sum() > 0
"""


def guarded(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *options, "--", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("options", "program", "status"), [
    ((), "element(59).value", 0),
    ((), "element(64).value", 128 + signal.SIGSEGV),
    (("--below",), "element(-1).value", 128 + signal.SIGSEGV),
    ((), "element(60).value = 1; del x", 128 + signal.SIGILL),
], ids=["inside", "behind", "before", "in the rest"])  # fmt: skip
def test_what_leaves_its_tensor_ends_the_process(options, program, status):
    done = guarded(TENSOR + program, *options)
    assert done.returncode == status, done.stderr


@pytest.mark.parametrize("options", [(), ("--below",)], ids=["behind", "before"])
def test_calls_on_made_up_inputs_stay_inside_their_tensors(options):
    done = guarded(BUDGET, *options)
    assert done.returncode == 0, done.stderr
