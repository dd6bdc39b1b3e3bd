"""A compiled step that is wrong in any way is caught, and the message says where."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from aottrain.config import VerifyConfig
from aottrain.errors import NumericsError
from aottrain.runtime.rng import philox_eager
from aottrain.step import StepResult
from aottrain.trainer.engines import LossModule, ModuleStep
from aottrain.trainer.verification import relative_error, verify_step

BATCH = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.dropout = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.dropout(self.norm(self.linear(x)))


@pytest.fixture
def module():
    torch.manual_seed(0)
    return LossModule(Model(), lambda model, batch: model(*batch).square().mean())


def check(module, alter=lambda module, result: result):
    """Verify a step that is eager with Philox draws, then altered."""
    good = ModuleStep("aot", module, tokens_per_batch=0, draws=philox_eager)

    def step(micro_batches):
        return alter(module, good(micro_batches))

    return verify_step(7, step, module, BATCH, VerifyConfig(), philox_eager)


def test_a_right_step_passes_and_leaves_no_trace(module):
    module.model.linear.weight.grad = grad = torch.ones(3, 4)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random = torch.get_rng_state()
    verification = check(module)
    assert verification.max_error == 0.0
    assert module.model.linear.weight.grad is grad and torch.equal(grad, torch.ones(3, 4))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert torch.equal(random, torch.get_rng_state())


def test_other_random_numbers_are_a_difference(module):
    eager = ModuleStep("aot", module, tokens_per_batch=0)
    with pytest.raises(NumericsError, match="loss"):
        verify_step(1, eager, module, BATCH, VerifyConfig(), philox_eager)


def wrong_loss(module, result):
    return StepResult(result.loss * 1.01, 6, 0)


def nan_loss(module, result):
    return StepResult(result.loss * math.nan, 6, 0)


def wrong_gradient(module, result):
    module.model.linear.weight.grad[1, 2] += 0.1
    return result


def nan_gradient(module, result):
    module.model.linear.bias.grad[0] = math.nan
    return result


def missing_gradient(module, result):
    module.model.norm.weight.grad = None
    return result


def zeros_for_none(module, result):
    module.model.unused.grad = torch.zeros(2)
    return result


def stale_buffer(module, result):
    module.model.norm.running_mean.zero_()
    return result


def uncounted_batch(module, result):
    module.model.norm.num_batches_tracked -= 1
    return result


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (wrong_loss, "the compiled loss is"),
        (nan_loss, "the compiled loss is nan"),
        (wrong_gradient, "gradient of model.linear.weight differs"),
        (nan_gradient, "gradient of model.linear.bias differs from eager's by inf"),
        (missing_gradient, "eager has a gradient for model.norm.weight, the compiled step has None"),
        (zeros_for_none, "the compiled step has a gradient for model.unused, eager has None"),
        (stale_buffer, "buffer model.norm.running_mean differs"),
        (uncounted_batch, "buffer model.norm.num_batches_tracked differs"),
    ],
)
def test_a_wrong_step_is_named(module, alter, message):
    with pytest.raises(NumericsError, match="step 7: .*" + re.escape(message)):
        check(module, alter)
    assert torch.equal(module.model.norm.running_mean, torch.zeros(3))


class Steep(nn.Module):
    """Its gradient hangs on the last digits of its product."""

    def __init__(self, precise=False):
        super().__init__()
        self.precise, self.weight = precise, nn.Parameter(torch.linspace(-1, 1, 40))

    def forward(self, x):
        if self.precise:
            product = (x.double() @ self.weight.double()).float()
        else:
            product = (x * self.weight).flip(-1).cumsum(-1)[:, -1]
        return torch.sin(5e4 * product)


@pytest.mark.parametrize("altered", [False, True])
def test_what_rounding_explains_is_not_an_error(altered):
    """Two right programs differ by more than the tolerance here; a wrong one still differs by more than both."""
    eager = LossModule(Steep(), lambda model, batch: model(*batch).square().mean())
    precise = LossModule(Steep(precise=True), eager.loss)
    precise.model.weight = eager.model.weight
    batch = (torch.randn(64, 40, generator=torch.Generator().manual_seed(0)),)
    before = eager.model.weight.detach().clone()

    def step(micro_batches):
        loss = precise(*micro_batches[0])
        loss.backward()
        if altered:
            eager.model.weight.grad.neg_()
        return StepResult(loss.detach(), 64, 0)

    if altered:
        with pytest.raises(NumericsError, match="eager's own rounding error"):
            verify_step(1, step, eager, batch, VerifyConfig(), philox_eager)
    else:
        found = verify_step(1, step, eager, batch, VerifyConfig(), philox_eager)
        assert found.grad_error > VerifyConfig().grad_tolerance and found.noise > found.grad_error / 4
    assert torch.equal(eager.model.weight, before)


def test_relative_errors():
    one, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert relative_error(one * 1.5, one) == 0.5
    assert relative_error(nan, nan) == 0.0
    assert relative_error(nan, one) == relative_error(one, nan) == math.inf
    assert relative_error(one, torch.zeros(2)) == math.inf
    assert relative_error(torch.ones(3), one) == math.inf
    assert relative_error(torch.empty(0), torch.empty(0)) == 0.0
