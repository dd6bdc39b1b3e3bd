"""task=plan device=h100-sxm, in processes of their own: they take CUDA to be there from then on."""

import json
import subprocess
import sys

import pytest

from aottrain.config.extensions.recipes import recipe_names
from aottrain.ir.settings.devices import DEVICES
from aottrain.toolchain.native import compiler_obstacle
from tests.sampling import WHOLE

pytestmark = [
    pytest.mark.usefixtures("quick_children"),
    pytest.mark.skipif(bool(compiler_obstacle()), reason="there is no C++ compiler"),
]
SMALL = ("recipe=llama", "recipe.model.context=64", "recipe.model.num_layers=2", "trainer.precision=bf16")


@pytest.fixture
def plan(tmp_path):
    def call(*overrides):
        command = [sys.executable, "-m", "aottrain", "task=plan", f"hydra.run.dir={tmp_path}/out", *overrides]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        path = tmp_path / "out" / "plan.json"
        return done.returncode, done.stdout + done.stderr, json.loads(path.read_text()) if path.exists() else None

    return call


def test_a_step_is_planned_for_a_device_that_is_not_there(plan, tmp_path):
    code, out, found = plan("device=h100-sxm", *SMALL)
    assert code == 0, out
    for part in ("fits", "allocated at the peak", "tokens/s", "MFU", "limited by", "Memory over the step"):
        assert part in out
    (row,) = found["rows"]
    assert row["kernel"] == "triton" and row["verdict"] == "fits" and row["budget_is_met"]
    assert sum(row["memory"].values()) == row["allocated_peak_bytes"] < DEVICES["h100-sxm"].memory_bytes
    assert row["step_s_range"][0] < row["step_s"] < row["step_s_range"][1]
    assert "h100-sxm" in (tmp_path / "out" / "compile_report.html").read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[WHOLE] * (name != "transformer")) for name in recipe_names()]
)
def test_every_recipe_is_planned(plan, name):
    """With dropout, where it has some: what eager takes of a draw cannot be asked there."""
    if name == "hf":
        pytest.importorskip("transformers", reason="transformers is not installed")
    smaller = ["recipe.model.num_layers=1", "recipe.model.context=32"] if name == "transformer" else []
    code, out, found = plan("device=h100-sxm", f"recipe={name}", *smaller)
    assert code == 0 and found["rows"][0]["verdict"] == "fits", out


def test_a_table_of_batches_budgets_and_devices_has_the_cheapest_first(plan):
    code, out, found = plan("device=a100-40", *SMALL, "plan.batches=[1]", "plan.budgets=[1.0,0.0]", "plan.worlds=[1,4]")
    assert code == 0, out
    rows = found["rows"]
    assert {(row["batch_size"], row["plan"], row["world"]) for row in rows} == {
        (batch, budget, world) for batch in (1,) for budget in ("1", "0") for world in (1, 4)
    }
    costs = [row["world"] / row["samples_per_s"] for row in rows]
    assert costs == sorted(costs) and "devices" in out
    by_key = {(row["batch_size"], row["plan"], row["world"]): row for row in rows}
    for batch in (1,):
        assert by_key[batch, "0", 1]["allocated_peak_bytes"] <= by_key[batch, "1", 1]["allocated_peak_bytes"]
        alone, shared = by_key[batch, "1", 1], by_key[batch, "1", 4]
        assert shared["memory"]["optimizer"] * 4 == pytest.approx(alone["memory"]["optimizer"], abs=4)
        assert alone["exchange_s"] == 0 < shared["exchange_s"]


def test_what_cannot_fit_is_said_and_is_no_failure(plan):
    code, out, found = plan("device=rtx-4090", *SMALL, "partition.budget=1MiB")
    assert code == 0 and "the budget cannot be met" in out
    assert not found["rows"][0]["budget_is_met"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["task=plan", "device=h100"], "did you mean"),
        (["device=h100-sxm"], "task=plan alone"),
        (["task=plan", "plan.world=8"], "give the name of a device"),
        (["task=plan", "device=here.yaml"], "cannot be read: No such file"),
    ],
)
def test_a_mistake_is_one_line(overrides, text, tmp_path):
    command = [sys.executable, "-m", "aottrain", *overrides, f"hydra.run.dir={tmp_path}/out"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 2 and text in done.stderr and "Traceback" not in done.stderr
