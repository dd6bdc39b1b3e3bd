"""write_out, and join_sums of what takes turns along two dimensions: eager's values, and no library call is left."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import leaf
from tests.numerics.tolerance import assert_close_as_sums

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def shuffled(x: Tensor) -> Tensor:
    return F.pixel_unshuffle(F.pixel_shuffle(x.sin(), 2).exp() + 1, 4)


def windows(x: Tensor) -> Tensor:
    return x.unfold(2, 4, 4).unfold(3, 2, 2).sin()


def powers_of_images(x: Tensor) -> Tensor:
    return F.avg_pool2d(x.clamp(min=0.1).pow(3), (16, 24)).pow(1 / 3)


def lengths_of_channels(x: Tensor) -> Tensor:
    return x / (torch.linalg.vector_norm(x, dim=(0, 2), keepdim=True) + x.norm(dim=-2, keepdim=True))


def normed_and_weighed(x: Tensor) -> Tensor:
    weight = x.mean((0, 2, 3))
    return F.layer_norm(x, x.shape[2:]) * weight[:, None, None]


def focal(x: Tensor) -> Tensor:
    logs = x.flatten(1).log_softmax(-1).gather(-1, torch.arange(4)[:, None])[:, 0]
    return (1 - logs.exp()) ** 2 * logs


def wavelet(x: Tensor) -> Tensor:
    a, b, c, d = x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]
    return torch.cat((a + b + c + d, a - b + c - d, a + b - c - d, (a - b - c + d).sin()), 1)


def merged_by_columns(x: Tensor) -> Tensor:
    return torch.cat((x[:, ::2, ::2], x[:, 1::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), -1).sin()


def merged_by_rows(x: Tensor) -> Tensor:
    return torch.cat((x[:, ::2, ::2], x[:, ::2, 1::2], x[:, 1::2, ::2], x[:, 1::2, 1::2]), 1).sin()


def merged_in_another_order(x: Tensor) -> Tensor:
    return torch.cat((x[:, 1::2, ::2], x[:, ::2, ::2], x[:, ::2, 1::2], x[:, 1::2, 1::2]), -1).sin()


def blurred(x: Tensor) -> Tensor:
    return x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]


PROGRAMS = {
    each.__name__: each
    for each in (
        shuffled, windows, powers_of_images, lengths_of_channels, normed_and_weighed, focal, wavelet, merged_by_columns,
        merged_by_rows, merged_in_another_order, blurred,
    )
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_eagers(name, dtype):
    function, x = PROGRAMS[name], leaf(4, 8, 16, 24).detach().to(dtype).requires_grad_()
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = compiled(x), function(x)
    cotangent = torch.linspace(-1, 1, wanted.numel()).view(wanted.shape).to(dtype)
    gradients = [torch.autograd.grad(y, x, cotangent)[0] for y in (got, wanted)]
    for one, other in zip((got, gradients[0]), (wanted, gradients[1]), strict=True):
        assert one.stride() == other.stride() and one.dtype is other.dtype
        assert_close_as_sums(one, other, 1536)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_library_is_called(name):
    compiled = aottrain.compile(PROGRAMS[name], kernel="cpp", capture="trace", on_unsupported="error")
    assert not compiled.prepare(leaf(4, 8, 16, 24)).library_calls
