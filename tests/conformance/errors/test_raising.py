"""What eager raises for the values that it meets, a compiled call raises: the same type, after the same writes.

Each program is also called with values that eager accepts, before and after: nothing else changes.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.conformance import asserting
from tests.sampling import thinned

tensor = torch.tensor
FAR = tensor([1, 7])
NAN, INF = float("nan"), float("inf")
ONES, EYE, ZEROS = torch.ones(3), torch.eye(3), torch.zeros(3, 3)
TWOS = torch.full((3,), 2.0)
HALVES = torch.full((3,), 0.5)


def unread(f):
    """The program computes it and gives something else."""
    return lambda x, *more: (f(x, *more), x * 2)[1]


# Name: the program, the arguments that eager refuses, and those that it accepts.
MATRICES = {
    "cholesky": (torch.linalg.cholesky, (-EYE,), (EYE,)),
    "cholesky, unread": (unread(torch.linalg.cholesky), (-EYE,), (EYE,)),
    "torch.cholesky": (torch.cholesky, (-EYE,), (EYE,)),
    "inv": (torch.linalg.inv, (ZEROS,), (EYE,)),
    "inv, unread": (unread(torch.linalg.inv), (ZEROS,), (EYE,)),
    "inverse": (torch.inverse, (ZEROS,), (EYE,)),
    "solve": (torch.linalg.solve, (ZEROS, EYE), (EYE, EYE)),
    "tensorsolve": (lambda a, b: torch.linalg.tensorsolve(a, b), (ZEROS, ONES), (EYE, ONES)),
    "lu_factor": (torch.linalg.lu_factor, (ZEROS,), (EYE,)),
    "ldl_factor": (torch.linalg.ldl_factor, (ZEROS,), (EYE,)),
    "matrix_power": (lambda a: torch.linalg.matrix_power(a, -2), (ZEROS,), (EYE,)),
    "inv_ex, unread": (unread(lambda a: torch.linalg.inv_ex(a, check_errors=True)), (ZEROS,), (EYE,)),
    "cholesky_ex, unread": (unread(lambda a: torch.linalg.cholesky_ex(a, check_errors=True)), (-EYE,), (EYE,)),
    "eigh, unread": (unread(torch.linalg.eigh), (ZEROS * NAN,), (EYE,)),
    "eig": (torch.linalg.eig, (ZEROS * NAN,), (EYE,)),
}
if not hasattr(torch.ops.aten, "cholesky"):
    del MATRICES["torch.cholesky"]  # which torch 2.14 has no more
if hasattr(torch.linalg, "polar"):  # not in torch 2.13
    MATRICES["polar, unread"] = (unread(torch.linalg.polar), (ZEROS * NAN,), (EYE,))
    MATRICES["matrix_sqrth, unread"] = (unread(torch.linalg.matrix_sqrth), (ZEROS * NAN,), (EYE,))
DRAWS = {
    "bernoulli": (torch.bernoulli, (TWOS,), (HALVES,)),
    "bernoulli, unread": (unread(torch.bernoulli), (TWOS,), (HALVES,)),
    "bernoulli_": (lambda p: torch.empty(3).bernoulli_(p), (-ONES,), (HALVES,)),
    "bernoulli of nan": (torch.bernoulli, (ONES * NAN,), (HALVES,)),
    "multinomial, negative": (lambda p: torch.multinomial(p, 1), (-ONES,), (ONES,)),
    "multinomial, zeros": (lambda p: torch.multinomial(p, 1), (ONES * 0,), (ONES,)),
    "multinomial, a row of zeros": (lambda p: torch.multinomial(p, 1), (ZEROS,), (EYE,)),
    "multinomial with replacement": (lambda p: torch.multinomial(p, 4, replacement=True), (ONES * INF,), (ONES,)),
    "normal": (lambda m, s: torch.normal(m, s), (ONES, -ONES), (ONES, ONES)),
    "normal of a number": (lambda s: torch.normal(0.0, s), (-ONES,), (ONES,)),
}
LOOKUPS = {
    "index": (lambda x, i: x[i], (ONES, FAR), (ONES, FAR % 3)),
    "index_select": (lambda x, i: x.index_select(0, i), (ONES, FAR), (ONES, FAR % 3)),
    "index_select, unread": (unread(lambda x, i: x.index_select(0, i)), (ONES, FAR), (ONES, FAR % 3)),
    "index_select, negative": (lambda x, i: x.index_select(0, i), (ONES, tensor([-1, 0])), (ONES, FAR % 3)),
    "gather": (lambda x, i: x.gather(0, i), (ONES, FAR), (ONES, FAR % 3)),
    "take": (lambda x, i: x.take(i), (ONES, FAR), (ONES, FAR % 3)),
    "embedding": (lambda x, i: F.embedding(i, x), (EYE, FAR), (EYE, FAR % 3)),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x), (EYE, FAR), (EYE, FAR % 3)),
    "scatter": (lambda x, i: x.scatter(0, i, x), (ONES, FAR), (ONES, FAR % 3)),
    "scatter_add": (lambda x, i: x.scatter_add(0, i, x), (ONES, FAR), (ONES, FAR % 3)),
    "index_add": (lambda x, i: x.index_add(0, i, x[:2]), (ONES, FAR), (ONES, FAR % 3)),
    "index_copy": (lambda x, i: x.index_copy(0, i, x[:2]), (ONES, FAR), (ONES, tensor([0, 1]))),
    "index_fill": (lambda x, i: x.index_fill(0, i, 2.0), (ONES, FAR), (ONES, FAR % 3)),
    "index_put": (lambda x, i: x.index_put((i,), x[:2], accumulate=True), (EYE, FAR), (EYE, FAR % 3)),
    "index_put of many": (
        lambda x, i: x.index_put((i,), x[:2], accumulate=True),
        (torch.ones(3, 1 << 15), tensor([1, -7])),
        (torch.ones(3, 1 << 15), tensor([1, -2])),
    ),
    "nll_loss": (F.nll_loss, (EYE[:2], FAR), (EYE[:2], FAR % 3)),
    "nll_loss, unread": (unread(F.nll_loss), (EYE[:2], FAR), (EYE[:2], FAR % 3)),
    "cross_entropy": (F.cross_entropy, (EYE[:2], FAR), (EYE[:2], FAR % 3)),
    "a loss head": (
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t), (EYE[:2], EYE, FAR), (EYE[:2], EYE, FAR % 3)
    ),
    "multi_margin_loss": (F.multi_margin_loss, (EYE[:2], FAR), (EYE[:2], FAR % 3)),
    "one_hot": (lambda t: F.one_hot(t, 3), (FAR,), (FAR % 3,)),
    "masked_scatter": (lambda x, y: x.masked_scatter(x > 0, y), (ONES, ONES[:1]), (-ONES, ONES[:1])),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        (torch.ones(1, 1, 2, 2), torch.full((1, 1, 2, 2), 99)),
        (torch.ones(1, 1, 2, 2), torch.arange(4).view(1, 1, 2, 2)),
    ),
}  # fmt: skip
NUMBERS = {
    "binary_cross_entropy": (F.binary_cross_entropy, (TWOS, HALVES), (HALVES, HALVES)),
    "binary_cross_entropy, unread": (unread(F.binary_cross_entropy), (TWOS, HALVES), (HALVES, HALVES)),
    "binary_cross_entropy of nan": (F.binary_cross_entropy, (ONES * NAN, HALVES), (HALVES, HALVES)),
    "binary_cross_entropy, targets": (F.binary_cross_entropy, (HALVES, TWOS), (HALVES, HALVES)),
    "binary_cross_entropy of each": (
        lambda p, t: F.binary_cross_entropy(p, t, reduction="none"), (TWOS, HALVES), (HALVES, HALVES)
    ),
    "integers // 0": (lambda a, b: a // b, (FAR, FAR * 0), (FAR, FAR)),
    "integers // 0, unread": (unread(lambda a, b: a // b), (FAR, FAR * 0), (FAR, FAR)),
    "integers % 0": (lambda a, b: a % b, (FAR, FAR * 0), (FAR, FAR)),
    "fmod": (torch.fmod, (FAR, FAR * 0), (FAR, FAR)),
    "histc": (torch.histc, (ONES * NAN,), (ONES,)),
    "segment_reduce": (
        lambda x, n: torch.segment_reduce(x, "sum", lengths=n), (ONES, tensor([5, 1])), (ONES, tensor([2, 1]))
    ),
    "_assert_async": (lambda x: (torch._assert_async((x > 0).all()), x * 2)[1], (-ONES,), (ONES,)),
    "nothing but an assertion": (lambda x: torch._assert_async((x > 0).all()), (-ONES,), (ONES,)),
    "gaussian_nll_loss": (lambda x: F.gaussian_nll_loss(x, x, x), (-ONES,), (ONES,)),
}  # fmt: skip


def a_raise(x):
    if (x < 0).any():
        raise KeyError(f"{x.shape}")
    return x.sqrt()


def a_raise_after_other_lines(x):
    y = x * 2
    if not torch.isfinite(y).all():
        text = "not finite"
        raise OverflowError(text + str(y.shape))
    return y.sin()


def a_raise_of_two_conditions(x):
    if (x < 0).any() or torch.isnan(x).any():
        raise KeyError
    return x + 2


def a_raise_for_each_number(x):
    for number in x.unbind():
        if number < 0:
            raise LookupError
    return x * 5


def a_raise_at_the_end(x):
    if (x > 0).all():
        return x.log()
    raise KeyError


# By the direct trace; TorchDynamo breaks the graph there.
RAISES = {
    function.__name__: (function, (-ONES / 0,), (ONES,))
    for function in (
        a_raise, a_raise_after_other_lines, a_raise_of_two_conditions, a_raise_for_each_number, a_raise_at_the_end
    )
}  # fmt: skip
distributions = torch.distributions
# Under TorchDynamo, which turns these checks off for good, they raise nothing.
CONSTRAINTS = {
    "Normal": (lambda m, s: distributions.Normal(m, s).rsample(), (ONES, -ONES), (ONES, ONES)),
    "Normal, unread": (unread(lambda m, s: distributions.Normal(m, s)), (ONES, -ONES), (ONES, ONES)),
    "Normal of nan": (lambda m, s: distributions.Normal(m, s).log_prob(m), (ONES * NAN, ONES), (ONES, ONES)),
    "a sample": (lambda m, x: distributions.Exponential(m).log_prob(x), (ONES, -ONES), (ONES, ONES)),
    "Categorical": (lambda p, i: distributions.Categorical(p).log_prob(i), (ONES, FAR), (ONES, FAR % 3)),
    "Geometric": (lambda p: distributions.Geometric(p).entropy(), (ONES * 0,), (HALVES,)),
    "ContinuousBernoulli": (
        lambda p: distributions.ContinuousBernoulli(p, validate_args=True).mean, (TWOS,), (HALVES,)
    ),
    "a covariance": (
        lambda m, c: distributions.MultivariateNormal(m, c).log_prob(m), (ONES, EYE + EYE.roll(1, 0)), (ONES, EYE)
    ),
    "a negative covariance": (
        lambda m, c: distributions.MultivariateNormal(m, c).log_prob(m), (ONES, -EYE), (ONES, EYE)
    ),
}  # fmt: skip
CASES = {**MATRICES, **DRAWS, **LOOKUPS, **NUMBERS}
LOWERED = [*LOOKUPS, *NUMBERS]


def error_of(function, arguments):
    """The error's type and the arguments as they are after it; None for no error."""
    given = [value.clone() for value in arguments]
    try:
        function(*given)
    except Exception as error:
        return type(error), [repr(value) for value in given]
    return None


def check(program, refused, accepted, **options):
    torch._dynamo.reset()
    wanted = error_of(program, refused)
    assert wanted is not None
    compiled = aottrain.compile(program, **options)
    for _ in range(2):
        assert error_of(compiled, accepted) is None
        assert error_of(compiled, refused) == wanted
    assert error_of(compiled, accepted) is None
    return compiled.report


@pytest.mark.parametrize(("rng", "name"), [*(("philox", name) for name in CASES), *(("eager", name) for name in DRAWS)])
def test_by_the_direct_trace(rng, name):
    report = check(*CASES[name], capture="trace", kernel="aten", rng=rng)
    assert len(report.graphs) == 1 or report.num_fallbacks > 0


@pytest.mark.parametrize("name", thinned(CASES, one_in=2))
def test_under_dynamo(name):
    check(*CASES[name], kernel="aten")


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("name", thinned(LOWERED, one_in=2))
def test_by_generated_kernels(name):
    check(*CASES[name], capture="trace", kernel="cpp")


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    "program",
    [
        lambda x, i: x[i] * 2,
        lambda x, i: (x * 2)[:, :1].gather(0, i[:, None]),
        lambda x, i: F.embedding(i, x).sin(),
        lambda x, i: F.nll_loss(x.sum(1, keepdim=True), i[1:]),
    ],
    ids=["index", "gather", "embedding", "nll_loss"],
)
def test_generated_kernels_check_what_is_looked_up_along_one_element(program):
    """There nothing moves with the index: an address is right without it."""
    check(program, (torch.ones(1, 3), FAR), (torch.ones(1, 3), FAR * 0), capture="trace", kernel="cpp")


@pytest.mark.parametrize("name", RAISES)
def test_a_branch_that_only_raises(name):
    report = check(*RAISES[name], capture="trace", kernel="aten")
    assert len(report.graphs) == 1 and not report.fallbacks


@pytest.fixture
def validating():
    before = distributions.Distribution._validate_args
    distributions.Distribution.set_default_validate_args(True)
    yield
    distributions.Distribution.set_default_validate_args(before)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_arguments_of_distributions(validating, name):
    report = check(*CONSTRAINTS[name], capture="trace", kernel="aten")
    assert len(report.graphs) == 1


def test_the_checks_of_distributions_are_turned_on(validating):
    compiled = aottrain.compile(CONSTRAINTS["Normal"][0], capture="trace", kernel="aten")
    distributions.Distribution.set_default_validate_args(False)
    compiled(ONES, -ONES)
    distributions.Distribution.set_default_validate_args(True)
    with pytest.raises(ValueError, match="Expected parameter scale"):
        compiled(ONES, -ONES)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).bernoulli_(2.0),
        lambda x: torch.empty_like(x).normal_(0.0, -1.0),
        lambda x: torch.empty_like(x).exponential_(-1.0),
        lambda x: torch.empty_like(x).geometric_(2.0),
        lambda x: torch.empty_like(x).uniform_(2.0, 1.0),
        lambda x: torch.empty_like(x).cauchy_(0.0, -1.0),
        lambda x: torch.empty_like(x).log_normal_(0.0, -1.0),
        lambda x: torch.empty(3, dtype=torch.uint8).random_(0, 1000),
        lambda x: torch.empty_like(x).random_(5, 5),
    ],
)
def test_arguments_that_no_draw_accepts(draw):
    wanted = error_of(draw, (ONES,))
    assert wanted is not None
    assert error_of(aottrain.compile(draw, capture="trace"), (ONES,)) == wanted
    with aottrain.philox_eager():
        assert error_of(draw, (ONES,)) == wanted


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_an_assert_statement(capture):
    torch._dynamo.reset()
    compiled = aottrain.compile(asserting.program, capture=capture)
    compiled(ONES)
    with pytest.raises(AssertionError, match="not positive"):
        compiled(-ONES)
    compiled(ONES)
    assert compiled.report.fallbacks == []


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("first", [True, False])
def test_writes_before_the_error_are_eagers(capture, first):
    def program(x, y):
        if first:
            x.add_(1)
        torch.linalg.cholesky(y)
        x.mul_(3)
        return x + 1

    check(program, (ONES, -EYE), (ONES, EYE), capture=capture)


def test_a_try_inside_the_program():
    def program(x):
        try:
            return torch.linalg.cholesky(x)
        except RuntimeError:
            return x * 0

    compiled = aottrain.compile(program, capture="trace")
    assert torch.equal(compiled(EYE), EYE)
    assert torch.equal(compiled(-EYE), ZEROS)
    assert any("raised where eager does not" in fallback.reason for fallback in compiled.report.fallbacks)


def test_the_error_of_a_drawn_value_is_of_the_same_draw():
    def program(x):
        value = torch.rand(3)
        torch._assert_async((value < x).all())
        return value

    compiled = aottrain.compile(program, capture="trace")
    for seed in range(12):
        torch.manual_seed(seed)
        got = error_of(compiled, (HALVES,))
        torch.manual_seed(seed)
        with aottrain.philox_eager():
            assert got == error_of(program, (HALVES,))
    assert compiled.report.fallbacks == []


@pytest.mark.parametrize("budget", [None, 0.0, 0.5])
@pytest.mark.parametrize("of_gradient", [True, False])
def test_checks_of_a_hook_are_the_backwards(budget, of_gradient):
    def program(x, limit):
        y = x.exp()
        z = y.sin()
        z.register_hook(lambda g: torch._assert_async((g < limit).all() if of_gradient else (y < limit).all()))
        return z.sum() + z.square().sum()

    compiled = aottrain.compile(program, capture="trace", kernel="aten", budget=budget)
    for run in (program, compiled):
        x = torch.ones(3, requires_grad=True)
        run(x, tensor(10.0)).backward()
        with pytest.raises(RuntimeError):
            run(x, tensor(0.0)).backward()
    assert compiled.report.fallbacks == []


def test_of_a_lookup_that_only_the_backward_reads():
    def program(x, i):
        return (x.detach().index_select(0, i) * x[:2]).sum()

    compiled = aottrain.compile(program, capture="trace", kernel="aten", partition="recompute_all")
    compiled(torch.ones(3, requires_grad=True), FAR % 3).backward()
    with pytest.raises(IndexError):
        compiled(torch.ones(3, requires_grad=True), FAR)
