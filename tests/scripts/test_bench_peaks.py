"""scripts/bench_peaks.py: its table, what counts as well, and a table that goes on where it was interrupted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_peaks.py"
MIB = 2**20
KNOWN = {
    "eager": {"peak": 400 * MIB},
    "torch.compile": {"peak": 500 * MIB},
    "ours": {"peak": 300 * MIB, "predicted": 299 * MIB},
}


@pytest.fixture(scope="module")
def bench_peaks():
    spec = importlib.util.spec_from_file_location("bench_peaks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    path = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = path
    return module


def test_a_row_has_peaks_predictions_and_ratios(bench_peaks):
    (row, empty) = bench_peaks.rows_of({"gpt2": {**KNOWN, "budget=0.5": {"error": "no"}}}, ["gpt2", "vit-base"])
    assert row == ["gpt2", "400.0", "500.0", "300.0 (299.0)", "", "failed", "", "0.75", "0.60"]
    assert empty == ["vit-base", *[""] * 8]


@pytest.mark.parametrize(
    ("changed", "well"),
    [
        ({}, True),
        ({"ours": {"peak": 401 * MIB}}, False),
        ({"budget=0.5": {"error": "exit code 1"}}, False),
        ({"eager": {}}, True),
    ],
)
def test_a_default_above_another_engine_or_an_error_is_a_failure(bench_peaks, changed, well):
    figures = {name: known for name, known in {**KNOWN, **changed}.items() if known}
    assert bench_peaks.went_well({"gpt2": figures}, ["gpt2"]) is well


def test_what_is_there_is_not_run_again(bench_peaks, tmp_path, monkeypatch, capsys):
    out, ran = tmp_path / "peaks.json", []
    out.write_text(json.dumps({"gpt2": {"eager": KNOWN["eager"], "ours": {"error": "killed"}}}))
    monkeypatch.setattr(bench_peaks.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(bench_peaks, "measure_apart", lambda *run: ran.append(run) or {"peak": 300 * MIB})
    line = ["bench_peaks.py", "--out", str(out), "--names", "gpt2", "--engines", "eager", "ours"]
    monkeypatch.setattr(sys, "argv", line)
    assert bench_peaks.main() == 0 and ran == [("gpt2", "ours")]
    assert json.loads(out.read_text())["gpt2"]["ours"] == {"peak": 300 * MIB}
    assert "0.75" in capsys.readouterr().out


def test_every_model_has_a_batch_of_its_own_kind(bench_peaks):
    groups = {"CausalLM", "MaskedLM", "Seq2SeqLM", "SpeechSeq2Seq", "AudioClassification", "ImageClassification"}
    assert {group for group, *_ in bench_peaks.MODELS.values()} == groups and len(bench_peaks.MODELS) >= 20
    assert all(count >= 1 and size >= 64 for *_, (count, size) in bench_peaks.MODELS.values())


def test_every_model_has_a_name_in_the_texts(bench_peaks):
    assert set(bench_peaks.TITLES) == set(bench_peaks.MODELS)
    assert len(set(bench_peaks.TITLES.values())) == len(bench_peaks.MODELS)


@pytest.mark.parametrize("name", ["deit-base", "t5-small"])
def test_a_model_is_made_from_its_configuration(bench_peaks, name, monkeypatch):
    """Of deit transformers has two classes, and of t5 the configuration names no token to start with."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"deit": {"hidden_size": 12, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8},
             "t5": {"d_model": 8, "d_kv": 4, "num_heads": 2, "num_layers": 1, "d_ff": 8, "vocab_size": 64}}  # fmt: skip
    group, kind, changes, _ = bench_peaks.MODELS[name]
    size = (1, 224) if kind == "deit" else (1, 64)
    monkeypatch.setitem(bench_peaks.MODELS, name, (group, kind, changes | small[kind], size))
    model = bench_peaks.build(name)
    assert model(**bench_peaks.make_batch(model, name)).loss.isfinite()
