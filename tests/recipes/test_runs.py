"""Every recipe as a person runs it: trained, and planned, from the command line."""

from __future__ import annotations

import csv
import json

import pytest

from aottrain.cli import main

SMALL = {
    "transformer": ["num_layers=2", "width=24", "context=32"],
    "llama": ["num_layers=2", "width=24", "mlp_width=40", "context=32"],
    "resnet": ["width=4", "num_blocks=1", "image_size=12"],
}


def options_of(name: str) -> list[str]:
    return [f"recipe={name}", *(f"recipe.model.{option}" for option in SMALL[name]), "debug=fast"]


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_runs_from_the_command_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = [*options_of(name), "partition.budget=0.3", "hydra.run.dir=run", "engine.on_unsupported=error"]
    assert main(line) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["recipe"] == name and summary["fallbacks"] == 0 and summary["verify_max_error"] < 1e-5
    assert summary["samples_per_s"] > 0 and summary["model_flops_per_s"] > 0 and summary["val_loss"] > 0
    assert summary["saved_bytes"] < 0.9 * summary["eager_saved_bytes"]

    unit, other = ("samples", "tokens") if name == "resnet" else ("tokens", "samples")
    out = capsys.readouterr().out
    assert f"{unit}/s" in out and f"{unit} a step" in out and f"{other}/s" not in out
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        rates = [row[f"perf/{unit}_per_s"] for row in csv.DictReader(file)]
    assert len(rates) == 5 and float(rates[0]) > 0
    assert (summary["tokens_per_s"] is None) == (unit == "samples")


@pytest.mark.parametrize("name", SMALL)
def test_a_recipe_is_planned(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*options_of(name), "task=plan", "hydra.run.dir=run"]) == 0
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["recipe"] == name and plan["graph"]["saved_bytes"] > 0 and plan["fallbacks"] == []
    assert f"Plan of {name}" in capsys.readouterr().out
