"""Training on a device that is not there, from the configuration to the last checkpoint: run by test_simulated.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from aottrain.config.extensions.recipes import load_recipe
from aottrain.tasks import plan, train
from aottrain.trainer.weights import scaling
from tests.sampling import WHOLE
from tests.simulated.steps import made_of, run_step
from tests.trainer.conftest import left_by, tiny

__all__ = ["left_by", "tiny"]


def test_a_run_has_every_figure_and_resumes(tiny, left_by, launches, capsys):
    """On the second device, which the run makes the current one."""
    given = {"device": "cuda:1", "kernel": {"name": "triton"}, "model": {"num_layers": 1}}
    config = tiny("aot", trainer={"steps": 2, "save_every": 1}, lr_schedule={"total_steps": 4}, **given)
    try:
        assert train.run(config) == 0
        summary = left_by(config).summary
        assert summary["peak_bytes"] > 0 and summary["tokens_per_s"] > 0 and summary["kernel"] == "triton"
        assert summary["fallbacks"] == 0 and 0 <= summary["verify_max_error"] < 1e-4
        assert {launch.device for launch in launches.launches} == {1} and not launches.skipped
        again = tiny("aot", trainer={"steps": 4}, resume="auto", lr_schedule={"total_steps": 4}, **given)
        assert train.run(again) == 0
        assert left_by(config).summary["steps"] == 4 and "finished after step 4" in capsys.readouterr().out
    finally:
        torch.cuda.set_device(0)


@WHOLE
def test_bfloat16_by_graphs_follows_the_same_run_without(tiny, left_by, tmp_path):
    losses = []
    for graphs in (False, True):
        given = {"kernel": {"name": "triton", "cuda_graphs": graphs}, "output_dir": str(tmp_path / str(graphs))}
        trainer = {"steps": 3, "precision": "bf16", "accumulate": 2}
        given |= {"partition": {"strategy": "min_cut", "budget": None}, "verify": {"steps": 0}}
        config = tiny("aot", model={"dropout": 0.1, "num_layers": 1}, device="cuda", trainer=trainer, **given)
        assert train.run(config) == 0
        losses.append(left_by(config).losses)
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.parametrize("kernel", ["generated", "torch"])
def test_float16_scales_the_loss_and_leaves_overflows_out(kernel, tiny, left_by, tmp_path, monkeypatch, capsys):
    """One step's gradients are made to overflow; a run that is resumed goes on with the scale."""
    monkeypatch.setattr(scaling.LossScaling, "scaled", overflowing(scaling.LossScaling.scaled, at=3))
    given = {
        "device": "cuda",
        "kernel": {"name": "triton"},
        "model": {"num_layers": 1},
        "optimizer": {"kernel": kernel},
    }
    given |= {"lr_schedule": {"total_steps": 4}, "verify": {"steps": 0}}
    trainer = {"precision": "fp16", "save_every": 1, "accumulate": 2, "ema": 0.9}
    config = tiny("aot", trainer={"steps": 3, **trainer}, **given)
    assert train.run(config) == 0
    summary = left_by(config).summary
    assert (summary["loss_scale"], summary["overflowed_steps"], summary["skipped_steps"]) == (32768, 1, 0)
    assert "is left out: gradients overflow with the loss times 65536; half" in capsys.readouterr().out
    again = tiny("aot", trainer={"steps": 4, **trainer}, resume="auto", **given)
    assert train.run(again) == 0
    summary = left_by(config).summary
    assert (summary["loss_scale"], summary["overflowed_steps"]) == (32768, 0)


def overflowing(scaled, at):
    calls = []

    def method(self, loss):
        calls.append(loss)
        return scaled(self, loss) * (float("inf") if len(calls) == at else 1)

    return method


@pytest.mark.parametrize(
    ("recipe", "size", "budget"),
    [("llama", {"num_layers": 1}, 0.3), ("resnet", {"num_blocks": 1}, None)],
)
def test_recipes_are_planned_and_run(recipe, size, budget, device, launches):
    """As wide as they come, where nothing is computed."""
    made = made_of(load_recipe(recipe), load_recipe(recipe).Options(**size), 8)
    more = {} if budget is None else {"budget": budget}
    found, report = run_step(device, launches, made, autocast=True, **more)
    assert found and report.kernels and not launches.skipped
    assert {launch.device for launch in found} == {0}


def test_a_plan_runs_no_step(tiny, left_by, launches, tmp_path, capsys):
    config = tiny("aot", {"num_layers": 1}, device="cuda", kernel={"name": "triton"}, partition={"budget": 0.3})
    Path(config.output_dir).mkdir(parents=True)
    assert plan.run(config) == 0
    assert not launches.launches
    known = json.loads((Path(config.output_dir) / "plan.json").read_text())
    assert known["graph"]["kernel"] == "triton" and "No step was run" in capsys.readouterr().out
