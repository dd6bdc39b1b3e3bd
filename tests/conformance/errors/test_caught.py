"""Programs that catch whatever is raised inside: what a trace refuses must not be taken for an error of the program."""

from __future__ import annotations

import concurrent.futures
import contextlib

import numpy
import pytest
import torch

import aottrain
from tests.conformance.backwards import gradients_of, tries, with_backward, with_hook

X = torch.ones(2)


def caught(action):
    """A program that does something in a `try`, and goes another way where that fails."""

    def program(x):
        try:
            return x + action(x)
        except Exception as error:
            return x * len(str(error))

    program.__name__ = action.__name__
    return program


def a_shape_that_hangs_on_values(x):
    return x.nonzero().sum()


def a_branch_on_values(x):
    return 2 if x.sum() > 0 else 3


def a_value(x):
    return x.sum().item()


def an_array(x):
    return float(x.numpy().sum())


def an_array_of_numpys(x):
    return float(numpy.asarray(x).sum())


def printing(x):
    print("said")
    return 1


def a_generator(x):
    return torch.rand(2, generator=torch.Generator().manual_seed(3))


def a_factor_of_another_shape(x):
    return x @ torch.ones(5)


def a_factor_of_another_type(x):
    return x @ torch.ones(2, dtype=torch.float64)


def an_argument_of_another_type(x):
    return torch.nn.functional.linear(x, "weight")


def memory_that_overlaps(x):
    return x[:1].expand(2).add_(1)


def a_branch_of_torchs(x):
    return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x * 3, (x,))


ACTIONS = [a_shape_that_hangs_on_values, a_branch_on_values, a_value, an_array, an_array_of_numpys, printing]
ACTIONS += [a_generator, a_factor_of_another_shape, a_factor_of_another_type, an_argument_of_another_type]
ACTIONS += [memory_that_overlaps, a_branch_of_torchs]


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
def test_as_eager(action, capture):
    torch._dynamo.reset()
    program = caught(action)
    compiled = aottrain.compile(program, capture=capture)
    for _ in range(2):
        ours, eagers = X.clone(), X.clone()
        assert torch.equal(compiled(ours), program(eagers)) and torch.equal(ours, eagers)
    assert compiled.report.num_fallbacks or capture == "dynamo" or action is an_argument_of_another_type


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
def test_what_suppresses_errors():
    def program(x):
        with contextlib.suppress(Exception):
            return x * x.sum().item()
        return x * 0

    compiled = aottrain.compile(program, capture="trace")
    assert torch.equal(compiled(X), X * 2)
    with pytest.raises(aottrain.UnsupportedError, match=r"the program catches.*item"):
        aottrain.compile(program, capture="trace", on_unsupported="error")(X)


def test_what_raises_nothing_stays_compiled():
    program = caught(lambda x: x.sin().sum())
    compiled = aottrain.compile(program, capture="trace", on_unsupported="error")
    assert torch.equal(compiled(X), program(X)) and len(compiled.report.graphs) == 1


def suppresses(g):
    with contextlib.suppress(Exception):
        return g * g.norm().item()
    return g * 100


def branches(g):
    try:
        return g * 2 if g.sum() > 0 else g * 3
    except Exception:
        return g * 100


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize("made", [with_backward, with_hook], ids=["a_function", "a_hook"])
@pytest.mark.parametrize("formula", [tries, suppresses, branches])
def test_in_the_backward(formula, made):
    program = made(formula)
    compiled = aottrain.compile(program, capture="trace")
    assert gradients_of(compiled, X, X) == gradients_of(program, X, X)
    assert [fallback.count for fallback in compiled.report.fallbacks] == [2]
    with pytest.raises(
        aottrain.UnsupportedError, match=r"^the program catches an error that its trace raises: (item|__bool__)"
    ):
        aottrain.compile(program, capture="trace", on_unsupported="error")(X.clone().requires_grad_())


@pytest.mark.parametrize("made", [with_backward, with_hook], ids=["a_function", "a_hook"])
def test_a_try_in_the_backward_that_catches_nothing_stays_compiled(made):
    def formula(g):
        try:
            return g * g.sin().sum()
        except Exception:
            return g * 100

    program = made(formula)
    compiled = aottrain.compile(program, capture="trace", on_unsupported="error")
    assert gradients_of(compiled, X, X) == gradients_of(program, X, X) and len(compiled.report.graphs) == 1


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
def test_an_error_that_a_future_keeps():
    def program(x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(lambda: 2 if x.sum() > 0 else 3)
        return x * (100 if future.exception() else future.result())

    compiled = aottrain.compile(program, capture="trace")
    assert torch.equal(compiled(X), X * 2) and compiled.report.num_fallbacks == 1
    with pytest.raises(aottrain.UnsupportedError, match=r"the program catches.* in another thread"):
        aottrain.compile(program, capture="trace", on_unsupported="error")(X)


def test_a_thread_that_computes_no_tensors_stays_compiled():
    def program(x):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return x * pool.submit(lambda: x.shape[0]).result()

    compiled = aottrain.compile(program, capture="trace", on_unsupported="error")
    assert torch.equal(compiled(X), X * 2) and len(compiled.report.graphs) == 1
