"""A refusal leaves nothing behind: eager code gives after it what it gave before, in this thread and in others."""

from __future__ import annotations

import threading
import warnings

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

import aottrain
from tests.sampling import crossed


def cond(x):
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))


def loop(x):
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x.detach()))[1]


def scanned(x):
    return scan(lambda carry, y: (carry + y, carry * y), torch.zeros_like(x[0]), x)[1]


def mapped(x):
    return torch_map(lambda y: y.sin(), x)


def flexible(x):
    q = x.detach().reshape(1, 1, 4, 4)
    return flex_attention(q, q, q)


_compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")


def compiled_inside(x):
    return _compiled(x) + 1


class CondInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.cond(gradient.sum() > 0, lambda g: g * 2, lambda g: g * 3, (gradient,))


def cond_in_backward(x):
    return CondInBackward.apply(x)


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.rand(4, 4)


def draws_in_backward(x):
    return DrawsInBackward.apply(x)


def values(x):
    return x[x.sum(1) > 0]


def number(x):
    return x * 2 if float(x.sum()) > 0 else x * 3


def settings(x):
    torch.set_default_dtype(torch.float64)
    try:
        return x + torch.ones(4)
    finally:
        torch.set_default_dtype(torch.float32)


def seeds(x):
    torch.manual_seed(3)
    return x + torch.rand(4)


def generator(x):
    return x + torch.rand(4, generator=torch.Generator().manual_seed(1))


def sparse(x):
    return (x.detach().to_sparse() * 2).to_dense() + x


def thaws(x):
    y = x.detach()
    y.requires_grad_()
    return y.sin()


def resizes(x):
    y = x.detach().clone()
    y.resize_(2, 2)
    return y


def raises(x):
    raise KeyError("the program's own")


def warns(x):
    warnings.warn("said by the program", stacklevel=1)
    return x * 2


PROGRAMS = [
    cond, loop, scanned, mapped, flexible, compiled_inside, cond_in_backward, draws_in_backward, values, number,
    settings, seeds, generator, sparse, thaws, resizes, raises, warns,
]  # fmt: skip


def observe(program):
    """All that a caller can see of an eager run."""
    torch.manual_seed(0)
    x = torch.linspace(-1, 2, 16).reshape(4, 4).requires_grad_()
    try:
        out = program(x)
        if isinstance(out, tuple):
            out = out[-1]
        if out.requires_grad:
            out.sum().backward()
        found = [out.detach(), x.grad]
    except Exception as error:
        found = [type(error), str(error)[:80]]
    now = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    return [*found, torch.get_rng_state(), *now]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    return one == other


def attempt(program, capture, how):
    call = aottrain.compile(program, capture=capture, on_unsupported=how)
    try:
        out = call(torch.ones(4, 4, requires_grad=True))
        out = out[-1] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.sum().backward()
    except Exception:
        return


def in_a_thread(function, *args):
    found = []
    thread = threading.Thread(target=lambda: found.append(function(*args)))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize(("program", "capture"), crossed(PROGRAMS, ["trace", "dynamo"], one_in=2))
def test_eager_is_as_it_was(program, capture):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = observe(program)
        for how in ("eager", "error"):
            attempt(program, capture, how)
            assert all(map(same, before, observe(program))), how
        in_a_thread(attempt, program, capture, "error")
        assert all(map(same, before, observe(program)))
        assert all(map(same, before, in_a_thread(observe, program)))


@pytest.mark.parametrize("program", [cond, compiled_inside, cond_in_backward])
def test_the_first_run_of_all_is_the_attempt(program):
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        attempt(program, "trace", "error")
        after = observe(program)
        torch._dynamo.reset()
        assert all(map(same, observe(program), after))


def test_what_is_compiled_stays_compiled():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    inner = torch.compile(lambda x: x.sin(), backend=backend)
    model = nn.Sequential()
    model.forward = lambda x: inner(x) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = aottrain.compile(model, capture="trace")
        call(torch.ones(3))
        call(torch.ones(4))
    assert call.report.num_fallbacks == 2 and "torch.compile" in call.report.fallbacks[0].reason
    assert len(graphs) >= 1, "torch.compile has not learnt to leave it alone"
