"""specialise_backward: a backward for a pattern of defined tangents does only what they need."""

from __future__ import annotations

import pytest
import torch
from torch import fx

import aottrain
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.compiler.partition.undefined import specialise_backward
from aottrain.ir.graph import calls, placeholders, results, set_value
from aottrain.runtime.executor import aten_runner
from tests.compiler.programs import joint_of, leaf, targets
from tests.numerics.comparison import assert_same
from tests.numerics.fuzzing import values

aten = torch.ops.aten


def function(x, y, w):
    h = x @ w
    return h.sin(), (h + y).exp(), y.sort().values


def backward_of(defined, *args):
    joint = joint_of(function, *args)
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    return parts, specialise_backward(parts.backward, len(parts.residuals), defined)


def arguments():
    return leaf(3, 3), leaf(3, 3, seed=1), leaf(3, 3, seed=2)


def test_with_all_tangents_nothing_changes():
    parts, graph = backward_of((True, True, True), *arguments())
    assert graph is parts.backward


def test_without_any_tangent_nothing_runs():
    _, graph = backward_of((False, False, False), *arguments())
    assert calls(graph) == [] and results(graph) == [None, None, None]


@pytest.mark.parametrize("defined", [(a, b, c) for a in (0, 1) for b in (0, 1) for c in (0, 1)], ids=str)
def test_gradients_are_those_of_the_defined_tangents(defined):
    args = arguments()
    parts, graph = backward_of(tuple(map(bool, defined)), *args)
    state = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        residuals = aten_runner(parts.forward)([*[v.detach() for v in args], state])[3:]
        tangents = [torch.linspace(i, i + 1, 9).view(3, 3) for i in range(3)]
        given = [t if flag else None for t, flag in zip(tangents, defined, strict=True)]
        got = aten_runner(graph)([*residuals, *given])
    used = [(o, t) for o, t, flag in zip(function(*args), tangents, defined, strict=True) if flag]
    wanted = [None] * 3
    if used:
        wanted = torch.autograd.grad([o for o, _ in used], args, [t for _, t in used], allow_unused=True)
    assert_same(got, list(wanted))


def test_the_inputs_stay_the_same():
    parts, graph = backward_of((False, True, False), *arguments())
    assert [n.name for n in placeholders(graph)] == [n.name for n in placeholders(parts.backward)]


def test_formulas_of_undefined_outputs_do_not_run():
    _, graph = backward_of((False, False, True), *arguments())
    assert not [t for t in targets(graph) if "mm" in t or "cos" in t or "exp" in t]


def test_where_one_op_needs_both_the_missing_one_is_zeros():
    def parts_of_one(x):
        a, b = (x * 2).split(2)
        return a * 1.0, b * 1.0

    joint = joint_of(parts_of_one, leaf(4))
    parts = apply_partition(joint, plan_partition(joint, "min_cut"))
    graph = specialise_backward(parts.backward, len(parts.residuals), (True, False))
    (gradient,) = aten_runner(graph)([*([None] * len(parts.residuals)), torch.ones(2), None])
    assert_same(gradient, torch.tensor([2.0, 2.0, 0.0, 0.0]))


def test_a_gradient_that_is_zero_whatever_the_tangents_are_is_refused_beside_another_output() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.copysign(y, x), x * y

    compiled = aottrain.compile(function, capture="trace", on_unsupported="error")
    with pytest.raises(aottrain.errors.UnsupportedError, match="zero whatever"):
        compiled(leaf(3), leaf(3, seed=1))


def test_a_gradient_of_zeros_without_memory_is_one_beside_another_output() -> None:
    compiled = aottrain.compile(lambda x: (torch.sgn(x), x * 2), capture="trace")
    x = leaf(3)
    with pytest.warns(UserWarning, match="zero whatever"):
        signs, _ = compiled(x)
        (gradient,) = torch.autograd.grad(signs.sum(), x, allow_unused=True)
        assert gradient is not None
        assert bool((gradient == 0).all())


def test_what_lies_beside_values_of_the_forward_is_zeros_there():
    """No gradient formula puts a tangent beside the forward's own values; a rewrite of products may."""
    graph = fx.Graph()
    held, tangent = graph.placeholder("held"), graph.placeholder("tangent")
    for node in (held, tangent):
        set_value(node, torch.ones(2, 3))
    beside = [graph.call_function(aten.cat.default, ([one, tangent],)) for one in (held, tangent)]
    gap = graph.call_function(aten.new_zeros.default, (tangent, [1, 3]))
    beside.append(graph.call_function(aten.cat.default, ([gap, tangent],)))
    for node, value in zip((*beside, gap), map(torch.zeros, ([4, 3], [4, 3], [3, 3], [1, 3])), strict=True):
        set_value(node, value)
    graph.output(beside)
    specialised = specialise_backward(graph, 1, (False,))
    assert [value is None for value in results(specialised)] == [False, True, True]
    (found, *_) = aten_runner(specialised)([torch.ones(2, 3), None])
    assert torch.equal(found, torch.cat([torch.ones(2, 3), torch.zeros(2, 3)]))


@pytest.mark.parametrize("partition", ["min_cut", "save_all"])
@pytest.mark.parametrize("part", [lambda p: p.split(1, -1)[0], lambda p: p.unbind(1)[0]], ids=["split", "unbind"])
def test_of_parts_of_which_others_are_zeros_the_gradient_is_none(part, partition):
    """Those zeros are views where parts are stacked."""
    x, p = leaf(2, 3), leaf(6, 6)
    options = {"capture": "trace", "kernel": "aten", "partition": partition}
    compiled = aottrain.compile(lambda x, p: (x.sin(), part(p).exp()), **options)
    first, second = compiled(x, p)
    gradients = torch.autograd.grad(first.sum(), (x, p), allow_unused=True, retain_graph=True)
    assert gradients[0] is not None and gradients[1] is None
    (gradient,) = torch.autograd.grad(second.sum(), p)
    assert torch.equal(gradient, torch.autograd.grad(part(p).exp().sum(), p)[0])


@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_a_part_of_the_other_gradient_is_read_where_it_lies(kernel):
    """What remains of a sum is a part of a tangent, and a product reads a view of it."""

    def function(x, w):
        h = x @ w.t()
        return torch.cat([h.detach(), h]), 3 * h

    compiled = aottrain.compile(function, capture="trace", kernel=kernel)
    tangent = values((6, 4), torch.float32, 5)
    found = []
    for call in (compiled, function):
        w = leaf(4, 3, seed=1)
        found.append(torch.autograd.grad(call(leaf(3, 3), w)[0], w, tangent)[0])
    torch.testing.assert_close(*found)
