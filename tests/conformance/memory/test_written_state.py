"""Programs that write what outlives a call: parameters, buffers, gradients, containers, and what they close over."""

import pytest
import torch
from torch import nn

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal, raises


@case
def closed_over_tensor(comp):
    count = torch.zeros(2)

    def f(x):
        count.add_(1)
        return x * count

    g = comp(f)
    x = normal(2)
    return g(x), g(x), g(x), count


@case
def closed_over_tensor_saved_for_backward(comp):
    scale = torch.ones(2)

    def f(x):
        scale.mul_(2)
        return (x * scale).sum()

    g = comp(f)
    x = leaf(2)
    g(x).backward()
    g(x).backward()
    return grads(x), scale


_TOTAL = torch.zeros(2)


@case
def global_tensor(comp):
    _TOTAL.zero_()

    def f(x):
        _TOTAL.add_(x)
        return _TOTAL * 2

    g = comp(f)
    return g(normal(2)), g(normal(2, seed=1)), _TOTAL


@case
def dictionary_argument_written(comp):
    def f(d):
        d["a"].add_(1)
        return d["a"] * 2

    d = {"a": normal(2)}
    return comp(f)(d), d


@case
def dictionary_argument_gains_a_key(comp):
    def f(d):
        d["b"] = d["a"] * 2
        return d["b"] + 1

    d = {"a": normal(2)}
    out = comp(f)(d)
    return out, d


@case
def dictionary_argument_key_replaced(comp):
    def f(d):
        d["a"] = d["a"] * 2
        return d["a"] + 1

    d = {"a": normal(2)}
    out = comp(f)(d)
    return out, d


@case
def list_argument_grows(comp):
    def f(x, seen):
        seen.append(x * 2)
        return x + len(seen)

    seen = []
    g = comp(f)
    out = g(normal(2), seen), g(normal(2), seen)
    return out, seen


@case
def list_argument_item_replaced(comp):
    def f(xs):
        xs[0] = xs[0] * 2
        return xs[0] + xs[1]

    xs = [normal(2), normal(2, seed=1)]
    out = comp(f)(xs)
    return out, xs


@case
def list_argument_popped(comp):
    def f(xs):
        return xs.pop() * 2

    xs = [normal(2), normal(2, seed=1)]
    out = comp(f)(xs)
    return out, len(xs)


@case
def list_argument_plain_item_replaced(comp):
    def f(x, log):
        log[0] += 1
        return x * 2

    log = [0]
    g = comp(f)
    return g(normal(2), log), g(normal(2), log), log


@case
def gradient_read_inside(comp):
    def f(x):
        return x * 2 if x.grad is None else x * x.grad

    g = comp(f)
    x = leaf(3)
    one = g(x)
    one.sum().backward()
    two = g(x)
    return one, two


@case
def gradient_written_inside(comp):
    def f(x):
        if x.grad is not None:
            x.grad.mul_(10)
        return (x * x).sum()

    g = comp(f)
    x = leaf(3)
    g(x).backward()
    g(x).backward()
    return grads(x)


@case
def gradient_cleared_inside(comp):
    def f(x):
        x.grad = None
        return (x * x).sum()

    g = comp(f)
    x = leaf(3)
    g(x).backward()
    g(x).backward()
    return grads(x)


@case
def parameter_gradient_read_inside(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x):
            bonus = 0 if self.w.grad is None else self.w.grad.sum()
            return (self.w * x).sum() + bonus

    m = M()
    g = comp(m)
    a = g(normal(3))
    a.backward()
    b = g(normal(3, seed=1))
    b.backward()
    return a, b, grads(m.w)


@case
def batch_norm_trained_and_evaluated(comp):
    m = fill(nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()))
    g = comp(m)
    x = normal(4, 2, 5, 5)
    one = g(x)
    one.sum().backward()
    two = g(x * 2)
    m.eval()
    three = g(x)
    m.train()
    four = g(x)
    return one, two, three, four, dict(m.state_dict()), grads(*m.parameters())


@case
def batch_norm_used_twice(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.BatchNorm1d(3)

        def forward(self, x):
            return self.n(self.n(x) * 2 + 1)

    m = M()
    x = leaf(5, 3)
    out = comp(m)(x)
    out.pow(3).sum().backward()
    return out, grads(x, *m.parameters()), dict(m.state_dict())


@case
def batch_norm_without_momentum_or_stats(comp):
    m = nn.Sequential(nn.BatchNorm1d(3, momentum=None), nn.BatchNorm1d(3, track_running_stats=False, affine=False))
    g = comp(m)
    return g(normal(5, 3)), g(normal(5, 3, seed=1)), dict(m.state_dict())


@case(kernels_differ="the gradients are zero but for rounding")
def instance_norm_running_stats(comp):
    m = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    g = comp(m)
    x = leaf(2, 3, 5)
    g(x).pow(2).sum().backward()
    g(x)
    m.eval()
    return g(x), grads(x, *m.parameters()), dict(m.state_dict())


@case
def buffer_assigned(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.mean(0) * 0.1
            return x - self.mean

    m = M()
    g = comp(m)
    return [g(normal(4, 3, seed=i)) for i in range(3)], m.mean


@case
def ring_buffer(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("ring", torch.zeros(3, 2))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.ring[self.at % 3] = x
            self.at += 1
            return self.ring.sum(0) + x

    m = M()
    g = comp(m)
    return [g(normal(2, seed=i)) for i in range(5)], m.ring, m.at


@case
def buffer_read_before_and_after_update(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))
            self.register_buffer("s", torch.ones(3))

        def forward(self, x):
            a = self.w * self.s.clone()
            self.s.mul_(1.5)
            return (a * x + (self.w * self.s).sin()).sum()

    m = M()
    g = comp(m)
    [g(normal(3, seed=i)).backward() for i in range(3)]
    return m.s, grads(m.w)


@case
def embedding_max_norm(comp):
    m = fill(nn.Embedding(5, 3, max_norm=0.5))
    g = comp(m)
    i = torch.tensor([0, 1, 1, 4])
    out = g(i)
    out.pow(2).sum().backward()
    return out, m.weight, grads(m.weight)


@case
def embedding_padding_sparse_and_scaled(comp):
    m = fill(nn.Embedding(6, 3, padding_idx=2, scale_grad_by_freq=True))
    i = torch.tensor([2, 1, 1, 4])
    out = comp(m)(i)
    out.pow(2).sum().backward()
    return out, grads(m.weight)


@case
def spectral_norm(comp):
    m = nn.utils.parametrizations.spectral_norm(fill(nn.Linear(3, 4)))
    g = comp(m)
    outs = [g(normal(2, 3, seed=i)) for i in range(3)]
    sum(o.sum() for o in outs[-1:]).backward()
    m.eval()
    return outs, g(normal(2, 3)), dict(m.state_dict())


@case
def weight_norm(comp):
    m = nn.utils.parametrizations.weight_norm(fill(nn.Linear(3, 4)))
    g = comp(m)
    out = g(normal(2, 3))
    out.pow(2).sum().backward()
    return out, grads(*m.parameters())


@case
def old_weight_norm(comp):
    m = nn.utils.weight_norm(fill(nn.Linear(3, 4)))
    g = comp(m)
    out = g(normal(2, 3))
    out.pow(2).sum().backward()
    return out, grads(*m.parameters())


@case
def sgd_inside(comp):
    w = leaf(3)

    def f(x):
        loss = (w * x).pow(2).sum()
        (g,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.sub_(0.1 * g)
        return loss.detach()

    step = comp(f)
    return [step(normal(3, seed=i)) for i in range(3)], w


@case
def lazily_initialised_buffer(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("s", torch.zeros(2))
            self.ready = False

        def forward(self, x):
            if not self.ready:
                self.s.copy_(x)
                self.ready = True
            return x / self.s

    m = M()
    g = comp(m)
    return g(normal(2)), g(normal(2, seed=1)), m.s, m.ready


@case(close="a batch norm rounds otherwise in generated kernels")
def norms_trained_in_inference_mode(comp):
    norms = nn.BatchNorm2d(3), nn.InstanceNorm2d(3, track_running_stats=True), nn.BatchNorm2d(3, affine=False)
    m = nn.Sequential(*norms)
    g = comp(m)
    with torch.inference_mode():
        inside = [g(normal(2, 3, 4, 4, seed=i)) for i in range(2)]
        tensors = normal(2, 3, 4, 4, seed=5).clone()
        inside.append(g(tensors))
    return inside, g(normal(2, 3, 4, 4)), m.state_dict()


class Averaging(nn.Module):
    """It multiplies by its average as it is after the update, or by a copy of that; its other result needs neither."""

    def __init__(self, copies=False):
        super().__init__()
        self.l = fill(nn.Linear(3, 3))
        self.register_buffer("average", torch.ones(3))
        self.copies = copies

    def forward(self, x):
        h = self.l(x)
        with torch.no_grad():
            self.average.mul_(0.5).add_(h.mean(0), alpha=0.5)
        return h * (self.average.clone() if self.copies else self.average), h.sin()


@case(close="sums in another order")
def updated_twice_before_the_backward(comp):
    """Eager raises where the first call's average is needed and is not there any more."""
    found = []
    for copies in (False, True):
        m = Averaging(copies)
        g = comp(m)
        for which in (0, 1):
            first, second = g(normal(2, 3)), g(normal(2, 3, seed=1))
            found.append(raises(lambda which=which, second=second: second[which].sum().backward(retain_graph=True)))
            found.append(raises(lambda which=which, first=first: first[which].sum().backward()))
        found += grads(*m.parameters())
    return found


@case(close="a batch norm rounds otherwise in generated kernels")
def statistics_written_before_the_backward(comp):
    """By the caller: eager's backward has saved them. What a second call does to them no version counter sees."""
    m = nn.Sequential(fill(nn.Linear(3, 3)), nn.BatchNorm1d(3))
    g = comp(m)
    first, _ = g(normal(4, 3)).pow(3).sum(), g(normal(4, 3, seed=1))
    first.backward(retain_graph=True)
    with torch.no_grad():
        m[1].running_mean.zero_()
    return raises(first.backward), grads(*m[1].parameters()), list(m.buffers())


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
