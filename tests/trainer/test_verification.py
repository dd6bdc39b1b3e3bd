"""A compiled step that is wrong in any way is caught, and the message says where."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from aottrain.config.run import VerifyConfig
from aottrain.errors import NumericsError
from aottrain.ops.random.mode import philox_eager
from aottrain.step import StepResult
from aottrain.trainer.engines import LossModule, ModuleStep
from aottrain.trainer.verify import checking
from aottrain.trainer.verify.operands import changed_operands
from aottrain.trainer.verify.rounding import Surroundings, distance, place_of, relative_norm, unexplained
from aottrain.trainer.verify.verification import run_compiled, verify_outcome

BATCH = (torch.randn(6, 4, generator=torch.Generator().manual_seed(0)),)


def verify_step(step_number, step, module, micro_batches, config, eager_draws):
    """Run the micro-batches through `step` and through the eager `module`, and compare; see `verify_outcome`."""
    compiled = run_compiled(step, module, micro_batches)
    return verify_outcome(step_number, compiled, step, module, micro_batches, config, eager_draws)


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
    good = ModuleStep("aot", module, tokens_per_batch=0, shares=module.shares, draws=philox_eager)

    def step(micro_batches):
        return alter(module, good(micro_batches))

    return verify_step(7, step, module, [BATCH], VerifyConfig(), philox_eager)


def test_a_right_step_passes_and_leaves_no_trace(module):
    module.model.linear.weight.grad = grad = torch.ones(3, 4)
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    random = torch.get_rng_state()
    verification = check(module)
    assert verification.max_error == 0.0
    assert module.model.linear.weight.grad is grad and torch.equal(grad, torch.ones(3, 4))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in module.named_buffers())
    assert torch.equal(random, torch.get_rng_state())


def test_products_are_compared_whole(module):
    """Where PyTorch may leave out bits of float32 products, eager leaves out others on a CPU."""
    seen = []

    def alter(module, result):
        seen.append(torch.get_float32_matmul_precision())
        return result

    torch.set_float32_matmul_precision("high")
    try:
        check(module, alter)
        assert torch.get_float32_matmul_precision() == "high" and seen == ["highest"]
    finally:
        torch.set_float32_matmul_precision("highest")


def test_other_random_numbers_are_a_difference(module):
    eager = ModuleStep("aot", module, tokens_per_batch=0, shares=module.shares)
    with pytest.raises(NumericsError, match="loss"):
        verify_step(1, eager, module, [BATCH], VerifyConfig(), philox_eager)


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
        (missing_gradient, "eager has a gradient of model.norm.weight, the compiled step has None"),
        (zeros_for_none, "the compiled step has a gradient of model.unused, eager has None"),
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
            verify_step(1, step, eager, [batch], VerifyConfig(), philox_eager)
    else:
        found = verify_step(1, step, eager, [batch], VerifyConfig(), philox_eager)
        assert found.grad_error > VerifyConfig().grad_tolerance and found.noise > found.grad_error / 4
    assert torch.equal(eager.model.weight, before)


def test_a_gradient_that_is_rounding_alone_is_told_apart(module):
    """That of a bias before a batch norm is zero in exact arithmetic: any two right programs differ by all of it."""

    def negated(module, result):
        module.model.linear.bias.grad.neg_()
        return result

    found = check(module, negated)
    assert found.only_rounding == ("gradient of model.linear.bias",)
    assert found.max_error == 0.0 and found.noise is None  # of all others
    said = checking._only_rounding(found)
    assert said == "; rounding is all that there is, by eager as well, of gradient of model.linear.bias"
    assert checking._only_rounding(check(module)) == ""


class Wide(nn.Module):
    """Right but for rounding in two ways: each product's sum in one order, or in the other."""

    def __init__(self, reverse=False):
        super().__init__()
        torch.manual_seed(2)
        self.reverse, self.first, self.second = reverse, nn.Linear(48, 64), nn.Linear(64, 24)

    def forward(self, x):
        weight = self.first.weight
        hidden = F.linear(x.flip(-1), weight.flip(-1)) if self.reverse else F.linear(x, weight)
        return self.second((hidden + self.first.bias).relu())


WIDE_BATCHES = [(torch.randn(40, 48, generator=torch.Generator().manual_seed(seed)),) for seed in (3, 4)]


def check_wide(alter=lambda grads: None, micro_batches=WIDE_BATCHES, precision="fp32", accumulate=None):
    """Verify the one order against the other, with gradients that `alter` makes of them."""
    eager = LossModule(Wide(), lambda model, batch: model(*batch).square().mean(), precision)
    other = LossModule(Wide(reverse=True), eager.loss, precision)
    other.model.first, other.model.second = eager.model.first, eager.model.second
    good = ModuleStep("aot", other, tokens_per_batch=0, shares=other.shares)

    def step(micro_batches):
        result = good(micro_batches) if accumulate is None else accumulate(other, micro_batches)
        alter({name: parameter.grad for name, parameter in eager.named_parameters()})
        return result

    return verify_step(1, step, eager, micro_batches, VerifyConfig(), philox_eager)


def test_another_order_of_summing_is_no_error():
    assert 0 < check_wide().grad_error < 2.0**-20
    assert check_wide(precision="bf16").grad_error < 2.0**-7


def small_ones(grad):
    return (grad.abs() < 9e-4 * grad.abs().max()) & (grad != 0)


def zero_the_small(grads):
    for grad in grads.values():
        grad[small_ones(grad)] = 0


def zero_the_smallest(grads):
    """Of those that rounding does not reach: above a few millionths of what is around."""
    grad = grads["model.second.weight"]
    grad.flatten()[torch.where(grad.abs() < 1e-4 * grad.square().mean().sqrt(), 9.0, grad.abs()).argmin()] = 0


def scale_a_little(grads):
    grads["model.first.weight"][5, 7] *= 1.001


def mix_a_row_into_another(grads):
    grad = grads["model.first.weight"]
    grad[3] += 1e-4 * grad[4]


def repeat_a_neighbour(grads):
    grads["model.second.weight"][-1, -1] = grads["model.second.weight"][-1, -2] / 3


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (zero_the_small, r"gradient of model\.first\.weight differs from eager's"),
        (zero_the_smallest, r"gradient of model\.second\.weight .* in 1 elements .* it is 0, eager's is"),
        (scale_a_little, r"gradient of model\.first\.weight .* at \[5, 7\]"),
        (mix_a_row_into_another, r"gradient of model\.first\.weight .* elements .* at \[3, \d+\]"),
        (repeat_a_neighbour, r"gradient of model\.second\.weight"),
    ],
)
def test_elements_that_are_small_beside_the_largest_count(alter, named):
    with pytest.raises(NumericsError, match=named):
        check_wide(alter)


def last_gradient_alone(module, micro_batches):
    """What a step gives that writes gradients where it should add to them."""
    for batch in micro_batches:
        module.zero_grad(set_to_none=True)
        loss = module(*batch)
        (loss / len(micro_batches)).backward()
    return StepResult(torch.stack([module(*batch).detach() for batch in micro_batches]).mean(), 80, 0)


def second_is_wrong(module, micro_batches):
    total = torch.zeros(())
    for batch in micro_batches:
        loss = module(*batch)
        (loss / len(micro_batches)).backward()
        if torch.equal(batch[0], WIDE_BATCHES[1][0]):
            module.model.second.bias.grad[0] *= 1.01
        total += loss.detach() / len(micro_batches)
    return StepResult(total, 80, 0)


def not_the_mean(module, micro_batches):
    losses = [module(*batch) for batch in micro_batches]
    sum(losses).backward()
    return StepResult((sum(losses) / len(losses)).detach(), 80, 0)


@pytest.mark.parametrize(
    ("accumulate", "where"),
    [
        (last_gradient_alone, "each of the 2 micro-batches alone is right"),
        (second_is_wrong, "micro-batch 2 of 2 alone"),
        (not_the_mean, "each of the 2 micro-batches alone is right"),
    ],
)
def test_all_micro_batches_and_their_sum_are_compared(accumulate, where):
    with pytest.raises(NumericsError, match="gradient of .*" + where) as caught:
        check_wide(accumulate=accumulate)
    assert caught.value.micro_batch == (2 if "alone is right" not in where else None)


def test_a_few_signs_that_rounding_turns_excuse_as_many_and_no_more():
    """An element whose sign hangs on rounding is as far off in eager's own runs; elements beside it stay exact."""
    expected, samples = torch.ones(100, 100), [torch.full((100, 100), 1e-7) for _ in range(4)]
    for i, sample in enumerate(samples):
        sample[i, i] = 1e-2
    away = torch.full((100, 100), 1e-7)
    away[50, 50] = 1e-2
    assert unexplained(away, expected, samples, 1e-6) is None
    away[:, 50] = 1e-2
    excess = unexplained(away, expected, samples, 1e-6)
    assert excess.count == 100 and excess.place[1] == 50
    away[:, 50] = 1e-7
    away[7, 50] = 1.0
    assert unexplained(away, expected, samples, 1e-6).place == (7, 50)


def test_distances_and_norms():
    one, nan = torch.ones(2), torch.tensor([1.0, math.nan])
    assert relative_norm(distance(one * 1.5, one), one) == 0.5
    assert distance(nan, nan).tolist() == [0, 0] and distance(nan, one).tolist() == [0, math.inf]
    assert distance(one, nan).tolist() == [0, math.inf] and relative_norm(distance(one, nan), nan) == math.inf
    assert relative_norm(one, torch.zeros(2)) == math.inf and relative_norm(0 * one, torch.zeros(2)) == 0
    assert relative_norm(torch.empty(0), torch.empty(0)) == 0.0
    assert place_of(11, (2, 3, 4)) == (0, 2, 3) and place_of(0, ()) == ()


def test_mean_squares_of_several_tensors_are_those_of_all_their_elements():
    one, other = torch.linspace(0.5, 3, 12).view(3, 4), torch.linspace(-9, 7, 12).view(3, 4)
    pooled = Surroundings.pooled([Surroundings.of(one), Surroundings.of(torch.zeros(3, 4)), Surroundings.of(other)])
    both = torch.stack([one, torch.zeros(3, 4), other]).square() / pooled.top**2
    assert pooled.top == 9.0 and pooled.mean == pytest.approx(both.mean().item())
    for axis, mean in enumerate(pooled.along):
        torch.testing.assert_close(mean.flatten(), both.mean([0, 2 - axis]))


def test_a_step_whose_check_does_not_fit_goes_on_unchecked_and_its_memory_is_given_back(monkeypatch):
    def full(*_):
        raise torch.cuda.OutOfMemoryError("no memory is left")

    emptied, said, output = [], [], SimpleNamespace(summary={})
    monkeypatch.setattr(checking, "run_compiled", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    job = SimpleNamespace(step=None, module=None, device=torch.device("cuda"))
    progress = SimpleNamespace(say=said.append)
    checking.verify(job, 3, [], None, output, progress)
    note = "the check does not fit into memory"
    assert emptied == [True] and output.summary == {"verify_note": note}
    assert said == [f"step 3 could not be verified: {note}"]


def test_a_check_that_a_library_refuses_is_not_told_as_a_lack_of_memory(monkeypatch):
    """oneDNN does not say why it fails, and nothing is tried with less here."""

    def refusing(*_):
        raise RuntimeError("could not create a primitive")

    said, output = [], SimpleNamespace(summary={})
    monkeypatch.setattr(checking, "run_compiled", refusing)
    job = SimpleNamespace(step=None, module=None, device=torch.device("cpu"))
    checking.verify(job, 3, [], None, output, SimpleNamespace(say=said.append))
    assert output.summary["verify_note"].endswith("or a library has no such call (could not create a primitive)")
    assert said == [f"step 3 could not be verified: {output.summary['verify_note']}"]


def test_what_cancels_whatever_the_inputs_are_is_off_by_a_rounding_of_its_operands():
    """Where a softmax has one place its gradient is g - g: zero in eager, a rounding of g in another kernel."""
    scores = torch.randn(64, 1, requires_grad=True)
    gradient = torch.rand(64, 1) + 1
    scores.softmax(-1).backward(gradient)
    assert not scores.grad.any()
    with changed_operands(torch.Generator().manual_seed(0)):
        (changed,) = torch.autograd.grad(scores.softmax(-1), scores, gradient)
    assert changed.any() and (changed.abs() <= 4 * torch.finfo(torch.float32).eps * gradient).all()


def test_what_compares_and_selects_has_its_operands_as_they_are():
    values = torch.randn(8, 8, requires_grad=True)
    (expected,) = torch.autograd.grad(values.amax(1), values, torch.ones(8))
    with changed_operands(torch.Generator().manual_seed(0)):
        (gradient,) = torch.autograd.grad(values.amax(1), values, torch.ones(8))
    assert torch.equal(gradient, expected)
