"""One program, called with memory that lies apart and with memory that overlaps, in either order: each call is eager's.

Where an op writes memory that overlaps, eager raises, and the program may catch it. A program that was compiled for
other memory must not run then.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import aottrain
from aottrain.compiler.frontends import dynamo
from aottrain.toolchain.native import find_compiler
from tests.sampling import crossed, thinned
from tests.skips import NO_COMPILER

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason=NO_COMPILER)
said: list[str] = []


def in_a_try(x, y):
    try:
        x.add_(y)
    except RuntimeError:
        return y + 100
    return y + 1


def without_a_try(x, y):
    x.add_(y)
    return y + 1


def after_another_write(x, y):
    said.append("called")
    z = y * 2
    z[0].mul_(3)
    try:
        z.sub_(1)
        x.add_(z[0].mean())
        torch.mul(y, 2, out=x)
    except RuntimeError:
        said.append("caught")
        return x * 1, z
    finally:
        said.append("left")
    return x + 1, z


def helper(x, y):
    x.copy_(y)
    return 1


def in_a_function_that_it_calls(x, y):
    try:
        number = helper(x, y)
    except RuntimeError as error:
        number = len(type(error).__name__)
    return y * number


def after_a_break(x, y):
    z = y + 1
    torch._dynamo.graph_break()
    try:
        x.add_(y)
    except RuntimeError:
        return z + 100
    return z * 2


def what_is_not_compiled(x, y):
    z = (y.detach().requires_grad_() * 2)[1:]
    try:
        x.add_(y)
    except RuntimeError:
        return y + 100
    return z.as_strided((1,), (1,)).detach() + y


class WithABuffer(nn.Module):
    """Its second argument is written into the buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 2))

    def forward(self, x, y):
        self.kept = x
        try:
            self.kept.add_(y)
        except RuntimeError:
            return y + 100
        return y + 1


def apart():
    return numbers(6).view(3, 2), numbers(6).view(3, 2)


def shifted():
    memory = numbers(8)
    return memory[2:].view(3, 2), memory[:-2].view(3, 2)


def parts():
    return tuple(numbers(12).view(6, 2).split(3))


def expanded():
    return numbers(2).expand(3, 2), numbers(6).view(3, 2)


def windows():
    return numbers(4).as_strided((3, 2), (1, 1)), numbers(6).view(3, 2)


def columns():
    memory = numbers(12).view(3, 4)
    return memory[:, ::2], memory[:, 1::2]


def numbers(count):
    return torch.arange(1.0, count + 1)


PROGRAMS = [in_a_try, without_a_try, after_another_write, in_a_function_that_it_calls, after_a_break]
PROGRAMS += [what_is_not_compiled, WithABuffer]
FRONTENDS = {
    "dynamo": lambda target, **options: aottrain.compile(target, capture="dynamo", **options),
    "trace": lambda target, **options: aottrain.compile(target, capture="trace", **options),
    "torch": lambda target, **options: torch.compile(target, backend="aottrain", options=options, dynamic=False),
}


def seen(function, given):
    """What a caller sees of one call: the result or the error's type, what is written, what the program has said."""
    said.clear()
    try:
        result = function(*given)
    except Exception as error:
        return type(error), [value.tolist() for value in given], list(said)
    results = result if isinstance(result, tuple) else (result,)
    return [value.tolist() for value in results], [value.tolist() for value in given], list(said)


def compare(program, frontend, orders, **options):
    made = program() if isinstance(program, type) else program
    compiled = FRONTENDS[frontend](made, **options)
    for make in orders:
        given = make()
        got = seen(compiled, given)
        assert got == seen(program() if isinstance(program, type) else program, make()), make.__name__
    return compiled


@pytest.fixture(autouse=True)
def _anew():
    torch._dynamo.reset()


LAID = [apart, shifted, apart, expanded, windows, parts, columns, apart]
COMBINED = [(program, frontend, "auto") for program in PROGRAMS for frontend in FRONTENDS]
COMBINED += [
    (program, frontend, "cpp") for program in (in_a_try, after_another_write) for frontend in ("dynamo", "trace")
]


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize(
    ("program", "frontend", "kernel"),
    [pytest.param(*values, marks=[needs_compiler] * (values[2] == "cpp")) for values in COMBINED],
    ids=["-".join((program.__name__, *names)) for program, *names in COMBINED],
)
def test_each_call_is_eagers(program, frontend, kernel):
    compare(program, frontend, LAID, kernel=kernel)
    for other in (shifted, expanded, windows):
        torch._dynamo.reset()
        compare(program, frontend, [other, apart, other], kernel=kernel)


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize("orders", thinned(itertools.permutations([apart, shifted, expanded]), one_in=3))
def test_calls_with_memory_that_lies_apart_stay_compiled(orders):
    compiled = compare(in_a_try, "dynamo", [*orders, apart])
    assert compiled.report.num_fallbacks == 2 and len(compiled.report.graphs) == 1


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
def test_it_is_an_error_where_that_is_asked_for():
    compiled = compare(in_a_try, "dynamo", [apart], on_unsupported="error")
    with pytest.raises(aottrain.UnsupportedError, match="shares its memory"):
        compiled(*shifted())
    compare(in_a_try, "dynamo", [apart])


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize("frontend", ["dynamo", "torch"])
def test_calls_that_overlap_are_counted_and_not_traced_without_end(frontend):
    def program(x, y):
        return in_a_try(x, y)

    frames = torch._dynamo.utils.counters["frames"]
    compiled = FRONTENDS[frontend](program)
    compare_more(compiled, [apart])
    before = frames["total"]
    compare_more(compiled, [*[shifted] * (dynamo.RECOMPILE_LIMIT + 4), apart])
    found = [fallback for report in aottrain.reports() for fallback in report.fallbacks]
    counts = [fallback.count for fallback in found if "shares its memory" in fallback.reason]
    assert dynamo.RECOMPILE_LIMIT + 4 in counts
    assert frames["total"] <= before + 2 * dynamo.RECOMPILE_LIMIT  # its own frame, and that of what it calls
    torch._dynamo.reset()
    before = frames["total"]
    compare_more(compiled, [shifted, apart])
    assert frames["total"] > before


def compare_more(compiled, orders):
    for make in orders:
        assert seen(compiled, make()) == seen(in_a_try, make()), make.__name__


def doubled(x):
    try:
        x.mul_(2)
    except RuntimeError:
        return x + 100
    return x + 1


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize("kernel", ["auto", pytest.param("cpp", marks=needs_compiler)])
@pytest.mark.parametrize(("frontend", "first"), crossed(["dynamo", "trace"], [0, 2], one_in=2))
def test_of_symbolic_sizes(first, frontend, kernel):
    """Strides are no part of what a program is compiled for: rows that lie apart, and rows that overlap."""
    compiled = aottrain.compile(doubled, dynamic=True, capture=frontend, kernel=kernel)
    layouts = [((3, 3), (5, 1)), ((4, 3), (6, 1)), ((3, 3), (2, 1)), ((5, 3), (2, 1)), ((5, 3), (7, 1))]
    for shape, stride in layouts[first:] + layouts[:first]:
        ours, eagers = numbers(40), numbers(40)
        assert torch.equal(compiled(ours.as_strided(shape, stride)), doubled(eagers.as_strided(shape, stride)))
        assert torch.equal(ours, eagers)
    assert compiled.report.graphs


def multiplied(x, y):
    try:
        return x @ y
    except RuntimeError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:aottrain runs this call eagerly")
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_arguments_that_are_wrong(frontend):
    """In a `try` and outside of one: the error is eager's, and other calls stay compiled."""
    right, wrong = (torch.ones(3, 3), torch.ones(3, 3)), (torch.ones(3, 3), torch.ones(2, 3))
    for program in (multiplied, torch.matmul):
        torch._dynamo.reset()
        earlier = {id(report) for report in aottrain.reports()}
        compiled = FRONTENDS[frontend](program)
        for arguments in (wrong, right, wrong, right):
            expected, got = error_or_result(program, arguments), error_or_result(compiled, arguments)
            assert torch.equal(expected, got) if arguments is right else expected == got
        made = [report for report in aottrain.reports() if id(report) not in earlier]
        assert sum(len(report.graphs) for report in made) == 1
        assert sum(report.num_fallbacks for report in made) == 2 or frontend == "torch"


def test_arguments_that_are_wrong_are_an_error_where_that_is_asked_for():
    compiled = FRONTENDS["torch"](multiplied, on_unsupported="error")
    with pytest.raises(aottrain.UnsupportedError, match="cannot trace it"):
        compiled(torch.ones(3, 3), torch.ones(2, 3))
    assert torch.equal(compiled(torch.ones(3, 3), torch.ones(3, 3)), torch.full((3, 3), 3.0))


def error_or_result(function, given):
    try:
        return function(*given)
    except Exception as error:
        return type(error), str(error)
