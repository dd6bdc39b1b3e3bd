"""trainer.precision=fp8: which layers, what is rounded, gradients, and runs that learn and go on bit for bit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import aottrain
from aottrain.errors import ConfigError
from aottrain.tasks import train
from aottrain.tasks.building import build
from aottrain.trainer.weights.float8 import BACKWARD, FORWARD, Float8, multiply, use_float8
from tests.trainer.conftest import left_by, one_thread, tiny, unbroken_and_resumed

__all__ = ["left_by", "one_thread", "tiny"]


def layers(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


def rounded(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In float64, over the number by which its largest element is the type's largest."""
    scale = value.abs().amax() / torch.finfo(dtype).max
    return (value / scale).to(dtype).double() * scale.double()


def test_all_linear_layers_but_the_last_and_those_that_do_not_fit():
    model = use_float8(layers(32, 48, 40, 64, 32, 16))
    assert [isinstance(layer, Float8) for layer in model] == [True, False, False, True, False]
    assert list(model.state_dict()) == list(layers(32, 48, 40, 64, 32, 16).state_dict())


def test_a_weight_that_is_an_embedding_too_stays_as_it_is():
    model = nn.ModuleDict({"table": nn.Embedding(32, 16), "tied": nn.Linear(16, 32), "own": nn.Linear(32, 16)})
    model["tied"].weight = model["table"].weight
    model["last"] = nn.Linear(16, 16)
    use_float8(model)
    assert [name for name, module in model.named_modules() if isinstance(module, Float8)] == ["own"]


def test_where_no_layer_fits_it_is_said():
    with pytest.raises(ConfigError, match="trainer.precision=fp8: the model has no linear layer beside the last one"):
        use_float8(layers(16, 16))


def test_products_are_those_of_the_rounded_operands():
    torch.manual_seed(1)
    x, weight, cotangent = torch.randn(32, 64), torch.randn(48, 64) * 0.02, torch.randn(32, 48).bfloat16() * 1e-6
    leaves = x.requires_grad_(), weight.requires_grad_()
    result = multiply(*leaves)
    gradients = torch.autograd.grad(result, leaves, cotangent)
    small_x, small_weight = rounded(x.detach(), FORWARD), rounded(weight.detach(), FORWARD)
    small = rounded(cotangent.float(), BACKWARD)
    wanted = small_x @ small_weight.T, small @ small_weight, small.T @ small_x
    for got, exact in zip((result, *gradients), wanted, strict=True):
        # One rounding of the result to bfloat16, and sums in float32.
        torch.testing.assert_close(got.double(), exact, rtol=2**-8, atol=1e-5 * exact.abs().max().item())
    assert result.dtype is torch.bfloat16 and {gradient.dtype for gradient in gradients} == {torch.float32}


def test_what_is_not_finite_stays_so():
    x = torch.randn(16, 16)
    x[3, 4] = torch.inf
    assert not multiply(x, torch.randn(16, 16)).isfinite().all()


def test_one_token_is_multiplied_as_it_is():
    model, plain = use_float8(layers(16, 16, 16)), layers(16, 16, 16)
    x = torch.randn(1, 1, 16)
    assert torch.equal(model(x), plain(x))
    assert not torch.equal(model(torch.ones(16, 16)), plain(torch.ones(16, 16)))


@pytest.mark.parametrize("capture", ("trace", "dynamo"))
def test_compiled_it_is_what_eager_computes(capture):
    model = use_float8(layers(32, 64, 64, 32))
    x = torch.randn(4, 16, 32, requires_grad=True)

    def step(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(torch.tanh(x)).float().square().mean()

    compiled = aottrain.compile(step, capture=capture, kernel="aten", on_unsupported="error")
    inputs = x, *model.parameters()
    got, wanted = (torch.autograd.grad(call(x), inputs) for call in (compiled, step))
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)


def test_a_gpu_without_float8_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    config = tiny(trainer={"precision": "fp8"})
    with pytest.raises(ConfigError, match="fp8: A100 has compute capability 8.0; products in float8 need 8.9"):
        build._check_float8(config, SimpleNamespace(type="cuda"))


@pytest.mark.parametrize("engine", ["eager", "aot"])
def test_a_run_that_stopped_goes_on_bit_for_bit(tiny, left_by, tmp_path, engine):
    whole, rest = unbroken_and_resumed(tiny, tmp_path, engine, precision="fp8")
    assert left_by(whole).losses[2:] == left_by(rest).losses


def test_the_engines_train_alike(tiny, left_by):
    losses = []
    for engine in ("eager", "aot"):
        config = tiny(engine, trainer={"precision": "fp8", "steps": 3})
        assert train.run(config) == 0
        losses.append([float(loss) for loss in left_by(config).losses])
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)
