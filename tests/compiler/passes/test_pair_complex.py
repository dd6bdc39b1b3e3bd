"""Complex numbers between transforms as pairs of reals: values, gradients, strides and lazy views are eager's."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain.native import find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
B, C, L = 3, 4, 16


def of(*shape, dtype=torch.complex64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def fourier_layer(x, w):
    """As neural operators have it: a product of the low frequencies, zeros elsewhere."""
    h = torch.fft.rfft(x)
    out = torch.zeros_like(h)
    out[..., :5] = torch.einsum("bcl,cdl->bdl", h[..., :5], w[..., :5])
    return torch.fft.irfft(out, n=x.shape[-1])


def long_convolution(x, w):
    """By a kernel that all sequences share: its gradient is a sum over these."""
    return torch.fft.irfft(torch.fft.rfft(x) * w[0, :, :9], n=x.shape[-1])


def windows(x, w):
    h = torch.fft.fft(x)
    h = torch.cat([h[..., 4:], h[..., :4].conj() * 2], -1)
    h = h * w[:3, 0, :1, None]
    return torch.fft.ifft(F.pad(h, (1, 2)) - F.pad(h, (2, 1)).conj())


def scaled(x, w):
    h = torch.fft.fft(x)
    h = h * h
    return torch.fft.ifft((x.sin() * h + (-h) * w[0]).transpose(0, 1) * 0.5 + 3 * h.transpose(0, 1).clone())


def placed(x, w):
    h = torch.fft.fft(x)
    part = (h[:, 1:3] * w[0, 1:3, :1]).conj_physical()
    h = h.clone()
    h[:, 0:4:2] = part
    return torch.fft.ifft(h.unsqueeze(1).expand(-1, 2, -1, -1).sum((0, 1), keepdim=True).squeeze(0))


def products(x, w):
    """Small ones, of matrices of which some are conjugate or transposed."""
    h, v = torch.fft.fft(x), w[:3]
    first = torch.bmm(h.conj(), v.transpose(1, 2))
    return torch.fft.ifft(torch.bmm(first, torch.bmm(v, h.mH).conj()).reshape(-1, 2))


def returned(x, w):
    """What the caller gets has eager's strides, and is as lazy."""
    h = (torch.fft.fft(x) * w[0]).permute(2, 0, 1) + 1j * torch.fft.fft(x).permute(2, 0, 1)
    return h.conj(), torch.view_as_real(h.clone() + h)


PROGRAMS = [fourier_layer, long_convolution, windows, scaled, placed, products, returned]


def compiled(function):
    return aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("function", PROGRAMS, ids=lambda function: function.__name__)
def test_values_and_gradients_are_eagers(function, dtype):
    x = of(B, C, L, dtype=dtype.to_real()).requires_grad_()
    w = of(C, C, L, dtype=dtype, seed=1).requires_grad_()
    step = compiled(function)
    results, expected = (call(x, w) for call in (step, function))
    results, expected = (each if isinstance(each, tuple) else (each,) for each in (results, expected))
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.complex64 else {"rtol": 1e-10, "atol": 1e-12}
    for got, wanted in zip(results, expected, strict=True):
        assert got.stride() == wanted.stride() and got.is_conj() == wanted.is_conj()
        torch.testing.assert_close(got, wanted, **tolerance)
    weights = [torch.randn_like(each) for each in expected]
    both = (torch.autograd.grad(each, (x, w), weights) for each in (results, expected))
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted, **tolerance)


@pytest.mark.parametrize("function", PROGRAMS[:-1], ids=lambda function: function.__name__)
def test_only_transforms_give_complex_numbers(function):
    x, w = of(B, C, L, dtype=torch.float32).requires_grad_(), of(C, C, L, seed=1).requires_grad_()
    step = compiled(function)
    step(x, w).real.sum().backward()
    (graph,) = step.report.graphs
    made = re.findall(r": complex64.* = (\w+)", f"{graph.forward_text}\n{graph.backward_text}")
    views = "view_as_complex", "slice", "permute", "transpose", "view", "squeeze", "unsqueeze", "_conj", "clone"
    assert {name for name in made if not name.startswith("_fft")} <= {"input", *views}


def test_the_gradient_of_a_shared_weight_holds_no_product():
    """It is a sum of products over all sequences, each of which a kernel makes and adds at once."""
    x, w = of(64, C, L, dtype=torch.float32).requires_grad_(), of(1, C, L, seed=1).requires_grad_()
    step = compiled(long_convolution)
    step(x, w).sum().backward()
    (graph,) = step.report.graphs
    assert not {"aten.sum.dim_IntList", "aten.mul.Tensor"} & set(graph.library_calls)


def test_what_is_not_finite_is_eagers():
    """A real number is one whose imaginary part is 0: times infinity it is no number."""
    x = torch.tensor([[1.0, float("inf"), -2.0, 0.0, float("nan"), 3.0]])
    h = torch.complex(x, x.flip(1))

    def program(h, x):
        return (h * 2 + h * x).clone()

    got, wanted = compiled(program)(h, x), program(h, x)
    torch.testing.assert_close(torch.view_as_real(got), torch.view_as_real(wanted), equal_nan=True)


def test_a_place_is_written():
    """Of which eager knows no gradient."""

    def program(h, v):
        return torch.fft.fft((h.select_scatter(v, 1, 2) * v[:, None]).select_scatter(-v, -2, -1))

    h, v = of(B, C, L), of(B, L, seed=1)
    step = compiled(program)
    torch.testing.assert_close(step(h, v), program(h, v), rtol=1e-4, atol=1e-4)
    assert [name for name in step.report.graphs[0].library_calls if "_fft" not in name] == []


def test_large_products_stay_the_librarys():
    h, v = of(2, 64, 64), of(2, 64, 64, seed=1)
    step = compiled(lambda h, v: (torch.bmm(h, v) + h) * v)
    torch.testing.assert_close(step(h, v), (torch.bmm(h, v) + h) * v, rtol=1e-4, atol=1e-4)
    assert "complex64[2, 64, 64] = bmm" in step.report.graphs[0].forward_text


def test_the_reals_of_complex_numbers_are_read_by_kernels():
    def program(h):
        half = h[:, 1:]
        return torch.view_as_real(half).sin(), half.real * 2, half.imag.exp()

    h = of(5, 7)
    step = compiled(program)
    for given in (h, h.t().contiguous().t(), h[1:, 2:], h.conj().resolve_conj()):
        for got, wanted in zip(step(given), program(given), strict=True):
            torch.testing.assert_close(got, wanted)
    assert not any(name.startswith("aten") for name in step.report.graphs[0].library_calls)
