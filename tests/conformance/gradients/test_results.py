"""Gradients between the results of one call: hooks, captures and kept gradients at a result that others came from."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal, raises


def squared(x):
    n = x * 2
    return n, n * n


@case
def hook_on_a_result(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(seen.append)
    m.sum().backward()
    return n, m, seen, grads(x)


@case
def hook_sees_what_comes_from_both_sides(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(seen.append)
    ((m * normal(3)).sum() + n.sin().sum()).backward()
    return seen, grads(x)


@case
def hook_replaces_the_gradient(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    n.register_hook(lambda gradient: gradient * 3)
    n.register_hook(lambda gradient: None)
    (m.sum() + n.sum()).backward()
    return grads(x)


@case
def hook_removed_again(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(seen.append).remove()
    m.sum().backward()
    return seen, grads(x)


@case
def hook_on_a_result_that_is_let_go(comp):
    x, seen = leaf(3), []

    def hooked():
        n, m = comp(squared)(x)
        n.register_hook(lambda gradient: (seen.append(gradient), gradient + 1)[1])
        return m

    hooked().sum().backward()
    return seen, grads(x)


@case
def hooks_on_both(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(lambda gradient: seen.append(("n", gradient)))
    m.register_hook(lambda gradient: gradient * 5)
    m.sum().backward()
    return seen, grads(x)


@case
def hook_on_several_at_once(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    torch.autograd.graph.register_multi_grad_hook((n, m), lambda gradients: seen.extend(gradients))
    (m.sum() + n.sum()).backward()
    return seen, grads(x)


@case
def retained_gradient(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    n.retain_grad()
    m.retain_grad()
    m.sum().backward()
    return n.grad, m.grad, grads(x)


@case
def gradient_of_one_by_another(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    (first,) = torch.autograd.grad(m.sum(), n, retain_graph=True)
    second = torch.autograd.grad(m.sum(), [n, x], retain_graph=True)
    third = torch.autograd.grad(m.sum() + n.sum(), [x, n], retain_graph=True)
    m.sum().backward(inputs=[x, n])
    return first, second, third, n.grad, grads(x)


@case
def parameters_alone_asked_for(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    return torch.autograd.grad(m.sum() + n.sum(), x)


@case
def backward_of_the_first_alone(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(seen.append)
    n.sum().backward()
    return seen, grads(x)


@case
def backward_twice(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    m.sum().backward(retain_graph=True)
    n.register_hook(seen.append)
    m.sum().backward(retain_graph=True)
    m.sum().backward()
    return seen, grads(x), raises(lambda: m.sum().backward())


@case
def capture_twice_without_retaining(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    first = torch.autograd.grad(m.sum(), n)
    failed = raises(lambda: torch.autograd.grad(m.sum(), n))
    n.sum().backward()
    return first, failed, grads(x)


@case
def result_written_in_place_before_the_backward(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    n.mul_(2)
    return raises(lambda: m.sum().backward())


@case
def result_written_in_place_that_nothing_saved(comp):
    x, seen = leaf(3), []
    n, m = comp(lambda x: ((n := x * 2), n + 1))(x)
    n.mul_(3)
    n.register_hook(seen.append)
    (m.sum() + n.sum()).backward()
    return seen, n, m, grads(x)


@case
def last_result_written_in_place(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(seen.append)
    m.add_(1).mul_(n.detach())
    m.sum().backward()
    return seen, m, grads(x)


@case
def derivatives_of_the_gradient_at_a_result(comp):
    x, y = leaf(3), leaf(3, seed=1)
    n, m = comp(lambda x, y: ((n := x * x), (n**3 * y).sum()))(x, y)
    (at_n,) = torch.autograd.grad(m, n, create_graph=True)
    return at_n, torch.autograd.grad(at_n.sin().sum() + n.sum(), [n, x, y])


@case
def hook_under_create_graph(comp):
    x, seen = leaf(3), []
    n, m = comp(lambda x: ((n := x * x), (n**3).sum()))(x)
    n.register_hook(lambda gradient: (seen.append(gradient.detach()), gradient * 2)[1])
    (first,) = torch.autograd.grad(m + n.sum(), x, create_graph=True)
    first.sum().backward()
    return first, seen, grads(x)


@case(close="second derivatives are added up in another order")
def penalty_on_a_gradient_with_a_result_let_go(comp):
    x = leaf(3)
    g = comp(lambda x: ((n := x * x), (n**3).sum()))
    m = g(x)[1]
    (first,) = torch.autograd.grad(m, x, create_graph=True)
    (m + first.pow(2).sum()).backward()
    return first, grads(x)


class Tower(nn.Module):
    def __init__(self, depth=4, width=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        hidden = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            hidden.append(x)
        return x.pow(2).mean(), hidden


@case
def hidden_states_of_every_layer(comp):
    m, seen = fill(Tower()), []
    loss, hidden = comp(m)(normal(2, 3, 4))
    for i, value in enumerate(hidden):
        value.register_hook(lambda gradient, i=i: seen.append((i, gradient)))
    hidden[1].register_hook(lambda gradient: gradient * 2)
    (loss + hidden[0].sin().sum() + hidden[2].sum()).backward()
    return seen, grads(*m.parameters())


@case
def hidden_states_that_nobody_looks_at(comp):
    m = fill(Tower())
    loss, hidden = comp(m)(normal(2, 3, 4))
    (loss + hidden[1].sin().sum()).backward()
    return hidden, grads(*m.parameters())


@case
def gradients_between_hidden_states(comp):
    m = fill(Tower())
    loss, hidden = comp(m)(normal(2, 3, 4))
    kept = {"retain_graph": True}
    return (
        torch.autograd.grad(loss, hidden, **kept),
        torch.autograd.grad(hidden[3].sum(), hidden[1], **kept),
        torch.autograd.grad(hidden[2].sum(), [hidden[0], m.layers[1].weight], **kept),
        torch.autograd.grad(loss + hidden[1].sum(), [hidden[1], *m.parameters()]),
    )


@case
def loss_and_logits(comp):
    m = fill(nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 11)))
    ids = torch.arange(6).view(2, 3)

    def f(ids):
        logits = m(ids)
        return F.cross_entropy(logits.view(-1, 11), ids.view(-1)), logits

    seen = []
    loss, logits = comp(f)(ids)
    logits.register_hook(seen.append)
    loss.backward()
    return loss, logits, seen, grads(*m.parameters())


@case
def view_of_a_computed_tensor(comp):
    x, w, seen = leaf(2, 3), leaf(3, 4, seed=1), []

    def f(x):
        n = (x @ w).view(4, 2).t()
        return n, n.exp().sum(), n[0] * 2

    n, m, part = comp(f)(x)
    n.register_hook(seen.append)
    (m + part.sum() + (n * normal(2, 4)).sum()).backward()
    return n, seen, grads(x, w)


@case
def several_views_of_one_tensor(comp):
    x, seen = leaf(2, 6), []

    def f(x):
        q, k, v = (x * 2).chunk(3, 1)
        return q, k, v, (q * k).sum() + v.sin().sum()

    q, k, v, m = comp(f)(x)
    for name, value in (("q", q), ("k", k), ("v", v)):  # in eager one node has all their hooks, and runs them in turn
        value.register_hook(lambda gradient, name=name: seen.append((name, gradient)))
    k.register_hook(lambda gradient: gradient * 3)
    (m + q.sum()).backward()
    return q, k, v, sorted(seen, key=lambda pair: pair[0]), grads(x)


@case
def base_and_its_view(comp):
    x, seen = leaf(2, 3), []

    def f(x):
        b = x * 2
        n = b.view(-1)
        return b, n, n * n, b.exp()

    b, n, m, e = comp(f)(x)
    b.register_hook(lambda gradient: seen.append(("b", gradient)))
    n.register_hook(lambda gradient: seen.append(("n", gradient)))
    (m.sum() + e.sum() + n.sum()).backward()
    return seen, grads(x)


def in_pairs(x):
    return torch.view_as_complex(x.view(-1, 2))


VIEWS_OF_VIEWS = {
    "of an input": lambda x: ((part := x[2]), part.unflatten(-1, (2, 2))),
    "of a computed tensor": lambda x: ((parts := (x * 2).unbind(0))[-1], parts[-1].view(2, 2), parts[-1] * 1),
    "of a chunk": lambda x: ((part := x.chunk(2)[0]), part[1]),
    "three deep": lambda x: ((part := (x * 3).view(2, -1)), part[0], part[0][1:]),
    "before it": lambda x: ((part := x.view(2, -1))[0], part),
    "of numbers in pairs": lambda x: ((pairs := in_pairs(x)), pairs[1:], pairs.imag, pairs.real),
    "of a conjugate": lambda x: ((pairs := in_pairs(x).conj()), pairs[1:], pairs.imag, pairs.t()),
    "of a negative": lambda x: ((part := in_pairs(x).conj().imag), part[2:], part.view(2, -1)),
    "of parts of a split": lambda x: ((part := torch.unsafe_split(x * 1, 2)[0]), part[0], part[0][1:]),
    "with a result computed from it": lambda x: ((part := (x * 2).t()), (row := part[1]), row.exp(), part.sin()),
}


@case
def views_of_results_that_are_views(comp):
    """A hook, a kept gradient and a gradient asked for at a view see what comes through views of it."""
    seen = {}
    for name, program in VIEWS_OF_VIEWS.items():
        x = leaf(4, 4)
        out = comp(program)(x * 1)
        hooked = seen[name] = []
        for number, value in enumerate(out):
            value.register_hook(lambda gradient, number=number, hooked=hooked: hooked.append((number, gradient)))
        out[0].retain_grad()
        total = sum((value * normal(*value.shape, seed=i)).abs().sum() for i, value in enumerate(out))
        between = torch.autograd.grad(total, out, retain_graph=True)
        hooked.sort(key=lambda pair: pair[0])
        total.backward()
        hooked[len(between) :] = sorted(hooked[len(between) :], key=lambda pair: pair[0])
        seen[name] = [*hooked, between, out[0].grad, grads(x)]
    return seen


@case
def view_of_a_result_written_in_place(comp):
    x, seen = leaf(4, 4), []
    out, part, other = comp(lambda x: ((out := (x * 2).view(2, 8)), out[0], out[1]))(x)
    part.mul_(3)
    assert out.grad_fn is not None  # asked for first: torch's register_hook crashes where a write has made it stale
    out.register_hook(seen.append)
    (part.sum() + (other * normal(8)).sum() + out.exp().sum()).backward()
    return out, part, other, seen, grads(x)


@case
def kept_gradient_of_a_result_written_in_place(comp):
    """Not the first result: each has a node of its own, or torch's hook is lost and an assertion fails."""
    x = leaf(3, 4)
    first, second, third = comp(lambda x: (x.sin(), x.cos(), x * 2))(x)
    second.retain_grad()
    third.retain_grad()
    second.add_(1)
    third.mul_(second)
    (first.sum() + third.sum()).backward()
    return second.grad, third.grad, second._is_view(), grads(x)


@case
def view_of_an_input(comp):
    x, seen = leaf(2, 3), []

    def f(x):
        n = x.t()
        return n, n * n

    n, m = comp(f)(x)
    n.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    (m.sum() + n[0].sum()).backward()
    return n._base is x, seen, grads(x)


@case
def parts_of_an_unsafe_split(comp):
    x, seen = leaf(4, 2), []

    def f(x):
        a, b = torch.unsafe_split(x * 2, 2)
        return a, b, a * b

    a, b, m = comp(f)(x)
    a.register_hook(seen.append)
    m.sum().backward()
    return seen, grads(x)


def total_of_a_part(x, y):
    with torch.no_grad():
        part = x[:2]
    total = part.sum()
    return total, y + total


@case
def result_that_leads_to_no_input(comp):
    """A view made under no_grad passes no gradient on, but what is computed from it asks for one."""
    x, seen = leaf(4, 3), []
    total, out = comp(total_of_a_part)(x, x)
    total.register_hook(seen.append)
    (out * normal(4, 3)).sum().backward()
    return total, seen, grads(x)


@case
def capture_at_a_result_that_leads_to_no_input(comp):
    """Autograd captures what the hook makes of a gradient only where nothing that is asked for lies behind."""
    x, seen = leaf(4, 3), []

    def f(x):
        y = x * 2
        with torch.no_grad():
            part = y[:2]
        return y, part.sum()

    y, total = comp(f)(x)
    total.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    asked = torch.autograd.grad([y, total], [x, y, total], [normal(4, 3), normal()])
    return asked, seen


@case
def capture_at_such_a_result_that_others_come_from(comp):
    x, seen = leaf(4, 3), []
    total, out = comp(total_of_a_part)(x, x)
    total.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    return torch.autograd.grad([total, out], [x, total], [normal(), normal(4, 3)]), seen


@case
def nothing_leads_to_an_input(comp):
    x, seen = leaf(4, 3), []

    def f(x):
        with torch.no_grad():
            part = x[:2]
        return part.sum(), (part * 3).exp()

    one, other = comp(f)(x)
    one.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    asked = torch.autograd.grad([one, other], [x, one, other], [normal(), normal(2, 3)], allow_unused=True)
    return asked, seen


@case
def such_results_that_come_from_each_other(comp):
    x, seen = leaf(4, 3), []

    def f(x):
        with torch.no_grad():
            part = x[:2]
        total = part.sum()
        return total, total.exp(), x * 2

    total, out, other = comp(f)(x)
    total.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    asked = torch.autograd.grad([total, out, other], [x, total], [normal(), normal(), normal(4, 3)])
    return asked, seen


@case
def saved_value_of_such_a_result_is_written(comp):
    """Its backward raises in eager, though it leads to no input."""
    x = leaf(4, 3)

    def f(x):
        y = x.cos().abs()
        with torch.no_grad():
            part = y[:2]
        return torch.relu_(part.sqrt()), x * 2

    root, other = comp(f)(x)
    return raises(lambda: root.sum().backward()), root, other, grads(x)


@case
def saved_value_beside_such_a_gradient_is_written(comp):
    """The sum hands gradients to the input, and to a node whose backward raises in eager."""
    x = leaf(4, 3)

    def f(x):
        y = x * 2
        with torch.no_grad():
            part = y[:2]
        waves = part.sin()
        with torch.no_grad():
            part.add_(1)
        return waves.sum() + x.sum()

    total = comp(f)(x)
    return raises(lambda: total.backward()), total


@case
def input_that_such_a_result_needs_is_written(comp):
    x = leaf(4, 3)

    def f(x):
        with torch.no_grad():
            part = x[:2]
        return part.sin(), part.cos().sum() + x.sum()

    root, total = comp(f)(x)
    with torch.no_grad():
        x.mul_(2)
    return raises(lambda: root.sum().backward()), raises(lambda: total.backward()), root, total


@case
def such_a_result_that_its_own_gradient_needs_is_written(comp):
    x = leaf(4, 3)

    def f(x):
        y = x.sin()
        with torch.no_grad():
            part = y[:2]
        return part.exp(), y

    root, waves = comp(f)(x)
    root.mul_(2)
    waves.sum().backward()
    return raises(lambda: root.sum().backward()), root, grads(x)


@case
def result_that_a_product_needs_for_such_a_gradient_is_written(comp):
    """Eager's product unpacks both of its factors, though one gradient is all that comes to the input."""
    x = leaf(4, 3)

    def f(x):
        y = x.sin()
        with torch.no_grad():
            part = y[:2]
        return part.exp() * y[:2], y

    product, waves = comp(f)(x)
    waves.mul_(2)
    return raises(lambda: product.sum().backward()), product, waves


def with_a_leaf_of_its_own(x, w):
    """A gradient for `hidden`, which nobody asks for, needs w; that for w needs x."""
    hidden = x[None]
    hidden.requires_grad = True
    return (hidden * w).sum()


@case
def leaf_of_the_program_s_own(comp):
    w = leaf(3)
    total = comp(with_a_leaf_of_its_own)(normal(3), w)
    total.backward()
    return total, grads(w)


@case
def weight_is_written_that_a_gradient_to_such_a_leaf_needs(comp):
    x, w = normal(3), leaf(3)
    total = comp(with_a_leaf_of_its_own)(x, w)
    with torch.no_grad():
        w.mul_(2)
    return raises(lambda: total.backward()), total


@case
def input_is_written_beside_such_a_leaf(comp):
    x, w = normal(3), leaf(3)
    total = comp(with_a_leaf_of_its_own)(x, w)
    x.mul_(2)
    return raises(lambda: total.backward()), total


@case
def weight_is_written_through_data_beside_such_a_leaf(comp):
    x, w = normal(3), leaf(3)
    total = comp(with_a_leaf_of_its_own)(x, w)
    w.data.mul_(2)
    total.backward()
    return total, grads(w)


def slope_at_a_detached_input(x, w):
    """The gradient for the input itself, which nobody asks for in the end, needs both."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad((x @ w).tanh().sum(), x, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean()


@case
def slope_at_a_detached_input_is_steered(comp):
    w = leaf(3, 2)
    total = comp(slope_at_a_detached_input)(normal(4, 3), w)
    total.backward()
    return total, grads(w)


@case
def detached_input_is_written_after_it(comp):
    x, w = normal(4, 3), leaf(3, 2)
    total = comp(slope_at_a_detached_input)(x, w)
    x.mul_(2)
    return raises(lambda: total.backward()), total


def value_and_slope(x, w):
    x = x.detach().requires_grad_()
    value = (x @ w).tanh()
    (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
    return value, slope


@case
def value_and_slope_of_which_one_is_used(comp):
    outs = []
    for which in (0, 1):
        x, w = normal(4, 3), leaf(3, 2)
        pair = comp(value_and_slope)(x, w)
        pair[which].square().sum().backward()
        outs.append((pair, grads(w)))
    return outs


@case
def detached_input_of_value_and_slope_is_written(comp):
    outs = []
    for which in (0, 1):
        x, w = normal(4, 3), leaf(3, 2)
        pair = comp(value_and_slope)(x, w)
        x.mul_(2)
        outs.append((raises(lambda pair=pair, which=which: pair[which].sum().backward()), pair))
    return outs


@case
def detached_input_is_written_that_one_of_two_results_needs(comp):
    """For the other eager's backward does not need it."""

    def f(x, w):
        inner = x.detach().requires_grad_()
        return (inner * w).sum(), w.exp().sum()

    outs = []
    for which in (0, 1):
        x, w = normal(3), leaf(3)
        pair = comp(f)(x, w)
        x.mul_(2)
        outs.append((raises(lambda pair=pair, which=which: pair[which].backward()), grads(w)))
    return outs


@case
def detached_input_is_written_through_data(comp):
    x, w = normal(4, 3), leaf(3, 2)
    total = comp(slope_at_a_detached_input)(x.detach(), w)
    x.data.mul_(2)
    total.backward()
    return total.shape, grads(w)


@case
def input_that_a_part_of_the_only_result_needs_is_written(comp):
    x = leaf(4, 3)

    def f(x):
        with torch.no_grad():
            part = x[:2]
        return part.cos().sum() + x.sum()

    total = comp(f)(x)
    with torch.no_grad():
        x.mul_(2)
    return raises(lambda: total.backward()), total


@case
def saved_result_behind_a_part_of_an_input(comp):
    """What tanh saves is its result: it is unpacked at the node that links it to the part."""
    x, y = leaf(4, 3), leaf(4, 3)

    def f(x):
        part = x.chunk(2)[0]
        return torch.tanh(part), part

    asked = torch.autograd.grad(comp(f)(x), [x], [normal(2, 3), normal(2, 3)])
    out, part = comp(f)(y)
    part.retain_grad()
    out.sum().backward()
    return asked, part.grad, grads(y)


@case
def expanded_gradient(comp):
    x, seen = leaf(2, 3), []
    n, m = comp(lambda x: ((n := x * 2), n.sum()))(x)
    n.register_hook(seen.append)
    m.backward()
    return seen, grads(x)


@case
def input_updated_in_place(comp):
    x, seen = leaf(3), []

    def f(h):
        h.mul_(2)
        return h * h

    h = x * 1
    m = comp(f)(h)
    h.register_hook(lambda gradient: (seen.append(gradient), gradient * 2)[1])
    (m.sum() + h.sum()).backward()
    return h, m, seen, grads(x)


@case
def input_updated_in_place_from_a_result(comp):
    x, seen = leaf(3), []

    def f(h):
        n = h.exp()
        h.mul_(n)
        return n, h.sin()

    h = x * 1
    n, m = comp(f)(h)
    n.register_hook(seen.append)
    h.register_hook(seen.append)
    (m.sum() + h.sum()).backward()
    return h, n, m, seen, grads(x)


@case
def view_of_an_input_updated_in_place(comp):
    x, seen = leaf(4), []

    def f(h):
        h.mul_(2)
        n = h[1:]
        return n, n * n

    h = x * 1
    n, m = comp(f)(h)
    n.register_hook(seen.append)
    m.sum().backward()
    return n._base is h, seen, grads(x)


@case
def the_same_result_twice(comp):
    x, seen = leaf(3), []
    n, same, cut, m = comp(lambda x: ((n := x * 2), n, n.detach(), n * n))(x)
    same.register_hook(seen.append)
    m.sum().backward()
    return n is same, cut.requires_grad, seen, grads(x)


@case
def results_side_by_side(comp):
    x, y, seen = leaf(3), leaf(3, seed=1), []

    def f(x, y):
        a, b = x * 2, y * 3
        return a, b, a * b, a.sin(), x * y

    out = comp(f)(x, y)
    for value in out:
        value.register_hook(seen.append)
    (out[2].sum() + out[3].sum() + out[4].sum()).backward()
    return len(seen), grads(x, y)


@case
def some_results_unused(comp):
    x, y = leaf(3), leaf(3, seed=1)

    def f(x, y):
        n = x * 2
        return n, n.log(), n * y, y.sqrt()

    found = []
    for used in ((0,), (2,), (0, 2), (2, 3)):
        out = comp(f)(x, y)
        out[0].retain_grad()
        sum(out[i].sum() for i in used).backward()
        found.append((out[0].grad, grads(x, y)))
        x.grad = y.grad = None
    return found


@case
def dropout_and_batch_norm_between(comp):
    m = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2)))
    seen = []

    def f(x):
        n = m[:3](x)
        return n, m[3:](n)

    n, out = comp(f)(normal(5, 3))
    n.register_hook(lambda gradient: seen.append(gradient.shape))
    out.sum().backward()
    return seen, [parameter.grad.shape for parameter in m.parameters()], m[1].num_batches_tracked


@case(close="autocast rounds to bfloat16")
def under_autocast(comp):
    m, seen = fill(Tower()), []
    g = comp(m)
    with torch.autocast("cpu", torch.bfloat16):
        loss, hidden = g(normal(2, 3, 4))
    hidden[1].register_hook(seen.append)
    loss.backward()
    return seen, grads(*m.parameters())


@case
def vectorised_jacobian_between_results(comp):
    x = leaf(3)
    n, m = comp(squared)(x)
    rows = torch.autograd.grad(m, [n, x], torch.eye(3), is_grads_batched=True)
    return rows


@case
def hooks_on_saved_tensors(comp):
    x, seen = leaf(3), []
    g = comp(squared)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        n, m = g(x)
    n.register_hook(seen.append)
    m.sum().backward()
    return seen, grads(x)


@case(eager_was_wrong="a checkpoint lets each saved tensor be unpacked once alone, also in a function's own backward")
def checkpoint_around(comp):
    x, seen = leaf(3), []
    g = comp(squared)

    def block(x):
        n, m = g(x)
        n.register_hook(seen.append)
        return m.exp()

    checkpoint(block, x, use_reentrant=False).sum().backward()
    return seen, grads(x)


@case
def threads_on_one_graph(comp):
    x, seen = leaf(3), []
    n, m = comp(squared)(x)
    n.register_hook(lambda gradient: seen.append(float(gradient.sum())))
    m.sum().backward(retain_graph=True)
    workers = [threading.Thread(target=lambda: m.sum().backward(retain_graph=True)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return seen, grads(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


@case
def custom_function_between(comp):
    x, seen = leaf(3), []
    n, m = comp(lambda x: ((n := x.exp()), Doubled.apply(n)))(x)
    n.register_hook(seen.append)
    m.sum().backward()
    return seen, grads(x)


@case
def complex_results(comp):
    x, seen = leaf(3), []
    n, m = comp(lambda x: ((n := torch.complex(x, x * 2)), (n * n.conj()).real))(x)
    n.register_hook(seen.append)
    m.sum().backward()
    return seen, grads(x)


@case(options={"dynamic": True})
def symbolic_sizes(comp):
    g, found = comp(lambda x: ((n := x.exp()), (n * n).cumsum(0))), []
    for size in (3, 5, 4):
        x = leaf(size)
        n, m = g(x)
        n.register_hook(found.append)
        m.sum().backward()
        found.append(grads(x))
    return found


@case
def result_given_back_in_another_call(comp):
    g = comp(lambda h, x: ((n := torch.tanh(h + x)), n * 2))
    x, seen = leaf(3), []
    h = x
    for i in range(3):
        h, out = g(h, normal(3, seed=i))
        h.register_hook(seen.append)
    out.sum().backward()
    return seen, grads(x)


def hooked_inside(a):
    b = a * 3
    b.register_hook(lambda gradient: gradient * 2)
    return b, b.sin()


@case
def hook_inside_on_a_result(comp):
    x = leaf(3)
    b, s = comp(hooked_inside)(x)
    (b.sum() + s.sum()).backward()
    return b, s, grads(x)


@case
def hook_inside_on_a_result_whose_gradient_is_kept_outside(comp):
    x = leaf(3)
    b, s = comp(hooked_inside)(x)
    b.retain_grad()
    (b.sum() + s.sum()).backward()
    return b.grad, grads(x)


@case
def hook_inside_on_a_view_that_is_a_result(comp):
    def program(a):
        b = a * 3
        v = b.view(-1)
        v.register_hook(lambda gradient: gradient * 2)
        return b, v.sin(), v

    x = leaf(3)
    b, s, v = comp(program)(x)
    (b.sum() + s.sum() + v.sum()).backward()
    return b, s, v, grads(x)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
