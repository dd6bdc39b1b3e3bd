"""Plans that are made for a described device, and used on this one."""

import json

import pytest
import yaml

from aottrain.cli import main

MODEL = [f"recipe.model.{key}" for key in ("num_layers=2", "width=32", "num_heads=2", "context=16")]
TRAINED = ["debug=fast", "trainer.steps=2", "device=cpu", "partition=plan", "logger=csv"]
CPU = {
    "name": "some CPU", "source": "a test", "kind": "cpu", "memory_bytes": 8 << 30, "flops": {"float32": 1e11},
    "bytes_per_s": 2e10, "launch_s": 0.0,
}  # fmt: skip


@pytest.fixture
def planned(tmp_path, monkeypatch, capsys):
    """A folder with plan.json, made for a file of rates under a tight budget."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cpu.yaml").write_text(yaml.safe_dump(CPU))
    arguments = ["task=plan", "device=cpu.yaml", "partition.budget=0.2", "kernel=aten", "data.batch_size=4"]
    assert main([*arguments, *MODEL, f"hydra.run.dir={tmp_path}/planned"]) == 0
    assert "some CPU (a test)" in capsys.readouterr().out
    return tmp_path / "planned" / "plan.json"


def test_a_plan_is_followed_where_the_program_is_the_same(planned, tmp_path, capsys):
    arguments = [*TRAINED, f"partition.path={planned}", "kernel=aten", "data.batch_size=4"]
    assert main([*arguments, *MODEL, f"hydra.run.dir={tmp_path}/run"]) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    plan = json.loads(planned.read_text())
    row = plan["rows"][0]
    assert summary["saved_bytes"] == row["saved_bytes"] and summary["fallbacks"] == 0
    # What was planned leaves out what libraries of this machine allocate within calls.
    assert summary["predicted_peak_bytes"] == pytest.approx(row["allocated_peak_bytes"], rel=0.2)


def test_another_program_is_refused_by_the_value_that_differs(planned, tmp_path, capsys):
    arguments = [*TRAINED, f"partition.path={planned}", "kernel=aten", "data.batch_size=2"]
    assert main([*arguments, *MODEL, f"hydra.run.dir={tmp_path}/run"]) == 2
    error = capsys.readouterr().err
    assert "the plan is of another program: here is" in error and "float32[2, 16" in error and "Traceback" not in error


@pytest.mark.parametrize(
    ("content", "text"), [(None, "no such file"), ("{}", "is no plan.json"), ("[1]", "is no plan.json")]
)
def test_a_file_that_is_no_plan_is_refused(tmp_path, monkeypatch, capsys, content, text):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "plan.json").write_text(content)
    assert main([*TRAINED, "partition.path=plan.json", *MODEL, f"hydra.run.dir={tmp_path}/run"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"flops": {}}, "flops must have"),
        ({"speed": 1}, "speed is not known"),
        ({"bytes_per_s": None}, "bytes_per_s=None must be a number"),
        ({"kind": "tpu"}, "must be cuda or cpu"),
    ],
)
def test_a_file_of_rates_is_checked(tmp_path, monkeypatch, capsys, change, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "device.yaml").write_text(yaml.safe_dump({**CPU, **change}))
    assert main(["task=plan", "device=device.yaml", f"hydra.run.dir={tmp_path}/run"]) == 2
    assert text in capsys.readouterr().err


def test_what_is_measured_can_be_planned_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["task=measure", "device=cpu", f"hydra.run.dir={tmp_path}/measured"]) == 0
    file = tmp_path / "measured" / "device.yaml"
    assert yaml.safe_load(file.read_text())["flops"]["float32"] > 0
    arguments = ["task=plan", f"device={file}", "kernel=aten", "data.batch_size=2"]
    assert main([*arguments, *MODEL, f"hydra.run.dir={tmp_path}/planned"]) == 0
    assert "task=measure on" in capsys.readouterr().out
