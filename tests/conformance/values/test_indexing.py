"""Reads and writes by index, mask and slice, with repeats, gaps and errors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.conformance.harness import VALUES, case, cases_of, check, fill, grads, leaf, normal, raises


def both(comp, f, *shapes):
    xs = [leaf(*shape, seed=i) for i, shape in enumerate(shapes)]
    outs = comp(f)(*xs)
    sum((o * o).sum() for o in outs if o.requires_grad).backward()
    return outs, grads(*xs)


@case
def basic_and_negative(comp):
    return both(
        comp,
        lambda x: (
            x[0],
            x[-1],
            x[1:],
            x[:-1],
            x[::2],
            x[..., 0],
            x[None],
            x[:, None, 1],
            x[1:1],
            x[-2:, ::3],
            x[0, 1],
            x[(0, 1)],
        ),
        (4, 5),
    )


@case
def integer_tensors(comp):
    def f(x):
        i, j = torch.tensor([0, 2, -1]), torch.tensor([1, 1, 0])
        return (
            x[i],
            x[i, j],
            x[:, j],
            x[i[:, None], j],
            x[i, 1:3],
            x[[0, 1]],
            x[[0, 1], [1, 0]],
            x[i].sum(0),
            x[torch.tensor(1)],
            x[i, None],
            x[..., i],
        )

    return both(comp, f, (4, 5))


@case
def separated_advanced_indices(comp):
    i = torch.tensor([0, 1])
    return both(comp, lambda x: (x[i, :, i], x[:, i, i], x[i, :, 1], x[0, :, i], x[i, ..., i]), (2, 3, 4))


@case
def boolean_masks(comp):
    m = torch.tensor([True, False, True, False])
    return both(comp, lambda x: (x[m], x[m, 1:], x[:, m], x[m].sum(), torch.where(m[:, None], x, -x)), (4, 4))


@case
def masks_computed_from_values(comp):
    return both(
        comp,
        lambda x: (
            x[x > 0],
            x.masked_select(x < 0),
            x.clone().masked_fill(x > 0, 2.0),
            torch.where(x > 0, x, 0.0),
            x * (x > 0),
        ),
        (4, 4),
    )


@case
def mask_writes(comp):
    def f(x):
        y = x.clone()
        y[y > 0] = 0
        z = x.clone()
        z[z < 0] *= 2
        w = x.clone()
        w[torch.tensor([True, False, True])] = torch.ones(4)
        return y, z, w

    return both(comp, f, (3, 4))


@case
def index_writes(comp):
    def f(x, v):
        y = x.clone()
        y[torch.tensor([0, 2])] = v
        z = x.clone()
        z[1:, ::2] = 5
        w = x.clone()
        w[0] = w[1]
        u = x.clone()
        u[..., -1] += u[..., 0]
        return y, z, w, u

    return both(comp, f, (4, 3), (2, 3))


@case
def writes_with_broadcast_and_cast(comp):
    def f(x):
        y = torch.zeros(3, 3, dtype=torch.int64)
        y[:, 0] = x[:3].long()
        z = torch.zeros(3, 3)
        z[1] = 2
        z[:, 2] = x[0]
        z[torch.tensor([0]), torch.tensor([1])] = x[1]
        return y, z

    return both(comp, f, (4,))


@case
def repeated_indices_accumulate(comp):
    def f(x, v):
        i = torch.tensor([0, 0, 2, 0])
        y = x.clone().index_put((i,), v, accumulate=True)
        return (
            y,
            x.index_add(0, i, v),
            x.scatter_add(0, i, v),
            x.scatter_reduce(0, i, v, "mean"),
            x.scatter_reduce(0, i, v, "prod", include_self=False),
            x.index_reduce(0, i, v, "amin"),
        )

    return both(comp, f, (4,), (4,))


@case
def gather_and_scatter(comp):
    def f(x, v):
        i = torch.tensor([[0, 1], [2, 2], [1, 0]])
        return (
            x.gather(1, i),
            x.scatter(1, i[:, :1], v[:, :1]),
            x.scatter(1, i[:, 1:], 3.0),
            torch.take_along_dim(x, i, 1),
            x.take(torch.tensor([0, 5, 5])),
            x.scatter_add(1, i, v),
        )

    return both(comp, f, (3, 3), (3, 2))


@case(close="gradients of several results are added in another order")
def selected_rows(comp):
    def f(x):
        i = torch.tensor([1, 1, 0])
        return (
            x.index_select(0, i),
            x.index_select(1, i),
            x.index_fill(0, i, 2.0),
            x.index_copy(0, torch.tensor([0, 2]), x[:2]),
            x.select(1, 2),
            x.narrow(1, 1, 2),
        )

    return both(comp, f, (3, 4))


@case
def out_of_range_raises(comp):
    bad = torch.tensor([7])
    return [
        raises(lambda f=f: comp(f)(normal(3, 3), bad))
        for f in (
            lambda x, i: x[i],
            lambda x, i: x[:, i],
            lambda x, i: x.gather(0, i[None]),
            lambda x, i: x.index_select(0, i),
            lambda x, i: F.embedding(i, x),
            lambda x, i: x.scatter(0, i[None], 1.0),
            lambda x, i: x[7],
            lambda x, i: x[i, i],
            lambda x, i: x.index_add(0, i, x[:1]),
            lambda x, i: F.cross_entropy(x[:1], i),
            lambda x, i: F.one_hot(i, 3),
            lambda x, i: x.take(i + 5),
            lambda x, i: x.clone().index_put_((i,), x[0]),
        )
    ]


@case
def negative_index_where_forbidden_raises(comp):
    bad = torch.tensor([-1])
    return [
        raises(lambda f=f: comp(f)(normal(3, 3), bad))
        for f in (
            lambda x, i: x.gather(0, i[None]),
            lambda x, i: F.embedding(i, x),
            lambda x, i: x.index_select(0, i),
            lambda x, i: x.scatter(0, i[None], 1.0),
        )
    ]


@case
def range_is_checked_again_on_later_calls(comp):
    g = comp(lambda x, i: x[i] * 2)
    a = g(normal(3), torch.tensor([2]))
    return a, raises(lambda: g(normal(3), torch.tensor([3]))), g(normal(3), torch.tensor([-3]))


@case
def embeddings(comp):
    w = leaf(6, 3)
    i = torch.tensor([[0, 5, 5], [2, 2, 2]])

    def f(w, i):
        return (
            F.embedding(i, w),
            F.embedding(i, w, padding_idx=2),
            F.embedding_bag(i, w, mode="mean"),
            F.embedding_bag(i, w, mode="sum"),
            F.one_hot(i, 6).float() @ w,
        )

    outs = comp(f)(w, i)
    sum((o * o).sum() for o in outs).backward()
    return outs, grads(w)


@case
def sparse_embedding_gradient(comp):
    m = fill(nn.Embedding(5, 2, sparse=True))
    comp(m)(torch.tensor([1, 3, 1])).pow(2).sum().backward()
    return m.weight.grad.is_sparse, m.weight.grad.to_dense()


@case(close="gradients of several results are added in another order")
def joining(comp):
    def f(x, y):
        return (
            torch.cat([x, y]),
            torch.cat([x, y], 1),
            torch.stack([x, y], -1),
            torch.hstack([x, y]),
            torch.vstack([x, y]),
            torch.cat([x, x]),
            torch.cat([x.double(), y]),
            torch.cat([x, torch.zeros(0)]) if x.dim() == 1 else x,
            torch.block_diag(x, y),
            torch.cartesian_prod(x[0], y[0]),
            torch.meshgrid(x[0], y[0], indexing="ij")[0],
        )

    return both(comp, f, (3, 3), (3, 3))


@case
def splitting(comp):
    return both(
        comp, lambda x: (*x.split([1, 0, 3]), *x.chunk(3), *x.tensor_split(3), *x.unbind(1), *x.hsplit(2)), (4, 4)
    )


@case
def padding(comp):
    x = leaf(1, 2, 4, 4)

    def f(x):
        return (
            F.pad(x, (1, 2)),
            F.pad(x, (-1, 1, 0, -2), value=3.0),
            F.pad(x, (1, 1, 1, 1), mode="reflect"),
            F.pad(x, (2, 1, 0, 1), mode="replicate"),
            F.pad(x, (1, 1, 1, 1), mode="circular"),
            F.pad(x, (0, 0)),
        )

    outs = comp(f)(x)
    sum((o * o).sum() for o in outs).backward()
    return outs, grads(x)


@case
def no_op_pad_then_write(comp):
    def f(a):
        b = F.pad(a, (0, 0))
        a[0] = 1
        return b, b.sort()[0], a

    x = normal(4)
    return comp(f)(x), x


@case(close="gradients of several results are added in another order")
def moving(comp):
    def f(x):
        return (
            x.roll(1, 0),
            x.roll((1, -1), (0, 1)),
            x.flip(0),
            x.fliplr(),
            x.rot90(),
            x.tril(),
            x.triu(1),
            x.diagonal(),
            x.diag(),
            x.repeat(2, 1),
            x.repeat_interleave(2, 1),
            x.tile((1, 2)),
            torch.kron(x, x[:1]),
            x.unfold(1, 2, 1),
            x.trace(),
        )

    return both(comp, f, (3, 3))


@case
def repeat_interleave_by_tensor(comp):
    return both(comp, lambda x: (x.repeat_interleave(torch.tensor([1, 0, 2]), 0),), (3, 2))


@case(close="gradients of several results are added in another order")
def einsum_forms(comp):
    def f(x, y):
        return (
            torch.einsum("ij,jk->ik", x, y),
            torch.einsum("ij,ij->i", x, y),
            torch.einsum("ii->i", x),
            torch.einsum("ij->ji", x),
            torch.einsum("ij,kl->", x, y),
            torch.einsum("...j,jk", x, x),
            torch.tensordot(x, y, 1),
            torch.outer(x[0], y[0]),
        )

    return both(comp, f, (3, 3), (3, 3))


@case
def searching(comp):
    def f(x):
        s = x.sort()[0]
        return (
            torch.searchsorted(s, x),
            torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])),
            x.histc(4),
            torch.bincount((x > 0).long()),
            x.nonzero(),
            torch.argwhere(x > 0),
            x.count_nonzero(),
            torch.isin(x, x[:2]),
        )

    return comp(f)(normal(6))


@case
def batched_gather_by_tokens(comp):
    def f(logits, tokens):
        return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0].mean(), logits[
            torch.arange(2)[:, None], torch.arange(3), tokens
        ]

    x = leaf(2, 3, 5)
    outs = comp(f)(x, torch.tensor([[0, 1, 4], [2, 2, 2]]))
    (outs[0] + outs[1].sum()).backward()
    return outs, grads(x)


@case
def causal_mask_built_inside(comp):
    def f(x):
        n = x.shape[-1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(1)
        return x.masked_fill(mask, float("-inf")).softmax(-1), x + torch.full((n, n), float("-inf")).triu(1)

    return comp(f)(normal(4, 4)), comp(f)(normal(3, 3))


@case
def scalar_tensor_as_slice_bound(comp):
    g = comp(lambda x, n: x[: int(n)] * 2)
    x = normal(5)
    return g(x, torch.tensor(2)), g(x, torch.tensor(4))


@case
def zero_sized_indices(comp):
    return both(
        comp,
        lambda x: (
            x[torch.tensor([], dtype=torch.long)],
            x[torch.zeros(4, dtype=torch.bool)],
            x[:0].sum(),
            x.index_select(0, torch.tensor([], dtype=torch.long)),
            x * 2,
        ),
        (4, 3),
    )


@case
def mixture_of_experts_routing(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = fill(nn.Linear(3, 2))
            self.experts = nn.ModuleList(fill(nn.Linear(3, 3), i * 10) for i in range(2))

        def forward(self, x):
            w, i = self.gate(x).softmax(-1).topk(1)
            out = torch.zeros_like(x)
            for e, expert in enumerate(self.experts):
                rows = (i[:, 0] == e).nonzero()[:, 0]
                if rows.numel():
                    out = out.index_add(0, rows, expert(x[rows]) * w[rows])
            return out

    m = M()
    x = leaf(5, 3)
    out = comp(m)(x)
    out.pow(2).sum().backward()
    return out, grads(x, *m.parameters())


@case
def indices_that_are_transposed(comp):
    """The result is laid out as the index is, so that its flattened form is a copy of it and no view."""

    def f(x, i):
        y, rows = x[:, 0][i], x[i]
        z, flat_rows = y.flatten(), rows.reshape(-1, 5)
        z.add_(1)
        flat_rows.mul_(2)
        return y, z, rows, flat_rows, x[i, i.transpose(0, 1)] if i.shape[0] == i.shape[1] else x[None, i]

    x = leaf(40, 5)
    i = torch.arange(24).remainder(7).view(2, 4, 3).transpose(-1, -2)
    outs = comp(f)(x, i)
    sum((o * o).sum() for o in outs).backward()
    return outs, [o.stride() for o in outs], x.grad


@case
def an_index_that_is_a_number(comp):
    """As a tensor without dimensions, whose place among others torch's own fakes get wrong."""

    def f(x):
        i = torch.tensor(1)
        return x[:, i], x[:, i, i], torch.ops.aten.index(x, [None, i, i]), torch.ops.aten.index(x, [i])

    return both(comp, f, (4, 3, 3, 4))


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
