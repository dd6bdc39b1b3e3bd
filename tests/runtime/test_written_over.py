"""Residuals that a backward writes over, where nothing else refers to them; and who may refer to one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aottrain
from aottrain.compat_dispatch import ALONE, ALONE_NAMES
from aottrain.compiler.link.programs import plan_program
from aottrain.metrics.memory import watch_cpu_peak
from tests.compiler.programs import joint_of

ROWS, WIDTH = 512, 64


class Perceptron(nn.Module):
    """Its backward computes the activation again, beside its gradient: two results, and two operands that die."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 8 * WIDTH), nn.Linear(8 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Shown(Perceptron):
    """Gives what the backward reads, too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.up(x)
        return self.down(torch.nn.functional.gelu(hidden)), hidden


def batch() -> Tensor:
    return torch.linspace(-2, 2, ROWS * WIDTH).view(ROWS, WIDTH).sin()


def gradients(model: nn.Module, loss: Tensor, **options: Any) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters()), **options))


def compiled(model: nn.Module, **options: Any) -> Any:
    return aottrain.compile(model, capture="trace", kernel="cpp", on_unsupported="error", workspaces=True, **options)


def wanted(model: nn.Module) -> list[Tensor]:
    out = model(batch())
    return gradients(model, (out if isinstance(out, Tensor) else out[0]).square().mean())


def peak_of(call: Any, model: nn.Module) -> int:
    x = batch()
    for _ in range(2):
        gradients(model, call(x).square().mean())
    with watch_cpu_peak([*model.parameters(), x]) as peak:
        gradients(model, call(x).square().mean())
    assert peak.num_bytes is not None
    return peak.num_bytes


@pytest.mark.parametrize("options", [{}, {"budget": 0.0}], ids=str)
def test_the_step_peaks_lower_and_as_predicted(options):
    model = Perceptron()
    call = compiled(model, **options)
    peak, hidden = peak_of(call, model), 4 * ROWS * 8 * WIDTH
    of_the_loss = 2 * 4 * ROWS * WIDTH  # eager squares the result
    assert abs(call.report.graphs[0].predicted_peak_bytes - peak) <= 0.02 * peak + of_the_loss
    if not options:
        assert peak < peak_of(model, model) - hidden // 2
    torch.testing.assert_close(gradients(model, call(batch()).square().mean()), wanted(model))


def test_only_what_no_other_result_lies_in_may_be_written_over():
    for model, may in ((Perceptron(), True), (Shown(), False)):
        joint = joint_of(model, batch())
        parts = aottrain.apply_partition(joint, aottrain.plan_partition(joint, "min_cut"))
        (_, _, backward) = plan_program(parts)[1]
        assert any(operand.op == "placeholder" for operand in backward.in_place.values()) is may


@pytest.mark.parametrize("options", [{}, {"budget": 0.0}, {"partition": "save_all"}], ids=str)
def test_a_retained_graph_can_be_taken_backward_again(options):
    model = Perceptron()
    call = compiled(model, **options)
    for _ in range(2):
        loss = call(batch()).square().mean()
        for retains in (True, True, False):
            torch.testing.assert_close(gradients(model, loss, retain_graph=retains), wanted(model))
        with pytest.raises(RuntimeError, match="a second time"):
            gradients(model, loss)


@pytest.mark.parametrize("packed", ["itself", "a list", "a copy"])
def test_what_a_saved_tensors_hook_keeps_is_left_alone(packed):
    held: list[Tensor] = []

    def pack(value: Tensor) -> Any:
        held.append(value)
        return value if packed == "itself" else value.clone() if packed == "a copy" else len(held) - 1

    def unpack(value: Any) -> Tensor:
        return held[value] if packed == "a list" else value

    model = Perceptron()
    call = compiled(model)
    gradients(model, call(batch()).square().mean())
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = call(batch())
    before = [value.clone() for value in held]
    torch.testing.assert_close(gradients(model, out.square().mean()), wanted(model))
    assert held and all(map(torch.equal, held, before))


def test_what_the_caller_has_taken_from_the_graph_is_left_alone():
    model = Perceptron()
    call = compiled(model)
    gradients(model, call(batch()).square().mean())
    out = call(batch())
    saved = [value for value in out.grad_fn.saved_tensors if isinstance(value, Tensor)]
    before = [value.clone() for value in saved]
    torch.testing.assert_close(gradients(model, out.square().mean()), wanted(model))
    assert (ROWS, 8 * WIDTH) in [value.shape for value in saved] and all(map(torch.equal, saved, before))


@pytest.mark.parametrize("watched", [False, True])
def test_views_and_other_names_of_a_tensor_are_counted(watched):
    """Also where TorchDynamo watches Python's calls, by which they hold what they are given otherwise."""
    namespace = dict(ALONE_NAMES)
    exec(f"def run(inputs):\n    value, = inputs\n    inputs.clear()\n    return {ALONE.format('value')}\n", namespace)
    run, held = namespace["run"], torch.empty(4)

    before = torch._C._dynamo.eval_frame.set_eval_frame(False if watched else None)  # False: runs what it has compiled
    try:
        found = [run([torch.empty(4)]), run([held]), run([held[1:]]), run([held.detach()])]
    finally:
        torch._C._dynamo.eval_frame.set_eval_frame(before)
    assert found == [True, False, False, False]
