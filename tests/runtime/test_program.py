"""A compiled program is an ordinary autograd node: undefined tangents, residuals' lives, versions, hooks, threads."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.compat import CAN_UNPACK_ONE
from aottrain.errors import UnsupportedError
from tests.conformance.harness import FRONTENDS
from tests.numerics.comparison import assert_call_like_eager, assert_same, compiled, fresh_inputs

PLANS = ("save_all", "min_cut", 0.0, "recompute_all")


def leaf(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


# -- law 6: undefined tangents stay undefined ---------------------------------------------------------------------


def three_outputs(x, y, z):
    shared = x * y
    return shared.sin(), (shared + z).exp(), z * 3


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("used", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)], ids=str)
def test_gradients_of_partly_used_outputs(plan, used):
    inputs = [leaf(4, seed=i) for i in range(3)]
    function = compiled(three_outputs, plan)
    results = []
    for call in (three_outputs, function):
        values = fresh_inputs(inputs)
        out = call(*values)
        results.append(torch.autograd.grad(sum(out[i].sum() for i in used), values, allow_unused=True))
    assert_same(results[1], results[0])


# One op of each family of gradient formulas: none of them may run for an output that nothing reads.
UNUSED = {
    "index": lambda x: x[torch.tensor([0, 1, 0])],
    "max": lambda x: x.max(0).values,
    "sort": lambda x: x.sort(0).values,
    "gather": lambda x: x.gather(0, torch.zeros(2, 3, dtype=torch.int64)),
    "index_select": lambda x: x.index_select(0, torch.tensor([0])),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "tril": lambda x: x.tril(),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "clamp": lambda x: x.clamp(0, 1),
    "softplus": F.softplus,
    "hardswish": F.hardswish,
    "gelu": F.gelu,
    "glu": lambda x: F.glu(F.pad(x, (0, 1))),
    "softmax": lambda x: x.softmax(-1),
    "logsumexp": lambda x: x.logsumexp(0),
    "std": lambda x: x.std(),
    "norm": lambda x: x.norm(),
    "pow": lambda x: x**3,
    "cumsum": lambda x: x.cumsum(0),
    "cat": lambda x: torch.cat([x, x * 2]),
    "stack": lambda x: torch.stack([x, x * 2]),
    "reflect": lambda x: F.pad(x[None], (1, 1), mode="reflect") * 1,
    "huber": lambda x: F.huber_loss(x, torch.zeros(2, 3)),
    "cross_entropy": lambda x: F.cross_entropy(x, torch.tensor([0, 1])),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]) * 1,
    "embedding": lambda x: F.embedding(torch.tensor([0, 1, 1]), x),
    "conv": lambda x: F.conv1d(x[None], torch.ones(2, 2, 2)),
    "dropout": lambda x: F.dropout(x, 0.5),
    "cdist": lambda x: torch.cdist(x, x + 1),
    "diagonal": lambda x: x.diagonal() * 1,
    "matmul": lambda x: x @ x.t(),
}


@pytest.mark.parametrize("op", UNUSED)
def test_an_input_of_unused_outputs_alone_gets_none(op):
    def function(x, y):
        return UNUSED[op](x), y * 2

    x, y = leaf(2, 3), leaf(2)
    compiled(function)(x, y)[1].sum().backward()
    assert x.grad is None and torch.equal(y.grad, torch.full((2,), 2.0))


@pytest.mark.parametrize("op", ["gather", "softplus", "sort", "where", "attention", "pow"])
def test_an_infinity_in_an_unused_branch_gives_no_nan(op):
    def function(x):
        return UNUSED[op](x.log() / (x - x)), x * 2

    x = leaf(2, 3)
    compiled(function)(x)[1].sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0))


def test_a_pattern_of_undefined_tangents_is_compiled_once():
    function = compiled(three_outputs)
    x, y, z = (leaf(3, seed=i) for i in range(3))
    for _ in range(2):
        for i in range(3):
            function(x, y, z)[i].sum().backward()
    assert len(function.report.graphs) == 1


def test_a_sum_of_defined_and_undefined_contributions_is_the_defined_one():
    def function(x):
        return x.sin(), (x * 1e30).exp() * 1e30

    x = leaf(3)
    compiled(function)(x)[0].sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


# -- law 7: residuals die during the backward ---------------------------------------------------------------------


def chain(x, w1, w2):
    return ((x @ w1).sin() @ w2).sin().sum()


class Token:
    """What a saved-tensor hook leaves in a tensor's place; it can be watched dying."""

    def __init__(self, value):
        self.value = value


def call_with_tokens(function, inputs):
    """The output of a compiled call, and weak references to a token for each residual that its node holds."""
    function(*inputs)
    tokens = []

    def pack(value):
        token = Token(value)
        tokens.append(weakref.ref(token))
        return token

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda token: token.value):
        return function(*inputs), tokens


@pytest.mark.parametrize("plan", ["save_all", "min_cut"])
def test_nothing_is_kept_after_the_backward(plan):
    out, tokens = call_with_tokens(compiled(chain, plan), [leaf(8, 8, seed=i) for i in range(3)])
    assert tokens and all(ref() is not None for ref in tokens)
    out.backward()
    gc.collect()
    assert all(ref() is None for ref in tokens), "the node still holds its residuals"


def test_residuals_live_while_the_graph_is_retained():
    inputs = [leaf(8, 8, seed=i) for i in range(3)]
    out, tokens = call_with_tokens(compiled(chain), inputs)
    first = torch.autograd.grad(out, inputs, retain_graph=True)
    assert all(ref() is not None for ref in tokens)
    assert_same(torch.autograd.grad(out, inputs), first)
    gc.collect()
    assert all(ref() is None for ref in tokens)


def test_residuals_die_with_an_output_that_is_dropped():
    out, tokens = call_with_tokens(compiled(chain, "save_all"), [leaf(8, 8, seed=i) for i in range(3)])
    del out
    gc.collect()
    assert all(ref() is None for ref in tokens)


def memory_events(function):
    """Bytes allocated (> 0) and freed (< 0) on the CPU while function() runs, in order."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    found = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def test_each_residual_dies_at_its_last_use_within_the_backward():
    """Twenty saved values: with all of them held to the end of the backward, the peak is reached inside it."""
    size, mark = 256 * 256 * 4, 12345

    def deep(x):
        for _ in range(10):
            x = x.sin().exp()  # two saved values a layer
        return x.sum()

    x = leaf(256, 256)
    function = compiled(deep, "save_all", kernel="aten")  # blocks of generated programs outlive their values
    function(x).backward()
    x.grad = None

    def step():
        out = function(x)
        torch.empty(mark, dtype=torch.uint8)
        out.backward()

    events = memory_events(step)
    start = events.index(mark)
    held = sum(events[:start])
    assert held >= 20 * size, "the forward saved less than this test believes"
    levels = [held]
    for change in events[start:]:
        levels.append(levels[-1] + change)
    assert max(levels) <= held + 3 * size, "the backward holds more than its residuals and what it works on"
    # Half way through its allocations it must have let go of about half the residuals.
    assert levels[len(levels) // 2] < held - 6 * size
    assert levels[-1] <= size + 1024, "more than the gradient is left"


# -- law 8: versions, hooks, buffers ------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_writing_to_an_input_after_the_forward_raises_or_does_not_matter(plan):
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    function = compiled(lambda x, w: (x @ w).sin().sum(), plan)
    right = torch.autograd.grad(function(x, w), [x, w])
    for changed in (x, w):
        out = function(x, w)
        saved = changed.detach().clone()
        with torch.no_grad():
            changed.mul_(2)
        try:
            got = torch.autograd.grad(out, [x, w])
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
        else:
            assert_same(got, right)
        with torch.no_grad():
            changed.copy_(saved)


@pytest.mark.parametrize("plan", PLANS)
def test_a_matrix_product_of_a_changed_parameter_raises_as_in_eager(plan):
    x, w = leaf(4, 4), leaf(4, 4, seed=1)
    for call in (F.linear, compiled(lambda x, w: F.linear(x, w), plan)):
        out = call(x, w).sum()
        with torch.no_grad():
            w.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(out, [x, w])


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("op", [torch.exp, torch.tanh, torch.sigmoid, torch.relu, lambda v: v.softmax(-1)])
def test_writing_to_a_saved_output_raises_as_in_eager(plan, op):
    x = leaf(4, 4)
    for call in (op, compiled(lambda v: op(v), plan)):
        out = call(x)
        with torch.no_grad():
            out.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.skipif(not CAN_UNPACK_ONE, reason="this torch unpacks, and checks, all saved tensors at once")
@pytest.mark.parametrize("plan", PLANS)
def test_writing_to_what_an_unused_output_saved_matters_as_in_eager(plan):
    def two(x, y):
        return x.exp(), (y * 2).tanh()

    x, y = leaf(4, 4), leaf(4, 4, seed=1)
    for call in (two, compiled(two, plan)):
        used, unused = call(x, y)
        unused.detach().mul_(3)
        assert_same(torch.autograd.grad(used.sum(), [x, y], retain_graph=True, allow_unused=True), (x.exp(), None))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(unused.sum(), y, retain_graph=True)
        torch.autograd.grad(used.sum(), x)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(used.sum(), x)


@pytest.mark.parametrize("plan", PLANS)
def test_saved_tensor_hooks_see_the_residuals_and_may_replace_them(plan):
    inputs = [leaf(6, 6, seed=i) for i in range(3)]
    function = compiled(chain, plan)
    right = torch.autograd.grad(function(*inputs), inputs)
    seen = []

    def pack(value):
        seen.append(value.shape)
        return value.detach().numpy().copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        out = function(*inputs)
    assert seen
    assert_same(torch.autograd.grad(out, inputs), right)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.count.add_(1)
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return self.linear(x) / self.count - self.mean


@pytest.mark.parametrize("plan", PLANS)
def test_buffers_never_come_to_require_grad(plan):
    model = Counting()
    call = compiled(model, plan)
    count = model.count
    for step in range(1, 4):
        version = model.count._version
        call(torch.randn(5, 3)).sum().backward()
        assert model.count is count and float(count) == step and count._version > version
        assert not count.requires_grad and count.grad_fn is None and not model.mean.requires_grad


def test_hooks_on_parameters_and_outputs_run():
    x, w = leaf(3, 3), leaf(3, 3, seed=1)
    seen = []
    w.register_hook(lambda g: seen.append("hook") or g * 2)
    w.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    out = compiled(lambda x, w: x @ w)(x, w)
    out.retain_grad()
    out.sum().backward()
    assert seen == ["hook", "accumulated"]
    assert torch.equal(w.grad, 2 * (x.detach().t() @ torch.ones(3, 3))) and torch.equal(out.grad, torch.ones(3, 3))


# -- the backward, called in every way ----------------------------------------------------------------------------


def test_a_second_backward_raises_as_in_eager():
    x = leaf(3)
    for call in (lambda x: x.sin().sum(), compiled(lambda x: x.sin().sum())):
        out = call(x)
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()


def test_retained_graphs_give_the_same_again():
    inputs = [leaf(4, 4, seed=i) for i in range(3)]
    out = compiled(lambda *v: F.dropout(chain(*v) * v[0], 0.5), "recompute_all")(*inputs)
    tangent = torch.randn(4, 4)
    first = torch.autograd.grad(out, inputs, tangent, retain_graph=True)
    for _ in range(3):
        assert_same(torch.autograd.grad(out, inputs, tangent, retain_graph=True), first)


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, tangent):
        (x,) = ctx.saved_tensors
        return tangent * 3 * x**2


def test_create_graph_gives_the_second_derivative():
    def cut(x):
        with torch.no_grad():
            held = x * 3
        return (x**3 * held + x.detach() * x * x).sum()

    found = []
    for function in (cut, compiled(cut)):
        x = leaf(3)
        (first,) = torch.autograd.grad(function(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x)
        found.append((first, second))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [3, 1 << 15])
def test_create_graph_finds_a_small_constant_that_is_gone(size):
    """A large one is not kept for it."""

    def program(x, y):
        return (x - y.sin()).pow(4).mean()

    found = []
    for function in (program, compiled(program)):
        x, y = leaf(3), torch.ones(size, 3)
        out, mark = function(x, y), weakref.ref(y)
        del y
        gc.collect()
        assert mark() is None
        if function is not program and size > 3:
            with pytest.raises(UnsupportedError, match="one is gone"):
                torch.autograd.grad(out, x, create_graph=True)
            return
        (first,) = torch.autograd.grad(out, x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), x)))
    torch.testing.assert_close(*found)


def _clamped_under_no_grad(x):
    hidden = x.sin()
    with torch.no_grad():
        hidden.clamp_(-0.5, 0.5)
    return hidden * x


def _part_written_detached(x):
    hidden = x.sin()
    hidden.detach()[1:].mul_(2)
    return hidden * x


def _cubed_twice(x):
    return _Cube.apply(_clamped_under_no_grad(_Cube.apply(x) * 2)) * x


class _Exp(torch.autograd.Function):
    """Saves its result, and a value that has no history."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.half, result = x / 2, x.exp() * factor
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx, tangent):
        (result,) = ctx.saved_tensors
        return tangent * result + ctx.half * 0, None


@pytest.mark.parametrize(
    "program",
    [
        _clamped_under_no_grad,
        _part_written_detached,
        lambda x: F.cosine_similarity(x, x.exp(), dim=0),
        _cubed_twice,
        lambda x: _Exp.apply(x.sin(), 3.0),
    ],
    ids=["no_grad", "detached", "cosine_similarity", "custom Functions", "saved results"],
)
def test_create_graph_sees_what_a_functional_graph_does_not_hold(program):
    """The history that a value keeps where it is written unrecorded, and the formulas of custom Functions."""
    found = []
    for function in (program, compiled(program)):
        x = leaf(3)
        (first,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        found.append((first, second, *torch.autograd.grad(second.sum(), x)))
    torch.testing.assert_close(*found)


class _Averaged(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("average", torch.ones(size, 3))

    def forward(self, x):
        out = self.norm(x).pow(3) * (x - self.average[0])
        with torch.no_grad():
            self.average.mul_(0.5).add_(x.mean(0))
        return out


@pytest.mark.parametrize("size", [1, 1 << 15])
def test_create_graph_through_a_program_that_updates_state(size):
    """Statistics that nothing else reads matter to no gradient; what is read is kept as it was, where it is small."""
    found = []
    for module in (_Averaged(size), compiled(_Averaged(size))):
        x = leaf(4, 3)
        out = module(x).sum()
        if found and size > 1:
            with pytest.raises(UnsupportedError, match="one is gone"):
                torch.autograd.grad(out, x, create_graph=True)
            return
        for _ in range(2):
            (first,) = torch.autograd.grad(out, x, create_graph=True)
        module(leaf(4, 3))
        found.append((first, *torch.autograd.grad(first.square().sum(), x), dict(module.named_buffers())["average"]))
    torch.testing.assert_close(*found)


def test_create_graph_finds_a_computed_input_that_is_gone():
    program, found = lambda x: x**3, []
    for function in (program, compiled(program)):
        x = leaf(3)
        out = function(x.exp() + 1)
        (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), x)))
    torch.testing.assert_close(*found)


def test_create_graph_through_a_gradient_that_the_program_takes():
    """What its formulas read of saved results is differentiated, too."""

    def slope(w):
        x = torch.ones(2, 3, requires_grad=True)
        return torch.autograd.grad((x * w).tanh().exp().sum(), x, create_graph=True)[0].square().sum()

    found = []
    for function in (slope, compiled(slope)):
        w = leaf(3)
        (first,) = torch.autograd.grad(function(w), w, create_graph=True)
        found.append((first, *torch.autograd.grad(first.sum(), w)))
    torch.testing.assert_close(*found)


def _cubed_under_autocast(x):
    with torch.autocast("cpu", torch.bfloat16):
        return _Cube.apply(x)


def _cubed_with_another_result(x):
    cubed = _Cube.apply(x)
    return cubed, cubed.sin()


@pytest.mark.parametrize("program", [_cubed_under_autocast, _cubed_with_another_result])
def test_create_graph_is_refused_where_a_replay_would_be_wrong(program):
    """A Function may read what autocast is there; what a link stands for is no result of a call that is made again."""
    x = leaf(3)
    out = compiled(program)(x)
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad((out[1] if isinstance(out, tuple) else out).sum(), x, create_graph=True)


def test_backwards_out_of_order():
    def noisy(x):
        return F.dropout(x.sin(), 0.5)

    function, x = compiled(noisy, "recompute_all"), leaf(50)
    outs = [function(x) for _ in range(3)]
    grads = [None] * 3
    for i in (1, 2, 0):
        (grads[i],) = torch.autograd.grad(outs[i].sum(), x)
    for out, grad in zip(outs, grads, strict=True):
        assert torch.equal(grad != 0, out != 0), "a backward used another call's mask"
    assert not torch.equal(outs[0], outs[1])


@pytest.mark.parametrize(
    "tangent",
    [
        lambda: torch.ones(()).expand(2, 3, 4, 5),
        lambda: torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0),
        lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 4, 10)[..., ::2],
        lambda: torch.randn(2, 3, 4, 5),
    ],
    ids=["expanded", "permuted", "channels_last", "sliced", "contiguous"],
)
def test_odd_tangents(tangent):
    def function(x, w):
        return F.conv2d(x, w, padding=1).view(-1).view(2, 3, 4, 5).sin() * 2

    inputs, tangent = [leaf(2, 3, 4, 5), leaf(3, 3, 3, 3, seed=1)], tangent()
    before = tangent.clone()
    wanted = torch.autograd.grad(function(*inputs), inputs, tangent)
    got = torch.autograd.grad(compiled(function)(*inputs), inputs, tangent)
    assert_same(got, wanted)
    assert torch.equal(tangent, before)


def test_gradients_do_not_share_memory_with_each_other_or_the_tangent():
    a, b, tangent = leaf(4), leaf(4, seed=1), torch.ones(4)
    compiled(lambda a, b: a + b)(a, b).backward(tangent)
    assert len({a.grad.data_ptr(), b.grad.data_ptr(), tangent.data_ptr()}) == 3


def test_gradients_accumulate_over_calls():
    x = leaf(3)
    function = compiled(lambda x: (x * 2).sum())
    for step in range(1, 4):
        function(x).backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0 * step))


def test_forward_of_one_program_inside_the_graph_of_another():
    x = leaf(3)
    f, g = compiled(lambda x: x.sin()), compiled(lambda x: x.exp())
    f(g(f(x))).sum().backward()
    got, x.grad = x.grad, None
    x.sin().exp().sin().sum().backward()
    assert torch.equal(got, x.grad)


# -- outputs ------------------------------------------------------------------------------------------------------


def test_outputs_that_do_not_need_gradients_are_not_differentiable():
    def function(x):
        return x.sin(), x.argmax(), x > 0, (x * 2).detach() + 1

    outs = compiled(function)(leaf(5))
    assert [out.requires_grad for out in outs] == [True, False, False, False]
    assert [out.dtype for out in outs] == [torch.float32, torch.int64, torch.bool, torch.float32]


def test_outputs_that_are_inputs_are_those_objects():
    def function(x, y):
        return x, x * y, F.dropout(y, 0.5, training=False)

    x, y = leaf(3), torch.randn(3)
    a, b, c = compiled(function)(x, y)
    assert a is x and c is y
    (a.sum() + b.sum()).backward()
    assert torch.equal(x.grad, 1 + y)


def test_a_mutated_input_that_is_returned_is_that_object():
    def function(x, w):
        x.add_(1)
        return x, (x * w).sum()

    x, w = torch.zeros(3), leaf(3)
    out, loss = compiled(function)(x, w)
    assert out is x and torch.equal(x, torch.ones(3))
    loss.backward()
    assert torch.equal(w.grad, torch.ones(3))


def test_outputs_own_their_memory():
    """Neither equal outputs nor copies of inputs may come to share memory in the compiled program."""

    def function(x, b):
        copy = torch.empty_like(b)
        copy.copy_(b)
        b.add_(1)
        return x * 2, x * 2, x.clone(), copy.view(-1), b.clone().view(-1), b.clone().view(-1)

    x, b = torch.randn(2, 2), torch.zeros(2, 2)
    outs = compiled(function)(x, b)
    pointers = [v.data_ptr() for v in (*outs, x, b)]
    assert len(set(pointers)) == len(pointers)
    assert_same(outs[3], torch.zeros(4))
    assert_same(outs[4], torch.ones(4))


def test_two_buffers_swap():
    def function(a, b, x):
        old = a.clone()
        a.copy_(b)
        b.copy_(old)
        return (x * a - b).sum()

    assert_call_like_eager(function, [torch.ones(3), torch.zeros(3), leaf(3)])


def test_trees_of_outputs_with_constants():
    def function(x, flag=True):
        return {"loss": x.sum(), "rest": [3, None, (x * 2, "name")], "flag": flag}

    x = leaf(3)
    out, wanted = compiled(function)(x), function(x)
    assert out["rest"][:2] == [3, None] and out["rest"][2][1] == "name" and out["flag"] is True
    assert_same([out["loss"], out["rest"][2][0]], [wanted["loss"], wanted["rest"][2][0]])


def test_one_tensor_returned_twice_is_eager_like():
    def function(x):
        y = x * 2
        return y, y

    x = leaf(3)
    try:
        a, b = compiled(function)(x)
    except UnsupportedError:
        return  # refused is as good as right
    (a.sum() + b.sum()).backward()
    assert torch.equal(x.grad, torch.full((3,), 4.0)) and a.data_ptr() == b.data_ptr()


def test_without_gradients_no_autograd_node_is_made():
    x, w = leaf(3), torch.randn(3)
    function = compiled(lambda a: a * 2)
    with torch.no_grad():
        assert function(x).grad_fn is None
    assert function(w).grad_fn is None and not function(w).requires_grad
    assert function(x).grad_fn is not None
    with torch.inference_mode():
        assert not function(w).requires_grad


def test_inference_programs_have_no_backward():
    function = compiled(lambda a: a * 2)
    assert function.prepare(torch.ones(3)).mode == "inference"
    assert function.prepare(leaf(3)).mode == "train"


# -- autocast, constants, threads ---------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", PLANS)
def test_ambient_autocast_around_the_forward_alone(plan):
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    call, x = compiled(model, plan), torch.randn(5, 8)
    results = []
    for function in (model, call):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = function(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
        results.append([out.detach(), *[p.grad.clone() for p in model.parameters()]])
    assert_same(results[1], results[0])


def test_a_weight_used_twice_under_autocast():
    def function(w, x):
        return (x @ w) @ w

    w, x = leaf(8, 8), torch.randn(4, 8)
    grads = []
    for call in (function, compiled(function)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = call(w, x)
        grads.append(torch.autograd.grad(out.float().square().sum(), w))
    assert_same(grads[1], grads[0])


def test_backward_under_an_ambient_autocast_runs_in_the_traced_types():
    w, x = leaf(8, 8), torch.randn(4, 8)
    function = compiled(lambda w, x: (x @ w).sin())
    wanted = torch.autograd.grad((x @ w).sin().sum(), w)
    out = function(w, x).sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(torch.autograd.grad(out, w), wanted)


def test_constants_of_the_program_are_not_used_up():
    def function(x):
        t = torch.tensor([0.5, 1.5, 2.5])
        t += 1.0
        return t * x * torch.tensor(2.0)

    x = leaf(3)
    call = compiled(function)
    for _ in range(3):
        assert_same(call(x), function(x))


@pytest.mark.parametrize("warm", [True, False], ids=["compiled before", "compiled by the threads"])
def test_eight_threads_at_once(warm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4))
    call, parameters = compiled(model, 0.5), list(model.parameters())
    inputs = [torch.randn(32, 16) for _ in range(8)]
    wanted = [torch.autograd.grad(model(x).square().sum(), parameters) for x in inputs]
    if warm:
        call(inputs[0])
    results, errors, barrier = [None] * 8, [], threading.Barrier(8)

    def work(i):
        try:
            barrier.wait()
            for _ in range(5):
                results[i] = torch.autograd.grad(call(inputs[i]).square().sum(), parameters)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=partial(work, i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert_same(results, wanted)
    assert len(call.report.graphs) == 1


def test_threads_take_their_own_seeds():
    function = compiled(lambda x: F.dropout(x, 0.5))
    x = leaf(200)
    function(x)
    outs = [None] * 4

    def work(i):
        outs[i] = function(x).detach()

    threads = [threading.Thread(target=partial(work, i)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(out.tolist()) for out in outs}) == 4


def test_the_only_result_that_requires_a_gradient_keeps_it_through_a_write():
    """Torch looks for the hook of `retain_grad` under the number that a result has after the write."""

    def program(x):
        return x.detach() * 3, x.sin()

    found = []
    for call in (program, compiled(program)):
        x = torch.linspace(-1, 1, 4).requires_grad_()
        count, out = call(x)
        out.retain_grad()
        out.neg_()
        out.sum().backward()
        found.append([count, out, out.grad, x.grad])
    assert_same(found[1], found[0])


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("change", ["clone().t_()", "clone().resize_(3, 4)", "mul(2).squeeze_()"])
def test_a_result_that_is_no_view_in_eager_is_none(change, frontend):
    """Without gradients, too: the caller may add one to it in place, which autograd refuses of a view made inside."""
    x, weight = torch.randn(4, 4), torch.ones((), requires_grad=True)
    function = eval(f"lambda x: x.{change}")
    want, got = function(x), aottrain.compile(function, capture=frontend)(x)
    assert not want._is_view() and not got._is_view()
    got += weight
    assert torch.equal(got, want + 1) and got.requires_grad
