"""Programs lowered, fused and run by Triton kernels: each kernel against `evaluate`, the whole against eager. Run by
test_triton.py."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten

import aottrain
from aottrain.compiler.codegen.evaluation import evaluate
from aottrain.compiler.codegen.triton.programs import with_draws
from aottrain.compiler.codegen.triton.render import render_triton
from aottrain.compiler.passes import choose_layouts
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.kernel import KernelIR, draw_numbers
from aottrain.ir.settings.decisions import DEFAULT
from aottrain.measure.decisions import deciding
from aottrain.runtime.cuda.triton_launch import triton_launch
from aottrain.runtime.launch import scheduled_runner
from tests.compiler.lowering import lowering_rows
from tests.compiler.lowering.lowering_cases import covering
from tests.compiler.lowering.lowering_runs import differences, plan
from tests.numerics.comparison import gradients_of, train
from tests.numerics.programs import PROGRAMS
from tests.numerics.tolerance import RTOL_ATOL, assert_close

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def memory_of(value: Tensor, span: int) -> Tensor:
    """The memory from a tensor's first element on, as one dimension."""
    left = value.untyped_storage().nbytes() // value.element_size() - value.storage_offset()
    return value.detach().as_strided((min(span, left),), (1,))


def checked_launch(kernel: KernelIR) -> Callable[[Sequence[Tensor]], None]:
    """Runs a kernel, and compares with what `evaluate` makes of the same memory."""
    launch = with_draws(triton_launch(render_triton(kernel)), kernel)

    def run(buffers: Sequence[Tensor]) -> None:
        memory = [memory_of(b, p.span) for b, p in zip(buffers, kernel.parameters, strict=True)]
        wanted = [m.clone() for m in memory]
        evaluate(kernel, wanted)
        launch(buffers)
        # A result may take the memory of an operand that dies here: what is left of that operand is the result.
        taken = {m.data_ptr() for m, p in zip(memory, kernel.parameters, strict=True) if p.written and m.numel()}
        for parameter, got, right in zip(kernel.parameters, memory, wanted, strict=True):
            if not parameter.written and got.data_ptr() in taken:
                continue
            if parameter.written and parameter.dtype.is_floating_point:
                assert_close(got, right)
            else:
                torch.testing.assert_close(got, right, rtol=0, atol=0, equal_nan=True)

    return run


class Checking:
    """A kernel backend: the graphs by Triton, every kernel checked. kernels: all that were made."""

    def __init__(self) -> None:
        self.kernels: list[KernelIR] = []

    def __call__(self, module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graph = module.graph
        planned = schedule(graph)
        self.kernels += [call.kernel for call in planned.kernels]
        runner = scheduled_runner(graph, planned, {k.name: checked_launch(k) for k in self.kernels})
        return lambda *given: runner(list(given))


@pytest.fixture(autouse=True)
def float32_is_not_rounded() -> Iterator[None]:
    """cuDNN would round it to TF32, by which algorithms and layouts differ in the third digit."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def compare(function: Callable[..., Any], inputs: Sequence[Any], kernel: Any = None) -> Checking:
    """Outputs and gradients of one call, with every kernel checked on the way, are eager's."""
    backend = Checking()
    inputs = [v.to(DEVICE) if isinstance(v, Tensor) else v for v in inputs]
    call = aottrain.compile(function, kernel=kernel or backend, capture="trace", on_unsupported="error")

    def run(target: Callable[..., Any], eager: bool) -> list[Tensor | None]:
        leaves = [v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, Tensor) else v for v in inputs]
        wanted = [v for v in leaves if isinstance(v, Tensor) and v.requires_grad]
        if isinstance(function, nn.Module):
            wanted += [p for p in function.parameters() if p.requires_grad]
        torch.manual_seed(3)
        if eager:
            with aottrain.philox_eager():
                out = target(*leaves)
                return [*tree_flatten(out)[0], *gradients_of(out, wanted)]
        out = target(*leaves)
        return [*tree_flatten(out)[0], *gradients_of(out, wanted)]

    for a, b in zip(run(call, False), run(function, True), strict=True):
        assert (a is None) == (b is None)
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            assert a.shape == b.shape and a.dtype is b.dtype and a.stride() == b.stride()
            same_scale(a, b)
    return backend


def same_scale(a: Tensor, b: Tensor) -> None:
    """Close, where the absolute tolerance is of the tensor's largest element: sums of many terms cancel."""
    if not b.dtype.is_floating_point:
        return torch.testing.assert_close(a, b, rtol=0, atol=0)
    rtol, atol = RTOL_ATOL[b.dtype]
    scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
    torch.testing.assert_close(a, b, rtol=10 * rtol, atol=10 * atol * scale, equal_nan=True)
    return None


class NormGelu(nn.Module):
    """A linear layer between fused work on both sides; dropout in the middle."""

    def __init__(self, width: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.to(device=DEVICE, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(F.gelu(self.linear(self.norm(x))), 0.3, True)


@pytest.mark.parametrize("width", [1, 63])
def test_a_block_with_norm_gelu_and_dropout(width):
    compare(NormGelu(width), [torch.randn(5, width, requires_grad=True)])


def test_the_block_in_bfloat16():
    """Each kernel against `evaluate` alone: the norm amplifies what eager's products round in another way."""
    x = torch.randn(4, 32, device=DEVICE, dtype=torch.bfloat16)
    backend = Checking()
    call = aottrain.compile(NormGelu(32, torch.bfloat16), kernel=backend, capture="trace", on_unsupported="error")
    call(x.requires_grad_()).float().square().mean().backward()
    assert backend.kernels and x.grad is not None


def test_draws_are_eagers():
    x = torch.ones(3, 1000, device=DEVICE)
    call = aottrain.compile(lambda x: F.dropout(x, 0.5, True) * 2, kernel="triton", capture="trace")
    torch.manual_seed(5)
    got = call(x)
    torch.manual_seed(5)
    with aottrain.philox_eager():
        wanted = F.dropout(x, 0.5, True) * 2
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1000, 37])
def test_normal_draws_are_eagers(width, dtype):
    """Up to the rounding of the interpreter's logarithms and angles."""
    x = torch.zeros(3, width, device=DEVICE, dtype=dtype)
    call = aottrain.compile(lambda x: x + torch.randn_like(x) * 2, kernel="triton", capture="trace")
    torch.manual_seed(5)
    got = call(x)
    torch.manual_seed(5)
    with aottrain.philox_eager():
        wanted = torch.randn_like(x) * 2
    assert call.report.graphs[0].library_calls == {}
    torch.testing.assert_close(got, wanted, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4097])
def test_softmax_and_its_logarithm(size):
    compare(lambda x: (x.softmax(-1) * x, x.log_softmax(-1)), [torch.randn(3, size, requires_grad=True)])


def test_softmax_over_other_dimensions():
    compare(lambda x: x.softmax(0) + x.transpose(1, 2).softmax(1).mT, [torch.randn(4, 5, 7, requires_grad=True)])


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy(reduction):
    target = torch.tensor([0, 5, -100, 10, 3, 3])
    loss = lambda x: F.cross_entropy(x * 2, target.to(x.device), reduction=reduction)  # noqa: E731
    compare(loss, [torch.randn(6, 11, requires_grad=True)])


def test_embedding():
    table, tokens = torch.randn(11, 6, requires_grad=True), torch.randint(11, (3, 5))
    compare(lambda w, t: F.embedding(t, w).tanh() + w[0], [table, tokens])


def test_an_index_out_of_range_is_eagers_error():
    if DEVICE.type == "cuda":
        return  # a failed assertion on a device ends the process's use of it
    call = aottrain.compile(lambda w, t: F.embedding(t, w) * 2, kernel="triton", capture="trace")
    table = torch.randn(5, 3)
    assert torch.equal(call(table, torch.tensor([4])), table[4:] * 2)
    with pytest.raises(IndexError):
        call(table, torch.tensor([5]))


@pytest.mark.parametrize("shape", [(1, 5), (300, 20)])
def test_sums_over_rows_and_over_all(shape):
    """The gradient of a bias is a sum over rows."""
    x, bias = torch.randn(*shape, requires_grad=True), torch.randn(shape[-1], requires_grad=True)
    compare(lambda x, b: ((x + b).sin() * 3, (x * b).sum(0), (x - b).square().mean()), [x, bias])


@pytest.mark.parametrize("shape", [(3, 50, 129), (2, 300, 16), (2, 9, 5000)], ids=str)
def test_sums_over_the_rows_of_each_sequence(shape):
    """The gradients of a norm's scale and shift, in one kernel; rows that are swept, too; and sums without a norm."""

    def modulated(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x, (shape[2],)) * scale.unsqueeze(1), (x * 2).mean(1)

    given = torch.randn(shape, requires_grad=True), torch.randn(shape[0], shape[2], requires_grad=True)
    kernels = compare(modulated, given).kernels
    assert any(column.kept == 1 for kernel in kernels for column in kernel.columns)


@pytest.mark.parametrize("shape", [(5, 24), (300, 40)], ids=str)
def test_parts_of_a_result_are_written_where_they_are_made(shape):
    """Of gradients of halves, and of what takes turns along a dimension."""

    def gated(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = x.chunk(2, -1)
        return F.silu(left) * right, torch.stack((left.exp(), right.sin()), -1).flatten(-2)

    kernels = compare(gated, [torch.randn(shape, requires_grad=True)]).kernels
    assert any(len({store.buffer for store in k.stores}) < len(k.stores) for k in kernels)


@pytest.mark.parametrize("window", [(2,), (3, 2, 1)], ids=str)
def test_largest_of_windows(window):
    """With a relu before it, whose gradient is taken after it."""
    x = torch.randn(2, 3, 9, 10, requires_grad=True)
    backend = compare(lambda x: F.max_pool2d(F.relu(x * 2), *window) * 3, [x], kernel="triton")
    assert backend is not None


@pytest.mark.parametrize("training", (True, False))
def test_batch_and_group_norms_in_parts(training):
    layers = nn.BatchNorm2d(6), nn.ReLU(), nn.GroupNorm(3, 6), nn.SiLU()
    model = nn.Sequential(*layers).to(DEVICE).train(training)
    state = copy.deepcopy(model.state_dict())
    x = torch.randn(3, 6, 5, 7, requires_grad=True)
    compare(model, [x], kernel="triton")
    model.load_state_dict(state)
    compare(model, [x.detach().contiguous(memory_format=torch.channels_last).requires_grad_()], kernel="triton")


class Residual(nn.Module):
    """Convolutions with batch norms, a pool, and a sum of images around them."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.convolutions
        hidden = F.max_pool2d(F.relu(self.norms[0](first(x))), 3, 2, 1)
        return F.relu(self.norms[1](second(hidden)) + hidden).mean((2, 3))


def test_images_in_channels_last(monkeypatch):
    """The kernels between convolutions: norms that sum over rows, a pool, what is pointwise, and weights' gradients."""
    monkeypatch.setattr(choose_layouts, "_model_prices", lambda node: (1 << 30, 0))
    model, x = Residual().to(DEVICE), torch.randn(4, 8, 10, 10, requires_grad=True)
    with deciding(DEFAULT):
        call = aottrain.compile(model, capture="trace", kernel="triton")
        assert "4 convolutions, forward and backward, in channels_last" in call.prepare(x.to(DEVICE)).layouts
        compare(model, [x], kernel="triton")


@pytest.mark.skipif(DEVICE.type == "cuda", reason="these calls are planned for a CPU")
def test_every_part_of_a_norm_in_every_layout():
    number = 0
    for case in covering(lowering_rows.batch_norm_parts()):
        if case.tensors[0].dtype not in (torch.float32, torch.bfloat16) or case.tensors[0].numel() > 2000:
            continue
        planned = plan(case, number := number + 1)
        kernels = [call.kernel for call in planned.schedule.kernels]
        assert kernels
        launches = {kernel.name: with_draws(triton_launch(render_triton(kernel)), kernel) for kernel in kernels}
        runner = scheduled_runner(planned.graph, planned.schedule, launches)
        assert differences(case, runner(list(case.tensors))) == []


def test_scalars_among_blocks():
    """Tensors without dimensions are one value of the kernel: compared, chosen by, raised to a power."""
    x, s = torch.rand(3, 5), torch.tensor(0.5)
    compare(lambda x, s: torch.where(s > 0.25, x**s, x) * ((x > s) & (s < 2)) + torch.atan2(x, s), [x, s])


def test_cat_pad_and_slices():
    a, b = torch.randn(3, 5, requires_grad=True), torch.randn(3, 4, requires_grad=True)
    compare(lambda a, b: F.pad(torch.cat([a * 2, b.sin()], 1), (1, 2), value=1.5)[:, 1:9] * a.sum(), [a, b])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_casts_between_types(dtype):
    x = torch.randn(4, 63, requires_grad=True)
    compare(lambda x: (x.to(dtype) * 3 + 1).exp().float() * x, [x])


def test_integers():
    """64-bit arithmetic wraps; positions and comparisons of indices."""

    def function(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        where = torch.arange(9, device=i.device) * 3 - 4
        return i * 6364136223846793005 + where, torch.where(where > i, x, -x).masked_fill(where == 2, 7.0)

    compare(function, [torch.randint(-(2**62), 2**62, (4, 9)), torch.randn(4, 9)])


@pytest.mark.parametrize("size", [(), (1,), (0, 3), (4097,)], ids=str)
def test_pointwise_chains_of_odd_sizes(size):
    compare(lambda x: x.sin().sin().sin() + x.cos(), [torch.randn(size, requires_grad=True)])


TRAINED = [(name, "min_cut") for name in ("resnet block", "gpt block")]
TRAINED += [(name, "recompute_all") for name in ("dropout", "random inputs", "norms", "step counter")]
TRAINED += [("padded embedding", "min_cut"), ("buffer read then mutated", "recompute_all")]


@pytest.mark.parametrize(("name", "plan"), TRAINED)
def test_training_follows_eager(name, plan):
    """Steps of a model: outputs, gradients, buffers and parameters."""
    make, batches = PROGRAMS[name]
    torch.manual_seed(5)
    eager = make().to(DEVICE)
    model = copy.deepcopy(eager)
    given = [tuple(v.to(DEVICE) for v in batch) for batch in batches()][:2]
    target = aottrain.compile(model, kernel="triton", partition=plan, capture="trace", on_unsupported="error")
    got, wanted = train(model, target, given, eager=False), train(eager, eager, given, eager=True)
    assert target.report.graphs[0].kernel == "triton" and target.report.graphs[0].kernels
    assert got.keys() == wanted.keys()
    for what in wanted:
        if what.startswith("generator"):
            assert torch.equal(got[what], wanted[what])
            continue
        for a, b in zip(tree_flatten(got[what])[0], tree_flatten(wanted[what])[0], strict=True):
            same_scale(a, b) if isinstance(a, Tensor) else None


def test_complex_numbers_between_transforms_are_pairs():
    """Kernels read the reals of what a transform gives, and make those of what another reads."""

    def fourier_layer(x: Tensor, w: Tensor) -> Tensor:
        h = torch.fft.rfft(x)
        out = torch.zeros_like(h)
        out[..., :5] = h[..., :5].conj() * w[:, :5] + h[..., 2:7]
        return torch.fft.irfft(out * 2, n=x.shape[-1])

    x = torch.randn(3, 4, 16, device=DEVICE, requires_grad=True)
    w = torch.randn(4, 9, dtype=torch.complex64, device=DEVICE, requires_grad=True)
    call = aottrain.compile(fourier_layer, kernel="triton", capture="trace", on_unsupported="error")
    out, wanted = call(x, w), fourier_layer(x, w)
    weights = torch.randn_like(out)
    both = [torch.autograd.grad(value, (x, w), weights) for value in (out, wanted)]
    for one, other in zip((out, *both[0]), (wanted, *both[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert all("_fft" in name for name in call.report.graphs[0].library_calls)


def test_dynamo_runs_it_too():
    x = torch.randn(3, 8, device=DEVICE, requires_grad=True)
    call = aottrain.compile(lambda x: x.sin().sum(-1).exp(), kernel="triton", on_unsupported="error")
    same_scale(call(x), x.sin().sum(-1).exp())


def test_equal_kernels_of_repeated_blocks_are_one_module():
    from aottrain.compiler.codegen.triton.render import render_code

    backend = compare(nn.Sequential(*[NormGelu(8) for _ in range(5)]), [torch.randn(5, 8)])
    texts: dict[str, list[tuple[int, ...]]] = {}
    for kernel in backend.kernels:
        texts.setdefault(render_code(kernel), []).append(draw_numbers(kernel))
    # The numbers of draws are arguments: four blocks, each of which ends in the next one's norm, are one module.
    assert [(0,), (1,), (2,), (3,)] in texts.values()
