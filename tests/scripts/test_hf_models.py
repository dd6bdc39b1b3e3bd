"""scripts/hf_models.py: what it calls equal is equal, and its table says of each task what became of its types."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    yield importlib.import_module("hf_models")
    sys.path.remove(str(SCRIPTS))


def trained(script, losses=(2.0, 1.0), gradient=(1.0, 2.0), reasons=()):
    value = None if gradient is None else torch.tensor(gradient)
    return script.Trained(losses, {"a": value, "noise": torch.zeros(2)}, reasons, 3)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ({}, "equal"),
        ({"reasons": ("a draw",)}, "partly eager"),
        ({"losses": (2.0, 1.0005)}, "equal"),
        ({"losses": (2.0, 1.01)}, "losses differ"),
        ({"losses": (2.0, float("nan"))}, "losses differ"),
        ({"gradient": (1.0, 2.00001)}, "equal"),
        ({"gradient": (1.0, 2.01)}, "gradient of a differs"),
        ({"gradient": (1.0, float("nan"))}, "gradient of a differs"),
        ({"gradient": None}, "gradient of a differs"),
    ],
)
def test_a_verdict(script, ours, verdict):
    result = script.judged("causal", "qwen3", trained(script, **ours), trained(script))
    assert result.verdict.startswith(verdict)
    assert result.falls == (result.losses[1] < result.losses[0])


def test_the_table(script, tmp_path):
    results = [
        script.judged("causal", "qwen3", trained(script), trained(script)),
        script.judged("causal", "rwkv", trained(script, reasons=("why",)), trained(script)),
        script.judged("image", "vit", trained(script, losses=(1.0, 3.0)), trained(script)),
    ]
    causal, image = script.rows(results)
    assert causal == ("causal", "1: qwen3", "1: rwkv: why", "0")
    assert image[0] == "image" and image[3].startswith("vit: losses differ from eager's by")
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(script.asdict(result)) + "\n" for result in results))
    assert script.read(path) == results and script.read(tmp_path / "none") == []


def test_unknown_name(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hf_models.py", "qwen"])
    assert script.main() == 2
    assert capsys.readouterr().err.startswith("hf_models.py: qwen is not in the table")
