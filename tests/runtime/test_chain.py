"""Results that depend on each other: every plan, and what a chain of nodes costs while nobody looks at its links."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from aottrain.compiler.capture.capture import capture
from aottrain.compiler.graphs.simplification import simplify
from aottrain.compiler.joint.analysis import analyse
from aottrain.compiler.joint.functional import functionalize
from aottrain.compiler.joint.joint import trace_joint
from aottrain.compiler.joint.links import without_links, without_values
from aottrain.errors import UnsupportedError
from tests.numerics.comparison import assert_same, compiled
from tests.numerics.tolerance import assert_close

PLANS = ("save_all", "min_cut", 0.0, "recompute_all")


def leaf(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def doubled(gradient):
    return None if gradient is None else gradient * 2


def layers(x, w):
    first = torch.tanh(x @ w)
    second = torch.tanh(first @ w).view(-1)
    return first, second, (second * second).sum() + first.exp().sum()


def looked_at(function, hook):
    x, w = leaf(3, 4), leaf(4, 4, seed=1)
    first, second, out = function(x, w)
    seen = {}
    if hook:
        first.register_hook(lambda gradient: seen.update(first=gradient))
        second.register_hook(lambda gradient: seen.update(second=gradient))
    (out + second.sin().sum()).backward()
    return [*seen.values(), x.grad, w.grad]


@pytest.mark.parametrize("plan", PLANS)
def test_hooks_at_every_budget(plan):
    function = compiled(layers, plan)
    assert_same(looked_at(function, True), looked_at(layers, True))
    # While nobody looks the backward is whole, and what comes from several results is added up in another order.
    for ours, theirs in zip(looked_at(function, False), looked_at(layers, False), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("plan", PLANS)
def test_draws_are_the_same_whether_somebody_looks_or_not(plan):
    def program(x, w):
        n = F.dropout(x @ w, 0.5)
        return n, F.dropout(n.exp(), 0.5).sum()

    function, found = compiled(program, plan, kernel="aten"), []
    for hook in (True, False):
        x, w = leaf(3, 4), leaf(4, 4, seed=1)
        torch.manual_seed(3)
        n, out = function(x, w)
        if hook:
            n.register_hook(lambda gradient: None)
        out.backward()
        found.append([n, out, x.grad, w.grad])
    assert_same(found[0], found[1])


def test_nobody_looks_and_nothing_is_cut():
    """The gradient at the first result is not handed to it, and no other backward than the whole one is made."""
    function = compiled(layers)
    looked_at(function, False)
    (entry,) = _entries(function)
    assert all(isinstance(flag, bool) for pattern in entry.program._backwards for flag in pattern)
    looked_at(function, True)
    assert any(isinstance(pattern[0], tuple) for pattern in entry.program._backwards)


def _entries(function):
    call = function.prepare.__self__
    return [entry for entries in call._entries.values() for entry in entries]


@pytest.mark.parametrize("program", [layers, lambda x, w: ((n := (x @ w)[:2]), n.exp(), x * 2)])
def test_what_is_planned_knows_nothing_of_links(program):
    """But for the names of sums it is the program that was planned without."""
    step = capture(program, None, (leaf(3, 4), leaf(4, 4, seed=1)), {})
    analysis = analyse(step)
    assert analysis.links.links
    plain, linked = (simplify(without_values(functionalize(trace_joint(step, analysis, flag)))) for flag in (0, 1))
    planned = without_links(linked)
    assert planned.signature == plain.signature
    assert [node.target for node in planned.graph.nodes if node.op != "placeholder"] == [
        node.target for node in plain.graph.nodes if node.op != "placeholder"
    ]


def test_results_that_do_not_depend_on_each_other_are_no_links():
    step = capture(lambda x, w: (x @ w, x * 2, x.detach().exp() * w[0]), None, (leaf(3, 4), leaf(4, 4, seed=1)), {})
    assert not analyse(step).links.links


@pytest.mark.parametrize("use", ["none", "hook", "capture", "create_graph"])
def test_results_are_let_go(use):
    function = compiled(lambda x: ((n := x * 2), n * n))
    x = leaf(3)
    gc.collect()
    gc.disable()
    try:
        n, m = function(x)
        known = [weakref.ref(value) for value in (n, m, n.grad_fn, m.grad_fn)]
        if use == "hook":
            n.register_hook(lambda gradient: None)
            m.sum().backward()
        elif use != "none":
            torch.autograd.grad(m.sum(), n, create_graph=use == "create_graph")
        del n, m
        assert all(reference() is None for reference in known)
    finally:
        gc.enable()


def test_a_hook_that_comes_too_late():
    """While gradients of another result pass through already: not silently."""
    n, a, b = compiled(lambda x: ((n := x * 2), n * n, (n * n) * n))(leaf(3))
    b.register_hook(lambda gradient: None)
    done = []

    def late(gradient):
        if not done:
            done.append(n.register_hook(lambda gradient: None))

    a.register_hook(late)
    with pytest.raises(UnsupportedError, match="a hook was added"):
        (a.sum() + b.sum()).backward()


def test_second_derivatives_need_the_result_as_it_was():
    n, m = compiled(lambda x: ((n := x * 2), n.exp()))(leaf(3))
    with torch.no_grad():
        n.mul_(2)
    with pytest.raises((UnsupportedError, RuntimeError), match="as they were|modified"):
        torch.autograd.grad(m.sum(), n, create_graph=True)


SEVERAL = {"linked": lambda x: ((n := x * 2), n * n), "apart": lambda x: (x * 2, x.exp())}


@pytest.mark.parametrize("program", SEVERAL)
def test_hooks_behind_nodes_are_refused(program):
    for value in compiled(SEVERAL[program])(leaf(3)):
        with pytest.raises(UnsupportedError, match="one node .* of all its ops"):
            value.grad_fn.register_hook(lambda inputs, outputs: None)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("program", SEVERAL)
def test_hooks_before_nodes_are_eagers(program, number):
    found = []
    for call in (SEVERAL[program], compiled(SEVERAL[program])):
        x, seen = leaf(3), []
        results = call(x)
        results[number].grad_fn.register_prehook(
            lambda gradients, seen=seen: seen.append(gradients) or tuple(map(doubled, gradients))
        )
        for value in results:
            value.sum().backward(retain_graph=True)
        found.append([*seen, x.grad])
    assert_same(found[1], found[0])


VIEWS = {
    "nested": lambda x: ((whole := x * 3), (part := whole[:2]), (last := part[:, 1:]), last * 2),
    "two": lambda x: ((whole := x * 3), (top := whole[:1]), (rest := whole[1:]), top.exp() * rest),
    "whole too": lambda x: ((whole := x * 3), (part := whole[:2]), part * whole.sum()),
    "replaced": lambda x: (x.mul_(3), (part := x[:2]), part.exp()),
}


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize(
    ("program", "observed"),
    [
        (program, observed)
        for program in VIEWS
        for observed in ("hook", "retain_grad", "create_graph")
        if (program, observed) != ("replaced", "create_graph")  # refused: it updates an input
    ],
)
def test_what_a_link_is_a_view_of_is_looked_at(program, observed, number):
    """The gradient goes on to it from the link: a hook there, or retain_grad(), has it, as a hook at the link has."""
    found = []
    for call in (VIEWS[program], compiled(VIEWS[program], kernel="aten")):
        x, seen = leaf(3, 4), []
        given = x * 1
        results = call(given)
        if observed == "retain_grad":
            results[number].retain_grad()
        else:
            results[number].register_hook(lambda gradient, seen=seen: seen.append(gradient) or doubled(gradient))
        results[-1].sum().backward(create_graph=observed == "create_graph")
        found.append([*seen, results[number].grad if observed == "retain_grad" else None, x.grad])
    ours, theirs = ([None if value is None else value.detach() for value in values] for values in found)
    assert_same(ours, theirs)


def test_second_derivatives_do_not_pass_a_hook_by():
    """That of a base, where the view that the gradient came through is gone."""
    whole, part, out = compiled(lambda x: ((n := x * 3), (p := n[:2]), p.exp()))(leaf(3, 4))
    del part
    whole.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(UnsupportedError, match="has hooks, and it is gone"):
        torch.autograd.grad(out.sum(), whole, create_graph=True)


@pytest.mark.parametrize("program", SEVERAL)
def test_one_result_after_another_says_what_it_needs(program):
    x = leaf(3)
    first, second = compiled(SEVERAL[program])(x)
    first.sum().backward()
    with pytest.raises(RuntimeError, match="a second time .* one node of that graph"):
        torch.autograd.grad(second.sum(), first if program == "linked" else x)
