"""Learning rates, decay groups, clipping, and an update that leaves itself out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from aottrain.config.run import LrScheduleConfig, OptimizerConfig
from aottrain.metrics.memory import distinct_bytes
from aottrain.ops.optimizers.lion import Lion
from aottrain.step import StepResult
from aottrain.trainer.loop import take_step
from aottrain.trainer.meters import History
from aottrain.trainer.optim import (
    build_optimizer,
    clip_and_update,
    clip_gradients,
    learning_rate,
    optimizer_state_bytes,
    update,
)
from aottrain.trainer.weights.groups import parameter_groups


@pytest.mark.parametrize(
    ("step", "expected"),
    [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.1 + 0.9 * 0.5), (110, 0.1), (200, 0.1)],
)
def test_the_cosine_schedule(step, expected):
    schedule = LrScheduleConfig(warmup_steps=10, min_lr_ratio=0.1)
    assert learning_rate(step, 1.0, schedule, total_steps=110) == pytest.approx(expected)


def test_the_constant_schedule_and_no_warm_up():
    schedule = LrScheduleConfig(name="constant", warmup_steps=0)
    assert [learning_rate(step, 0.5, schedule, 10) for step in (1, 10, 99)] == [0.5, 0.5, 0.5]


def test_only_matrices_decay():
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    decayed, others = parameter_groups(model, OptimizerConfig(weight_decay=0.1))
    assert decayed["weight_decay"] == 0.1 and others["weight_decay"] == 0.0
    assert [tuple(p.shape) for p in decayed["params"]] == [(5, 4), (3, 4)]
    assert [tuple(p.shape) for p in others["params"]] == [(4,), (4,), (3,)]


@pytest.mark.parametrize("config", [
    OptimizerConfig(), OptimizerConfig(name="sgd"), OptimizerConfig(name="sgd", momentum=0.0),
    OptimizerConfig(name="lion"),
])  # fmt: skip
def test_state_bytes_are_known_before_the_first_step(config):
    model = nn.Linear(7, 5)
    optimizer = build_optimizer(model, config)
    model(torch.ones(2, 7)).sum().backward()
    update(optimizer, torch.tensor(1.0))
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    assert optimizer_state_bytes(model, config) == distinct_bytes(held)


def test_clipping_returns_the_norm_from_before():
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0]), torch.tensor([4.0])
    assert clip_gradients(parameters, None).item() == 5.0
    assert parameters[1].grad.item() == 4.0
    assert clip_gradients(parameters, 1.0).item() == 5.0
    assert math.hypot(parameters[0].grad[0], parameters[1].grad[0]) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("loss", [1.0, math.nan])
def test_clipping_and_updating_in_one(loss):
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.5, fused=True)
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_and_update(optimizer, [parameter], 1.0, torch.tensor(loss)).item() == 5.0
    expected = torch.zeros(2) if math.isnan(loss) else torch.tensor([-0.3, -0.4])
    torch.testing.assert_close(parameter.detach(), expected)


def test_lion_steps_by_the_sign():
    """By hand: c = b1 m + (1 - b1) g, x -= lr (sign c + wd x), m = b2 m + (1 - b2) g."""
    parameter = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    optimizer = Lion([parameter], lr=0.1, betas=(0.9, 0.99), weight_decay=0.5)
    parameter.grad = torch.tensor([2.0, -3.0, 0.0])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.85, -1.8, 0.475]))
    torch.testing.assert_close(optimizer.state[parameter]["exp_avg"], torch.tensor([0.02, -0.03, 0.0]))
    parameter.grad = torch.tensor([-0.1, -0.1, -0.1])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), torch.tensor([0.7075, -1.61, 0.55125]))


def test_an_update_with_a_norm_that_is_not_finite_leaves_itself_out():
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
    for norm, changes in ((1.0, True), (math.nan, False), (math.inf, False), (1.0, True)):
        parameter.grad = torch.full((3,), norm)
        before = parameter.detach().clone()
        update(optimizer, torch.tensor(norm))
        assert (not torch.equal(before, parameter.detach())) == changes
        assert torch.isfinite(parameter).all() and torch.isfinite(optimizer.state[parameter]["exp_avg"]).all()


def test_a_step_leaves_no_gradients_behind():
    """Zeros in their place would have the next update decay what the next step does not reach."""
    module = nn.Linear(2, 1)
    module.norm_of_all = lambda norm: norm

    def step(micro_batches):
        loss = module(*micro_batches[0]).sum()
        loss.backward()
        return StepResult(loss.detach(), 4, 0)

    optimizer = build_optimizer(module, OptimizerConfig())
    job = SimpleNamespace(step=step, module=module, optimizer=optimizer, device=torch.device("cpu"), scaling=None)
    history = History()
    take_step(job, 1, 0.1, [(torch.ones(4, 2),)], 1.0, history, logs=False)
    assert len(history.losses) == 1 and all(parameter.grad is None for parameter in module.parameters())
