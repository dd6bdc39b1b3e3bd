"""`out=` of another type than the result, where eager computes in that type, or raises, by operator; and of other
strides, which eager keeps, changes or does not heed."""

from __future__ import annotations

import pytest
import torch

import aottrain

pytestmark = pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
COMPUTED = {
    "sum": lambda x, out: torch.sum(x, 0, out=out),
    "mean": lambda x, out: torch.mean(x, 0, out=out),
    "prod": lambda x, out: torch.prod(x, 0, out=out),
    "cumsum": lambda x, out: torch.cumsum(x, 0, out=out),
    "nansum": lambda x, out: torch.nansum(x, 0, out=out),
    "var": lambda x, out: torch.var(x, 0, out=out),
    "logsumexp": lambda x, out: torch.logsumexp(x, 0, out=out),
}
REFUSED = {
    "amax": lambda x, out: torch.amax(x, 0, out=out),
    "clamp": lambda x, out: torch.clamp(x, -1, 1, out=out),
    "cummax": lambda x, out: torch.cummax(x, 0, out=(out, torch.empty(0, dtype=torch.int64))),
    "softmax": lambda x, out: torch.softmax(x, 0, out=out),
    "tril": lambda x, out: torch.tril(x, out=out),
}


def taken(operator, capture, dtype):
    """What a compiled call gives, and eager's."""

    def program(x):
        out = torch.empty(0, dtype=dtype)
        operator(x, out)
        return out

    torch._dynamo.reset()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    return lambda: aottrain.compile(program, capture=capture, kernel="aten")(x), lambda: program(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_is_what_eager_computes_in(name, dtype):
    compiled, eager = taken(COMPUTED[name], "trace", dtype)
    torch.testing.assert_close(compiled(), eager(), rtol=0, atol=0)


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("name", REFUSED)
def test_is_an_error_where_eager_raises(name, capture):
    compiled, eager = taken(REFUSED[name], capture, torch.float32)
    with pytest.raises(RuntimeError) as wanted:
        eager()
    with pytest.raises(RuntimeError) as got:
        compiled()
    assert str(got.value) == str(wanted.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_of_the_result_s_type_nothing_runs_eagerly(dtype):
    def program(x):
        total, product = torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)
        torch.sum(x, 0, out=total)
        return torch.mul(x, total, out=product)

    compiled = aottrain.compile(program, capture="trace", kernel="aten")
    x = torch.randn(8, 8).to(dtype)
    torch.testing.assert_close(compiled(x), program(x), rtol=0, atol=0)
    assert not compiled.report.fallbacks


STRIDED = {
    "sort": lambda x, out: torch.sort(x, 0, out=(out, torch.empty(0, dtype=torch.int64))),
    "gelu": lambda x, out: torch._C._nn.gelu(x, out=out),
    "cholesky": lambda x, out: torch.linalg.cholesky(x @ x.t() + torch.eye(4), out=out),
    "narrow_copy": lambda x, out: torch.narrow_copy(x, 0, 0, 4, out=out),
    "exp": lambda x, out: torch.exp(x, out=out),
    "exp of a transposed": lambda x, out: torch.exp(x.t(), out=out),
}


@pytest.mark.parametrize(
    "made",
    [lambda: torch.zeros(4, 4, 2)[..., 1], lambda: torch.zeros(0), lambda: torch.zeros(4, 4)],
    ids=["gaps", "empty", "dense"],
)
@pytest.mark.parametrize("name", STRIDED)
def test_has_the_strides_and_values_of_eager(name, made):
    def program(x):
        out = made()
        STRIDED[name](x, out)
        return out

    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    got, wanted = aottrain.compile(program, capture="trace", kernel="aten")(x), program(x)
    torch.testing.assert_close(got, wanted, check_stride=True)


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_what_a_function_of_torch_does_not_write_while_it_is_traced_runs_eagerly(capture):
    def program(x):
        out = torch.full((), 9)
        torch.linalg.matrix_rank(x, atol=None, rtol=None, out=out)
        return out

    compiled = aottrain.compile(program, capture=capture, kernel="aten")
    for x in (torch.ones(3, 3), torch.eye(3)):
        assert torch.equal(compiled(x), program(x))


def test_a_result_that_is_the_argument_is_written():
    """The conjugates of real numbers are these themselves, and `out` is another tensor."""

    @torch.no_grad()
    def program(x):
        out = torch.zeros(3)
        torch.conj_physical(x, out=out)
        return out

    x = torch.ones(3, requires_grad=True)
    out = aottrain.compile(program, capture="trace", kernel="aten")(x)
    assert torch.equal(out, torch.ones(3))
    assert not out.requires_grad
    assert out.data_ptr() != x.data_ptr()
