"""Modules and functions as peers' suites try them: custom functions, state between calls, types, transforms."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.conformance.harness import PEERS, case, cases_of, check, fill, grads, leaf, normal, raises


class Split(torch.autograd.Function):
    """Two results and an integer; the second input has no gradient."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        index = x.argmax()
        ctx.mark_non_differentiable(index)
        return x * y, x + y, index

    @staticmethod
    def backward(ctx, g, h, _):
        x, y = ctx.saved_tensors
        return g * y + h * 2, None


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos() * 3


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()


@case
def function_of_several_results_and_none(comp):
    x, y = leaf(3), leaf(3, seed=1)
    a, b, i = comp(lambda x, y: Split.apply(x, y))(x, y)
    (a.sum() + b.exp().sum()).backward()
    return a, b, i, grads(x, y)


@case
def function_with_one_result_unused(comp):
    x, y = leaf(3), leaf(3, seed=1)
    comp(lambda x, y: Split.apply(x, y)[1].sum())(x, y).backward()
    return grads(x, y)


@case
def once_differentiable_function(comp):
    x = leaf(3)
    out = comp(lambda x: Once.apply(x).sum())(x)
    (first,) = torch.autograd.grad(out, x, create_graph=False)
    return first


@case
def function_inside_a_checkpoint(comp):
    x, y = leaf(3), normal(3, seed=1)
    comp(lambda x, y: checkpoint(lambda x: Split.apply(x, y)[0].exp().sum(), x, use_reentrant=False))(x, y).backward()
    return grads(x)


@case
def symmetric_parametrisation(comp):
    m = fill(nn.Linear(3, 3))
    parametrize.register_parametrization(m, "weight", Symmetric())
    x = leaf(2, 3)
    comp(m)(x).square().sum().backward()
    return grads(x, *m.parameters())


@case
def cached_parametrisation(comp):
    m = fill(nn.Linear(3, 3))
    parametrize.register_parametrization(m, "weight", Symmetric())
    x, g = leaf(2, 3), comp(m)
    with parametrize.cached():
        (g(x).sum() + g(x * 2).sum()).backward()
    return grads(x, *m.parameters())


@case
def cached_parametrisation_inside(comp):
    m = fill(nn.Linear(3, 3))
    parametrize.register_parametrization(m, "weight", Symmetric())

    def f(x):
        with parametrize.cached():
            return m(x).sin() + m(x * 2)

    x = leaf(2, 3)
    comp(f)(x).sum().backward()
    return grads(x, *m.parameters()), m(x)


@case(close="the norm is divided in another order")
def weight_norm_parametrisation(comp):
    m = parametrizations.weight_norm(fill(nn.Linear(3, 3)))
    x = leaf(2, 3)
    comp(m)(x).square().sum().backward()
    return grads(x, *m.parameters())


@case
def orthogonal_parametrisation(comp):
    m = parametrizations.orthogonal(fill(nn.Linear(3, 3)), orthogonal_map="cayley")
    x = leaf(2, 3)
    out = comp(m)(x)
    out.square().sum().backward()
    return out.shape, [g is None for g in grads(x, *m.parameters())]


@case
def tied_weights_with_a_hook(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(3, 3, bias=False)
            self.b = nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    m, seen = fill(M()), []
    m.a.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
    comp(m)(normal(2, 3)).sum().backward()
    return seen, grads(*m.parameters())


@case
def state_dict_loaded_between_forward_and_backward(comp):
    m = fill(nn.Linear(3, 2))
    state = {k: v + 1 for k, v in m.state_dict().items()}
    g, x = comp(m), leaf(2, 3)
    out = g(x)
    m.load_state_dict(state)
    stale = raises(lambda: out.sum().backward())
    g(x).sum().backward()
    return stale, grads(x, *m.parameters())


@case
def state_dict_loaded_by_assignment(comp):
    m = fill(nn.Linear(3, 2))
    g, x = comp(m), leaf(2, 3)
    first = g(x)
    m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True)
    second = g(x)
    second.sum().backward()
    return first, second, grads(x, *m.parameters())


@case
def copied_and_pickled_module_with_state(comp):
    m = fill(nn.BatchNorm1d(3))
    g = comp(m)
    g(normal(4, 3))
    other = copy.deepcopy(g)
    third = pickle.loads(pickle.dumps(m))
    outs = [g(normal(4, 3, seed=1)), other(normal(4, 3, seed=2)), third(normal(4, 3, seed=3))]
    return outs, m.running_mean, other.running_mean, third.running_mean


@case
def batch_norm_switched_and_counted(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, momentum=None)))
    g = comp(m)
    found = []
    for train in (True, True, False, True):
        g.train(train)
        x = leaf(4, 3)
        g(x).square().sum().backward()
        found.append((x.grad, m[1].running_var.clone(), m[1].num_batches_tracked.clone()))
    return found


@case
def batch_norm_of_one_value_raises_then_works(comp):
    g = comp(fill(nn.BatchNorm1d(3)))
    return raises(lambda: g(normal(1, 3))), g(normal(2, 3))


@case
def frozen_batch_norm_under_no_grad_buffers(comp):
    m = fill(nn.BatchNorm2d(2)).eval()
    x = leaf(2, 2, 3, 3)
    comp(m)(x.contiguous(memory_format=torch.channels_last)).sin().sum().backward()
    return grads(x, *m.parameters()), m.running_mean


@case
def autocast_and_a_function_in_float32(comp):
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)))

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
            with torch.autocast("cpu", enabled=False):
                z = y.float().logsumexp(1)
        return y, z

    x = leaf(2, 3)
    y, z = comp(f)(x)
    z.sum().backward()
    return y.dtype, z, grads(x)


@case
def autocast_cache_does_not_keep_old_weights(comp):
    m = fill(nn.Linear(3, 2))
    g = comp(m)
    found = []
    for i in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            out = g(normal(2, 3, seed=i))
        out.float().sum().backward()
        with torch.no_grad():
            for p in m.parameters():
                p.sub_(p.grad)
        found.append(out)
    return found, list(m.parameters())


@case
def promotion_of_scalars_and_types(comp):
    def f(h, i, b, z, s):
        joined = torch.cat([i, h]), torch.where(b, h, i)
        return h + 1, h * s, i / 2, i + b, b * 2.5, i * z, h + i, *joined, s + h.double()

    values = normal(3).half(), torch.arange(3), torch.tensor([True, False, True]), torch.tensor(2.0), torch.tensor(3.5)
    return comp(f)(*values)


@case
def complex_network(comp):
    def f(z, w):
        return (z @ w).abs().square().sum() + torch.fft.fft(z).real.sum() + (z * z.conj()).imag.sum()

    z, w = torch.complex(leaf(2, 3), leaf(2, 3, seed=1)), leaf(3, 2, seed=2)
    z.retain_grad()
    comp(f)(z, w.to(torch.complex64)).backward()
    return z.grad, grads(w)


@case
def zero_sized_batch_trains(comp):
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    g = comp(m)
    x = leaf(0, 3)
    g(x).sum().backward()
    return grads(x, *m.parameters()), g(normal(2, 3))


@case
def zero_sized_and_zero_dimensional_operators(comp):
    def f(x, s):
        return x.sum(0), x.mean(1), torch.cat([x, x]), s.exp(), s.expand(2), s[None].cumsum(0), x.amax(1), x @ x.t()

    x, s = leaf(0, 3), leaf(())
    out = comp(f)(x, s)
    (out[3] + out[4].sum() + out[0].sum()).backward()
    return out, grads(x, s)


@case
def expanded_and_overlapping_inputs_read(comp):
    x = leaf(6)
    w = x.unfold(0, 3, 1)
    out = comp(lambda w, e: (w * e).sum(1))(w, x[:1].expand(4, 3))
    out.sum().backward()
    return out, grads(x)


@case
def flipped_rolled_and_strided_inputs(comp):
    x = leaf(4, 6)
    out = comp(lambda a, b: (a.flip(0) * b).cumsum(1))(x[::2, 1::2], x.t()[::2, ::2].t()[:2])
    out.sum().backward()
    return out, grads(x)


@case
def dropout_in_train_and_eval_with_a_seed(comp):
    m = nn.Sequential(nn.Dropout(0.5), nn.Dropout1d(0.5))
    g = comp(m)
    torch.manual_seed(3)
    a = g(torch.ones(2, 3, 4))
    torch.manual_seed(3)
    b = g(torch.ones(2, 3, 4))
    g.eval()
    return torch.equal(a, b), g(torch.ones(2, 3, 4))


@case
def mask_agrees_between_forward_and_backward(comp):
    x = torch.ones(64, requires_grad=True)
    out = comp(lambda x: F.dropout(F.dropout(x * 1, 0.5), 0.5))(x)
    out.sum().backward()
    return bool(torch.equal(out != 0, x.grad != 0)), float(x.grad.max())


@case
def gradient_and_jacobian_inside(comp):
    def f(x, w):
        g = grad(lambda x: (x @ w).tanh().sum())(x)
        j = jacrev(lambda x: (x @ w).sin())(x)
        return (g * j.sum(0)).sum()

    x, w = leaf(3), leaf(3, 2, seed=1)
    comp(f)(x, w).backward()
    return grads(x, w)


@case
def samples_of_a_vector_times_a_number(comp):
    x, y = leaf(4), leaf(4, seed=1)
    out = comp(lambda x, y: (vmap(lambda t: t * 2)(x) * vmap(lambda t: 1 - t / 3)(y)).sum())(x, y)
    out.backward()
    return out, grads(x, y)


@case
def samples_with_conditions_and_types(comp):
    def one(t, i):
        return torch.where(t > 0, t, 0.5), t.to(torch.float64) + i, i % 2 == 0

    return comp(lambda t, i: vmap(one)(t, i))(normal(4), torch.arange(4))


@case
def samples_of_rows_with_writes(comp):
    def one(row):
        y = row.clone()
        y[0] = 2
        y.mul_(3)
        return y.sum()

    x = leaf(3, 4)
    out = comp(lambda x: vmap(one)(x))(x)
    out.sum().backward()
    return out, grads(x)


@case
def ensemble_by_stacked_parameters(comp):
    models = [fill(nn.Linear(3, 2), seed=i) for i in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")

    def f(p, x):
        return vmap(lambda p: functional_call(base, p, (x,)))(p)

    out = comp(f)(parameters, normal(4, 3))
    out.square().sum().backward()
    return out, [p.grad for p in parameters.values()]


@case
def both_kinds_of_checkpoint_in_one_program(comp):
    a, b = fill(nn.Linear(3, 3)), fill(nn.Linear(3, 3), seed=9)

    def f(x):
        y = checkpoint(lambda x: a(x).tanh(), x, use_reentrant=False)
        return checkpoint(lambda y: b(y).sigmoid(), y, use_reentrant=True).sum()

    x = leaf(2, 3)
    comp(f)(x).backward()
    return grads(x, *a.parameters(), *b.parameters())


@case
def exception_in_forward_leaves_state_usable(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("n", torch.zeros(()))
            self.l = nn.Linear(3, 2)

        def forward(self, x):
            out = self.l(x)
            self.n += 1
            return out

    m = fill(M())
    g = comp(m)
    g(normal(2, 3))
    failed = raises(lambda: g(normal(2, 4)))
    return failed, g(normal(2, 3, seed=1)), m.n


@case
def threads_with_their_own_modules(comp):
    found = {}

    def work(i, m, x):
        comp(m)(x).sum().backward()
        found[i] = (x.grad, m[0].weight.grad)

    # Made here: a trace in one thread takes random numbers that are drawn in another for the program's.
    made = [(i, fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), seed=i), leaf(2, 3, seed=i)) for i in range(3)]
    threads = [threading.Thread(target=work, args=given) for given in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in sorted(found)]


@case
def embedding_of_bags_and_sparse_rows(comp):
    table = leaf(6, 3)

    def f(w, i):
        bags = F.embedding_bag(i, w, torch.tensor([0, 2]), mode="mean")
        return (F.embedding(i, w, sparse=True).sum() + (w * 2).sum() + bags.square().sum()) * 0.5

    comp(f)(table, torch.tensor([0, 3, 3, 5])).backward()
    return grads(table)


@case
def sparse_gradient_alone_and_beside_a_dense_one(comp):
    found = []
    for both in (False, True):
        x = leaf(4, 3)

        def f(x, both=both):
            y = x.gather(0, torch.tensor([[0, 1, 2], [3, 3, 0]]), sparse_grad=True).square().sum()
            return y + x.sin().sum() if both else y

        comp(f)(x).backward()
        found.append((x.grad.layout == torch.strided, x.grad))
    return found


@case
def recurrent_cell_unrolled_with_state(comp):
    cell = fill(nn.GRUCell(3, 4))

    def f(x, h):
        for row in x:
            h = cell(row, h)
        return h

    x, h = leaf(3, 2, 3), leaf(2, 4, seed=1)
    comp(f)(x, h).sum().backward()
    return grads(x, h, *cell.parameters())


@case
def attention_with_masks_and_scale(comp):
    def f(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=m, scale=0.3), F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    q, k, v = leaf(1, 2, 4, 4), leaf(1, 2, 4, 4, seed=1), leaf(1, 2, 4, 4, seed=2)
    a, b = comp(f)(q, k, v, normal(4, 4, seed=3) > -1)
    (a.sum() + (b * b).sum()).backward()
    return a, b, grads(q, k, v)


@case
def pooled_padded_and_shuffled_images(comp):
    def f(x):
        y = F.pad(x, (1, 1, 1, 1), mode="reflect")
        y, i = F.max_pool2d(y, 2, return_indices=True)
        z = F.max_unpool2d(y, i, 2)
        return F.pixel_shuffle(F.pixel_unshuffle(z, 2), 2).sum(1), F.interpolate(y, size=(5, 3), mode="bilinear")

    x = leaf(1, 2, 6, 6)
    a, b = comp(f)(x)
    (a.square().sum() + b.sum()).backward()
    return a, b, grads(x)


@case
def transposed_and_grouped_convolutions(comp):
    m = fill(nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1)))
    x = leaf(1, 2, 5, 5)
    out = comp(m)(x)
    out.tanh().sum().backward()
    return out, grads(x, *m.parameters())


@case
def sorting_searching_and_counting(comp):
    def f(x):
        s, order = x.sort(stable=True, descending=True)
        return s * 2, order, torch.searchsorted(s.flip(0).detach(), x), torch.bucketize(x, torch.tensor([-1.0, 0, 1]))

    x = leaf(5)
    out = comp(f)(x)
    out[0].cumsum(0).sum().backward()
    return out, grads(x)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PEERS))
def test_equals_eager(case, frontend):
    check(case, frontend)
