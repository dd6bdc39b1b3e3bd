"""scripts/architectures.py: its comparison misses nothing; one model goes all the way where transformers is there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "architectures.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    yield importlib.import_module("architectures")
    sys.path.remove(str(SCRIPT.parent))


def step(value):
    return [{"gradient of w": value}]


@pytest.mark.parametrize(
    ("wanted", "got", "verdict"),
    [
        (torch.ones(2), torch.ones(2), "equal"),
        (None, None, "equal"),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), "equal"),
        (torch.ones(2), torch.ones(2) + 1e-6, "close"),
        (torch.ones(2), torch.ones(2) + 1e-3, "WRONG"),
        (None, torch.zeros(2), "WRONG"),
        (torch.zeros(2), None, "WRONG"),
        (torch.zeros(2), -torch.zeros(2), "close"),
        (torch.tensor([1.0, torch.nan]), torch.ones(2), "WRONG"),
        (torch.tensor([1.0, torch.inf]), torch.tensor([2.0, torch.inf]), "WRONG"),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]), "WRONG"),
        (torch.tensor([1]), torch.tensor([2]), "WRONG"),
        (torch.ones(2), torch.ones(3), "WRONG"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "WRONG"),
    ],
)
def test_compare(script, wanted, got, verdict):
    assert script.compare(step(wanted), step(got)).split(":")[0] == verdict
    if verdict == "WRONG":  # also by generated kernels
        assert script.compare(step(wanted), step(got), script.KERNEL_TOLERANCE).startswith("WRONG")


def test_unknown_name(script, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(sys, "argv", ["architectures.py", "berd"])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("architectures.py: berd is not in the table")


def test_without_transformers(script, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["architectures.py"])
    assert script.main() == 2
    assert capsys.readouterr().err == "architectures.py needs the package transformers: pip install transformers\n"


def test_one_model(quick_children):
    """In a process that has run nothing in threads yet: it forks."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    command = [sys.executable, SCRIPT, "gpt2", "--budgets", "0.2"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 equal" in done.stdout
