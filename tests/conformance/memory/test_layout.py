"""Strides, offsets and memory formats: the result is laid out as eager lays it out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.harness import VALUES, case, cases_of, check, fill, grads, leaf, normal


def last(x):
    return x.to(memory_format=torch.channels_last)


@case
def elementwise_keeps_strides(comp):
    g = comp(
        lambda x: (
            x + 1,
            x.sin() * 2,
            x.relu(),
            x > 0,
            x.double(),
            x.clone(),
            torch.zeros_like(x),
            torch.full_like(x, 3),
            x + x.contiguous(),
            x.contiguous() + x,
            torch.where(x > 0, x, x * 2),
        )
    )
    x = normal(3, 4, 5)
    return (
        g(x.transpose(0, 2)),
        g(x.permute(1, 2, 0)),
        g(x[:, ::2]),
        g(x.expand(3, 4, 5)),
        g(x[:1].expand(3, 4, 5)),
        g(x[..., :1]),
    )


@case
def gradients_keep_strides(comp):
    found = []
    g = comp(lambda x: (x.sin() * x).sum())
    for make in (
        lambda b: b.t(),
        lambda b: b[:, ::2],
        lambda b: b[1:],
        lambda b: b.unsqueeze(0),
        lambda b: b.t().contiguous(),
    ):
        x = make(normal(4, 6)).detach().requires_grad_()
        g(x).backward()
        found.append(x.grad)
    return found


@case
def leaf_with_odd_strides(comp):
    x = torch.empty_strided((3, 4), (1, 5)).copy_(normal(3, 4)).requires_grad_()
    out = comp(lambda x: x * 2)(x)
    out.sum().backward()
    return out, grads(x)


@case
def channels_last_network(comp):
    m = fill(
        nn.Sequential(
            nn.Conv2d(3, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 2, 1),
            nn.AdaptiveAvgPool2d(1),
        )
    )
    x = last(normal(2, 3, 8, 8)).requires_grad_()
    out = comp(m)(x)
    out.pow(2).sum().backward()
    return out, grads(x, *m.parameters())


@case
def channels_last_weights(comp):
    m = last(fill(nn.Conv2d(3, 4, 3)))
    x = leaf(2, 3, 6, 6)
    out = comp(m)(x)
    out.sum().backward()
    return out, grads(x, *m.parameters())


@case
def contiguous_then_channels_last(comp):
    g = comp(lambda x: F.interpolate(x * 2, scale_factor=2) + 1)
    x = normal(2, 3, 4, 4)
    return g(x), g(last(x)), g(x)


@case
def memory_format_conversions(comp):
    g = comp(
        lambda x: (
            x.contiguous(memory_format=torch.channels_last),
            x.to(memory_format=torch.channels_last),
            x.clone(memory_format=torch.contiguous_format),
            torch.full_like(x, 3, memory_format=torch.channels_last),
            x.permute(0, 2, 3, 1).contiguous(),
        )
    )
    return g(normal(2, 3, 4, 4)), g(last(normal(2, 3, 4, 4)))


@case
def branch_on_contiguity(comp):
    g = comp(lambda x: x * 2 if x.is_contiguous() else x * 3)
    x = normal(3, 3)
    return g(x), g(x.t()), g(x)


@case
def branch_on_strides_and_offset(comp):
    g = comp(lambda x: x * x.stride(0) + x.storage_offset())
    x = normal(6)
    return g(x), g(x[2:]), g(x[::2]), g(x[1::2]), g(x[4:])


@case
def offsets_into_one_buffer(comp):
    g = comp(lambda x: (x.sin(), x[1:], x.view(2, 2)))
    b = normal(12)
    return [g(b[i : i + 4]) for i in (0, 1, 2, 8)], [v.storage_offset() for v in g(b[3:7])[1:]]


@case
def as_strided_at_several_offsets(comp):
    g = comp(lambda x: x.as_strided((2, 2), (2, 1)) * 2)
    b = leaf(12)
    outs = [g(b[i : i + 4]) for i in (0, 3, 8)]
    sum((o * o).sum() for o in outs).backward()
    return outs, grads(b)


@case
def as_strided_with_offset_argument(comp):
    g = comp(lambda x: x.as_strided((2,), (1,), 1) * 2)
    b = leaf(12)
    outs = [g(b[i : i + 4]) for i in (0, 3)]
    sum((o * o).sum() for o in outs).backward()
    return outs, grads(b)


@case
def as_strided_view_returned(comp):
    g = comp(lambda x: x.as_strided((2, 2), (1, 2)))
    b = normal(12)
    outs = [g(b[i : i + 4]) for i in (0, 3, 8)]
    outs[1].zero_()
    return outs, [o.storage_offset() for o in outs], b


@case
def as_strided_scatter_and_copies(comp):
    x = leaf(3, 3)
    out = comp(
        lambda x: (
            torch.as_strided_scatter(x, torch.ones(2), (2,), (4,), 0)
            + torch.slice_scatter(x, torch.zeros(1, 3), 0, 1, 2)
            + torch.select_scatter(x, torch.ones(3), 1, 0)
            + torch.diagonal_scatter(x, torch.ones(3))
        )
    )(x)
    out.pow(2).sum().backward()
    return out, grads(x)


@case
def roll_of_channels_last(comp):
    return comp(lambda x: x.roll(1, 2).as_strided((2, 3), (3, 1)))(last(normal(2, 3, 4, 4)))


@case
def expanded_inputs(comp):
    g = comp(lambda x, y: (x * y, x.sum(0), x + 1, x.contiguous()))
    return g(normal(1, 4).expand(3, 4), normal(3, 4)), g(normal(3, 1).expand(3, 4), normal(1).expand(3, 4))


@case
def expanded_input_gradient(comp):
    b = leaf(1, 4)
    x = b.expand(3, 4)
    comp(lambda x: (x * x.sin()).sum())(x).backward()
    return grads(b)


@case
def matmul_layouts(comp):
    g = comp(lambda a, b: (a @ b, (a @ b).mT, a.matmul(b) + 1))
    a, b = normal(3, 4), normal(4, 5, seed=1)
    return (
        g(a, b),
        g(a.t().contiguous().t(), b),
        g(a, b.t().contiguous().t()),
        g(a[:, ::2], b[::2]),
        g(normal(2, 3, 4), b),
    )


@case
def linear_and_batched_products(comp):
    x = leaf(2, 3, 4)
    w = leaf(5, 4, seed=1)
    outs = comp(
        lambda x, w: (
            F.linear(x, w),
            x @ w.t(),
            torch.bmm(x, x.transpose(1, 2)),
            x.transpose(0, 1) @ w.t(),
            torch.baddbmm(torch.zeros(2, 3, 3), x, x.mT),
        )
    )(x, w)
    sum(o.sin().sum() for o in outs).backward()
    return outs, grads(x, w)


@case
def reshape_of_non_contiguous(comp):
    g = comp(lambda x: (x.reshape(-1), x.flatten(1), x.transpose(0, 1).reshape(4, -1), x.permute(2, 0, 1).flatten()))
    return g(normal(2, 4, 3)), g(normal(4, 2, 3).transpose(0, 1))


@case
def view_of_non_contiguous_raises(comp):
    from tests.conformance.harness import raises

    return raises(lambda: comp(lambda x: x.t().view(-1))(normal(2, 3)))


@case
def multi_head_split_and_merge(comp):
    def f(x):
        q = x.view(2, 5, 2, 4).transpose(1, 2)
        a = (q @ q.mT).softmax(-1) @ q
        return a.transpose(1, 2).reshape(2, 5, 8), a, q

    x = leaf(2, 5, 8)
    outs = comp(f)(x)
    outs[0].sin().sum().backward()
    return outs, grads(x)


@case
def reductions_of_permuted(comp):
    g = comp(
        lambda x: (
            x.sum(0),
            x.mean(-1, keepdim=True),
            x.softmax(1),
            x.cumsum(0),
            x.sort(1)[0],
            x.amax((0, 2)),
            x.argmax(1),
        )
    )
    x = normal(3, 4, 5)
    return g(x.permute(2, 0, 1)), g(x.transpose(1, 2)), g(x[:, :, ::2])


@case
def joins_of_mixed_layouts(comp):
    return comp(
        lambda x, y: (
            torch.cat([x, y.t()]),
            torch.stack([x, y.t()]),
            torch.cat([last(x[None, None]), last(x[None, None])]),
            torch.cat([y.t(), y.t()], 1),
        )
    )(normal(3, 4), normal(4, 3))


@case
def sizes_of_one(comp):
    g = comp(
        lambda x: (x + 1, x.squeeze(), x.t() if x.dim() == 2 else x, x.expand(*x.shape), x.contiguous(), x.reshape(-1))
    )
    return g(normal(1, 5)), g(normal(5, 1)), g(normal(1, 1)), g(normal(5, 5)[:, :1])


@case
def tangent_layouts(comp):
    g = comp(lambda x: x * 2 + 1)
    found = []
    for tangent in (
        torch.ones(()).expand(4, 4),
        normal(4, 4).t(),
        normal(8, 8)[::2, ::2],
        last(normal(1, 4, 2, 2)).reshape(4, 4),
    ):
        x = leaf(4, 4)
        g(x).backward(tangent)
        found.append(x.grad)
    return found


@case
def unaligned_memory(comp):
    g = comp(lambda x: (x.sin() * 2).sum())
    b = normal(1030)
    return g(b[:1024]), g(b[1:1025]), g(b[3:1027])


@case
def three_dimensional_channels_last(comp):
    m = fill(nn.Conv3d(2, 3, 2))
    x = normal(1, 2, 4, 4, 4).to(memory_format=torch.channels_last_3d).requires_grad_()
    out = comp(m)(x)
    out.sum().backward()
    return out, grads(x, *m.parameters())


@case
def zero_sized(comp):
    m = fill(nn.Linear(4, 3))
    g = comp(m)
    out = g(torch.zeros(0, 4))
    out.sum().backward()
    return out, grads(*m.parameters()), g(normal(2, 4))


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
