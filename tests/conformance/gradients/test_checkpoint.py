"""torch.utils.checkpoint inside compiled code and around it."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal


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


@case
def real_batch_norm_in_the_block(comp):
    m = fill(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh()))
    g = comp(lambda x: checkpoint(m, x, use_reentrant=False).sum())
    x = leaf(4, 3)
    g(x).backward()
    g(x * 2).backward()
    return grads(x, *m.parameters()), list(m.buffers())


@case
def counter_buffer_in_the_block(comp):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls.add_(1)
            return (x.sin() * self.calls).cos()

    m = Counts()
    g = comp(lambda x: checkpoint(m, x, use_reentrant=False).sum())
    x = leaf(3)
    g(x).backward()
    g(x).backward()
    return grads(x), m.calls


@case(raises="RuntimeError")
def input_written_in_the_block(comp):
    def f(x):
        y = x * 2
        return checkpoint(lambda z: z.mul_(3).sin(), y, use_reentrant=False).sum()

    x = leaf(3)
    comp(f)(x).backward()
    return grads(x)


@case(refused={"dynamo": "what the block closes over is an argument in TorchDynamo's graph, and so watched for writes"})
def closed_over_value_written_after_the_block(comp):
    def f(x, scale):
        out = checkpoint(lambda z: (z * scale).sin().cos(), x, use_reentrant=False)
        scale.mul_(2)
        return out.sum()

    x, scale = leaf(3), normal(3, seed=1)
    comp(f)(x, scale).backward()
    return grads(x), scale


@case
def own_memory_written_in_the_block(comp):
    def inner(x):
        y = x.sin()
        y.add_(1)
        y[0] = 2.0
        return y.cos().mul_(2).add(y)

    x = leaf(3)
    comp(lambda x: checkpoint(inner, x, use_reentrant=False).sum())(x).backward()
    return grads(x)


@case
def output_written_after_the_block(comp):
    def f(x):
        y = checkpoint(lambda z: (z + 1).sin().mul(2), x, use_reentrant=False)
        y.add_(1)
        return y.exp().sum()

    x = leaf(3)
    comp(f)(x).backward()
    return grads(x)


@case
def views_into_and_out_of_the_block(comp):
    def f(x):
        y = (x * 2).view(3, 2)
        a, b = checkpoint(lambda z: ((z.t() @ z).flatten(), z.exp()[1:]), y[1:], use_reentrant=False)
        return a.sin().sum() + b.cos().sum() + y.sum()

    x = leaf(6)
    comp(f)(x).backward()
    return grads(x)


@case
def input_returned_by_the_block(comp):
    x = leaf(3)
    a, b = comp(lambda x: checkpoint(lambda y: (y, y.sin()), x * 2, use_reentrant=False))(x)
    (a * b).sum().backward()
    return a, b, grads(x)


@case
def weight_shared_by_blocks_and_outside(comp):
    m = block()

    def f(x):
        for _ in range(3):
            x = checkpoint(m, x, use_reentrant=False) + x
        return m(x).sum()

    x = leaf(2, 3)
    comp(f)(x).backward()
    return grads(x, *m.parameters())


@case
def reentrant_of_an_input_without_gradient(comp):
    m = block()
    out = comp(lambda x: checkpoint(m, x, use_reentrant=True))(normal(2, 3))
    return out, grads(*m.parameters())


@case
def reentrant_with_detached_result(comp):
    def f(x):
        return checkpoint(lambda y: (y.sin(), y.detach().cos(), y.long()), x, use_reentrant=True)

    x = leaf(3)
    a, b, c = comp(f)(x)
    a.sum().backward()
    return a, c, grads(x)


@case
def reentrant_with_an_unused_result(comp):
    """Zeros come to an input that only the unused result depends on, for eager's backward runs the whole block."""

    def inner(x, y):
        return x.sin(), y.exp()

    def f(x, y):
        one, two = checkpoint(inner, x, y, use_reentrant=True)
        return one * 2, checkpoint(inner, one, y, use_reentrant=True)[0]

    seen = []
    for used in ([0], [1], [0, 1]):
        x, y = leaf(3), leaf(3, seed=1)
        results = comp(f)(x, y)
        sum(results[i].sum() for i in used).backward()
        seen += grads(x, y)
    return seen


@case
def reentrant_with_results_that_meet(comp):
    m, n = block(), fill(nn.Linear(3, 3), 9)

    def f(x):
        for _ in range(2):
            one, two = checkpoint(lambda x, y: (m(x) + y, n(y).tanh()), x, x * 2, use_reentrant=True)
            x = one * two
        return x.sum()

    x = leaf(2, 3)
    out = comp(f)(x)
    out.backward()
    return out, grads(x, *m.parameters(), *n.parameters())


@case
def reentrant_closes_over_what_needs_a_gradient(comp):
    """None comes to it: no argument of the region needs one."""
    x, y = normal(3), leaf(3, seed=1)
    out = comp(lambda x, y: checkpoint(lambda x: (y * x).sin(), x, use_reentrant=True) + y)(x, y)
    out.sum().backward()
    return out, grads(y)


@case
def reentrant_beside_a_mask(comp):
    x, y, mask = leaf(3), leaf(3, seed=1), normal(3, seed=2) > 0
    out = comp(lambda x, y: checkpoint(lambda m, x: torch.where(m, y * x, x), mask, x, use_reentrant=True))(x, y)
    out.sum().backward()
    return out, grads(x, y)


@case
def reentrant_sequential(comp):
    m = fill(nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]))
    x = leaf(2, 3)
    comp(lambda x: checkpoint_sequential(m, 4, x, use_reentrant=True))(x).sum().backward()
    return grads(x, *m.parameters())


@case(options={"rng": "eager"})
def dropout_in_eagers_stream(comp):
    m = fill(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3), nn.Dropout(0.2)))
    x = leaf(4, 3)
    g = comp(lambda x: checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False).sum())
    g(x).backward()
    g(x).backward()
    return grads(x, *m.parameters()), torch.rand(2)


@case(options={"rng": "eager"})
def dropout_without_preserved_state_in_eagers_stream(comp):
    x = leaf(16)
    g = comp(lambda x: checkpoint(lambda y: F.dropout(y.sin(), 0.5, True).exp(), x, use_reentrant=False,
                                  preserve_rng_state=False))  # fmt: skip
    out = g(x)
    out.sum().backward()
    return out, grads(x), torch.rand(2)


@case
def dropout_in_a_program_that_runs_eagerly(comp):
    """The mask of the backward is the forward's, also where the call was refused: here for the counter."""
    m = nn.BatchNorm1d(8)

    def f(x):
        y = checkpoint(lambda y: F.dropout(y.sin() + 2, 0.5, True), x, use_reentrant=False)
        return y, checkpoint(m, y, use_reentrant=False)

    x = leaf(16, 8)
    out, normed = comp(f)(x)
    (out.sum() + 0 * normed.sum()).backward()
    return bool(((out != 0) == (x.grad != 0)).all()), m.num_batches_tracked


@case(options={"budget": 0.0})
def at_the_smallest_budget(comp):
    m = block()
    x = leaf(2, 3)
    comp(lambda x: checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False).sum())(x).backward()
    return grads(x, *m.parameters())


POLICIES = list(CheckpointPolicy)[:4]


@case
def every_pair_of_policies(comp):
    found = []
    for one in POLICIES:
        for other in POLICIES:

            def policy(ctx, op, *args, one=one, other=other, **kwargs):
                return one if op in (torch.ops.aten.addmm.default, torch.ops.aten.t.default) else other

            context = functools.partial(create_selective_checkpoint_contexts, policy)
            m = block()
            x = leaf(2, 3)
            out = comp(lambda x, m=m, c=context: checkpoint(m, x, use_reentrant=False, context_fn=c))(x)
            out.pow(2).sum().backward()
            found.append((out, grads(x, *m.parameters())))
    return found


@case
def policy_with_dropout_and_writes(comp):
    def inner(x):
        y = F.dropout(x.sin() + 2, 0.5, True)
        return F.relu(y, inplace=True).exp() - 1

    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.exp.default])
    x = leaf(64)
    out = comp(lambda x: checkpoint(inner, x, use_reentrant=False, context_fn=context))(x)
    out.sum().backward()
    return bool(((out != 0) == (x.grad != 0)).all())


@case(raises="RuntimeError")
def saved_value_overwritten_raises(comp):
    context = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    x = leaf(3)
    out = comp(lambda x: checkpoint(lambda y: y.sin().mul_(2).exp(), x, use_reentrant=False, context_fn=context))(x)
    out.sum().backward()
    return grads(x)


_entered = []


class Context:
    def __enter__(self):
        _entered.append("in")

    def __exit__(self, *_):
        _entered.append("out")


def own_contexts():
    return Context(), Context()


@case
def contexts_of_the_callers_own(comp):
    _entered.clear()
    x = leaf(3)
    g = comp(lambda x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=own_contexts))
    g(x).sum().backward()
    g(x).sum().backward()
    return list(_entered), grads(x)


@case(refused={"dynamo": "TorchDynamo takes no lambda for context_fn"})
def contexts_by_a_lambda(comp):
    x = leaf(3)
    g = comp(lambda x: checkpoint(torch.sin, x, use_reentrant=False, context_fn=lambda: own_contexts()))
    g(x).sum().backward()
    return grads(x)


@case(eager_was_wrong="it asks the policy again in the backward")
def policy_that_is_a_boolean_or_counts(comp):
    def contexts():
        seen = []

        def policy(ctx, op, *args, **kwargs):
            seen.append(op)
            return len(seen) % 2 == 0

        return create_selective_checkpoint_contexts(policy)

    m = block()
    x = leaf(2, 3)
    comp(lambda x: checkpoint(m, x, use_reentrant=False, context_fn=contexts).sum())(x).backward()
    return grads(x, *m.parameters())


@case
def nested_policies(comp):
    m = block()
    inner = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default])
    outer = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

    def f(x):
        def one(y):
            return checkpoint(m, y.sin(), use_reentrant=False, context_fn=inner).cos()

        return checkpoint(one, x, use_reentrant=False, context_fn=outer).sum()

    x = leaf(2, 3)
    comp(f)(x).backward()
    return grads(x, *m.parameters())


@case
def flags_without_effect(comp):
    m = block()
    x = leaf(2, 3)

    def f(x):
        x = checkpoint(m, x, use_reentrant=False, determinism_check="none")
        return checkpoint(m, x, use_reentrant=False, early_stop=False).sum()

    comp(f)(x).backward()
    return grads(x, *m.parameters())


@case
def second_derivative_through_the_block(comp):
    x = leaf(3)
    out = comp(lambda x: checkpoint(lambda y: (y.sin() * y).exp(), x, use_reentrant=False))(x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()
    return gradient, grads(x)


@case
def attention_and_norms_in_the_block(comp):
    m = fill(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    x = leaf(2, 4, 8)
    comp(lambda x: checkpoint(m, checkpoint(m, x, use_reentrant=False), use_reentrant=False).pow(2).sum())(x).backward()
    return grads(x, *m.parameters())


def decorated(function, **settings):
    """torch.utils.checkpoint as a decorator makes it, which torch 2.13 does not."""
    if not hasattr(torch.utils.checkpoint, "_CheckpointedFunction"):
        return functools.partial(checkpoint, function, **settings)
    return checkpoint(**settings)(function)


@case
def decorated_function(comp):
    m = block()
    part = decorated(lambda x, *, scale=1: m(x * scale).sin(), use_reentrant=False)
    x = leaf(2, 3)
    out = comp(lambda x: part(x, scale=2).cos().sum())(x)
    out.backward()
    return out, grads(x, *m.parameters())


@case(options={"rng": "eager"})
def decorated_function_that_draws(comp):
    part = decorated(lambda x: F.dropout(x.sin().exp(), 0.5) * x, use_reentrant=False)
    x = leaf(64)
    torch.manual_seed(3)
    out = comp(lambda x: part(x).cos() * part(x))(x)
    out.sum().backward()
    return out, grads(x)


@case
def decorated_function_with_a_policy(comp):
    policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    m = block()
    part = decorated(lambda x: m(x).sin().exp(), use_reentrant=False, context_fn=policy, early_stop=False)
    x = leaf(2, 3)
    comp(lambda x: part(x.sin()).cos().sum())(x).backward()
    return grads(x, *m.parameters())


@case
def decorated_method(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = block()
            self.part = decorated(self.inner, use_reentrant=False)

        def inner(self, x):
            return self.block(x).sin()

        def forward(self, x):
            return self.part(self.part(x)).exp()

    m = fill(M())
    x = leaf(2, 3)
    comp(m)(x).sum().backward()
    return grads(x, *m.parameters())


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
