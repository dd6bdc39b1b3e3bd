"""Seeding inside a program under rng="eager": torch's generator moves as eager moves it, in every call, and no call
falls back."""

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.errors import UnsupportedError
from tests.conformance.harness import VALUES, case, cases_of, check, grads, leaf, normal, run

EAGER = {"rng": "eager"}
LEAST = {"rng": "eager", "budget": 0.0}


def dropped(x):
    return F.dropout(x.sin(), 0.5, True)


@case(options=EAGER)
def seed_inside_then_draws_outside(comp):
    def f(x):
        a = torch.rand(3)
        torch.manual_seed(7)
        return a, dropped(x), torch.rand(3)

    g = comp(f)
    return g(normal(8)), torch.rand(2), g(normal(8)), torch.rand(2), torch.get_rng_state()


@case(options=EAGER)
def seed_is_the_last_that_happens(comp):
    def f(x):
        y = dropped(x)
        torch.manual_seed(3)
        return y

    return comp(f)(normal(8)), torch.rand(2)


@case(options=LEAST)
def forked_with_gradients_at_the_smallest_budget(comp):
    def f(x):
        with torch.random.fork_rng():
            torch.manual_seed(5)
            y = dropped(dropped(x).exp())
        return (y * torch.rand(8)).cos()

    x, g = leaf(8), comp(f)
    for _ in range(2):
        g(x).sum().backward()
    return grads(x), torch.get_rng_state()


@case(options=LEAST)
def same_mask_drawn_twice_by_setting_the_state_back(comp):
    def f(x):
        state = torch.get_rng_state()
        a = dropped(x)
        torch.set_rng_state(state)
        return a, dropped(x.exp()), torch.rand(1)

    x = leaf(16)
    a, b, c = comp(f)(x)
    (a.sum() + b.sum()).backward()
    return a, b, c, grads(x), torch.get_rng_state()


@case(options=EAGER)
def state_read_and_returned(comp):
    def f(x):
        torch.rand(2)
        return torch.get_rng_state(), x * 2

    g = comp(f)
    return g(normal(2)), g(normal(2)), torch.rand(1)


@case(options=EAGER)
def state_given_as_an_argument(comp):
    def f(x, state):
        torch.set_rng_state(state)
        return dropped(x)

    g, state = comp(f), torch.Generator().manual_seed(9).get_state()
    return g(normal(8), state), g(normal(8), torch.get_rng_state()), torch.rand(1)


@case(options=EAGER)
def another_seed_by_argument(comp):
    def f(x, seed):
        torch.manual_seed(seed)
        return dropped(x)

    g = comp(f)
    return g(normal(8), 1), g(normal(8), 2), g(normal(8), 1)


@case(options=EAGER)
def nothing_else_reads_what_is_forked(comp):
    def f(x):
        with torch.random.fork_rng():
            torch.rand(5)
        return x * 2

    before = torch.get_rng_state()
    comp(f)(normal(2))
    return torch.equal(before, torch.get_rng_state())


@case(options=EAGER)
def module_that_seeds_itself(comp):
    class M(torch.nn.Module):
        def forward(self, x):
            torch.manual_seed(1)
            noise = torch.randn_like(x)
            x.add_(1)
            return x * noise

    x = normal(4)
    return comp(M())(x), x, torch.rand(1)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, VALUES))
def test_equals_eager(case, frontend):
    check(case, frontend)
    assert run(case, frontend).fallbacks == ()


@pytest.mark.parametrize("frontend", ["trace", "dynamo"])
def test_torch_is_left_as_it_was(frontend):

    def names():
        return torch.manual_seed, torch.get_rng_state, torch.set_rng_state, torch.random.fork_rng

    def f(x):
        torch.manual_seed(1)
        return names() == before, dropped(x)

    torch.compiler.reset()
    before = names()
    aottrain.compile(f, capture=frontend, rng="eager")(normal(2))
    assert names() == before
    assert torch.random.default_generator is torch.default_generator


def test_a_generator_reached_behind_is_refused():

    def f(x):
        torch.default_generator.manual_seed(3)
        return x + torch.rand(2)

    before = torch.get_rng_state()
    compiled = aottrain.compile(f, capture="trace", rng="eager", on_unsupported="error")
    with pytest.raises(UnsupportedError):
        compiled(normal(2))
    assert torch.equal(before, torch.get_rng_state())


def test_a_second_derivative_does_not_draw_again():

    x = leaf(4)
    out = aottrain.compile(lambda x: x.sin() * torch.rand(4), capture="trace", rng="eager")(x)
    with pytest.raises(UnsupportedError, match="draws by rng='eager'"):
        torch.autograd.grad(out.sum(), x, create_graph=True)
