"""Many threads, many backwards, hooks on what is saved: what a compiled call keeps, for how long, and for whom."""

import copy
import gc
import io
import pickle
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.conformance.harness import PROGRAMS, case, cases_of, check, fill, grads, leaf, normal

NUM_THREADS = 8


def mlp():
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def together(work):
    """Results of work(i) in threads that start at once; an error of any of them is raised."""
    barrier = threading.Barrier(NUM_THREADS)
    found, errors = [None] * NUM_THREADS, []

    def run(i):
        try:
            barrier.wait()
            found[i] = work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(NUM_THREADS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    if errors:
        raise errors[0]
    return found


def message(action):
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return None


@case
def first_call_in_eight_threads(comp):
    m = mlp()
    g = comp(m)

    def work(i):
        x = leaf(2, 3, seed=i)
        out = g(x)
        gradients = torch.autograd.grad(out.sum(), [x, *m.parameters()])
        return out, gradients

    return together(work)


@case
def eight_threads_of_several_shapes(comp):
    m = mlp()
    g = comp(m)

    def work(i):
        found = []
        for step in range(2):
            x = leaf(1 + (i + step) % 3, 3, seed=i)
            out = g(x)
            found.append((out, torch.autograd.grad(out.sum(), [x, *m.parameters()])))
        return found

    return together(work)


@case
def eight_threads_compile_a_function_each(comp):
    def work(i):
        g = comp(lambda x: (x.sin() * i).cos())
        x = leaf(4, seed=i)
        g(x).sum().backward()
        return grads(x)

    return together(work)


@case
def eight_threads_with_checkpoints_and_eager_ones_between(comp):
    m = mlp()
    g, parameters = comp(lambda x: checkpoint(m, x, use_reentrant=False)), list(m.parameters())

    def work(i):
        x = leaf(2, 3, seed=i)
        out = g(x) if i % 2 else checkpoint(m, x, use_reentrant=False)
        return out, torch.autograd.grad(out.sum(), [x, *parameters])

    return together(work)


@case
def eight_threads_with_grad_modes(comp):
    g = comp(mlp())

    def work(i):
        with torch.set_grad_enabled(i % 2 == 0):
            return g(normal(2, 3, seed=i)).requires_grad

    return together(work)


@case
def eight_threads_accumulate_into_one_gradient(comp):
    weight = torch.ones(3, requires_grad=True)
    g = comp(lambda x: (x * weight).sum())
    together(lambda i: g(torch.full((3,), float(i))).backward())
    return weight.grad


@case
def eight_threads_update_their_own_buffers(comp):
    modules = [fill(nn.BatchNorm1d(3)) for _ in range(NUM_THREADS)]

    def work(i):
        g = comp(modules[i])
        for step in range(2):
            g(normal(4, 3, seed=step)).sum().backward()
        return list(modules[i].buffers())

    return together(work)


@case
def forward_in_one_thread_and_backward_in_others(comp):
    g = comp(lambda x: (x.sin() * x).sum())
    xs = [leaf(3, seed=i) for i in range(NUM_THREADS)]
    outs = [g(x) for x in xs]
    together(lambda i: outs[i].backward())
    return grads(*xs)


@case(kernels_differ="residuals of generated kernels lie in blocks that the next call uses again")
def saved_values_are_freed_after_the_backward(comp):
    seen = []

    def pack(value):
        boxed = [value]
        seen.append(weakref.ref(value.untyped_storage()))
        return boxed

    m = mlp()
    g = comp(m)
    x = leaf(2, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda boxed: boxed[0]):
        out = g(x).sum()
    own = {value.untyped_storage().data_ptr() for value in (x, *m.parameters())}
    seen = [reference for reference in seen if reference() is not None and reference().data_ptr() not in own]
    out.backward()
    gc.collect()
    return all(reference() is None for reference in seen)


@case
def the_graph_is_freed_without_a_backward(comp):
    seen = []

    class Token:
        def __init__(self, value):
            self.value = value
            seen.append(weakref.ref(self))

    with torch.autograd.graph.saved_tensors_hooks(Token, lambda token: token.value):
        out = comp(lambda x: x.sin().exp())(leaf(8))
    held = any(reference() is not None for reference in seen)
    del out
    gc.collect()
    return held, any(reference() is not None for reference in seen)


@case
def hooks_pack_what_they_unpack(comp):
    count = {"pack": 0, "unpack": 0}

    def pack(value):
        count["pack"] += 1
        return value.clone()

    def unpack(value):
        count["unpack"] += 1
        return value

    g = comp(mlp())
    x = leaf(2, 3)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        out = g(x)
    packed = count["pack"]
    out.sum().backward()
    return packed > 0, count["unpack"] == packed == count["pack"], grads(x)


@case
def saved_on_cpu(comp):
    m = mlp()
    g = comp(m)
    x = leaf(2, 3)
    with torch.autograd.graph.save_on_cpu():
        out = g(x)
    out.pow(2).sum().backward()
    return out, grads(x, *m.parameters())


@case
def hooks_disabled(comp):
    g = comp(mlp())
    with torch.autograd.graph.disable_saved_tensors_hooks("not now"):
        a = g(normal(2, 3))
    return a, g(normal(2, 3))


@case
def allowed_mutation_on_saved_tensors(comp):
    g = comp(lambda x, w: (x * w).sin())
    x, w = leaf(3), normal(3, seed=1)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        out = g(x, w)
        w.zero_()
        out.sum().backward()
    return grads(x)


@case
def second_backward_says_what_eager_says(comp):
    x = leaf(3)
    y = comp(lambda x: x.sin().exp().sum())(x)
    y.backward()
    return message(y.backward)


@case
def saved_value_overwritten_before_the_backward(comp):
    x, w = leaf(3), normal(3, seed=1)
    y = comp(lambda x, w: (x * w).sin().sum())(x, w)
    w.add_(1)
    text = message(y.backward)
    return text is not None and "modified by an inplace operation" in text


def written_in_between(comp, function, write, b):
    """Eager keeps what is computed from b, and not b: a write to it before the backward changes nothing."""
    x, b = leaf(3, 3), b.clone()
    y = comp(function)(x, b)
    write(b)
    y.sum().backward()
    return grads(x)


def add_one(b):
    b.add_(1)


def add_one_unseen(b):
    b.data.add_(1)  # no version counter moves


@case
def cloned_input_written_before_the_backward(comp):
    return written_in_between(comp, lambda x, b: x @ b.clone(), add_one, normal(3, 3, seed=1))


@case
def made_from_an_input_that_is_written_before_the_backward(comp):
    return written_in_between(comp, lambda x, b: x @ b.exp().sin(), add_one, normal(3, 3, seed=1))


@case
def mask_from_an_input_that_is_written_unseen_before_the_backward(comp):
    return written_in_between(comp, lambda x, b: (x * (b > 0).float()).tanh(), add_one_unseen, normal(3, 3, seed=1))


@case
def centered_by_a_buffer_that_is_updated_before_the_backward(comp):
    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", normal(3, seed=2))

        def forward(self, student, teacher):
            target = ((teacher - self.center) / 0.1).softmax(-1)
            return -(target * student.log_softmax(-1)).sum(-1).mean()

    module = Loss()
    step, x, teacher = comp(module), leaf(4, 3), normal(4, 3, seed=3)
    found = []
    for _ in range(2):
        loss = step(x, teacher)
        module.center.mul_(0.9).add_(teacher.mean(0) * 0.1)
        teacher.zero_()
        loss.backward()
        found += [loss.detach(), *grads(x)]
    return found


@case
def retained_many_times(comp):
    m = mlp()
    x = leaf(2, 3)
    out = comp(m)(x)
    found = []
    for i in range(3):
        out.backward(normal(2, 2, seed=i), retain_graph=True)
        found.append([value.clone() for value in grads(x, *m.parameters())])
    out.backward(torch.ones(2, 2))
    return found, grads(x, *m.parameters()), message(lambda: out.sum().backward())


@case
def backwards_in_another_order_than_forwards(comp):
    m = mlp()
    g = comp(m)
    xs = [leaf(2, 3, seed=i) for i in range(4)]
    outs = [g(x).pow(2).sum() for x in xs]
    for i in (2, 0, 3, 1):
        outs[i].backward()
    return grads(*xs, *m.parameters())


@case
def backward_through_a_chain_of_calls(comp):
    m = fill(nn.Linear(3, 3))
    g = comp(m)
    x = leaf(2, 3)
    out = x
    for _ in range(4):
        out = g(out).tanh()
    out.sum().backward()
    return out, grads(x, *m.parameters())


@case
def gradient_buffer_stays_the_same_object(comp):
    m = mlp()
    g = comp(m)
    g(normal(2, 3)).sum().backward()
    kept = [parameter.grad for parameter in m.parameters()]
    g(normal(2, 3, seed=1)).sum().backward()
    same = [parameter.grad is value for parameter, value in zip(m.parameters(), kept, strict=True)]
    m.zero_grad(set_to_none=False)
    g(normal(2, 3, seed=2)).sum().backward()
    return same, grads(*m.parameters())


@case
def gradients_share_no_memory(comp):
    m = fill(nn.Linear(3, 3))
    x, y = leaf(2, 3), leaf(2, 3, seed=1)
    comp(lambda x, y: (x + y + m(x) * 0).sum())(x, y).backward()
    x.grad.mul_(5)
    return grads(x, y, *m.parameters())


@case
def frozen_and_tied_parameters(comp):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = fill(nn.Linear(3, 3)), fill(nn.Linear(3, 3), 20)
            self.b.weight = self.a.weight
            self.b.bias.requires_grad_(False)

        def forward(self, x):
            return self.b(self.a(x).tanh())

    m = M()
    g = comp(m)
    found = []
    for thaw in (False, True, False):
        m.b.bias.requires_grad_(thaw)
        m.a.bias.requires_grad_(not thaw)
        m.zero_grad()
        g(normal(2, 3)).sum().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in m.parameters()])
    m.b.weight = nn.Parameter(m.b.weight.detach() * 2)
    m.zero_grad()
    g(normal(2, 3)).sum().backward()
    return found, grads(*m.parameters())


@case
def hooks_of_every_kind_in_order(comp):
    log = []
    m = mlp()
    m.register_forward_pre_hook(lambda module, args: log.append("forward pre"))
    m.register_forward_hook(lambda module, args, out: log.append("forward"))
    m.register_full_backward_pre_hook(lambda module, gradient: log.append("backward pre"))
    m.register_full_backward_hook(lambda module, gin, gout: log.append("backward"))
    m[2].weight.register_hook(lambda gradient: gradient * 2)
    m[2].weight.register_post_accumulate_grad_hook(lambda parameter: log.append("accumulated"))
    g = comp(m)
    x = leaf(2, 3)
    for _ in range(2):
        out = g(x)
        out.register_hook(lambda gradient: gradient * 3)
        out.sum().backward()
    return sorted(log), grads(x, *m.parameters())


@case
def backward_hooks_that_change_gradients(comp):
    m = mlp()
    m[0].register_full_backward_hook(lambda module, gin, gout: tuple(value * 2 for value in gin if value is not None))
    m[2].register_full_backward_hook(lambda module, gin, gout: (gin[0] * 3,))
    g = comp(m)
    x = leaf(2, 3)
    g(x).sum().backward()
    return grads(x, *m.parameters())


@case
def prehook_on_the_gradient_function(comp):
    seen = []
    x = leaf(3)
    out = comp(lambda x: x.sin())(x)
    out.grad_fn.register_prehook(lambda gradients: seen.append(len(gradients)) or (gradients[0] * 2,))
    out.sum().backward()
    return len(seen), grads(x)


@case
def copies_made_between_forward_and_backward(comp):
    m = mlp()
    g = comp(m)
    x = leaf(2, 3)
    out = g(x)
    h, k = copy.deepcopy(g), pickle.loads(pickle.dumps(g))
    buffer = io.BytesIO()
    torch.save(g, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    out.sum().backward()
    results = [copied(normal(2, 3)) for copied in (h, k, loaded)]
    sum(value.sum() for value in results).backward()
    return results, grads(x, *m.parameters()), [grads(*copied.parameters()) for copied in (h, k, loaded)]


@case
def half_trained_copy_goes_on(comp):
    def train(g, optimizer, steps):
        for i in steps:
            optimizer.zero_grad()
            g(normal(4, 3, seed=i)).pow(2).mean().backward()
            optimizer.step()

    g = comp(mlp())
    first = torch.optim.Adam(g.parameters(), 0.1)
    train(g, first, range(2))
    h = copy.deepcopy(g)
    second = torch.optim.Adam(h.parameters(), 0.1)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    train(g, first, range(2, 4))
    train(h, second, range(2, 4))
    return list(g.parameters()), list(h.parameters())


@pytest.mark.parametrize(("case", "frontend"), cases_of(__name__, PROGRAMS))
def test_equals_eager(case, frontend):
    check(case, frontend)
