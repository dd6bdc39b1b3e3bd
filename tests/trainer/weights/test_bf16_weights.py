"""trainer.precision=bf16_weights: which weights are rounded, what is held, and that runs go on bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from aottrain.errors import ResumeError
from aottrain.metrics.memory import distinct_bytes
from aottrain.ops.optimizers.masters import MASTER
from aottrain.tasks import train
from aottrain.tasks.building.build import build_job
from aottrain.trainer.checkpoint import load
from aottrain.trainer.optim import build_optimizer, optimizer_state_bytes
from aottrain.trainer.weights.averaging import Averages
from aottrain.trainer.weights.rounding import round_matrices
from tests.numerics.comparison import assert_same
from tests.trainer.conftest import left_by, one_thread, tiny, unbroken_and_resumed

__all__ = ["left_by", "one_thread", "tiny"]
BF16_WEIGHTS = "bf16_weights"


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5), nn.Linear(5, 5).double())
    layers[2].weight = layers[0].weight
    return layers


def test_matrices_are_rounded_and_tied_ones_stay_tied():
    layers = model()
    round_matrices(layers)
    assert layers[2].weight is layers[0].weight and layers[0].weight.dtype is torch.bfloat16
    kept = (layers[1].weight, layers[1].running_mean, layers[2].bias)
    assert {value.dtype for value in kept} == {torch.float32} and layers[3].weight.dtype is torch.float64


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion"])
def test_what_the_optimizer_holds_is_known_before_its_first_step(tiny, name):
    config, layers = tiny(optimizer={"name": name, "momentum": 0.9}).optimizer, model()
    round_matrices(layers)
    optimizer = build_optimizer(layers, config, BF16_WEIGHTS)
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert optimizer_state_bytes(layers, config, BF16_WEIGHTS) == distinct_bytes(held)


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_a_run_that_stopped_goes_on_bit_for_bit(tiny, left_by, tmp_path, engine):
    """Also its average, which is float32's, and its weights are those of the checkpoint's copies."""
    whole, rest = unbroken_and_resumed(tiny, tmp_path, engine, precision=BF16_WEIGHTS, ema=0.5)
    assert left_by(whole).losses[2:] == left_by(rest).losses
    ends = [
        load(next((path / "checkpoints").glob("*4.pt"))).state
        for path in map(lambda config: left_by(config).directory, (whole, rest))
    ]
    for name, value in ends[0]["model"].items():
        assert_same(value, ends[1]["model"][name])
        assert_same(ends[0]["averages"]["values"][name], ends[1]["averages"]["values"][name])
        assert ends[0]["averages"]["values"][name].dtype is torch.float32
    states = ends[0]["optimizer"]["state"].values()
    matrices = [value for value in ends[0]["model"].values() if value.dtype is torch.bfloat16]
    assert matrices and sum(MASTER in state for state in states) == len(matrices)


def test_another_precision_is_refused_or_begins_the_optimizer_anew(tiny, tmp_path, capsys):
    config = tiny(trainer={"steps": 1, "precision": BF16_WEIGHTS})
    assert train.run(config) == 0
    other = dataclasses.replace(
        tiny(trainer={"steps": 2}), resume=config.output_dir, output_dir=str(tmp_path / "other")
    )
    with pytest.raises(ResumeError, match="trainer.precision: 'bf16_weights' in the checkpoint, 'fp32' in this run"):
        train.run(other)
    assert train.run(dataclasses.replace(other, resume_override=("trainer.precision",))) == 0
    assert "the optimizer begins anew" in capsys.readouterr().out


def test_a_step_is_eagers(tiny):
    """By generated kernels, as far as bfloat16 goes; the run's own check of the first step passes."""
    losses = []
    for engine in ("eager", "aot"):
        config = tiny(engine, trainer={"precision": BF16_WEIGHTS}, kernel={"name": "cpp"} if engine == "aot" else {})
        job = build_job(config)
        losses.append(job.step(job.batches.at(1)).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


def test_the_average_is_finer_than_its_parameter():
    layers = nn.Linear(2, 2, bias=False)
    nn.init.ones_(layers.weight)
    round_matrices(layers)
    averages = Averages(layers, 0.999)
    averages.update()
    with torch.no_grad():
        layers.weight += 1
    averages.update()
    (value,) = averages.values.values()
    assert value.dtype is torch.float32 and (value > 1).all() and (value < 1.01).all()
    with averages.applied():
        assert_same(layers.weight.detach(), torch.ones(2, 2, dtype=torch.bfloat16))
    assert_same(layers.weight.detach(), torch.full((2, 2), 2.0, dtype=torch.bfloat16))
    assert (value > 1).all()
