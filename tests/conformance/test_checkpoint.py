"""torch.utils.checkpoint inside compiled code and around it."""

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.conformance.harness import case, cases_of, check, fill, grads, leaf, normal


def block():
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


@case
def around_a_module(comp):
    m = block()
    x = leaf(2, 3)
    comp(lambda x: checkpoint(m, x, use_reentrant=False).sum())(x).backward()
    return grads(x, *m.parameters())


@case
def reentrant(comp):
    m = block()
    x = leaf(2, 3)
    comp(lambda x: checkpoint(m, x, use_reentrant=True).sum())(x).backward()
    return grads(x, *m.parameters())


@case
def around_the_compiled_module(comp):
    m = block()
    g = comp(m)
    x = leaf(2, 3)
    checkpoint(g, x, use_reentrant=False).sum().backward()
    return grads(x, *m.parameters())


@case
def reentrant_around_the_compiled_module(comp):
    m = block()
    g = comp(m)
    x = leaf(2, 3)
    checkpoint(g, x, use_reentrant=True).sum().backward()
    return grads(x, *m.parameters())


@case
def module_that_checkpoints_its_blocks(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(3))

        def forward(self, x):
            for b in self.blocks:
                x = checkpoint(b, x, use_reentrant=False) if self.training else b(x)
            return x

    m = M()
    g = comp(m)
    x = leaf(2, 3)
    out = g(x)
    out.sum().backward()
    m.eval()
    return out, g(x), grads(x, *m.parameters())


@case
def sequential(comp):
    m = fill(nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]))
    x = leaf(2, 3)
    comp(lambda x: checkpoint_sequential(m, 2, x, use_reentrant=False))(x).sum().backward()
    return grads(x, *m.parameters())


@case
def keyword_arguments_and_several_results(comp):
    def inner(x, *, k, y):
        return x * k, (x * y).sin()

    x, y = leaf(3), leaf(3, seed=1)
    a, b = comp(lambda x, y: checkpoint(inner, x, use_reentrant=False, k=3, y=y))(x, y)
    (a + b).sum().backward()
    return a, b, grads(x, y)


@case
def closed_over_value_in_the_block(comp):
    def f(x, w):
        y = x * w
        return checkpoint(lambda z: (z * y * w).sin(), x, use_reentrant=False).sum()

    x, w = leaf(3), leaf(3, seed=1)
    comp(f)(x, w).backward()
    return grads(x, w)


@case
def batch_norm_in_the_block(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    g = comp(lambda x: checkpoint(m, x, use_reentrant=False).sum())
    x = leaf(4, 3)
    g(x).backward()
    g(x * 2).backward()
    return grads(x, *m.parameters())


@case
def without_gradients(comp):
    m = block()
    g = comp(lambda x: checkpoint(m, x, use_reentrant=False))
    with torch.no_grad():
        a = g(normal(2, 3))
    return a, g(normal(2, 3))


@case
def policy_saves_products(comp):
    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    context = functools.partial(create_selective_checkpoint_contexts, policy)
    m = block()
    x = leaf(2, 3)
    comp(lambda x: checkpoint(m, x, use_reentrant=False, context_fn=context).sum())(x).backward()
    return grads(x, *m.parameters())


@case
def nested_three_deep(comp):
    m = block()

    def f(x):
        def one(y):
            return checkpoint(two, y, use_reentrant=False).sin()

        def two(z):
            return checkpoint(m, z.exp(), use_reentrant=False) * z

        return checkpoint(one, x, use_reentrant=False)

    x = leaf(2, 3)
    comp(f)(x).sum().backward()
    return grads(x, *m.parameters())


@case
def under_autocast(comp):
    m = block()
    x = leaf(2, 3)
    g = comp(lambda x: checkpoint(m, x, use_reentrant=False))
    with torch.autocast("cpu", torch.bfloat16):
        out = g(x)
    out.float().sum().backward()
    return out, grads(x, *m.parameters())


@case
def twice_with_retained_graph(comp):
    m = block()
    x = leaf(2, 3)
    out = comp(lambda x: checkpoint(m, x, use_reentrant=False).sum())(x)
    out.backward(retain_graph=True)
    out.backward()
    return grads(x, *m.parameters())


@case
def counts_its_calls(comp):
    calls = []

    def inner(x):
        calls.append(1)
        return x.sin()

    x = leaf(3)
    g = comp(lambda x: checkpoint(inner, x, use_reentrant=False).sum())
    g(x)
    return len(calls)


@case
def flag_changes_between_calls(comp):
    m = block()
    m.use = True

    def f(x):
        return checkpoint(m, x, use_reentrant=False) if m.use else m(x) * 2

    g = comp(f)
    x = leaf(2, 3)
    a = g(x)
    m.use = False
    b = g(x)
    (a + b).sum().backward()
    return a, b, grads(x)


@pytest.mark.parametrize(("known", "door"), cases_of(__name__))
def test_equals_eager(known, door):
    check(known, door)
