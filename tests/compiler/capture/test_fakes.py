"""KernelFakes: the strides that the CPU's kernels give; the errors that they raise."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_map

import aottrain
from aottrain.compiler.capture.fakes import KernelFakes
from aottrain.compiler.capture.kernel_results import CPU_LAYOUTS
from aottrain.toolchain.native import find_compiler

aten = torch.ops.aten


def images():
    return torch.rand(2, 4, 6, 6)


def _argmaxed():
    out, index = torch.nn.functional.max_pool2d(images(), 2, return_indices=True)
    return [out, index, (6, 6)]


# For each op the arguments, of which the tensors are laid out in every way.
ARGUMENTS = {
    aten.log_sigmoid_forward.default: lambda: [images()],
    aten._log_softmax_backward_data.default: lambda: [images(), images(), 1, torch.float32],
    aten.huber_loss_backward.default: lambda: [images(), images(), images(), 0, 1.0],
    aten.mse_loss_backward.default: lambda: [images(), images(), images(), 0],
    aten.smooth_l1_loss_backward.default: lambda: [images(), images(), images(), 0, 1.0],
    aten.hardswish_backward.default: lambda: [images(), images()],
    aten.hardtanh_backward.default: lambda: [images(), images(), -1.0, 1.0],
    aten.logit_backward.default: lambda: [images(), images()],
    aten.native_layer_norm_backward.default: lambda: [
        images(),
        images(),
        (6, 6),
        torch.zeros(2, 4, 1, 1),
        torch.ones(2, 4, 1, 1),
        images()[0, 0],
        images()[0, 0],
        [True] * 3,
    ],
    aten.normal.Tensor_Tensor: lambda: [images(), images()],
    aten.pow.Scalar: lambda: [2.0, images()],
    aten.channel_shuffle.default: lambda: [images(), 2],
    aten.max_unpool2d.default: _argmaxed,
    aten.native_group_norm.default: lambda: [images(), torch.ones(4), None, 2, 4, 36, 2, 1e-5],
    aten.native_group_norm_backward.default: lambda: [
        images(),
        images(),
        torch.zeros(2, 2),
        torch.ones(2, 2),
        torch.ones(4),
        2,
        4,
        36,
        2,
        [True] * 3,
    ],
    aten.native_batch_norm.default: lambda: [images(), None, None, None, None, True, 0.1, 1e-5],
    aten._native_batch_norm_legit_functional.default: lambda: [
        images(),
        None,
        None,
        torch.zeros(4),
        torch.ones(4),
        True,
        0.1,
        1e-5,
    ],
    aten._native_batch_norm_legit.no_stats: lambda: [images(), None, None, True, 0.1, 1e-5],
    aten._batch_norm_with_update_functional.default: lambda: [
        images(),
        torch.ones(4),
        torch.ones(4),
        torch.zeros(4),
        torch.ones(4),
        0.1,
        1e-5,
    ],
    aten.batch_norm_backward.default: lambda: [
        images(),
        images(),
        torch.ones(4),
        None,
        None,
        torch.zeros(4),
        torch.ones(4),
        True,
        1e-5,
        [True] * 3,
        torch.empty(0, dtype=torch.uint8),
    ],
    aten.native_batch_norm_backward.default: lambda: [
        images(),
        images(),
        torch.ones(4),
        None,
        None,
        torch.zeros(4),
        torch.ones(4),
        True,
        1e-5,
        [True] * 3,
    ],
    aten.replication_pad2d_backward.default: lambda: [torch.rand(2, 4, 8, 8), images(), (1, 1, 1, 1)],
    aten.reflection_pad3d.default: lambda: [torch.rand(2, 4, 5, 6, 7), (1,) * 6],
    aten.replication_pad3d.default: lambda: [torch.rand(2, 4, 5, 6, 7), (1,) * 6],
    aten.roll.default: lambda: [images(), [1], [2]],
    aten._fft_r2c.default: lambda: [images(), [3, 1], 0, True],
    aten.copysign.Tensor: lambda: [images(), images()[0]],
    aten.glu_backward.default: lambda: [images()[:, :2], images(), 1],
    aten.grid_sampler_2d.default: lambda: [images(), torch.rand(2, 3, 5, 2), 0, 0, False],
    aten.heaviside.default: lambda: [images()[:, :, :1], images()[0]],
    aten.logaddexp.default: lambda: [images()[:, :, :1], images()[0]],
    aten.binary_cross_entropy.default: lambda: [images(), images(), images(), 0],
    aten.binary_cross_entropy_backward.default: lambda: [images(), images(), images(), images(), 0],
    aten.nll_loss2d_forward.default: lambda: [images(), torch.zeros(2, 6, 6, dtype=torch.int64), None, 0, -100],
    aten.reflection_pad2d_backward.default: lambda: [torch.rand(2, 4, 8, 8), images(), (1, 1, 1, 1)],
    aten.replication_pad3d_backward.default: lambda: [torch.rand(2, 6, 8, 8), images(), (1, 1, 1, 1, 1, 1)],
    aten.ldexp.Tensor: lambda: [images()[:, :, :1], images()[0]],
    aten.logical_and.default: lambda: [images() > 0.5, images()[0, :, :1]],
    aten.logical_or.default: lambda: [images(), images()[0, :, :1] > 0.5],
    aten.logical_xor.default: lambda: [images(), images()[:, :1]],
    aten.div.Tensor_mode: lambda: [images(), images()[0]],
    aten.floor_divide.default: lambda: [images(), images()[0]],
    aten.native_dropout_backward.default: lambda: [images(), images() > 0.5, 2.0],
    aten.special_xlog1py.default: lambda: [images(), images()[0]],
    aten.xlogy.Tensor: lambda: [images(), images()[0]],
}
MOST_LAYOUTS = 100
LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: channels_last(t) if t.dim() > 3 else t,
    "transposed": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "batch inside": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "gaps": lambda t: t.repeat_interleave(2, -1)[..., ::2],
}
OF_IMAGES = ("contiguous", "channels last")
# What calls these gives them no other layout, and torch 2.13 has fakes of no other.
LAID_OUT_BEFORE = {aten.native_group_norm.default, aten.native_group_norm_backward.default}


def channels_last(value):
    return value.contiguous(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)


@pytest.mark.parametrize("op", ARGUMENTS, ids=str)
def test_strides_are_the_kernels(op):
    arguments = ARGUMENTS[op]()
    options = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
    places = [i for i, value in enumerate(arguments) if isinstance(value, torch.Tensor) and value.dim() > 1]
    every = list(itertools.product(OF_IMAGES if op in LAID_OUT_BEFORE else LAYOUTS, repeat=len(places)))
    # Of six tensors there are 15,625: a sample, in which each pair of two tensors' layouts is there many times.
    for layouts in random.Random(0).sample(every, min(len(every), MOST_LAYOUTS)):
        given = list(arguments)
        for i, name in zip(places, layouts, strict=True):
            given[i] = LAYOUTS[name](given[i])
        mode = KernelFakes()
        fakes = tree_map(lambda v: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v, given)  # noqa: B023
        with mode:
            found = [value.stride() for value in tree_flatten(op(*fakes, **options))[0]]
        wanted = [value.stride() for value in tree_flatten(op(*given, **options))[0]]
        assert found == wanted, layouts


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("plan", ["save_all", "min_cut"])
def test_an_error_of_the_backward_stays_there(frontend, plan):
    def function(x):
        return torch.logaddexp(x, x < x)

    x = torch.ones(2, 2, requires_grad=True)
    compiled = aottrain.compile(function, capture=frontend, partition=plan)
    with pytest.warns(UserWarning, match="runs this call eagerly: a subtraction of booleans"):
        out = compiled(x)
    assert compiled.report.num_fallbacks == 1
    assert torch.equal(out, function(x))
    with pytest.raises(RuntimeError, match="with a bool tensor"):
        out.sum().backward()


@pytest.mark.parametrize(
    "formula", [lambda x: x - (x > 0), lambda x: (x > 0) - x, lambda x: 1 - (x > 0), lambda x: (x > 0) - 1]
)
def test_booleans_are_not_subtracted(formula):
    x = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="Subtraction"):
        formula(x)
    with pytest.raises(RuntimeError, match="Subtraction"), pytest.warns(UserWarning, match="runs this call eagerly"):
        aottrain.compile(formula, capture="trace")(x)


WRITTEN = {
    "mul_ of a number": lambda t: t.mul_(0.75),
    "mul_ of floats": lambda t: t.mul_(torch.ones(8)),
    "mul_ of complex numbers": lambda t: t.mul_(torch.ones(8, dtype=torch.complex64)),
    "add_ of a complex number": lambda t: t.add_(1j),
    "div_": lambda t: t.div_(2),
    "div_, rounded": lambda t: t.div_(2, rounding_mode="floor"),
    "addcmul_": lambda t: t.addcmul_(torch.ones(8), torch.ones(8)),
    "ldexp_": lambda t: t.ldexp_(torch.ones(8, dtype=torch.int64)),
    "pow_": lambda t: t.pow_(2),
    "lt_": lambda t: t.lt_(torch.ones(8)),
    "sqrt_": lambda t: t.sqrt_(),
    "dropout": lambda t: F.dropout(t, 0.25),
}


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32], ids=str)
def test_no_type_is_written_that_the_argument_cannot_take(dtype, frontend):
    """A release of torch has fakes that take some of them."""

    def type_or_error(call):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what eager refuses is left to it
                return call(torch.ones(8).to(dtype)).dtype
        except RuntimeError as error:
            return str(error)

    for name, call in WRITTEN.items():
        assert type_or_error(aottrain.compile(call, capture=frontend)) == type_or_error(call), name


@pytest.mark.parametrize("arguments", [([1],), ([1], [0]), ([1, 1], [0, 1]), ([1, 2], [2, 2]), ([0], [0]), ([-5], [1])])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_of_rolled_values(layout, arguments):
    value = LAYOUTS[layout](images())
    mode = KernelFakes()
    with mode:
        found = aten.roll.default(mode.from_tensor(value), *arguments)
    assert found.stride() == aten.roll.default(value, *arguments).stride()


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_results_of_convolutions_are_laid_out_as_eager_s(num_dims, capture):
    """Which library runs a convolution decides its layout, and while a program is traced oneDNN is off for others."""
    convolve, back = (getattr(F, f"conv{kind}{num_dims}d") for kind in ("", "_transpose"))

    def f(x, weight):
        return convolve(x, weight), back(x, weight.transpose(0, 1)), convolve(x, weight, stride=2, padding=1).relu()

    for layouts in itertools.product(("contiguous", "channels last", "batch inside"), repeat=2):
        x, weight = torch.rand(2, 4, 8, 7, 6)[(..., *(0,) * (3 - num_dims))], torch.rand(5, 4, *[2] * num_dims)
        inputs = [LAYOUTS[name](value).requires_grad_() for name, value in zip(layouts, (x, weight), strict=True)]
        torch._dynamo.reset()  # which counts the programs of one code
        compiled = aottrain.compile(f, kernel="cpp", capture=capture, on_unsupported="error")
        expected, got = f(*inputs), compiled(*inputs)
        assert [one.stride() for one in got] == [one.stride() for one in expected], layouts
        gradients = [torch.autograd.grad(sum(one.sum() for one in results), inputs) for results in (expected, got)]
        assert [one.stride() for one in gradients[0]] == [one.stride() for one in gradients[1]], layouts


def shuffled(value, random):
    """The same numbers with dimensions that lie in another order in memory, sometimes with gaps."""
    order = random.sample(range(value.dim()), value.dim())
    value = value.permute(order).contiguous().permute(sorted(range(value.dim()), key=order.__getitem__))
    return value.repeat_interleave(2, -1)[..., ::2] if value.dim() and random.random() < 0.2 else value


@pytest.mark.parametrize("seed", range(200))
def test_strides_of_indexed_values(seed):
    """Those of indices count, too. Dimensions of size 1 are left out: what nothing orders hangs on their strides."""
    draw = random.Random(seed)
    value = shuffled(torch.rand(draw.choices([2, 3, 4], k=draw.randint(1, 4))), draw)
    shape = draw.choices([2, 3, 4], k=draw.randint(0, 3))
    places = draw.sample(range(value.dim()), draw.randint(1, value.dim()))
    indices = [
        shuffled(torch.zeros([n if draw.random() < 0.8 else 1 for n in shape], dtype=torch.int64), draw)
        if i in places
        else None
        for i in range(max(places) + 1)
    ]
    mode = KernelFakes()
    given = mode.from_tensor(value), [index if index is None else mode.from_tensor(index) for index in indices]
    with mode:
        found = aten.index.Tensor(*given)
    wanted = aten.index.Tensor(value, indices)
    assert found.shape == wanted.shape
    by_size = zip(wanted.shape, found.stride(), wanted.stride(), strict=True)
    assert all(mine == eager for size, mine, eager in by_size if size > 1)


FORMATS = (torch.contiguous_format, torch.channels_last)


def on_a_gpu(shape, form):
    return torch.empty(shape, device="cuda", memory_format=form)


@pytest.mark.parametrize("training", (True, False))
def test_a_batch_norm_by_running_statistics_has_a_contiguous_gradient_on_a_gpu(training):
    """Whatever is in channels_last: cuDNN has no such gradient, and ATen's kernel makes a contiguous one."""
    with KernelFakes():
        gradient, x = (on_a_gpu((2, 4, 6, 6), torch.channels_last) for _ in range(2))
        *values, weight = (torch.empty(4, device="cuda") for _ in range(5))
        arguments = gradient, x, weight, *values, training, 1e-5, [True] * 3
        found = aten.native_batch_norm_backward.default(*arguments)[0]
    assert found.stride() == (x.stride() if training else (144, 36, 6, 1))


@pytest.mark.parametrize("images", FORMATS)
@pytest.mark.parametrize("weight", FORMATS)
def test_convolutions_on_a_gpu_are_laid_out_as_by_cudnn(images, weight):
    """Also where a build of torch has none: for devices that are planned for, and not there."""
    with KernelFakes():
        x, w = on_a_gpu((2, 4, 6, 6), images), on_a_gpu((8, 4, 3, 3), weight)
        rest = [1, 1], [1, 1], [1, 1], False, [0, 0], 1
        out = aten.convolution.default(x, w, None, *rest)
        gradient = on_a_gpu((2, 8, 6, 6), torch.contiguous_format)
        of_x, of_w, _ = aten.convolution_backward.default(gradient, x, w, None, *rest, [True, True, False])
        form = torch.channels_last if torch.channels_last in (images, weight) else torch.contiguous_format
        for found in (out, of_x, of_w):
            assert found.stride() == on_a_gpu(found.shape, form).stride()


def test_each_rule_is_tested():
    assert {*ARGUMENTS, aten.index.Tensor} == set(CPU_LAYOUTS)


F32 = torch.float32


def norms(low, parameters):
    """Calls of all norms with an input of one type and parameters of another, and their backwards."""
    x, x2 = torch.randn(4, 6, 3).to(low), torch.randn(4, 6).to(low)
    w, b, mean, var = (torch.ones(6, dtype=parameters) for _ in range(4))
    kept = F32 if parameters is F32 else low
    rows, groups = torch.zeros(4, 1, dtype=kept), torch.zeros(4, 2, dtype=kept)
    yield aten.native_layer_norm.default, (x2, [6], w, b, 1e-5)
    yield aten.native_layer_norm.default, (x2, [6], None, b, 1e-5)
    yield aten.native_layer_norm.default, (x2, [6], None, None, 1e-5)
    yield aten.native_layer_norm_backward.default, (x2, x2, [6], rows, rows, w, b, [True] * 3)
    yield aten.native_group_norm.default, (x, w, b, 4, 6, 3, 2, 1e-5)
    yield aten.native_group_norm_backward.default, (x, x, groups, groups, w, 4, 6, 3, 2, [True] * 3)
    yield aten.native_batch_norm.default, (x, w, b, mean, var, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_functional.default, (x, w, b, mean, var, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit.no_stats, (x, w, b, True, 0.1, 1e-5)
    yield aten._native_batch_norm_legit_no_training.default, (x, w, b, mean, var, 0.1, 1e-5)
    yield aten._batch_norm_with_update_functional.default, (x, w, b, mean, var, 0.1, 1e-5)
    yield aten.native_batch_norm_backward.default, (x, x, w, b, var, w.to(kept), w.to(kept), True, 1e-5, [True] * 3)
    yield aten._fused_rms_norm.default, (x2, [6], w, 1e-5)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_norms_of_low_precision_have_the_kernels_types(low, is_mixed):
    for op, args in norms(low, F32 if is_mixed else low):
        wanted = [value.dtype for value in op(*args) if value is not None]
        with KernelFakes(allow_non_fake_inputs=True):
            fakes = op(*args)
        assert [value.dtype for value in fakes if value is not None] == wanted, op


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
def test_statistics_of_a_norm_under_autocast_are_not_rounded():
    """Kernels round an input's gradient once, as eager does: by 2^-8 of an element at most, evenly spread below it."""
    generator = torch.Generator().manual_seed(0)
    x, gradient = (torch.randn(64, 4, generator=generator).bfloat16() for _ in range(2))
    weight = torch.randn(4, generator=generator)

    def norm(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return torch.nn.functional.layer_norm(x, (4,), weight)

    def gradient_of(call, x, weight):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(call(x, weight), x, gradient.to(x.dtype))[0].double()

    def plain(x, weight):
        return torch.nn.functional.layer_norm(x, (4,), weight)

    exact = gradient_of(plain, x.double(), weight.double())
    compiled = aottrain.compile(norm, capture="trace", kernel="cpp", on_unsupported="error")
    for call in (norm, compiled):
        assert (gradient_of(call, x, weight) - exact).norm() <= 2.0**-8 / 3**0.5 * exact.norm()
