"""scripts/real_memory.py: its shortage makes allocators fail for real, and each failure is told from other errors."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from aottrain.compiler.frontends.api import compile as compiled
from aottrain.errors import is_out_of_memory
from scripts import real_memory
from scripts.real_memory import Shortage, problem_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")


def in_a_fork(call) -> int:
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = call()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_each_allocator_s_own_error_is_known():
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 64))
    step = compiled(model, kernel="cpp", capture="trace")
    batch = torch.randn(2048, 64)
    step(batch).sum().backward()
    ways = (
        lambda: torch.empty(1 << 24), lambda: bytearray(1 << 25), lambda: model(batch), lambda: [0] * (1 << 24),
        lambda: torch.randn(1 << 22).sort(),
    )  # fmt: skip

    def failing() -> int:
        known = 0
        for way in ways:
            shortage = Shortage(1 << 16)
            shortage.begin()
            error = None
            try:
                way()
            except Exception as raised:
                error = raised
            shortage.end()
            known += error is not None and is_out_of_memory(error)
        torch.empty(1 << 24)  # and what was taken is given back
        return known

    assert in_a_fork(failing) == len(ways)


def test_what_a_run_must_say_and_what_it_must_come_to(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "step 2: memory ran out in the backward (no memory): partition.budget=0.75 instead of 1.0"
    left = ([1.0, 2.0], {"replans": [{"what": line}]})
    monkeypatch.setattr(real_memory, "left", lambda folder: left)
    asks = {"kernel": "aten", "may_end": False}
    assert problem_of(0, line, [1.0, 2.0], **asks) == ""
    assert "other losses" in problem_of(0, line, [1.0, 2.0 + 1e-6], **asks)
    assert problem_of(0, line, [1.0, 2.0 + 1e-6], "cpp", may_end=False) == ""
    assert "0 lines" in problem_of(0, "", [1.0, 2.0], **asks)
    assert problem_of(1, line, [1.0], "aten", may_end=True) == "" != problem_of(1, line, [1.0], **asks)
    assert problem_of(1, "Traceback", [1.0], "aten", may_end=True) == "a traceback"
