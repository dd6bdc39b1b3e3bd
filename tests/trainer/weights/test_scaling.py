"""trainer.precision=fp16: the scale of losses, and where there is none."""

from __future__ import annotations

import pytest
import torch

from aottrain.errors import ConfigError
from aottrain.step import StepResult
from aottrain.tasks.building.build import build_job
from aottrain.trainer.meters import History
from aottrain.trainer.reliability.rollback import BadStepError
from aottrain.trainer.weights.scaling import LossScaling


def one_step(scaling, weight, optimizer, factor=1.0):
    (scaling.scaled((weight * 3).sum()) * factor).backward()
    scale = scaling.unscale(optimizer)
    gradient = weight.grad.clone()
    optimizer.zero_grad()
    scaling.update()
    return float(scale), gradient


def test_gradients_are_those_of_the_loss_and_the_scale_halves_where_they_are_not_finite():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaling = torch.optim.SGD([weight], 0.1), LossScaling(torch.device("cpu"))
    scale, gradient = one_step(scaling, weight, optimizer)
    assert scale == 65536 and gradient.tolist() == [3, 3]
    assert not one_step(scaling, weight, optimizer, float("inf"))[1].isfinite().any()
    again = LossScaling(torch.device("cpu"))
    again.load_state_dict(scaling.state_dict())
    assert one_step(scaling, weight, optimizer)[0] == one_step(again, weight, optimizer)[0] == 32768
    assert again.state_dict() == scaling.state_dict()


def test_a_step_that_ended_before_its_update_is_taken_again():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer, scaling = torch.optim.SGD([weight], 0.1), LossScaling(torch.device("cpu"))
    scaling.scaled((weight * 3).sum()).backward()
    scaling.unscale(optimizer)
    optimizer.zero_grad()
    scale, gradient = one_step(scaling, weight, optimizer)
    assert scale == 65536 and gradient.tolist() == [3, 3]


def history_of(loss, norm, scale):
    history = History(say=lambda line: None)
    history.add(1, 0.1, StepResult(torch.tensor(loss), 1, 1), torch.tensor(norm), None, torch.tensor(scale))
    history.read()
    return history


def test_an_overflow_is_no_failure_but_a_loss_is_and_so_are_gradients_of_any_scale():
    history = history_of(1.0, float("inf"), 65536.0)
    assert (history.num_overflows, history.num_skipped, history.scale) == (1, 0, 65536)
    for loss, norm, scale in ((float("nan"), float("nan"), 65536.0), (1.0, float("inf"), 0.5)):
        with pytest.raises(BadStepError):
            history_of(loss, norm, scale)


def test_on_a_cpu_it_is_refused(tiny):
    with pytest.raises(ConfigError, match="trainer.precision=fp16: needs a CUDA device; bf16 runs on any"):
        build_job(tiny("eager", trainer={"precision": "fp16"}))
