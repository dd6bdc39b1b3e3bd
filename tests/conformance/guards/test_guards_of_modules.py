"""What a module is made of, changed between two calls: parameters, hooks, submodules, their types and ties."""

import pytest
import torch
from torch import nn

from tests.conformance.changing import Scaled, before_and_after
from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal


@case
def training_flag_of_a_child(comp):
    m = nn.Sequential(nn.Dropout(1.0), nn.Linear(2, 2))
    fill(m)
    g = comp(m)
    a = g(normal(1, 2))
    m[0].eval()
    b = g(normal(1, 2))
    m.train()
    return a, b, g(normal(1, 2))


@case
def parameter_replaced(comp):
    def change(m):
        m.w = nn.Parameter(torch.full((2,), 9.0))

    return before_and_after(comp, change)


@case
def parameter_replaced_gets_the_gradient(comp):
    m = Scaled()
    g = comp(m)
    g(normal(2)).sum().backward()
    old = m.w
    m.w = nn.Parameter(torch.full((2,), 9.0))
    g(normal(2)).sum().backward()
    return grads(old, m.w)


@case
def parameter_data_swapped(comp):
    def change(m):
        m.w.data = torch.full((2,), 9.0)

    return before_and_after(comp, change)


@case
def parameter_data_of_another_shape(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.weight.data = normal(4, 2)
    m.bias.data = normal(4)
    return a, g(normal(1, 2))


@case
def parameter_becomes_none(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.bias = None
    return a, g(normal(1, 2))


@case
def parameter_frozen_later(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    g(normal(1, 2)).sum().backward()
    m.weight.requires_grad_(False)
    m.zero_grad()
    out = g(normal(1, 2))
    out.sum().backward()
    return out, grads(*m.parameters())


@case
def submodule_replaced(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    g = comp(m)
    a = g(normal(1, 2))
    m[1] = nn.Tanh()
    b = g(normal(1, 2))
    m[0] = fill(nn.Linear(2, 3), 50)
    return a, b, g(normal(1, 2))


@case
def submodule_appended_and_removed(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2)))
    g = comp(m)
    a = g(normal(1, 2))
    m.append(nn.Tanh())
    b = g(normal(1, 2))
    del m[0]
    return a, b, g(normal(1, 2))


@case
def module_list_reordered(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([fill(nn.Linear(2, 2), i) for i in range(3)])

        def forward(self, x):
            for layer in self.layers:
                x = layer(x).sin()
            return x

    m = M()
    g = comp(m)
    a = g(normal(1, 2))
    m.layers = nn.ModuleList(reversed(list(m.layers)))
    return a, g(normal(1, 2))


@case
def children_iterated(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = fill(nn.Linear(2, 2))

        def forward(self, x):
            for child in self.children():
                x = child(x)
            return x + len(dict(self.named_parameters()))

    m = M()
    g = comp(m)
    a = g(normal(1, 2))
    m.b = fill(nn.Linear(2, 2), 60)
    return a, g(normal(1, 2))


@case
def hook_added_and_removed(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    g = comp(m)
    a = g(normal(1, 2))
    h = m[0].register_forward_hook(lambda m, i, o: o * 5)
    b = g(normal(1, 2))
    h.remove()
    return a, b, g(normal(1, 2))


@case
def hook_added_to_the_target(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    h = m.register_forward_hook(lambda m, i, o: o * 5)
    b = g(normal(1, 2))
    h.remove()
    p = m.register_forward_pre_hook(lambda m, i: (i[0] + 1,))
    c = g(normal(1, 2))
    p.remove()
    return a, b, c, g(normal(1, 2))


@case
def backward_hook_added_later(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    g = comp(m)
    x = leaf(1, 2)
    g(x).sum().backward()
    one = x.grad.clone()
    m[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 5,))
    g(x).sum().backward()
    return one, grads(x)


@case
def hook_reads_a_number_that_changes(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    k = {"v": 2.0}
    m[0].register_forward_hook(lambda m, i, o: o * k["v"])
    g = comp(m)
    a = g(normal(1, 2))
    k["v"] = 9.0
    return a, g(normal(1, 2))


@case
def module_moved_between_dtypes(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.double()
    b = g(normal(1, 2, dtype=torch.float64))
    m.bfloat16()
    c = g(normal(1, 2, dtype=torch.bfloat16))
    m.float()
    return a, b, c, g(normal(1, 2))


@case
def state_dict_loaded(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    m.load_state_dict(fill(nn.Linear(2, 2), 99).state_dict())
    b = g(normal(1, 2))
    m.load_state_dict(fill(nn.Linear(2, 2), 77).state_dict(), assign=True)
    return a, b, g(normal(1, 2))


@case
def tied_then_untied(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = fill(nn.Linear(2, 2)), nn.Linear(2, 2)
            self.b.weight = self.a.weight
            self.b.bias = self.a.bias

        def forward(self, x):
            return self.b(self.a(x))

    m = M()
    g = comp(m)
    g(normal(1, 2)).sum().backward()
    one = m.a.weight.grad.clone()
    m.zero_grad()
    m.b = fill(nn.Linear(2, 2), 42)
    g(normal(1, 2)).sum().backward()
    return one, grads(m.a.weight, m.b.weight)


@case
def untied_then_tied(comp):
    m = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    g = comp(m)
    a = g(normal(1, 2))
    m[1].weight = m[0].weight
    b = g(normal(1, 2))
    b.sum().backward()
    return a, b, grads(*m.parameters())


@case
def parametrisation_added_later(comp):
    m = fill(nn.Linear(2, 2))
    g = comp(m)
    a = g(normal(1, 2))
    nn.utils.parametrizations.weight_norm(m)
    b = g(normal(1, 2))
    return a, b


@case
def pruned_later(comp):
    from torch.nn.utils import prune

    m = fill(nn.Linear(3, 3))
    g = comp(m)
    a = g(normal(1, 3))
    prune.l1_unstructured(m, "weight", 4)
    b = g(normal(1, 3))
    prune.remove(m, "weight")
    return a, b, g(normal(1, 3))


@case
def attribute_on_a_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.w.scale = 3.0

        def forward(self, x):
            return x * self.w * getattr(self.w, "scale", 1.0)

    m = M()
    g = comp(m)
    a = g(normal(2))
    m.w.scale = 7.0
    return a, g(normal(2))


@case
def kind_of_a_parameter(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return x * (2 if isinstance(self.w, nn.Parameter) else 3) + (5 if isinstance(self.b, nn.Parameter) else 7)

    return comp(M())(normal(2))


@case
def cache_dictionary_on_the_module(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {}

        def forward(self, x):
            n = x.shape[0]
            if n not in self.cache:
                self.cache[n] = torch.arange(float(n))
            return x + self.cache[n]

    m = M()
    g = comp(m)
    outs = [g(normal(n)) for n in (3, 3, 4, 3)]
    return outs, m.cache


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
