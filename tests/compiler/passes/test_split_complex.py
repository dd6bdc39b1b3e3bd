"""Products of complex numbers as pairs of reals: what is rewritten, what is left, and that values and strides stay."""

from __future__ import annotations

import pytest
import torch

import aottrain
from aottrain.compiler.passes.splits.complexes import split_complex
from aottrain.ir.graph import calls, spec_of
from tests.compiler.programs import joint_of, leaf
from tests.numerics.tolerance import assert_close

TABLE = torch.polar(torch.linspace(0.5, 2, 40).view(5, 8), torch.linspace(-3, 3, 40).view(5, 8))


def paired(x):
    return torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))


def rotary(x, table):
    return (torch.view_as_real(paired(x) * table).flatten(-2)).sin()


def conjugate_table(x, table):
    return (torch.view_as_real(paired(x.sin()) * table.conj())).sin()


def both_conjugate(x, table):
    return (torch.view_as_real(table.conj() * paired(x).conj())).sin()


def lazily_conjugate_view(x, table):
    return (torch.view_as_real(paired(x) * table.conj()[None])).sin()


def transposed_table(x, table):
    return (torch.view_as_real(paired(x) * table.t().contiguous().t())).sin()


def of_two(x, table):
    """Of two that both need a gradient."""
    return (torch.view_as_real(paired(x) * paired(x.cos()))).sin()


def read_as_complex(x, table):
    product = paired(x) * table
    return torch.view_as_real(product) + product.abs()[..., None]


def as_large(x, table):
    return torch.view_as_real(torch.polar(x, x.sin()) * torch.polar(x.cos(), x)).sin()


REWRITTEN = [rotary, conjugate_table, lazily_conjugate_view, transposed_table, of_two]
LEFT = [read_as_complex, as_large]


def num_complex(joint):
    specs = [spec_of(node) for node in calls(joint.graph) if "mul" in str(node.target)]
    return sum(spec is not None and spec.dtype.is_complex for spec in specs)


@pytest.mark.parametrize("program", [*REWRITTEN, both_conjugate, *LEFT], ids=lambda program: program.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_values_strides_and_gradients_are_eagers(program, dtype):
    x = leaf(3, 5, 16).detach().to(dtype).requires_grad_()
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    results, gradients = [], []
    for call in (program, compiled):
        results.append(call(x, TABLE.to(dtype.to_complex())))
        gradients += torch.autograd.grad(results[-1], x, torch.full_like(results[-1], 0.5) * results[-1].detach())
    assert results[1].stride() == results[0].stride() and results[1].dtype is results[0].dtype
    assert_close(*results[::-1])
    assert_close(*gradients[::-1])


@pytest.mark.parametrize("program", REWRITTEN, ids=lambda program: program.__name__)
def test_products_that_are_read_as_pairs_are_real(program):
    before = joint_of(program, leaf(3, 5, 16), TABLE)
    assert num_complex(before) >= 2 and num_complex(split_complex(before)) == 0


def test_what_is_read_as_complex_or_would_be_copied_stays():
    for program in LEFT:
        joint = joint_of(lambda x, table, program=program: program(x.detach(), table), leaf(3, 5, 16), TABLE)
        assert split_complex(joint) is joint


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_casts_around_it_are_of_its_kernels(dtype):
    """As language models in halves have it: nothing as large as the input is written in float32."""

    def rotated(x, table):
        return torch.view_as_real(paired(x.float()) * table).flatten(-2).type_as(x).sin()

    x = leaf(3, 5, 16).detach().to(dtype).requires_grad_()
    compiled = aottrain.compile(rotated, capture="trace", kernel="cpp", on_unsupported="error")
    results = [call(x, TABLE) for call in (rotated, compiled)]
    for got in (results, [torch.autograd.grad(value.sum(), x)[0] for value in results]):
        assert_close(got[1], got[0])
    joint = split_complex(joint_of(rotated, x, TABLE))
    wide = [node for node in calls(joint.graph) if (spec := spec_of(node)) and spec.dtype is torch.float32]
    assert all("select" in str(node.target) or spec_of(node).numel <= 3 * 5 * 16 // 2 for node in wide)
