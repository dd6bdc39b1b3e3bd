"""The dispatch mode that turns every random op into a Philox draw: what it gives, and what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain import philox_eager
from aottrain.errors import UnsupportedError
from aottrain.ops.random.mode import RULES, PhiloxMode, _check_no_draw

aten = torch.ops.aten
N = 4000


def half(*shape, dtype=torch.float32):
    return torch.full(shape, 0.5, dtype=dtype)


def in_range(low, high):
    return lambda v: float(v.min()) >= low and float(v.max()) < high and len(torch.unique(v)) > 1


def mean_is(wanted, spread=0.1):
    return lambda v: abs(float(v.double().mean()) - wanted) < spread


def median_is(wanted, spread=0.1):
    return lambda v: abs(float(v.double().median()) - wanted) < spread


# For each rule a call that draws about N numbers, and what must hold for them.
CALLS = {
    aten.bernoulli_.float: (lambda: half(N).bernoulli_(0.25), mean_is(0.25)),
    aten.bernoulli_.Tensor: (lambda: half(N).bernoulli_(torch.full((N,), 0.75)), mean_is(0.75)),
    aten.bernoulli.default: (lambda: torch.bernoulli(torch.full((N,), 0.25)), mean_is(0.25)),
    aten.bernoulli.p: (lambda: torch.bernoulli(half(N), 0.75), mean_is(0.75)),
    aten.native_dropout.default: (lambda: torch.native_dropout(half(N), 0.25, True)[0], mean_is(0.5)),
    aten.rand.default: (lambda: torch.rand(N), mean_is(0.5)),
    aten.randn.default: (lambda: torch.randn(N), mean_is(0.0)),
    aten.rand_like.default: (lambda: torch.rand_like(half(N)), mean_is(0.5)),
    aten.randn_like.default: (lambda: torch.randn_like(half(N)), mean_is(0.0)),
    aten.uniform_.default: (lambda: half(N).uniform_(2.0, 4.0), mean_is(3.0)),
    aten.normal_.default: (lambda: half(N).normal_(5.0, 0.5), mean_is(5.0)),
    aten.normal.Tensor_Tensor: (lambda: torch.normal(half(N), half(N)), mean_is(0.5)),
    aten.normal.Tensor_float: (lambda: torch.normal(half(N), 2.0), mean_is(0.5, 0.2)),
    aten.normal.float_Tensor: (lambda: torch.normal(-1.0, half(N)), mean_is(-1.0)),
    aten.normal.float_float: (lambda: aten.normal.float_float(5.0, 0.5, [N]), mean_is(5.0)),
    aten.exponential_.default: (lambda: half(N).exponential_(2.0), mean_is(0.5)),
    aten.log_normal_.default: (lambda: half(N).log_normal_(0.0, 0.5), median_is(1.0)),
    aten.cauchy_.default: (lambda: half(N).cauchy_(3.0, 1.0), median_is(3.0, 0.2)),
    aten.geometric_.default: (lambda: half(N).geometric_(0.5), mean_is(2.0, 0.2)),
    aten.randint.default: (lambda: torch.randint(10, (N,)), in_range(0, 10)),
    aten.randint.low: (lambda: torch.randint(-5, 5, (N,)), in_range(-5, 5)),
    aten.randint_like.default: (lambda: torch.randint_like(half(N), 10), in_range(0, 10)),
    aten.randint_like.low_dtype: (lambda: torch.randint_like(half(N), 3, 9), in_range(3, 9)),
    aten.random_.default: (lambda: torch.zeros(N, dtype=torch.uint8).random_(), in_range(0, 256)),
    aten.random_.to: (lambda: torch.zeros(N, dtype=torch.int32).random_(7), in_range(0, 7)),
    getattr(aten.random_, "from"): (lambda: torch.zeros(N).random_(5, 8), in_range(5, 8)),
    aten.randperm.default: (lambda: torch.randperm(N), lambda v: torch.equal(v.sort().values, torch.arange(N))),
    aten.rrelu_with_noise.default: (lambda: F.rrelu(-torch.ones(N), 0.2, 0.6, training=True), mean_is(-0.4)),
    aten.rrelu_with_noise_.default: (lambda: F.rrelu_(-torch.ones(N), 0.2, 0.6, training=True), mean_is(-0.4)),
    aten.multinomial.default: (
        lambda: torch.multinomial(torch.tensor([0.0, 3.0, 1.0]), N, replacement=True),
        lambda v: mean_is(1.25)(v) and in_range(1, 3)(v),
    ),
}


class Watch(PhiloxMode):
    """Notes which rules were used."""

    def __init__(self, state=None):
        super().__init__(state)
        self.used = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in RULES:
            self.used.append(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


def drawn(call, seed=1):
    with Watch(torch.tensor([seed, 0])) as mode:
        return call(), mode


def names(ops):
    return sorted(str(op) for op in ops)


def test_every_rule_has_its_test():
    assert names(CALLS) == names(RULES)


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_rule(op):
    call, check = CALLS[op]
    eager = call()
    before = torch.get_rng_state()
    value, mode = drawn(call)
    assert mode.used == [op] and mode.num_draws == 1
    assert torch.equal(torch.get_rng_state(), before), "a draw with a given state used torch's generator"
    assert (value.shape, value.stride(), value.dtype) == (eager.shape, eager.stride(), eager.dtype)
    assert check(eager), "the test's own expectation does not hold for eager"
    assert check(value)
    assert torch.equal(drawn(call)[0], value)
    assert not torch.equal(drawn(call, seed=2)[0], value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.rand(N, dtype=d),
        lambda d: torch.randn(N, dtype=d),
        lambda d: half(N, dtype=d).bernoulli_(0.3),
        lambda d: torch.rand_like(half(N, dtype=d)),
        lambda d: torch.rand_like(half(N), dtype=d),
        lambda d: half(N, dtype=d).exponential_(),
        lambda d: half(N, dtype=d).uniform_(-1.0, 1.0),
        lambda d: F.dropout(half(N, dtype=d), 0.3),
    ],
    ids=["rand", "randn", "bernoulli_", "rand_like", "rand_like_dtype", "exponential_", "uniform_", "dropout"],
)
def test_other_types(call, dtype):
    value, _ = drawn(lambda: call(dtype))
    eager = call(dtype)
    assert value.dtype == eager.dtype == dtype and value.isfinite().all()
    assert abs(float(value.double().mean() - eager.double().mean())) < 0.15


LAYOUTS = {
    "transposed": lambda: torch.zeros(5, 3).t(),
    "channels_last": lambda: torch.zeros(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.zeros(3, 1).expand(3, 4),
    "every second": lambda: torch.zeros(6, 8)[:, ::2],
    "scalar": lambda: torch.zeros(()),
    "empty": lambda: torch.zeros(0, 3),
}
LIKES = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda v: torch.randint_like(v, 100),
    "bernoulli": torch.bernoulli,
    "bernoulli p": lambda v: torch.bernoulli(v, 0.5),
    "memory_format": lambda v: torch.rand_like(v, memory_format=torch.contiguous_format),
    "dropout": lambda v: F.dropout(v + 1, 0.5),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", LIKES)
def test_like_ops_give_eagers_strides_and_the_logical_numbers(op, layout):
    source = LAYOUTS[layout]()
    value, _ = drawn(lambda: LIKES[op](source))
    eager = LIKES[op](source)
    assert (value.shape, value.stride(), value.dtype) == (eager.shape, eager.stride(), eager.dtype)
    plain, _ = drawn(lambda: LIKES[op](source.contiguous()))
    assert torch.equal(value, plain)


@pytest.mark.parametrize("layout", ["transposed", "channels_last", "every second"])
@pytest.mark.parametrize(
    "fill", [lambda v: v.uniform_(), lambda v: v.normal_(), lambda v: v.bernoulli_(0.5), lambda v: v.random_(9)]
)
def test_in_place_draws_write_in_place(fill, layout):
    value = LAYOUTS[layout]()
    pointer, strides = value.data_ptr(), value.stride()
    out, _ = drawn(lambda: fill(value))
    assert out is value and value.data_ptr() == pointer and value.stride() == strides
    plain, _ = drawn(lambda: fill(LAYOUTS[layout]().contiguous()))
    assert torch.equal(value, plain)


@pytest.mark.parametrize(
    "call",
    [
        lambda g: torch.rand(3, generator=g),
        lambda g: torch.randn(3, generator=g),
        lambda g: torch.randint(9, (3,), generator=g),
        lambda g: torch.zeros(3).uniform_(generator=g),
        lambda g: torch.zeros(3).bernoulli_(0.5, generator=g),
        lambda g: torch.bernoulli(half(3), generator=g),
        lambda g: torch.multinomial(half(3), 2, generator=g),
        lambda g: torch.randperm(4, generator=g),
    ],
)
def test_an_explicit_generator_is_refused(call):
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    with PhiloxMode(torch.tensor([1, 0])) as mode, pytest.raises(UnsupportedError):
        call(generator)
    assert mode.num_draws == 0 and torch.equal(generator.get_state(), before)


@pytest.mark.parametrize(
    "call",
    [
        lambda: torch.poisson(half(3)),
        lambda: torch.distributions.Gamma(half(3), half(3)).sample(),
        lambda: torch.binomial(half(3), half(3)),
    ],
    ids=["poisson", "gamma", "binomial"],
)
def test_a_random_op_without_a_rule_is_refused(call):
    before = torch.get_rng_state()
    with PhiloxMode(torch.tensor([1, 0])), pytest.raises(UnsupportedError, match="draws random numbers"):
        call()
    assert torch.equal(torch.get_rng_state(), before)


def test_rrelu_scales_what_is_negative_alone_and_draws_in_training_alone():
    x = torch.tensor([-2.0, 3.0, -4.0])
    with philox_eager() as mode:
        assert torch.equal(F.rrelu(x, 0.2, 0.4, training=False), torch.where(x > 0, x, x * ((0.2 + 0.4) / 2)))
        assert mode.num_draws == 0
        out = F.rrelu(x, 0.2, 0.4, training=True)
    slopes = out / x
    assert slopes[1] == 1.0 and 0.2 <= float(slopes[0]) < 0.4 and 0.2 <= float(slopes[2]) < 0.4


def test_every_op_that_takes_a_generator_is_ruled_or_tagged():
    """So that none passes the mode unseen: what carries the tag and has no rule is refused."""
    unseen = []
    for name in torch._C._dispatch_get_all_op_names():
        namespace, rest = name.split("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops, namespace), packet, None) if namespace == "aten" else None
        op = getattr(op, overload or "default", None)
        if op is None or op in RULES or torch.Tag.nondeterministic_seeded in op.tags:
            continue
        if any("Generator" in str(argument.type) for argument in op._schema.arguments):
            unseen.append(str(op))
    assert unseen == []


@pytest.mark.parametrize(
    "call, wanted",
    [
        (lambda x: F.dropout(x, 0.0), lambda x: x),
        (lambda x: F.dropout(x, 1.0), torch.zeros_like),
        (lambda x: F.dropout(x, 0.5, training=False), lambda x: x),
        (lambda x: F.dropout2d(x, 0.5, training=False), lambda x: x),
        (lambda x: F.alpha_dropout(x, 0.5, training=False), lambda x: x),
    ],
    ids=["p=0", "p=1", "eval", "dropout2d eval", "alpha eval"],
)
def test_nothing_is_drawn_where_nothing_is_dropped(call, wanted):
    x = torch.randn(2, 3, 4, 4)
    before = torch.get_rng_state()
    with philox_eager() as mode:
        out = call(x)
    assert torch.equal(out, wanted(x)) and mode.num_draws == 0 and mode.state is None
    assert torch.equal(torch.get_rng_state(), before)


def test_native_dropout_without_training_is_the_identity():
    x = torch.randn(5)
    with philox_eager() as mode:
        out, mask = torch.native_dropout(x, 0.5, False)
    assert torch.equal(out, x) and mask.all() and mode.num_draws == 0


def test_native_dropout_scales_what_it_keeps():
    with philox_eager():
        out, mask = torch.native_dropout(torch.ones(1000), 0.75, True)
        gone, none = torch.native_dropout(torch.ones(5), 1.0, True)
    assert mask.dtype == torch.bool and torch.equal(out, mask * 4.0)
    assert torch.equal(gone, torch.zeros(5)) and not none.any()


def test_philox_eager_takes_exactly_one_seed_at_the_first_draw():
    torch.manual_seed(8)
    start = torch.get_rng_state()
    with philox_eager() as mode:
        torch.ones(3) * 2
        assert torch.equal(torch.get_rng_state(), start)
        torch.rand(3)
        after_one = torch.get_rng_state()
        torch.randn(100)
        F.dropout(torch.ones(4), 0.5)
        assert torch.equal(torch.get_rng_state(), after_one) and mode.num_draws == 3
    torch.set_rng_state(start)
    seed = int(torch.randint(0, 2**63 - 1, (1,)))
    assert torch.equal(torch.get_rng_state(), after_one) and mode.state.tolist() == [seed, 0]


def test_generator_state_saved_and_restored_repeats_the_numbers():
    def sequence():
        values = []
        for _ in range(2):
            with philox_eager():
                values += [torch.rand(3), torch.randn(2)]
        return values

    state = torch.get_rng_state()
    first = sequence()
    again = sequence()
    torch.set_rng_state(state)
    repeated = sequence()
    assert all(torch.equal(a, b) for a, b in zip(first, repeated, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], first[2])


def test_two_draws_of_one_call_differ():
    with philox_eager():
        assert not torch.equal(torch.rand(8), torch.rand(8))


def test_attention_without_dropout_passes():
    q = torch.randn(1, 2, 4, 8)
    with philox_eager() as mode:
        out = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert torch.equal(out, F.scaled_dot_product_attention(q, q, q, is_causal=True)) and mode.num_draws == 0


def test_attention_with_dropout_draws_once_on_the_cpu():
    q = torch.randn(1, 2, 16, 8)
    torch.manual_seed(2)
    with philox_eager() as mode:
        out = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
    assert mode.num_draws == 1 and not torch.equal(out, F.scaled_dot_product_attention(q, q, q))
    torch.manual_seed(2)
    with philox_eager():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q, dropout_p=0.5), out)


def test_attention_that_draws_inside_its_kernel_is_refused():
    q = torch.randn(1, 2, 4, 8)
    with PhiloxMode(torch.tensor([1, 0])), pytest.raises(UnsupportedError, match="dropout mask"):
        aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.5)


def test_multinomial_never_takes_what_has_no_weight():
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0], [1.0, 0.0, 1.0, 0.0]]).repeat(500, 1)
    for replacement in (True, False):
        value, _ = drawn(lambda r=replacement: torch.multinomial(weights, 2, replacement=r))
        assert value.dtype == torch.int64 and weights.gather(1, value).min() > 0
        if not replacement:
            assert (value[:, 0] != value[:, 1]).all()


def test_multinomial_without_replacement_prefers_the_heavy():
    value, _ = drawn(lambda: torch.multinomial(torch.tensor([[1.0, 3.0]]).expand(8000, 2), 1))
    assert abs(float(value.double().mean()) - 0.75) < 5 * math.sqrt(0.75 * 0.25 / 8000)


@pytest.mark.parametrize("dtype, limit", [(torch.bool, 2), (torch.int8, 128), (torch.int16, 2**15)], ids=str)
def test_random_fills_the_range_of_its_type(dtype, limit):
    value, _ = drawn(lambda: torch.zeros(50_000, dtype=dtype).random_())
    wide = value.to(torch.int64)
    assert int(wide.min()) >= 0 and limit - 1 >= int(wide.max()) > 0.98 * (limit - 1)


def test_the_mode_sees_draws_inside_the_backward():
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return g * torch.rand_like(g)

    x = torch.ones(4, requires_grad=True)
    with Watch(torch.tensor([1, 0])) as mode:
        Noisy.apply(x).sum().backward()
    assert mode.num_draws == 1 and x.grad.isfinite().all()


@pytest.mark.parametrize("kernel", ["efficient_attention", "cudnn_attention"])
def test_attention_kernels_of_a_device_draw_only_with_dropout(kernel):
    """Backward too: torch tags both as drawing, though the mask's state comes in as a tensor."""
    for name in (f"_scaled_dot_product_{kernel}", f"_scaled_dot_product_{kernel}_backward"):
        func = getattr(aten, name).default
        names = [argument.name for argument in func._schema.arguments]
        given = [0.0 if argument == "dropout_p" else None for argument in names[: names.index("dropout_p") + 1]]
        _check_no_draw(func, tuple(given), {})
        with pytest.raises(UnsupportedError, match="dropout mask inside the kernel"):
            _check_no_draw(func, (*given[:-1], 0.5), {})


def test_attention_with_dropout_is_taken_apart_where_kernels_draw_inside(monkeypatch):
    """On a GPU; nn.MultiheadAttention too. Attention without dropout keeps its kernel."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = []

    def choose(*args, **kwargs):
        seen.append(torch.backends.cuda.flash_sdp_enabled())
        return attention(*args, **kwargs)

    attention = F.scaled_dot_product_attention
    layer = torch.nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
    q = torch.randn(2, 4, 8)
    with philox_eager() as mode:
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        F.scaled_dot_product_attention(q, q, q, None, 0.5)
        monkeypatch.setattr(F, "scaled_dot_product_attention", choose)
        layer(q, q, q, need_weights=False)
        layer.dropout = 0.0
        layer(q, q, q, need_weights=False)
        call = aottrain.compile(lambda x: x * 2, capture="trace", kernel="aten", on_unsupported="error")
        assert torch.equal(call(q), q * 2)
    assert seen == [False, True] and mode.num_draws == 3 and torch.backends.cuda.flash_sdp_enabled()


def test_spreads_of_nothing_are_eagers():
    """A normal number without a spread is its mean; a Cauchy distribution has one."""
    with aottrain.philox_eager():
        assert torch.equal(torch.empty(3).normal_(2.0, 0.0), torch.full((3,), 2.0))
        with pytest.raises(RuntimeError, match="sigma"):
            torch.empty(3).cauchy_(0.0, 0.0)
