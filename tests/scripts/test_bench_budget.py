"""scripts/bench_budget.py: what it asks of the command line is understood there, and its trunk is the one it says."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch

from aottrain import cli

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench_budget.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    yield importlib.import_module("bench_budget")
    sys.path.remove(str(SCRIPT.parent))


@pytest.fixture(autouse=True)
def same_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", ["transformer", "llama", "resnet"])
def test_a_recipe_s_command_line_is_a_valid_one(script, monkeypatch, capsys, tmp_path, recipe):
    commands = []

    class Ended:
        returncode = 0

    monkeypatch.setattr(script.subprocess, "run", lambda command, **_: commands.append(command) or Ended)
    arguments = ["x", "--recipe", recipe, "--budgets", "1.0,200MiB", "--out", str(tmp_path), "data.batch_size=2"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert script.main() == 0
    ((_, _, module, *settings),) = commands
    assert module == "aottrain"
    assert cli.main([*settings, "--cfg", "job"]) == 0
    shown = capsys.readouterr().out
    assert "- 200MiB" in shown and "batch_size: 2" in shown and f"name: {recipe}" in shown


@pytest.mark.parametrize("flags", [["--steps", "0"], ["--rounds", "many"], ["--recipe", "trnk"], ["--kernel", "cuda9"]])
def test_a_wrong_flag_is_refused(script, monkeypatch, capsys, flags):
    monkeypatch.setattr(sys, "argv", ["x", *flags])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and flags[1] in capsys.readouterr().err


def test_the_trunk_s_activations_are_counted(script):
    peaks = {}
    for point in ("eager", "eager_checkpoint"):
        figures, take = script.begin_stack("trunk", point, "aten")
        peaks[point] = figures["peak_bytes"]
        assert len(take(2)) == 2
    # 12 blocks: two norms, qkv, attention, its log-sum-exp, products; then what the last backward op needs.
    assert 100e6 < peaks["eager"] < 107e6 and peaks["eager_checkpoint"] < 0.25 * peaks["eager"]
