"""Compiled modules as objects: copied, saved, loaded, optimised, shared between threads, and let go."""

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from tests.conformance.harness import PYTHON, case, cases_of, check, fill, grads, leaf, normal


def mlp():
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


@case
def deep_copy(comp):
    g = comp(mlp())
    a = g(normal(1, 3))
    h = copy.deepcopy(g)
    with torch.no_grad():
        next(iter(g.parameters())).zero_()
    return a, g(normal(1, 3)), h(normal(1, 3)), isinstance(h, nn.Sequential)


@case
def deep_copy_of_a_model_with_a_compiled_child(comp):
    m = mlp()
    m[0] = comp(m[0])
    h = copy.deepcopy(m)
    m[0].weight.data.zero_()
    return m(normal(1, 3)), h(normal(1, 3)), list(h.state_dict())


@case
def shallow_copy(comp):
    g = comp(mlp())
    h = copy.copy(g)
    return g(normal(1, 3)), h(normal(1, 3))


@case
def pickled(comp):
    g = comp(mlp())
    a = g(normal(1, 3))
    h = pickle.loads(pickle.dumps(g))
    return a, h(normal(1, 3)), isinstance(h, nn.Sequential)


@case
def saved_and_loaded(comp):
    g = comp(mlp())
    g(normal(1, 3))
    b = io.BytesIO()
    torch.save(g, b)
    b.seek(0)
    h = torch.load(b, weights_only=False)
    return h(normal(1, 3))


@case
def state_dict_out_and_in(comp):
    m = mlp()
    g = comp(m)
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fresh.load_state_dict(g.state_dict())
    g.load_state_dict(fill(mlp(), 50).state_dict())
    return list(g.state_dict()), fresh(normal(1, 3)), g(normal(1, 3)), m(normal(1, 3))


@case
def state_dict_through_a_file(comp):
    g = comp(mlp())
    b = io.BytesIO()
    torch.save(g.state_dict(), b)
    b.seek(0)
    h = comp(fill(mlp(), 50))
    h.load_state_dict(torch.load(b))
    return h(normal(1, 3))


@case
def optimizer_built_before_and_after(comp):
    found = []
    for early in (True, False):
        m = mlp()
        o = torch.optim.AdamW(m.parameters(), 0.1) if early else None
        g = comp(m)
        o = o or torch.optim.AdamW(g.parameters(), 0.1)
        for i in range(3):
            o.zero_grad()
            g(normal(4, 3, seed=i)).pow(2).mean().backward()
            o.step()
        found.append([p.detach().clone() for p in m.parameters()])
    return found


@case
def optimizers_of_several_kinds(comp):
    found = []
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad):
        m = mlp()
        g = comp(m)
        o = kind(g.parameters(), lr=0.05)
        s = torch.optim.lr_scheduler.StepLR(o, 1, 0.5)
        for i in range(3):
            o.zero_grad()
            g(normal(4, 3, seed=i)).pow(2).mean().backward()
            nn.utils.clip_grad_value_(g.parameters(), 0.1)
            o.step()
            s.step()
        found.append(list(m.parameters()))
    return found


@case
def lbfgs_closure(comp):
    m = mlp()
    g = comp(m)
    o = torch.optim.LBFGS(m.parameters(), max_iter=4)

    def closure():
        o.zero_grad()
        loss = g(normal(4, 3)).pow(2).mean()
        loss.backward()
        return loss

    o.step(closure)
    return list(m.parameters())


@case
def averaged_model(comp):
    m = mlp()
    g = comp(m)
    average = torch.optim.swa_utils.AveragedModel(m)
    o = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(3):
        o.zero_grad()
        g(normal(4, 3, seed=i)).pow(2).mean().backward()
        o.step()
        average.update_parameters(m)
    return average(normal(1, 3)), g(normal(1, 3))


@case
def threads_on_one_module(comp):
    g = comp(mlp())
    found = [None] * 8

    def work(i):
        for _ in range(3):
            found[i] = g(normal(1 + i % 4, 3, seed=i)).detach()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return found


@case
def threads_with_backward(comp):
    g = comp(lambda x: (x.sin() * x).sum())
    found = [None] * 6

    def work(i):
        x = leaf(3 + i % 2, seed=i)
        g(x).backward()
        found[i] = x.grad

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return found


@case
def modes_differ_between_threads(comp):
    g = comp(lambda x: x * 2)
    x = leaf(3)
    found = [None] * 4

    def work(i):
        with torch.set_grad_enabled(i % 2 == 0):
            found[i] = g(x).requires_grad

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    return found


@case
def inputs_are_let_go(comp):
    g = comp(mlp())
    x = leaf(2, 3)
    out = g(x).sum()
    out.backward()
    r = weakref.ref(x)
    del x, out
    gc.collect()
    return r() is None


@case
def inputs_are_let_go_without_backward(comp):
    g = comp(mlp())
    x = leaf(2, 3)
    out = g(x)
    r = weakref.ref(x)
    s = weakref.ref(out)
    del x, out
    gc.collect()
    return r() is None, s() is None


@case
def written_inputs_are_let_go(comp):
    def f(x):
        x.mul_(2)
        return x + 1

    g = comp(f)
    x = normal(3)
    g(x)
    r = weakref.ref(x)
    del x
    gc.collect()
    return r() is None


@case
def the_module_is_let_go(comp):
    m = mlp()
    g = comp(m)
    g(normal(2, 3)).sum().backward()
    r = weakref.ref(next(iter(m.parameters())))
    del m, g
    torch._dynamo.reset()
    gc.collect()
    return r() is None


@case
def nothing_stays_fake(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.register_buffer("b", torch.ones(2))

        def forward(self, x):
            return self.a(x) * self.b + torch.arange(2.0)

    m = fill(M())
    g = comp(m)
    out = g(normal(1, 2))
    out.sum().backward()
    return [type(t).__name__ for t in (out, *m.parameters(), *m.buffers(), *grads(*m.parameters()))]


@case
def attributes_and_methods_reach_the_module(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = fill(nn.Linear(2, 2))
            self.k = 2.0

        def forward(self, x):
            return self.a(x) * self.k

        def scaled(self, x):
            return self(x) * 10

    m = M()
    g = comp(m)
    g.k = 5.0
    a = g(normal(1, 2))
    b = g.scaled(normal(1, 2))
    return a, b, m.k, isinstance(g, M), len(list(g.named_modules())), [n for n, _ in g.named_parameters()]


@case
def train_eval_and_to_through_the_compiled(comp):
    g = comp(nn.Sequential(fill(nn.Linear(2, 2)), nn.Dropout(1.0)))
    a = g(normal(1, 2))
    g.eval()
    b = g(normal(1, 2))
    g.double()
    c = g(normal(1, 2, dtype=torch.float64))
    g.requires_grad_(False)
    return a, b, c, g(normal(1, 2, dtype=torch.float64))


@case
def compiled_twice(comp):
    m = mlp()
    g = comp(comp(m))
    x = leaf(1, 3)
    out = g(x)
    out.sum().backward()
    return out, grads(x, *m.parameters())


@case
def two_compilations_of_one_module(comp):
    m = mlp()
    g, h = comp(m), comp(m)
    (g(normal(1, 3)) + h(normal(1, 3))).sum().backward()
    return grads(*m.parameters())


@case
def original_still_runs_eagerly(comp):
    m = mlp()
    g = comp(m)
    return g(normal(1, 3)), m(normal(1, 3)), m.training, type(m).__name__


@case
def applied_and_reinitialised(comp):
    g = comp(mlp())
    a = g(normal(1, 3))
    g.apply(lambda m: nn.init.ones_(m.weight) if isinstance(m, nn.Linear) else None)
    return a, g(normal(1, 3))


@case
def swapped_parameters_by_vector(comp):
    m = mlp()
    g = comp(m)
    v = nn.utils.parameters_to_vector(m.parameters())
    nn.utils.vector_to_parameters(v * 2, m.parameters())
    return g(normal(1, 3))


@case
def gradient_accumulation_and_no_grad_evaluation_interleaved(comp):
    m = mlp()
    g = comp(m)
    o = torch.optim.SGD(m.parameters(), 0.1)
    seen = []
    for i in range(4):
        m.train()
        g(normal(4, 3, seed=i)).pow(2).mean().backward()
        m.eval()
        with torch.no_grad():
            seen.append(g(normal(2, 3)))
        if i % 2:
            o.step()
            o.zero_grad()
    return seen, list(m.parameters())


@case
def error_then_recovery(comp):
    g = comp(mlp())
    with contextlib.suppress(Exception):
        g(normal(1, 7))
    return g(normal(1, 3))


@case
def interrupted_program(comp):
    state = {"stop": True}

    def f(x):
        if state["stop"]:
            raise KeyboardInterrupt
        return x * 2

    g = comp(f)
    with contextlib.suppress(KeyboardInterrupt):
        g(normal(2))
    state["stop"] = False
    return g(normal(2)), torch.is_grad_enabled()


@case(dynamo_blind="which path torch's attention layers take in evaluation")
def attention_in_evaluation(comp):
    """Eager's fast path gives zeros at what is padding, and NaN where a mask leaves out a whole row."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder, alone = (
        fill(nn.TransformerEncoder(layer, 2)).eval(),
        fill(nn.MultiheadAttention(8, 2, batch_first=True)).eval(),
    )
    x, padding = normal(2, 5, 8), torch.arange(5) > torch.tensor([[2], [4]])
    g, h = comp(encoder), comp(lambda x, mask: alone(x, x, x, key_padding_mask=mask, need_weights=False)[0])
    with torch.no_grad():
        hidden = [g(x, src_key_padding_mask=padding), h(x, padding), h(x, torch.ones(2, 5) > 0)]
    return hidden, g(x, src_key_padding_mask=padding), h(x, padding)


@case
def transformer_trains(comp):
    m = fill(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
    g = comp(m)
    o = torch.optim.SGD(m.parameters(), 0.1)
    for i in range(2):
        o.zero_grad()
        g(normal(2, 4, 8, seed=i)).pow(2).mean().backward()
        o.step()
    m.eval()
    return g(normal(2, 4, 8)), list(m.parameters())


@case
def many_steps_stay_equal(comp):
    m = mlp()
    g = comp(m)
    o = torch.optim.Adam(m.parameters(), 0.01)
    losses = []
    for i in range(12):
        o.zero_grad()
        loss = g(normal(4, 3, seed=i)).pow(2).mean()
        loss.backward()
        o.step()
        losses.append(loss.detach())
    return losses


@dataclass
class Settings:
    scale: float = 2.0
    mode: str = "sin"

    def apply(self, x):
        return getattr(x, self.mode)() * self.scale


@case
def dataclass_as_an_argument(comp):
    g, x = comp(lambda x, settings: settings.apply(x)), leaf(3)
    shared = Settings()
    outs = [g(x, shared), g(x, Settings()), g(x, Settings(3.0)), g(x, Settings(mode="cos"))]
    shared.scale = 5.0
    outs.append(g(x, shared))
    shared.mode = "exp"
    outs.append(g(x, settings=shared))
    outs.append(g(x, Settings()))
    sum(out.sum() for out in outs).backward()
    return outs, grads(x)


@case
def dataclass_that_the_program_writes(comp):
    def f(x, settings):
        settings.scale += 1.0
        return x * settings.scale

    g, settings = comp(f), Settings()
    return g(normal(2), settings), g(normal(2), settings), settings.scale


@case(dynamo_blind="a method put into a class")
def dataclass_whose_class_changes(comp):
    class Other(Settings):
        factor = 2.0

        def apply(self, x):
            return x * self.factor

    g = comp(lambda x, settings: settings.apply(x))
    a = g(normal(2), Other())
    Other.factor = 3.0
    b = g(normal(2), Other())
    Other.apply = lambda self, x: x + 1
    return a, b, g(normal(2), Other())


@case
def dataclass_with_a_field_of_its_own(comp):
    def f(x, settings):
        return x * settings.scale * getattr(settings, "more", 1.0)

    g, settings = comp(f), Settings()
    a = g(normal(2), settings)
    settings.more = 4.0
    return a, g(normal(2), settings)


@case
def module_as_an_argument(comp):
    g, x = comp(lambda x, layer: layer(x).sin()), leaf(2, 3)
    one, other = fill(nn.Linear(3, 3)), fill(nn.Linear(3, 3), 20)
    g(x, one).sum().backward()
    g(x, other).sum().backward()
    with torch.no_grad():
        one.weight.mul_(2)
    out = g(x, one)
    one.bias = None
    return out, g(x, one), grads(x, one.weight, *other.parameters())


@case
def module_with_state_as_an_argument(comp):
    norm, x = nn.BatchNorm1d(3), leaf(4, 3)
    g = comp(lambda x, layer: layer(x * 2))
    g(x, norm).sin().sum().backward()
    norm.eval()
    return g(x, norm), list(norm.buffers()), grads(x, *norm.parameters())


@case
def module_as_an_argument_gets_a_hook(comp):
    layer = fill(nn.Linear(3, 3))
    g = comp(lambda x, layer: layer(x))
    a = g(normal(2, 3), layer)
    layer.register_forward_hook(lambda module, args, out: out * 2)
    return a, g(normal(2, 3), layer)


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PYTHON))
def test_equals_eager(case, frontend):
    check(case, frontend)
