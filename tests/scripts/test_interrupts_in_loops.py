"""scripts/interrupts_in_loops.py: a Ctrl-C that comes while somebody's own call is compiled, and what it finds."""

from __future__ import annotations

import random
import signal
import sys
from pathlib import Path

import pytest
import torch

import aottrain
from scripts import interrupts_in_loops as script

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="children are forked on Linux alone")


@pytest.fixture(autouse=True)
def _can_be_forked():
    """A build for CUDA counts eight devices once fakes of some were traced here, each with a thread of autograd."""
    names = {path.read_text(encoding="utf-8").strip() for path in Path("/proc/self/task").glob("*/comm")}
    if torch.version.cuda is not None and any(name.startswith("pt_autograd") for name in names):
        pytest.skip(f"torch {torch.__version__}: threads of autograd are there, and no child of a fork goes backward")


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_it_reaches_the_caller_and_the_next_call_is_eager_s(tmp_path, monkeypatch, capture):
    monkeypatch.chdir(tmp_path)
    model, batch = script.model_and_batch()
    expected = script.gone_back(model, model, batch)
    aottrain.compile(torch.nn.Linear(3, 3), capture=capture)(torch.ones(2, 3)).sum().backward()
    found = script.one(capture, False, random.Random(0), 0.2, expected)  # of some seconds
    assert found["end"] == "KeyboardInterrupt" and found["wrong"] == []


def test_what_is_spoilt_is_told(tmp_path, monkeypatch):
    """A trace that leaves its mode on, and numbers that are not eager's."""
    monkeypatch.chdir(tmp_path)
    model, batch = script.model_and_batch()
    wrong = [torch.zeros_like(value) + 9 for value in script.gone_back(model, model, batch)]

    def interrupted(*_) -> None:
        torch.set_grad_enabled(False)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(aottrain, "compile", lambda model, **_: interrupted if not hasattr(model, "x") else model)
    found = script.one("trace", False, random.Random(0), 0.0, wrong)
    assert found["end"] == "KeyboardInterrupt" and "torch's state" in found["wrong"][0]
    assert any("next call" in line or "other numbers" in line for line in found["wrong"])
