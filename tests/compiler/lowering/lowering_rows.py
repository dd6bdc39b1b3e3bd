"""Calls of lowered ops that reduce, normalise, look up or rearrange."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.compiler.lowering.lowering_cases import (
    FLOATS,
    INTEGERS,
    LAYOUTS,
    case,
    channels_last,
    overload,
    plain,
    sliced,
    tensor,
    transposed,
)
from tests.compiler.lowering.lowering_images import pools
from tests.compiler.lowering.lowering_runs import Case

f32, f64, bf16, f16, i64 = torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64
# Rows of odd lengths, long rows, many rows, rows of one; with the dimensions to reduce.
ROWS: tuple[tuple[tuple[int, ...], list[int]], ...] = (
    ((63,), [0]), ((4097,), [0]), ((70001,), [0]), ((1,), [0]), ((5, 1), [1]), ((7, 63), [1]), ((63, 7), [0]),
    ((3, 4097), [-1]), ((4097, 3), [0]), ((2, 70001), [1]), ((3, 5, 7), [1]), ((3, 5, 7), [0, 2]),
    ((3, 5, 7), [0, 1, 2]), ((2, 3, 4, 5), [0, 2, 3]), ((2, 3, 4, 5), [1]), ((300, 129), [1]), ((300, 129), [0]),
    ((3, 11, 37), [1]), ((2, 3, 130, 64), [2]),
)  # fmt: skip
SOME = ROWS[5:7] + ROWS[10:12]


def reductions() -> Iterator[Case]:
    for shape, dims in ROWS:
        x = tensor(shape)
        yield from case("sum.dim_IntList", x, dims)
        yield from case("mean.dim", x, dims, True)
        yield from case("amax.default", x, dims)
        yield from case("amin.default", tensor(shape, special=True), dims, True)
        yield from case("var.correction", x, dims, correction=0)
        yield from case("std.correction", x, dims, correction=0)
        yield from case("all.dims", tensor(shape) > -6, dims)
        yield from case("var_mean.correction", x, dims, correction=1, keepdim=True)
        for name in ("max.dim", "min.dim", "argmax.default", "argmin.default"):
            if len(dims) == 1:
                yield from case(name, tensor(shape, special=len(shape) > 1), dims[0])
    for shape, dims in SOME:
        for dtype in (*FLOATS[1:], *INTEGERS, torch.bool):
            for layout in LAYOUTS[:4]:
                x = layout(tensor(shape, dtype))
                yield from case("sum.dim_IntList", x, dims)
                yield from case("amax.default", x, dims)
                yield from case("any.dims" if len(dims) > 1 else "any.dim", x, dims if len(dims) > 1 else dims[0])
                if len(dims) == 1:
                    yield from case("all.dim", x, dims[0], True)
                    yield from case("max.dim", x, dims[0])
                    yield from case("argmin.default", x, dims[0], True)
                    yield from case("prod.dim_int", x, dims[0])
                if dtype.is_floating_point:
                    yield from case("mean.dim", x, dims)
                    yield from case("var_mean.correction", x, dims, correction=1)
                    yield from case("std.correction", x, dims, keepdim=True)
                    yield from case("logsumexp.default", x, dims)
    for shape in ((), (1,), (63,), (300, 129), (0,), (3, 0)):
        for dtype in (f32, bf16, i64, torch.bool):
            x = tensor(shape, dtype)
            for name in ("sum", "mean", "any", "all", "max", "min", "prod"):
                yield from case(f"{name}.default", x)
            yield from case("sum.default", x, dtype=f64)
    for shape, dims in SOME:
        yield from case("sum.dim_IntList", tensor(shape, i64), dims, dtype=f32)
        yield from case("sum.dim_IntList", tensor(shape, bf16), dims, dtype=f32)
        yield from case("mean.dim", tensor(shape, bf16), dims, dtype=f32)


def vector_norms() -> Iterator[Case]:
    for power in (2, 1, 0, math.inf, -math.inf, 3, 0.5):
        for shape, dims in ROWS:
            yield from case("linalg_vector_norm.default", tensor(shape, special=power == 0), power, dims, True)
        for shape, dims in SOME:
            for dtype in FLOATS[1:]:
                for layout in LAYOUTS[:4]:
                    yield from case("linalg_vector_norm.default", layout(tensor(shape, dtype)), power, dims)
        yield from case("linalg_vector_norm.default", tensor((7, 9), bf16), power, [-1], True, dtype=f32)
        yield from case("linalg_vector_norm.default", tensor((7, 9)), power)
        yield from case("linalg_vector_norm.default", tensor((3, 0)), 2, [1])
        for scale in (1e-30, 1e30):  # the square of one number is not taken
            yield from case("linalg_vector_norm.default", tensor((7, 1)) * scale, power, [1])
    yield from case("linalg_vector_norm.default", tensor((5, 63), special=True), 2, [1])
    for power in (2.0, 1.0, math.inf):
        yield from case("norm.ScalarOpt_dim", tensor((7, 63)), power, [1], True)
        yield from case("norm.ScalarOpt_dim", tensor((3, 5, 7), bf16), power, [0, 2])


def softmaxes() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape, dims in ROWS if dtype is f32 else SOME:
            if len(dims) != 1:
                continue
            for layout in (plain, transposed, sliced):
                x, g = layout(tensor(shape, dtype)), layout(tensor(shape, dtype, 1))
                for name in ("_softmax", "_log_softmax"):
                    y = overload(f"{name}.default")(x, dims[0], False)
                    yield from case(f"{name}.default", x, dims[0], False)
                    yield from case(f"{name}_backward_data.default", g, y, dims[0], dtype)
    masked = tensor((5, 9)).masked_fill(tensor((5, 9), torch.bool), -math.inf)
    masked[3] = -math.inf
    yield from case("_softmax.default", masked, 1, False)
    yield from case("_safe_softmax.default", masked, 1)
    yield from case("_safe_softmax.default", masked.bfloat16(), 0)
    yield from case("_log_softmax.default", masked * 30, 1, False)
    yield from case("_softmax.default", tensor((5, 63), special=True), 1, False)


def norms() -> Iterator[Case]:
    for dtype in FLOATS:
        for shape, count in (((7, 63), 1), ((3, 5, 7), 2), ((300, 129), 1), ((1, 4097), 1), ((5, 1), 1)):
            yield from _layer_norms(shape, count, dtype)
    for dtype in (f32, f64):
        for shape in ((4, 3, 5, 7), (70, 33), (2, 5, 9)):
            yield from _batch_norms(shape, dtype)
        for shape, groups in (((2, 6, 5, 7), 3), ((3, 8, 9), 8), ((2, 4, 3), 1)):
            yield from _group_norms(shape, groups, dtype)


def _layer_norms(shape: tuple[int, ...], count: int, dtype: torch.dtype) -> Iterator[Case]:
    inner = list(shape[len(shape) - count :])
    for layout in (plain, sliced):
        x, g = layout(tensor(shape, dtype)), layout(tensor(shape, dtype, 1))
        for weight, bias in ((tensor(tuple(inner), dtype, 2), tensor(tuple(inner), dtype, 3)), (None, None)):
            yield from case("native_layer_norm.default", x, inner, weight, bias, 1e-5)
            _, mean, rstd = overload("native_layer_norm.default")(x, inner, weight, bias, 1e-5)
            for mask in ([True, weight is not None, bias is not None], [True, False, False]):
                args = (g, x, inner, mean, rstd, weight, bias, mask)
                yield from case("native_layer_norm_backward.default", *args)
            yield from case("_fused_rms_norm.default", x, inner, weight, 1e-6)
            yield from case("_fused_rms_norm.default", x, inner, weight, None)
            _, rstd = overload("_fused_rms_norm.default")(x, inner, weight, 1e-6)
            mask = [True, weight is not None]
            yield _rms_backward(g, x, inner, rstd, weight, mask)


def _rms_backward(g: Tensor, x: Tensor, inner: list[int], rstd: Tensor, weight: Tensor | None, mask: Any) -> Case:
    """Only other devices than a CPU have a kernel for it."""

    def reference(g: Tensor, x: Tensor, inner: list[int], rstd: Tensor, weight: Tensor | None, mask: Any) -> Any:
        compute = torch.promote_types(x.dtype, f32)
        g, normal, rstd = g.to(compute), x.to(compute) * rstd, rstd.to(compute)
        scaled = g if weight is None else g * weight.to(compute)
        dims = list(range(-len(inner), 0))
        out = [(rstd * (scaled - normal * (scaled * normal).mean(dims, keepdim=True))).to(x.dtype)]
        if mask[1]:
            out.append((g * normal).sum(list(range(x.dim() - len(inner)))).to(x.dtype))
        return out

    args = (g, x, inner, rstd, weight, mask)
    return Case(overload("_fused_rms_norm_backward.default"), args, {}, str(x.shape), False, reference)


def _batch_norms(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Case]:
    channels = (shape[1],)
    weight, bias, mean = (tensor(channels, dtype, seed) for seed in range(3))
    var = tensor(channels, dtype, 4).abs() + 0.5
    for layout in (plain, transposed, sliced, channels_last):
        x, g = layout(tensor(shape, dtype)), layout(tensor(shape, dtype, 1))
        yield from case("_native_batch_norm_legit_functional.default", x, weight, bias, mean, var, True, 0.1, 1e-5)
        yield from case("_native_batch_norm_legit_functional.default", x, weight, bias, mean, var, False, 0.1, 1e-5)
        yield from case("_native_batch_norm_legit.no_stats", x, weight, bias, True, 0.1, 1e-5)
        yield from case("_native_batch_norm_legit_no_training.default", x, weight, bias, mean, var, 0.1, 1e-5)
        functional = overload("_native_batch_norm_legit_functional.default")
        _, center, rstd, *_ = functional(x, weight, bias, mean, var, True, 0.1, 1e-5)
        for training in (True, False):
            args = (g, x, weight, mean, var, center, rstd, training, 1e-5, [True, True, True])
            yield from case("native_batch_norm_backward.default", *args)


def batch_norm_parts() -> Iterator[Case]:
    """Both halves of a batch norm, one part at a time."""
    for dtype in FLOATS:
        for shape in ((4, 3, 5, 7), (70, 33), (2, 5, 9), (7, 16, 8, 8)):
            for layout in (plain, transposed, sliced, channels_last):
                yield from _parts(layout(tensor(shape, dtype)), layout(tensor(shape, dtype, 1)))
        for shape in ((3, 2, 5, 7), (1, 4, 3, 63), (5, 1, 2, 1)):
            x, g = tensor(shape, dtype), tensor(shape, dtype, 1)
            mean, rstd = (tensor((*shape[:2], 1, 1), torch.promote_types(dtype, f32), seed) for seed in (2, 3))
            for name in ("sums", "example_sums", "sums_in_rows"):
                yield from case(f"aottrain.group_norm_{name}.default", g, x, mean, rstd)
            yield from case("aottrain.channel_sums_in_rows.default", x)
            total, product = (tensor(mean.shape, mean.dtype, seed) for seed in (4, 5))
            for weight in (tensor((1, *shape[1:3], 1), mean.dtype, 6), None):
                args = (g, x, mean, rstd, weight, total, product)
                yield from case("aottrain.group_norm_input_gradient.default", *args)
    yield from _parts(channels_last(tensor((3, 129, 23, 5)) + 300), channels_last(tensor((3, 129, 23, 5))))


def _parts(x: Tensor, g: Tensor) -> Iterator[Case]:
    wide = torch.promote_types(x.dtype, f32)
    count = x.numel() // x.shape[1]
    mean = x.to(wide).mean([d for d in range(x.dim()) if d != 1])
    yield from case("aottrain.batch_spread.default", x, mean)
    lost, square = overload("aottrain.batch_spread.default")(x, mean)
    running = tensor(mean.shape, x.dtype, 3), tensor(mean.shape, x.dtype, 4).abs()
    yield from case("aottrain.batch_statistics.default", mean, lost, square, *running, count, 0.1, 1e-5)
    rstd = (square / count + 1e-5).rsqrt()
    total, product = overload("aottrain.batch_norm_sums.default")(g, x, mean, rstd)
    yield from case("aottrain.batch_norm_sums.default", g, x, mean, rstd)
    for weight, bias in ((tensor(mean.shape, wide, 5), tensor(mean.shape, wide, 6)), (None, None)):
        yield from case("aottrain.batch_normalize.default", x, mean, rstd, weight, bias)
        yield from case("aottrain.batch_norm_input_gradient.default", g, x, mean, rstd, weight, total, product)


def _group_norms(shape: tuple[int, ...], groups: int, dtype: torch.dtype) -> Iterator[Case]:
    batch, channels, rest = shape[0], shape[1], math.prod(shape[2:])
    x, g = tensor(shape, dtype), tensor(shape, dtype, 1)
    for weight, bias in ((tensor((channels,), dtype, 2), tensor((channels,), dtype, 3)), (None, None)):
        yield from case("native_group_norm.default", x, weight, bias, batch, channels, rest, groups, 1e-5)
        _, mean, rstd = overload("native_group_norm.default")(x, weight, bias, batch, channels, rest, groups, 1e-5)
        mask = [True, weight is not None, bias is not None]
        args = (g, x, mean, rstd, weight, batch, channels, rest, groups, mask)
        yield from case("native_group_norm_backward.default", *args)


def _weighted(scores: Tensor, target: Tensor, reduction: int) -> Iterator[Case]:
    kind = "nll_loss" if scores.dim() == 2 else "nll_loss2d"
    weight = tensor((scores.shape[1],), scores.dtype, 5).abs()
    for given in (weight, None):
        args = (scores, target, given, reduction, -100)
        out, total = overload(f"{kind}_forward.default")(*args)
        yield from case(f"{kind}_forward.default", *args)
        g = tensor(out.shape, scores.dtype, 6)
        yield from case(f"{kind}_backward.default", g, *args, total)


def _of_pixels(dtype: torch.dtype) -> Iterator[Case]:
    for shape in ((2, 5, 3, 7), (1, 3, 1, 4), (3, 1, 5, 2)):
        for layout in (plain, channels_last):
            scores = layout(torch.log_softmax(tensor(shape, dtype), 1))
            target = tensor((shape[0], *shape[2:]), i64, 3).abs() % shape[1]
            target.view(-1)[::3] = -100
            yield from case("aottrain.nll_rows.default", scores, target, -100)
            for reduction in (0, 1, 2):
                yield from _weighted(scores, target, reduction)


def losses() -> Iterator[Case]:
    for dtype in (f32, f64, bf16):
        for rows, classes in ((7, 63), (1, 5), (300, 129)):
            scores = torch.log_softmax(tensor((rows, classes), dtype), 1)
            target = tensor((rows,), i64, 3).abs() % classes
            target[::3] = -100
            yield from case("aottrain.nll_rows.default", scores, target, -100)
            for reduction in (0, 1, 2):
                out, total = overload("nll_loss_forward.default")(scores, target, None, reduction, -100)
                yield from case("nll_loss_forward.default", scores, target, None, reduction, -100)
                g = torch.ones_like(out) * 0.7
                yield from case("nll_loss_backward.default", g, scores, target, None, reduction, -100, total)
                yield from _weighted(scores, target, reduction)
        yield from _of_pixels(dtype)
        for shape in ((63,), (7, 9), (300, 129)):
            x, y, t = tensor(shape, dtype), tensor(shape, dtype, 1), tensor(shape, dtype, 2).sigmoid()
            for reduction in (0, 1, 2):
                g = tensor(shape if reduction == 0 else (), dtype, 4)
                for name, rest in (("mse_loss", ()), ("smooth_l1_loss", (0.7,)), ("huber_loss", (1.3,))):
                    yield from case(f"{name}.default", x, y, reduction, *rest)
                    yield from case(f"{name}_backward.default", g, x, y, reduction, *rest)
                p = x.sigmoid()
                yield from case("binary_cross_entropy.default", p, t, None, reduction)
                yield from case("binary_cross_entropy_backward.default", g, p, t, None, reduction)
                yield from case("binary_cross_entropy_with_logits.default", x, t, None, None, reduction)
                yield from case("binary_cross_entropy_with_logits.default", x, t, None, y.abs(), reduction)
                few = y.abs()[..., :1], y.abs()[0]
                yield from case("binary_cross_entropy_with_logits.default", x, t, *few, reduction)


def places() -> Iterator[Case]:
    for dtype in (f32, bf16, i64, torch.bool):
        x = tensor((7, 9, 4), dtype)
        yield from case("embedding.default", tensor((11, 5), dtype), torch.tensor([[0, 10, 3], [4, 4, 1]]))
        yield from case("embedding.default", tensor((11, 5), dtype), torch.tensor(3))
        yield from case("embedding.default", tensor((1, 1), dtype), torch.tensor([0, 0], dtype=torch.int32))
        yield from case("cat.default", [x, x[:, :2], x[:, 3:8]], 1)
        yield from case("cat.default", [tensor((3,), dtype), tensor((0,), dtype), tensor((5,), dtype)], 0)
        yield from case("stack.default", [x, transposed(x)], -1)
        yield from case("slice_backward.default", x, [7, 20, 4], 1, 4, 13, 1)
        yield from case("slice_backward.default", x, [7, 20, 4], 1, -10, -1, 1)
        yield from case("slice_backward.default", x, [7, 20, 4], 1, 2, 20, 2)
        yield from case("slice_backward.default", x, [7, 30, 4], 1, -28, 30, 3)
        yield from case("slice_backward.default", transposed(x), [7, 9, 17], 2, 1, 15, 4)
        yield from case("slice_backward.default", x[:, :0], [7, 9, 4], 1, 9, 9, 2)
        yield from case("select_backward.default", x, [7, 5, 9, 4], 1, -2)
        yield from case("constant_pad_nd.default", x, [1, 2, 0, 3], 1)
        yield from case("constant_pad_nd.default", x, [-1, 2, 3, -2], 0)
        yield from case("select_scatter.default", x, x[:, 2] ^ True if dtype is torch.bool else x[:, 2] + 1, 1, -3)
        yield from case("slice_scatter.default", x, x[:, 1:5], 1, 3, 7)
        yield from case("slice_scatter.default", x, x[:, 1:4], 1, -6, None, 2)
        for offset in (-3, 0, 2):
            for first, second in ((0, 1), (2, 1)):
                part = torch.diagonal(x, offset, first, second)
                yield from case("diagonal_backward.default", part, [7, 9, 4], offset, first, second)
        yield from case("flip.default", x, [0, 2])
        for times in ([1, 1, 1], [2, 1, 3], [2, 3, 1, 2], [0, 1, 1]):
            yield from case("repeat.default", x, times)
            yield from case("repeat.default", sliced(x[:, :1]), times)
        yield from case("roll.default", x, [3, -1], [1, 0])
        yield from case("roll.default", x, [5], [1])
        yield from case("roll.default", x, [-2], [-1])
        yield from case("roll.default", x, [5])
        for diagonal in (-2, 0, 1):
            yield from case("tril.default", x, diagonal)
            yield from case("triu.default", transposed(x), diagonal)
        yield from case("index_select.default", x, 1, torch.tensor([8, 0, 3, 3]))
        yield from case("index_select.default", sliced(x), 0, torch.tensor([6]))
        index = tensor((7, 3, 4), i64, 2).abs() % 9
        yield from case("gather.default", x, 1, index)
        yield from case("gather.default", transposed(x), -1, index % 4)
        one = tensor((7, 1, 4), i64, 3).abs() % 9
        for layout in (plain, transposed, sliced):
            yield from case("gather.default", layout(x), 1, one)
            if dtype is not torch.bool:
                yield from case("scatter_add.default", layout(x), 1, one, layout(x[:, :1]))
                yield from case("scatter.src", layout(x), -2, sliced(one), x[:, 3:4])
                yield from case("scatter.value", x, 1, one, 3)
        yield from case("scatter_add.default", x, 1, index, x[:, :3])
        pick = torch.tensor([[1, -1], [0, 3]])
        yield from case("index.Tensor", x, [None, pick])
        yield from case("index.Tensor", x, [pick, pick])
        yield from case("index.Tensor", x, [pick, None, pick])
        yield from case("index.Tensor", x, [pick[:, :1], pick, torch.tensor(2)])
    yield from case("glu.default", tensor((5, 18)), 1)
    yield from case("glu.default", tensor((6, 9), bf16), 0)
    yield from case("glu_backward.default", tensor((5, 9), f32, 1), tensor((5, 18)), 1)
    yield from case("glu_backward.default", tensor((3, 9), f32, 1), tensor((6, 9)), 0)


def made() -> Iterator[Case]:
    for shape in ((), (1,), (63,), (0,), (3, 5, 7)):
        for dtype in (f32, bf16, i64, torch.bool):
            yield from case("zeros.default", list(shape), dtype=dtype)
            yield from case("eye.default", 9, dtype=dtype)
            yield from case("eye.m", 7, 63, dtype=dtype)
            yield from case("ones.default", list(shape), dtype=dtype)
            yield from case("full.default", list(shape), 2.7, dtype=dtype)
            like = tensor((2, 3), dtype)
            yield from case("new_zeros.default", like, list(shape))
            yield from case("new_ones.default", like, list(shape))
            yield from case("new_full.default", like, list(shape), -3)
    for value in (3, 2.5, -0.0, True, math.inf):
        yield from case("scalar_tensor.default", value, dtype=f32)
    yield from case("arange.default", 63, dtype=i64)
    yield from case("arange.start", 3, 70, dtype=torch.int32)
    yield from case("arange.start_step", 3, 70, 4, dtype=i64)
    yield from case("arange.start_step", 70, 3, -5, dtype=i64)
    yield from case("arange.default", 63, dtype=f32)
    yield from case("arange.start_step", 0.5, 9.5, 0.25, dtype=f32)
    for source in (f32, bf16, f16, i64, torch.uint8, torch.bool):
        for target in (f32, bf16, f16, i64, torch.uint8, torch.bool, f64, torch.int32):
            yield from case("_to_copy.default", tensor((7, 9), source), dtype=target)
            yield from case("prims.convert_element_type.default", tensor((63,), source), target)


def draws() -> Iterator[Case]:
    state = torch.tensor([2**61 + 12345, 2**33 + 5])
    for shape in ((1,), (63,), (4097,), (70001,), (7, 9, 5)):
        for draw in (0, 7):
            for dtype in (f32, torch.bfloat16, torch.float16):
                rest = {"dtype": dtype, "device": torch.device("cpu")}
                yield from case("aottrain.philox_uniform.default", state, draw, list(shape), **rest)
                yield from case("aottrain.philox_normal.default", state, draw, list(shape), **rest)
            for low, high in ((0, 2), (-5, 1000003), (0, 2**62)):
                args = (state, draw, low, high, list(shape))
                yield from case("aottrain.philox_randint.default", *args, device=torch.device("cpu"))


FAMILIES = (
    reductions, vector_norms, softmaxes, norms, batch_norm_parts, losses, places, pools, made, draws,
)  # fmt: skip
