"""Numbers that a program reads of constants alone, and grouped products: traced whole, as eager computes them."""

from __future__ import annotations

import copy
import itertools

import numpy
import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler.capture.fakes import KernelFakes
from aottrain.errors import AottrainError
from tests.numerics.tolerance import assert_close

grouped = torch.ops.aten._grouped_mm.default


def _causal(x):
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    other = torch.triu(torch.full((4, 4), float("-inf")), diagonal=1)
    return x * 2 if bool((mask == other).all()) else x * 3


def _written(x):
    mask = torch.zeros(3)
    first = mask[:1]
    mask[0] = 1
    return x * 2 if bool(first.sum() > 0) else x * 3


def _copied_before(x):
    mask = torch.zeros(3)
    later = mask + 1
    mask.add_(5)
    return x * later.sum().item()


def _listed(x):
    return x.sum(torch.arange(1, x.dim()).tolist()) * torch.arange(4).split(2)[1].tolist()[0]


def _literal(x):
    return x * 2 if bool((torch.tensor([[1.5, 2.0]]) > 0).all()) else x * 3


def _placed(x):
    values, places = torch.tensor([3, 1, 2]).sort()
    return x * places[0].item() + values.tolist()[2]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [_listed, _literal, _placed])
def test_lists_and_numbers_that_python_gives_are_known(function, dynamic):
    """What one call gives of constants in several parts is known part by part."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    compiled = aottrain.compile(function, capture="trace", dynamic=dynamic, on_unsupported="error")
    assert_close(compiled(x), function(x))


_STEPS = torch.arange(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * _STEPS.tolist()[1],
        lambda x: x * float(numpy.from_dlpack(_STEPS)[1]),
        lambda x: x * torch.from_numpy(_STEPS.numpy()).tolist()[1],
    ],
    ids=["as a list", "by dlpack", "as an array"],
)
def test_the_numbers_of_a_tensor_outside_are_read_anew(function):
    """Torch reads them from memory without an operator, and they may be others at the next call."""
    x = torch.ones(3, requires_grad=True)
    compiled = aottrain.compile(function, capture="trace")
    with pytest.warns(UserWarning, match="runs this call eagerly"):
        compiled(x)
    _STEPS.add_(1)
    assert torch.equal(compiled(x), function(x))


def _written_as_an_array(x):
    numbers = numpy.arange(3.0)
    tensor = torch.from_numpy(numbers)
    numbers[1] = 7
    return x * tensor[1].item()


def _read_as_an_array(x):
    numbers = numpy.arange(3.0)
    torch.from_numpy(numbers)[1:].fill_(7)
    return x * float(numbers[1])


@pytest.mark.parametrize("function", [_written_as_an_array, _read_as_an_array])
def test_memory_that_an_array_shares_is_not_known(function):
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="runs this call eagerly"):
        assert torch.equal(aottrain.compile(function, capture="trace")(x), function(x))


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_a_branch_on_constants_is_taken_while_tracing(frontend):
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    compiled = aottrain.compile(_causal, capture=frontend, on_unsupported="error" if frontend == "trace" else "eager")
    assert torch.equal(compiled(x), _causal(x))
    assert not compiled.report.fallbacks


@pytest.mark.parametrize(
    "function",
    [
        _written,
        lambda x: x * float(torch.rand(3).sum() * 0 + (x.detach() * 0).sum()),
        lambda x: x * float(torch.zeros(3).copy_(x.detach()).sum()),
        lambda x: x * float(torch.add(x.detach(), 1, out=torch.zeros(3)).sum()),
        lambda x: x * float(torch.rand(3).sum() > -1),
    ],
    ids=["written by an index", "read of an input", "overwritten by an input", "written as out=", "drawn"],
)
def test_what_is_written_or_drawn_is_not_known(function):
    """It runs eagerly, so that each call reads what stands there then."""
    x = torch.ones(3, requires_grad=True)
    compiled = aottrain.compile(function, capture="trace", on_unsupported="eager")
    with pytest.warns(UserWarning, match="runs this call eagerly"):
        out = compiled(x)
    assert_close(out, function(x))


def test_a_value_made_before_the_write_is_known():
    x = torch.ones(3, requires_grad=True)
    assert torch.equal(aottrain.compile(_copied_before, capture="trace", on_unsupported="error")(x), _copied_before(x))


class _Masked(nn.Module):
    """Its decoder asks whether the mask is causal, and the mask is made of plain numbers."""

    def __init__(self):
        super().__init__()
        self.network = nn.Transformer(16, 2, 1, 1, 32, dropout=0.0, batch_first=True)

    def forward(self, source, target, padded):
        mask = nn.Transformer.generate_square_subsequent_mask(4)
        return self.network(source, target, tgt_mask=mask, src_key_padding_mask=padded, memory_key_padding_mask=padded)


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_the_transformer_of_torch_with_a_causal_mask_is_compiled(frontend):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = _Masked()
    source, target, padded = torch.randn(2, 5, 16), torch.randn(2, 4, 16), torch.arange(5).expand(2, -1) >= 4
    truth = copy.deepcopy(model)
    compiled = aottrain.compile(model, capture=frontend, on_unsupported="eager")
    for both in (compiled, truth):
        both(source, target, padded).square().mean().backward()
    assert not compiled.report.num_fallbacks
    for parameter, other in zip(model.parameters(), truth.parameters(), strict=True):
        assert_close(parameter.grad, other.grad)


def _operands(kind, sizes, transposed, dtype):
    inner, columns, rows = sizes

    def made(flat, shape, turned):
        shape = shape if flat else (3, *shape)
        if turned:
            return torch.ones(*shape[:-2], shape[-1], shape[-2]).to(dtype).transpose(-1, -2)
        return torch.ones(shape).to(dtype)

    a, b = made(kind[0] == 2, (rows, inner), transposed[0]), made(kind[1] == 2, (inner, columns), transposed[1])
    last = {(2, 3): rows, (3, 2): columns, (2, 2): inner}.get(kind)
    return a, b, None if last is None else torch.tensor([2, 2, last], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("kind", list(itertools.product((2, 3), (2, 3))), ids=str)
def test_a_grouped_product_is_taken_and_refused_as_the_kernel_does(kind, dtype):
    """Sizes, strides and types of all combinations; what the kernel refuses is refused."""
    for sizes in ((8, 16, 8), (8, 16, 12), (8, 6, 5), (7, 5, 3)):
        for transposed in itertools.product((False, True), repeat=2):
            operands = _operands(kind, sizes, transposed, dtype)
            try:
                wanted = grouped(*operands)
            except RuntimeError:
                wanted = None
            mode = KernelFakes()
            fakes = [None if value is None else mode.from_tensor(value) for value in operands]
            if wanted is None:
                with mode, pytest.raises((AottrainError, RuntimeError)):
                    grouped(*fakes)
                continue
            with mode:
                found = grouped(*fakes)
            case = kind, sizes, transposed
            assert (found.shape, found.stride(), found.dtype) == (wanted.shape, wanted.stride(), wanted.dtype), case


@pytest.mark.parametrize("columns", [8, 6], ids=["whole rows", "padded rows"])
def test_experts_by_a_grouped_product_are_compiled(columns):
    """One of them has no rows. Rows of 6 columns are padded; their gradient eager itself refuses."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(12, 8, generator=generator), torch.randn(3, columns, 8, generator=generator)
    ends = torch.tensor([5, 5, 12], dtype=torch.int32)

    def function(x, w, ends):
        return torch.nn.functional.grouped_mm(x.sin(), w.transpose(1, 2), offs=ends).tanh().square().sum()

    found = []
    compiled = aottrain.compile(function, capture="trace", on_unsupported="error")
    for call in (compiled, function):
        leaves = [value.clone().requires_grad_(columns == 8) for value in (x, w)]
        out = call(*leaves, ends)
        found.append([out.detach(), *(torch.autograd.grad(out, leaves) if columns == 8 else ())])
    for ours, truth in zip(*found, strict=True):
        assert_close(ours, truth)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.float32, torch.bool])
def test_the_number_that_an_input_holds_is_no_part_of_the_program(dtype):
    """A fake of torch 2.14 remembers it."""
    step = aottrain.compile(lambda x, number: x * number.item(), capture="trace")
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="aottrain runs this call eagerly"):
        for value in (1, 0, 3):
            number = torch.tensor(value).to(dtype)
            assert torch.equal(step(x, number), x * number.item())
