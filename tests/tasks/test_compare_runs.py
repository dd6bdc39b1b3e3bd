"""Real comparisons and plans of a very small model, each engine in its own process."""

import csv
import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from aottrain.config.reading import read_config, read_model
from aottrain.config.run import RunConfig
from aottrain.tasks import compare, plan

ROOT = Path(__file__).resolve().parent.parent.parent
WRONG_KERNEL = {"kernel": {"name": "custom", "target": "tests.tasks.wrong_kernel:scaled"}}


def small(output_dir: Path, **sections) -> RunConfig:
    values = {
        "recipe": {"model": {"num_layers": 1, "width": 16, "num_heads": 2, "context": 16, "dropout": 0.1}},
        "partition": {"budget": 0.4},
        "data": {"batch_size": 2},
        "logger": {"name": "csv"},
        "device": "cpu",
        "compare": {"engines": ["eager", "aot"], "steps": 2, "loss_steps": 2},
        "measure": {"warmup_steps": 1},
        **sections,
    }
    config, mistakes = read_config(values)
    config, more = read_model(config)
    assert not mistakes + more
    return dataclasses.replace(config, output_dir=str(output_dir))


def run_here(config: RunConfig) -> str:
    """Instead of `run_apart`: what a process does, without the seconds that its imports take."""
    Path(config.output_dir).mkdir(parents=True, exist_ok=True)
    return "" if importlib.import_module(f"aottrain.tasks.{config.task}").run(config) == 0 else "failed"


@pytest.mark.parametrize(("changes", "code", "verdict"), [({}, 0, "equal"), (WRONG_KERNEL, 1, "deviates")], ids=str)
def test_the_comparison_tells_a_right_kernel_from_a_wrong_one(
    tmp_path, monkeypatch, capsys, quick_children, changes, code, verdict
):
    """The right one's own engine in a process of its own, as always; all else in this."""
    monkeypatch.chdir(ROOT)
    apart = compare.run_apart

    def run(config: RunConfig) -> str:
        return run_here(config) if changes or config.engine.name == "eager" else apart(config)

    monkeypatch.setattr(compare, "run_apart", run)
    assert compare.run(small(tmp_path, task="compare", **changes)) == code
    with (tmp_path / "compare.csv").open(newline="") as file:
        rows = {row["engine"]: row for row in csv.DictReader(file)}
    assert rows["aot"]["verdict"] == verdict, capsys.readouterr().out
    assert float(rows["aot"]["step_ms_median"]) > 0 and int(float(rows["aot"]["saved_bytes"])) > 0
    assert not list(tmp_path.rglob("*.pt"))


def test_an_engine_that_cannot_run_is_shown_with_its_error(tmp_path, monkeypatch, capsys, quick_children):
    monkeypatch.chdir(ROOT)
    broken = {"kernel": {"name": "custom", "target": "tests.tasks.wrong_kernel:absent"}}
    assert compare.run(small(tmp_path, compare={"engines": ["aot"], "steps": 1, "loss_steps": 1}, **broken)) == 1
    assert "aot failed: ConfigError: kernel.target=tests.tasks.wrong_kernel:absent" in capsys.readouterr().out


def test_a_plan_runs_no_step_and_says_all(tmp_path, capsys):
    assert plan.run(small(tmp_path, task="plan")) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())
    assert (tmp_path / "compile_report.html").stat().st_size > 10_000
    assert written["num_parameters"] == written["parameter_bytes"] // 4 > 0
    assert written["flops_per_step"]["backward"] > written["flops_per_step"]["forward"] > 0
    assert written["graph"]["saved"]
    for value in written["graph"]["saved"]:
        assert value["reason"] and value["name"] in printed
    memory = written["graph"]["memory"]
    assert sum(memory.values()) == written["graph"]["predicted_peak_bytes"]
    assert all(category in printed for category, size in memory.items() if size)
    assert "forward_text" not in written["graph"]
