"""Errors that values cause, and what the program does about them: its `except`, its `finally`, what it did before.

TorchDynamo traces a `try` into a graph without its handlers, and lets Python's effects follow the graph. Each call must
be eager's nevertheless, the calls before and after it stay compiled, and what eager runs is counted.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.toolchain.native import find_compiler
from tests.conformance import asserting
from tests.sampling import crossed
from tests.skips import NO_COMPILER

pytestmark = pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
said: list[object] = []
GOOD, BAD = torch.tensor([0, 2]), torch.tensor([0, 7])


def look_up(x, i):
    said.append("looked up")
    return x[i].sin()


def a_lookup(x, i):
    try:
        return x.exp()[i] * 2
    except IndexError:
        return x * 3


def an_embedding(x, i):
    try:
        return F.embedding(i, x).cos()
    except IndexError as error:
        return x + len(str(error))


def a_gather(x, i):
    try:
        return x.gather(0, i[:, None]).exp()
    except (RuntimeError, IndexError):
        return x.exp()


def an_index_select(x, i):
    y = x.sin()
    try:
        y = y.index_select(0, i)
    except Exception:
        y = y + 1
    else:
        y = y * 2
    return y.cos()


def a_cross_entropy(x, i):
    try:
        return F.cross_entropy(x[:2], i)
    except IndexError:
        return x.sum()


def a_nll_loss(x, i):
    try:
        return F.nll_loss(x[:2], i)
    except IndexError:
        return x.mean()


def an_assertion_of_torchs(x, i):
    try:
        torch._assert_async((i < 3).all())
    except RuntimeError:
        return x * 2
    return x * 3


def an_assert_statement(x, i):
    try:
        return asserting.program(x.detach().abs() * (3 - i.max())) + x
    except AssertionError as error:
        return x * len(str(error))


def a_draw(x, i):
    try:
        return x + torch.bernoulli(0.5 * (i.max() < 3) + 2.0 * (i.max() > 3)).detach() * 0
    except RuntimeError:
        return x * 5


def a_factorisation(x, i):
    try:
        return torch.linalg.cholesky(torch.eye(3) * (3 - i.max())) @ x
    except torch.linalg.LinAlgError:
        return x.tan()


def of_a_function_that_it_calls(x, i):
    try:
        return look_up(x, i)
    except IndexError:
        said.append("caught")
        return x + 1


def suppressed(x, i):
    with contextlib.suppress(IndexError):
        return look_up(x, i)
    return x + 2


@contextlib.contextmanager
def forgiving():
    said.append("entered")
    try:
        yield
    except IndexError:
        said.append("forgiven")


def forgiven(x, i):
    with forgiving():
        x = look_up(x, i)
    return x + 3


def with_a_finally(x, i):
    said.append("first")
    try:
        return look_up(x, i)
    finally:
        said.append("finally")


def without_a_handler(x, i):
    said.append(len(said))
    y = look_up(x, i)
    said.append("after")
    return y


def raised_anew(x, i):
    try:
        return look_up(x, i)
    except IndexError as error:
        raise ValueError("of the program's own") from error


def another_error(x, i):
    try:
        return look_up(x, i)
    except ValueError:
        return x


def writes_before(x, i):
    y = x.detach()
    y.add_(1)
    try:
        y.mul_(x.detach().cos().index_select(0, i).sum())
    except IndexError:
        y.sub_(5)
    return y * 2 + x


def in_a_loop(x, i):
    for shift in (1, 0, -5):
        try:
            x = x + (x * 2)[i + shift].sum()
        except IndexError:
            said.append(shift)
    return x


def after_a_break(x, i):
    y = x * 2
    torch._dynamo.graph_break()
    said.append("broken")
    try:
        return y[i]
    except IndexError:
        return y + 1


def before_a_break(x, i):
    try:
        y = x[i]
    except IndexError:
        y = x * 2
    torch._dynamo.graph_break()
    return y.sin()


def with_names(*values, power=2, **more):
    try:
        return values[0][values[1]] ** power + more["added"]
    except IndexError:
        return values[0] * power - more["added"]


def of_names(x, i):
    return with_names(x, i, added=3, power=3)


def with_cells(x, i, /, times=3):
    total = []

    def add(value):
        nonlocal times
        times += 1
        total.append(value * times)
        return x

    try:
        add(x)
        add(x[i].sum())
    except IndexError:
        add(x.cos())
    return sum(value.sum() for value in total) + times


def of_a_generator(x, i):
    def parts():
        try:
            yield x[i]
        except IndexError:
            yield x
        yield x * 2

    try:
        return [part.sin() for part in parts()]
    except IndexError:
        return [x]


def of_pythons_random_numbers(x, i):
    factor = random.uniform(1, 2)
    try:
        return x[i] * factor + random.randint(1, 9)
    except IndexError:
        return x * factor + random.randint(1, 9)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x, i):
        self.count += 1
        return x.sin()[i]


class Model(Base):
    def forward(self, x, i):
        self.last = x.shape
        try:
            return super().forward(x, i) + self.count
        except IndexError:
            self.failed = True
            return x * self.count


PROGRAMS = [a_lookup, an_embedding, a_gather, an_index_select, a_cross_entropy, a_nll_loss, an_assertion_of_torchs]
PROGRAMS += [an_assert_statement, a_draw, a_factorisation, of_a_function_that_it_calls, suppressed, forgiven]
PROGRAMS += [with_a_finally, without_a_handler, raised_anew, another_error, writes_before, in_a_loop, after_a_break]
PROGRAMS += [before_a_break, of_names, with_cells, of_a_generator, of_pythons_random_numbers, Model]
FRONTENDS = {
    "dynamo": lambda target, **options: aottrain.compile(target, **options),
    "trace": lambda target, **options: aottrain.compile(target, capture="trace", **options),
    "torch": lambda target, **options: torch.compile(target, backend="aottrain", options=options, dynamic=False),
}
KERNELS = ["aten", pytest.param("cpp", marks=pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER))]


def seen(function, i):
    """What a caller sees of a call: the result and its gradient, or the error; what is written, said and drawn."""
    said.clear()
    random.seed(5)
    leaf = torch.arange(1.0, 10.0).view(3, 3).div(10).requires_grad_()
    x = leaf * 1
    try:
        result = function(x, i)
    except Exception as error:
        return type(error), str(error).partition("\n")[0], x.tolist(), list(said), random.random()
    results = result if isinstance(result, list) else [result]
    (gradient,) = torch.autograd.grad(sum(value.sum() for value in results), leaf)
    return [value.detach() for value in (*results, gradient, x)], list(said), random.random()


def same(one, other):
    if isinstance(one, list) and one and isinstance(one[0], torch.Tensor):
        return len(one) == len(other) and all(map(lambda a, b: torch.allclose(a, b, rtol=1e-6, atol=1e-6), one, other))
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


@pytest.mark.parametrize(("program", "frontend", "kernel"), crossed(PROGRAMS, FRONTENDS, ["aten", "cpp"], one_in=4))
def test_as_eager(program, frontend, kernel):
    if kernel == "cpp" and find_compiler() is None:
        pytest.skip(NO_COMPILER)
    for order in ([GOOD, BAD, GOOD, BAD], [BAD, GOOD]):
        torch._dynamo.reset()
        ours, eagers = (program(), program()) if isinstance(program, type) else (program, program)
        compiled = FRONTENDS[frontend](ours, kernel=kernel)
        for i in order:
            wanted, got = seen(eagers, i), seen(compiled, i)
            assert same(wanted, got), f"{wanted} became {got}"
            if isinstance(program, type):
                assert same([eagers.count], [ours.count])
                assert eagers.last == ours.last and hasattr(eagers, "failed") == hasattr(ours, "failed")


def test_what_the_program_catches_is_counted_and_the_rest_stays_compiled():
    compiled = aottrain.compile(a_lookup)
    for i in (GOOD, BAD, GOOD, BAD):
        seen(compiled, i)
    (fallback,) = compiled.report.fallbacks
    assert fallback.count == 2 and "IndexError" in fallback.reason and fallback.source.startswith("test_values_that")
    assert len(compiled.report.graphs) == 1 and not compiled.report.graph_breaks


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_it_is_an_error_where_that_is_asked_for(capture):
    compiled = aottrain.compile(a_lookup, capture=capture, on_unsupported="error")
    assert same(seen(compiled, GOOD), seen(a_lookup, GOOD))
    with pytest.raises(aottrain.UnsupportedError, match="raised where eager does not: IndexError"):
        compiled(torch.ones(3, 3), BAD)
    uncaught = another_error if capture == "dynamo" else gathered
    plain = aottrain.compile(uncaught, capture=capture, on_unsupported="error")
    with pytest.raises(IndexError):
        plain(torch.ones(3, 3), BAD)


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_an_error_after_a_warning_is_eagers(capture):
    """Torch warns of the spread of one number. What it warns of while an error is on its way comes in the error's
    place, from the second warning on."""

    def function(x):
        spread = x.sum().std()
        torch.linalg.inv(torch.eye(2) * (x.detach() > 0).any())
        return spread

    call = aottrain.compile(function, capture=capture)
    with pytest.warns(UserWarning, match="degrees of freedom"):
        call(torch.ones(4, requires_grad=True))
    error = None
    with pytest.warns(UserWarning, match="degrees of freedom"):
        try:
            call(-torch.ones(4, requires_grad=True))
        except Exception as raised:
            error = raised
    assert isinstance(error, torch.linalg.LinAlgError) and "is singular" in str(error), repr(error)
    assert call.report.num_fallbacks == 0


def test_the_traceback_ends_at_the_programs_line():
    compiled = aottrain.compile(look_up)
    with pytest.raises(IndexError) as caught:
        compiled(torch.ones(3, 3), BAD)
    assert caught.traceback[-1].frame.code.raw is look_up.__code__
    assert caught.traceback[-1].lineno == look_up.__code__.co_firstlineno + 1
    assert caught.value.__context__ is None


def gathered(x, i):
    return x[i].sin()


def refused(x, i):
    x.add_(1)
    said.append("wrote")
    try:
        y = torch.rand(3, generator=torch.Generator().manual_seed(1)) * 0 + x[i].sum()
    except IndexError:
        said.append("caught")
        return x * 2
    finally:
        said.append("finally")
    return x + y


def not_traced_as_written(x, i):
    """as_strided counts from the start of the memory."""
    try:
        return x[i] + x.as_strided((3,), (1,), 1)
    except IndexError:
        return x * 2


@pytest.mark.parametrize("program", [refused, not_traced_as_written])
def test_what_is_not_compiled(program):
    for order in ([GOOD, BAD, GOOD, BAD], [BAD, GOOD]):
        torch._dynamo.reset()
        compiled = aottrain.compile(program)
        for i in order:
            wanted, got = seen(program, i), seen(compiled, i)
            assert same(wanted, got), f"{wanted} became {got}"
    memory = torch.arange(24.0)
    compiled = aottrain.compile(program)
    for first, i in ((0, GOOD), (6, GOOD), (6, BAD), (0, BAD), (0, GOOD)):
        given = [memory.clone()[first : first + 9].view(3, 3) for _ in range(2)]
        assert torch.equal(compiled(given[0], i), program(given[1], i))


def test_under_forward_mode():
    def program(x, i):
        said.append("called")
        try:
            return x[i]
        except IndexError:
            return x * 2

    compiled = aottrain.compile(program)
    compiled(torch.ones(3), GOOD)
    with torch.autograd.forward_ad.dual_level():
        for i in (GOOD, BAD):
            assert torch.equal(compiled(torch.ones(3), i), program(torch.ones(3), i))
    assert said[-4:] == ["called"] * 4


def test_compiled_code_dies_with_its_function():
    def make(factor):
        def program(x, i):
            try:
                return x[i] * factor
            except IndexError:
                return x * factor

        return program

    program = make(torch.ones(3))
    compiled = aottrain.compile(program)
    seen(compiled, GOOD), seen(compiled, BAD)
    references = weakref.ref(program), weakref.ref(compiled)
    report = weakref.ref(compiled.report)
    torch._dynamo.reset()
    del program, compiled
    gc.collect()
    assert all(reference() is None for reference in (*references, report))


@pytest.mark.parametrize("kernel", KERNELS)
def test_pythons_random_numbers(kernel):
    """TorchDynamo traces a drawn float as float32, and gives float64."""
    for program in (lambda x: x * random.uniform(1, 2), lambda x: x.sum().int() * random.randint(1, 9)):
        compiled = aottrain.compile(program, kernel=kernel)
        for seed in range(3):
            random.seed(seed)
            wanted = program(torch.ones(3)), random.random()
            random.seed(seed)
            got = compiled(torch.ones(3)), random.random()
            assert torch.equal(got[0], wanted[0]) and (got[0].dtype, got[1]) == (wanted[0].dtype, wanted[1])
        assert compiled.report.num_fallbacks == 3


def test_of_other_backends():
    """Code of theirs stays as it is, and handles no signal of ours."""
    plain = torch.compile(a_lookup, backend="eager")
    inner = aottrain.compile(a_lookup)
    for i in (GOOD, BAD):
        seen(inner, i)
    assert same(seen(plain, GOOD), seen(a_lookup, GOOD))
    with pytest.raises(IndexError):
        plain(torch.ones(3, 3), BAD)
