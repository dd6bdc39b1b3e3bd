"""A generated update that is wrong in any way is caught, and the message says of which parameter."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import aottrain
from aottrain.config.run import OptimizerConfig
from aottrain.errors import NumericsError
from aottrain.trainer.optim import hyperparameters
from aottrain.trainer.verify.updates import verify_update
from aottrain.trainer.weights.groups import parameter_groups

MADE = {"adamw": aottrain.AdamW, "sgd": aottrain.SGD, "lion": aottrain.Lion}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.unused = nn.Linear(7, 5), nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.tensor(2.0))


def setup(name="adamw", made=None, clip_norm=0.5, **config):
    """(optimizer over a model's parameters, their names, gradients that differ much in size, its configuration)"""
    model, config = Model(), OptimizerConfig(name=name, lr=0.01, weight_decay=0.1, clip_norm=clip_norm, **config)
    more = {"clip_norm": clip_norm, "skip_nonfinite": True, "kernel": "evaluate"}
    optimizer = (made or MADE[name])(parameter_groups(model, config), **hyperparameters(config), **more)
    names = {parameter: name for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    gradients = {
        name: torch.randn(p.shape, generator=generator) * torch.logspace(-9, 0, p.numel()).view(p.shape)
        for p, name in names.items()
    }
    return optimizer, names, {**gradients, "unused": None}, config


def check(optimizer, names, gradients, config):
    return verify_update(3, optimizer, names, gradients, config)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("clip_norm", [None, 0.5, 100.0])
def test_a_right_update_passes_from_any_state_and_leaves_no_trace(name, clip_norm):
    optimizer, names, gradients, config = setup(name, clip_norm=clip_norm)
    for _ in range(3):
        before = {name: parameter.clone() for parameter, name in names.items()}
        num_states = len(optimizer.state)
        found = check(optimizer, names, gradients, config)
        assert found.error < 1e-6
        assert all(torch.equal(before[name], parameter) for parameter, name in names.items())
        assert len(optimizer.state) == num_states and all(parameter.grad is None for parameter in names)
        for parameter, name in names.items():
            parameter.grad = None if gradients[name] is None else gradients[name].clone()
        optimizer.step()
        for parameter in names:
            parameter.grad = None


def test_what_is_not_finite_is_left_out():
    optimizer, names, gradients, config = setup()
    gradients["linear.bias"][2] = math.inf
    assert check(optimizer, names, gradients, config).error == 0.0
    optimizer, names, _, config = setup(made=TakesEveryStep)
    with pytest.raises(NumericsError, match="counts 1 steps of linear.weight, they are 0"):
        check(optimizer, names, gradients, config)


class NoDecay(aottrain.AdamW):
    def _row(self, group):
        return (*super()._row(group)[:-1], 0.0)


class OtherMean(aottrain.AdamW):
    """Its second mean is kept a little too long."""

    def _row(self, group):
        lr, beta1, beta2, *rest = super()._row(group)
        return (lr, beta1, beta2 + 1e-5, *rest)


class Altered(aottrain.AdamW):
    """alter(parameters, state) after a right step."""

    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            self.alter([p for group in self.param_groups for p in group["params"]])


class SkipsOneElement(Altered):
    def alter(self, parameters):
        kept = self.state[parameters[0]]["exp_avg"]
        kept[4, 6] = 0


class OffByAMillionth(Altered):
    def alter(self, parameters):
        parameters[0][1, 2] *= 1 + 2e-6


class CountsTwice(Altered):
    def alter(self, parameters):
        self.state[parameters[0]]["step"] += 1


class NoClipping(aottrain.AdamW):
    def _step(self):
        self.clip_norm = None
        super()._step()


class TakesEveryStep(aottrain.AdamW):
    def _step(self):
        self.skip_nonfinite = False
        super()._step()


class OtherNorm(aottrain.AdamW):
    @property
    def grad_norm(self):
        return super().grad_norm * (1 + 1e-6)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (NoDecay, r"step 3: the generated update makes linear\.weight at \[0, 0\] \S+, torch's"),
        (OtherMean, r"makes linear\.weight|exp_avg_sq of linear\.weight"),
        (SkipsOneElement, r"makes exp_avg of linear\.weight at \[4, 6\] 0, torch's"),
        (OffByAMillionth, r"makes linear\.weight at \[1, 2\]"),
        (CountsTwice, r"counts 2 steps of linear\.weight, they are 1"),
        (NoClipping, r"makes linear\.weight at \[0, 0\]"),
        (OtherNorm, "for the gradients' norm, it is"),
    ],
)
def test_a_wrong_update_is_named(made, message):
    with pytest.raises(NumericsError, match=message):
        check(*setup(made=made, clip_norm=0.01))


def test_a_wrong_update_is_found_where_the_state_is_not_fresh():
    """The first step is alike with and without a momentum that was forgotten."""

    class Forgets(aottrain.SGD):
        def _row(self, group):
            lr, _, *rest = super()._row(group)
            return (lr, 0.0, *rest)

    optimizer, names, gradients, config = setup("sgd", Forgets)
    assert check(optimizer, names, gradients, config).error < 1e-6
    for parameter, name in names.items():
        parameter.grad = gradients[name]
    optimizer.step()
    with pytest.raises(NumericsError, match="makes linear.weight"):
        check(optimizer, names, gradients, config)
