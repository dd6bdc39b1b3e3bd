"""Random draws: masks that both passes agree on, streams that seeds govern, generators that end where eager's do."""

import random

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.harness import VALUES, case, cases_of, check, fill, grads, leaf, normal

EAGER = {"rng": "eager"}


def agree(out, gradient):
    """Whether what was dropped in the forward is what is dropped in the backward."""
    return bool(((out != 0) == (gradient != 0)).all())


@case(options=EAGER)
def every_draw_in_eagers_stream(comp):
    def f(x):
        a = torch.rand(3) + torch.randn(3) + torch.rand_like(x) + torch.randn_like(x)
        b = torch.randint(0, 9, (3,)) + torch.randperm(3) + torch.bernoulli(torch.full((3,), 0.5))
        c = torch.empty(3).uniform_(-1, 2) + torch.empty(3).normal_(1, 2) + torch.empty(3).exponential_(2)
        d = torch.multinomial(torch.ones(5), 3) + torch.normal(x, 1.0) + torch.empty(3).geometric_(0.3)
        return a, b, c, d, F.dropout(x, 0.5, True), F.alpha_dropout(x, 0.3, True), F.rrelu(x, training=True)

    g = comp(f)
    return g(normal(3)), g(normal(3)), torch.rand(2), torch.get_rng_state()


def leaky(x):
    return [F.rrelu(v, training=t) for v in (x, x.t(), x[:, ::2], x[:1].expand(4, 4)) for t in (True, False)]


@case(options=EAGER)
def random_leaks_of_odd_layouts(comp):
    x = leaf(4, 4)
    out = comp(leaky)(x)
    sum(value.sum() for value in out).backward()
    return out, grads(x), comp(leaky)(normal(4, 4))


@case(options=EAGER)
def dropout_stream_with_gradients(comp):
    m = fill(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)))
    g = comp(m)
    for i in range(3):
        g(normal(3, 4, seed=i)).sum().backward()
    return grads(*m.parameters()), torch.rand(2)


@case(options=EAGER)
def dropout_variants_stream(comp):
    def f(x):
        return F.dropout1d(x, 0.5, True), F.feature_alpha_dropout(x, 0.5, True), F.dropout(x.transpose(1, 2), 0.5, True)

    x = leaf(3, 4, 5)
    outs = comp(f)(x)
    sum(o.sum() for o in outs).backward()
    return outs, grads(x), torch.rand(1)


@case(options=EAGER)
def gumbel_softmax_stream(comp):
    x = leaf(3, 4)
    out = comp(lambda x: F.gumbel_softmax(x, hard=True))(x)
    (out * normal(3, 4)).sum().backward()
    return out, grads(x)


@case(options=EAGER)
def attention_dropout_stream(comp):
    m = fill(nn.MultiheadAttention(4, 2, dropout=0.4, batch_first=True))
    x = leaf(2, 3, 4)
    out, w = comp(m)(x, x, x)
    out.sum().backward()
    return out, w, grads(x, *m.parameters()), torch.rand(1)


@case(options=EAGER)
def nothing_drawn_leaves_the_generator(comp):
    before = torch.get_rng_state()
    comp(lambda x: F.dropout(x, 0.0, True) + F.dropout(x, 0.5, False))(normal(3))
    return torch.equal(before, torch.get_rng_state())


@case(options=EAGER)
def transposed_and_strided_draws(comp):
    def f(x):
        y = x.t().clone()
        y.bernoulli_(0.5)
        z = torch.empty(4, 6)[:, ::2].uniform_()
        return y, z, torch.rand_like(x.t())

    return comp(f)(normal(3, 4)), torch.rand(1)


@case(options=EAGER)
def rng_state_saved_and_restored(comp):
    g = comp(lambda x: F.dropout(x, 0.5, True))
    x = torch.ones(8)
    state = torch.get_rng_state()
    a = g(x)
    torch.set_rng_state(state)
    b = g(x)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        c = g(x)
    return a, b, c, g(x)


@case
def mask_is_the_same_in_the_backward(comp):
    def f(x):
        return F.dropout(F.dropout(x.sin().exp(), 0.5, True) * 2, 0.5, True)

    x = leaf(64)
    out = comp(f)(x)
    out.sum().backward()
    return agree(out, x.grad), 0 < (out != 0).float().mean() < 0.6


@case(options={"budget": 0.0})
def mask_is_the_same_at_the_smallest_budget(comp):
    g = comp(lambda x: F.dropout(F.dropout(x.sin().exp(), 0.5, True).cos(), 0.5, True))
    x = leaf(64)
    out = g(x)
    out.sum().backward()
    return agree(out, x.grad)


@case
def mask_in_channels_and_features(comp):
    x = torch.ones(4, 8, 5, 5, requires_grad=True)
    out = comp(lambda x: F.dropout2d(x, 0.5, True))(x)
    out.sum().backward()
    kept = (out != 0).flatten(2)
    return agree(out, x.grad), bool((kept.all(-1) | (~kept).all(-1)).all())


@case
def fresh_mask_every_call(comp):
    g = comp(lambda x: F.dropout(x, 0.5, True))
    x = torch.ones(256)
    a, b = g(x), g(x)
    return bool((a != b).any())


@case
def seed_decides(comp):
    g = comp(lambda x: F.dropout(x, 0.5, True) + torch.rand_like(x))
    x = torch.ones(64)
    outs = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        outs.append(g(x))
    return torch.equal(outs[0], outs[1]), torch.equal(outs[0], outs[2])


@case
def state_saved_and_restored(comp):
    g = comp(lambda x: torch.rand_like(x))
    x = torch.ones(16)
    state = torch.get_rng_state()
    a = g(x)
    torch.set_rng_state(state)
    b = g(x)
    return torch.equal(a, b), torch.equal(b, g(x))


@case
def two_draws_differ(comp):
    a, b, c = comp(lambda x: (torch.rand_like(x), torch.rand_like(x), torch.rand(64)))(torch.ones(64))
    return torch.equal(a, b), torch.equal(b, c)


@case
def equal_expressions_draw_apart(comp):
    a, b = comp(lambda x: (F.dropout(x, 0.5, True), F.dropout(x, 0.5, True)))(torch.ones(256))
    return torch.equal(a, b)


@case
def eval_and_train_switch(comp):
    m = nn.Dropout(0.5)
    g = comp(m)
    x = torch.ones(128)
    a = g(x)
    m.eval()
    b = g(x)
    m.train()
    c = g(x)
    return bool((a == 0).any()), b, bool((c == 0).any())


@case
def probability_changed(comp):
    m = nn.Dropout(0.5)
    g = comp(m)
    x = torch.ones(1000)
    g(x)
    m.p = 1.0
    a = g(x)
    m.p = 0.0
    return a, g(x)


@case
def explicit_generator(comp):
    gen = torch.Generator().manual_seed(3)
    g = comp(lambda x: x + torch.rand(3, generator=gen))
    return g(normal(3)), g(normal(3)), torch.rand(3, generator=gen)


@case
def generator_as_argument(comp):
    g = comp(lambda x, gen: x + torch.randn(3, generator=gen))
    gen = torch.Generator().manual_seed(3)
    return g(normal(3), gen), g(normal(3), gen)


@case
def manual_seed_inside(comp):
    def f(x):
        torch.manual_seed(7)
        return x + torch.rand(3)

    g = comp(f)
    a, b = g(normal(3)), g(normal(3))
    return torch.equal(a, b)


@case
def rng_state_read_inside(comp):
    def f(x):
        state = torch.get_rng_state()
        a = torch.rand(3)
        torch.set_rng_state(state)
        return a, torch.rand(3) + x * 0

    a, b = comp(f)(normal(3))
    return torch.equal(a, b)


@case
def fork_rng_inside(comp):
    def f(x):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            a = torch.rand(3)
        return a + x

    g = comp(f)
    return g(normal(3)), g(normal(3))


@case
def python_and_numpy_random(comp):
    def f(x):
        return x * random.random() + random.randint(0, 5) + float(numpy.random.rand())

    random.seed(1)
    numpy.random.seed(1)
    g = comp(f)
    return g(normal(2)), g(normal(2)), random.random()


@case
def layer_drop(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(fill(nn.Linear(3, 3)) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                if random.random() > 0.5:
                    x = layer(x)
            return x

    random.seed(2)
    m = M()
    g = comp(m)
    return [g(normal(1, 3)) for _ in range(4)]


@case
def stochastic_depth_by_tensor(comp):
    def f(x):
        if torch.rand(()) < 2.0:
            return x * 2
        return x * 3

    g = comp(f)
    return g(normal(2)), g(normal(2))


@case
def dropout_in_checkpoint(comp):
    def f(x):
        return checkpoint(lambda y: F.dropout(y.sin() + 2, 0.5, True), x, use_reentrant=False)

    x = leaf(128)
    out = comp(f)(x)
    out.sum().backward()
    return agree(out, x.grad)


@case
def dropout_in_checkpoint_without_preserved_state(comp):
    def f(x):
        return checkpoint(lambda y: y * 2 + F.dropout(y, 1.0, True), x, use_reentrant=False, preserve_rng_state=False)

    x = leaf(8)
    out = comp(f)(x)
    out.sum().backward()
    return out, grads(x)


@case
def draws_of_all_kinds_lie_in_range(comp):
    def f(x):
        return (
            torch.randint(-3, 4, (500,)),
            torch.randperm(50),
            torch.empty(500).uniform_(2, 3),
            torch.rand(500, dtype=torch.float64),
            torch.empty(500).exponential_(),
            torch.multinomial(torch.tensor([0.0, 1.0, 2.0]), 500, True),
            torch.rand(500, dtype=torch.bfloat16),
            x,
        )

    i, p, u, d, e, m, h, _ = comp(f)(normal(1))
    return (
        int(i.min()),
        int(i.max()),
        p.sort()[0],
        bool(((u >= 2) & (u < 3)).all()),
        d.dtype,
        bool((e >= 0).all()),
        m.unique(),
        h.dtype,
        bool((h < 1).all()),
    )


@case
def noise_as_a_parameterised_layer(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64))

        def forward(self, x):
            return x + self.scale * torch.randn_like(x) if self.training else x

    m = M()
    x = torch.zeros(64)
    out = comp(m)(x)
    out.sum().backward()
    return torch.equal(out.detach(), m.scale.grad)


@case
def distributions(comp):
    def f(mu, sigma):
        d = torch.distributions.Normal(mu, sigma)
        s = d.rsample()
        return s, d.log_prob(s).sum()

    mu, sigma = leaf(5), torch.ones(5, requires_grad=True)
    s, lp = comp(f)(mu, sigma)
    s.sum().backward()
    return mu.grad, torch.allclose(sigma.grad, (s - mu).detach(), atol=1e-5)


@case
def init_functions_inside(comp):
    def f(x):
        w = torch.empty(4, 4)
        nn.init.kaiming_uniform_(w)
        return x @ w

    g = comp(f)
    a, b = g(torch.ones(2, 4)), g(torch.ones(2, 4))
    return torch.equal(a, b), a.shape


@case
def shuffle_by_permutation(comp):
    out, i = comp(lambda x: (lambda i: (x[i], i))(torch.randperm(x.shape[0])))(torch.arange(10.0))
    return torch.equal(out, i.float())


def broken(x):
    """Two graphs under TorchDynamo, one program in a direct trace."""
    a = F.dropout(x.sin() + 2, 0.5, True)
    torch._dynamo.graph_break()
    return a, F.dropout(x.cos() + 2, 0.5, True)


@case
def same_seed_same_masks_across_a_graph_break(comp):
    g = comp(broken)
    x = torch.ones(256)
    found = []
    for seed in (3, 3, 4):  # the first call compiles, the second does not
        torch.manual_seed(seed)
        a, b = g(x)
        found.append((a != 0, b != 0, torch.rand(1)))
    first, again, other = found
    return (
        torch.equal(first[0], again[0]),
        torch.equal(first[1], again[1]),
        torch.equal(first[2], again[2]),
        [torch.equal(one, two) for one, two in zip(first, other, strict=True)],
    )


@case
def masks_on_both_sides_of_a_graph_break_are_independent(comp):
    g = comp(broken)
    x = torch.ones(4096)
    (a, b), (c, d) = g(x), g(x)
    kept = [value != 0 for value in (a, b, c, d)]
    pairs = [(one & two).float().mean() for i, one in enumerate(kept) for two in kept[:i]]
    return [bool((value - 0.25).abs() < 0.03) for value in pairs]


@case
def masks_agree_in_the_backward_across_a_graph_break(comp):
    x, y = leaf(128), leaf(128)
    g = comp(broken)
    a, _ = g(x)
    _, b = g(y)
    b.sum().backward()
    a.sum().backward()
    return bool(((a == 0) == (x.grad == 0)).all()), bool(((b == 0) == (y.grad == 0)).all())


@case
def state_restored_replays_every_graph(comp):
    g = comp(broken)
    x = torch.ones(64)
    g(x)
    state = torch.get_rng_state()
    a, b = g(x)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    c, d = g(x)
    return torch.equal(a, c), torch.equal(b, d), torch.equal(after, torch.get_rng_state()), torch.equal(state, after)


@case(options=EAGER)
def eagers_stream_across_a_graph_break(comp):
    g = comp(broken)
    x = leaf(32)
    a, b = g(x)
    (a.sum() + b.sum()).backward()
    return a, b, grads(x), g(x), torch.rand(2)


@case
def eager_draws_between_calls_do_not_change_masks(comp):
    g = comp(lambda x: F.dropout(x, 0.5, True))
    x = torch.ones(64)
    torch.manual_seed(1)
    a = g(x)
    torch.rand(3)
    b = g(x)
    torch.manual_seed(1)
    c = g(x)
    torch.rand(3)
    return torch.equal(a, c), torch.equal(b, g(x)), torch.equal(a, b)


@case
def the_compiled_under_eager_checkpoint_draws_again_the_same(comp):
    g = comp(lambda x: F.dropout(x.sin() + 2, 0.5, True).exp() - 1)
    x = leaf(128)
    for reentrant in (False, True):
        x.grad = None
        out = checkpoint(g, x, use_reentrant=reentrant)
        out.sum().backward()
    return agree(out, x.grad)


@case
def fork_rng_around_calls(comp):
    g = comp(broken)
    x = torch.ones(64)
    state = torch.get_rng_state()
    with torch.random.fork_rng():
        a = g(x)
    b = g(x)
    return torch.equal(a[0], b[0]), torch.equal(a[1], b[1]), torch.equal(state, torch.get_rng_state())


@case
def masks_do_not_depend_on_the_budget(comp):
    m = nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.5))
    g = comp(m)
    x = torch.ones(256, requires_grad=True)
    torch.manual_seed(2)
    a = g(x)
    with torch.no_grad():  # another program: the forward alone
        torch.manual_seed(2)
        b = g(x)
    return torch.equal(a, b)


@case(options=EAGER)
def draws_in_inference_mode(comp):
    def f(x):
        noisy = F.rrelu(F.alpha_dropout(F.dropout(x, 0.5, True), 0.3, True), training=True)
        return noisy, F.dropout1d(x[None], 0.4), F.gumbel_softmax(x), torch.rand(2)

    g = comp(f)
    with torch.inference_mode():
        inside = g(normal(4, 4)), g(normal(4, 4, seed=1).clone())
    return inside, torch.get_rng_state()


@case
def masks_in_inference_mode(comp):
    def f(x):
        return F.dropout(x, 0.5, True), F.alpha_dropout(x, 0.5, True), F.rrelu(x, training=True)

    g = comp(f)
    with torch.inference_mode():
        dropped, other, _ = g(torch.ones(64, 64))
        torch.manual_seed(3)
        again = g(torch.ones(64, 64))[0]
        torch.manual_seed(3)
        equal = torch.equal(again, g(torch.ones(64, 64))[0])
    return 0.4 < (dropped != 0).float().mean() < 0.6, torch.equal(dropped, again), other.unique().numel(), equal


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
