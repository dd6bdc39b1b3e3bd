"""Four micro-batches train as one batch of all their examples, where padding makes their losses means of different
numbers of tokens."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.config.run import VerifyConfig
from aottrain.errors import RecipeError
from aottrain.ops.random.mode import philox_eager
from aottrain.trainer.engines import LossModule, ModuleStep
from aottrain.trainer.evaluation import evaluate
from aottrain.trainer.verify.verification import run_compiled, verify_outcome
from tests.numerics.tolerance import RTOL_ATOL

PADDING = -100


def loss(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=PADDING)


def num_targets(batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return (batch[1] != PADDING).sum()


@pytest.fixture
def module() -> LossModule:
    torch.manual_seed(0)
    return LossModule(nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)), loss, weight=num_targets)


def batches(lengths: tuple[int, ...]) -> tuple[list[tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    """A micro-batch of two rows for each of the lengths, which are padded to 5; and the batch of them all."""
    inputs, targets = torch.randint(0, 11, (2, 2 * len(lengths), 5), generator=torch.Generator().manual_seed(1))
    targets[torch.arange(5) >= torch.tensor(lengths).repeat_interleave(2)[:, None]] = PADDING
    return list(zip(inputs.split(2), targets.split(2), strict=True)), (inputs, targets)


def gradients(module: LossModule, step: ModuleStep, micro_batches: list) -> tuple[float, list[torch.Tensor]]:
    module.zero_grad()
    result = step(micro_batches)
    return result.loss.item(), [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("engine", ["eager", "aot"])
@pytest.mark.parametrize("lengths", [(5, 1, 3, 2), (2, 0, 5, 0)])
def test_accumulated_gradients_are_those_of_one_batch(module, engine, lengths):
    called = module if engine == "eager" else aottrain.compile(module, capture="trace", on_unsupported="error")
    step = ModuleStep(engine, called, tokens_per_batch=10, shares=module.shares)
    apart, whole = batches(lengths)
    expected_loss, expected = gradients(module, step, [whole])
    actual_loss, actual = gradients(module, step, apart)
    rtol, atol = RTOL_ATOL[torch.float32]
    assert actual_loss == pytest.approx(expected_loss, rel=1e-6)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


def test_without_a_weight_each_counts_alike(module):
    module.weight = None
    assert module.shares(batches((5, 1, 3))[0]) == [1 / 3] * 3


def test_where_nothing_counts_the_loss_is_no_number(module):
    apart, _ = batches((0, 0))
    step = ModuleStep("eager", module, tokens_per_batch=10, shares=module.shares)
    assert torch.isnan(step(apart).loss)


def test_held_out_loss_is_a_mean_over_what_counts(module):
    apart, whole = batches((5, 1, 0))
    drawn = SimpleNamespace(held_out=lambda count: apart[:count])
    metrics = lambda _, batch: {"same": module(*batch)}  # noqa: E731
    job = SimpleNamespace(module=module, batches=drawn, with_averages=nullcontext, metrics=metrics)
    loss = evaluate(job, 3)
    assert loss == pytest.approx(module(*whole).item(), rel=1e-6)
    assert job.own_figures == {"same": pytest.approx(loss, rel=1e-6)}  # by the same shares


def test_a_step_with_micro_batches_of_different_weight_is_verified(module):
    compiled = aottrain.compile(module, capture="trace", on_unsupported="error")
    step = ModuleStep("aot", compiled, tokens_per_batch=10, shares=module.shares)
    apart, _ = batches((5, 1, 0, 2))
    outcome = run_compiled(step, module, apart)
    assert verify_outcome(1, outcome, step, module, apart, VerifyConfig(), philox_eager).max_error < 1e-5


@pytest.mark.parametrize("value", [-1, float("nan"), None, True, torch.ones(2)])
def test_a_weight_that_is_none(module, value):
    module.weight = lambda batch: value
    with pytest.raises(RecipeError, match=r"weight\(batch\) must return a number of at least 0"):
        module.shares(batches((5, 1))[0])


def test_a_step_has_the_tokens_of_all_its_micro_batches(module):
    apart, _ = batches((5, 1, 3))
    result = ModuleStep("eager", module, tokens_per_batch=10, shares=module.shares)(apart)
    assert (result.num_tokens, result.num_samples) == (30, 6)
