"""What runs eagerly is counted, with the line that it is about, or is an error: by either front end, the whole call or
a part of it."""

from __future__ import annotations

import gc
import logging
import pickle
import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import aottrain
from aottrain.compiler.frontends import dynamo

ONE = torch.ones(3)
LIMIT = dynamo.RECOMPILE_LIMIT


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def twice(x):
    return x * 2


def writes(a, b):
    a.add_(1)
    return a * b


def under_hooks(call):
    handle = register_module_forward_hook(lambda *_: None)
    try:
        return call(ONE)
    finally:
        handle.remove()


def under_forward_mode(call):
    with torch.autograd.forward_ad.dual_level():
        return call(ONE)


def of_many_shapes(call):
    for size in range(1, LIMIT + 1):
        call(torch.ones(size))
    return call(torch.ones(LIMIT + 1))


def of_overlapping(call):
    call(torch.ones(3), torch.ones(3))
    memory = torch.ones(4)
    return call(memory[:3], memory[1:])


CALLS = [(twice, under_hooks), (twice, under_forward_mode), (twice, of_many_shapes), (writes, of_overlapping)]


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
@pytest.mark.parametrize(("function", "use"), CALLS)
def test_a_call(capture, function, use):
    wanted = use(function)
    counted = aottrain.compile(function, capture=capture)
    assert torch.equal(use(counted), wanted)
    (fallback,) = counted.report.fallbacks
    assert fallback.count == 1 and fallback.source.startswith("test_counting.py:")
    torch._dynamo.reset()
    with pytest.raises(aottrain.UnsupportedError, match=fallback.reason.split(",")[0]):
        use(aottrain.compile(function, capture=capture, on_unsupported="error"))


def test_an_attribute_that_hides_a_submodule():
    model = nn.Sequential(nn.Linear(3, 3))
    call = aottrain.compile(model, on_unsupported="error")
    call(ONE)
    vars(model)["0"] = nn.Identity()
    with pytest.raises(aottrain.UnsupportedError, match="hides"):
        call(ONE)


def broken(x, factor):
    y = x * 2
    torch._dynamo.graph_break()
    return y * factor + 1


def test_a_part_past_the_limit():
    call = aottrain.compile(broken)
    for i in range(40):
        assert torch.equal(call(ONE, i + 0.5), broken(ONE, i + 0.5))
    (fallback,) = call.report.fallbacks
    assert len(call.report.graphs) == LIMIT + 1 and fallback.count == 40 - LIMIT
    assert fallback.reason == dynamo.LIMIT_REACHED and fallback.source.startswith("test_counting.py:")
    (found,) = call.report.graph_breaks
    assert "graph_break" in found.reason and found.source.startswith("test_counting.py:")
    assert found.source in call.report.explain().partition("Program 1")[0]


def test_targets_of_one_code_have_a_limit_each():
    """Blocks of a model that are compiled one by one, as those that are sharded one by one, have one code."""
    blocks = [nn.Linear(3, 3) for _ in range(LIMIT + 3)]
    for block in blocks:
        block.forward = aottrain.compile(block.forward)
    for _ in range(2):
        nn.Sequential(*blocks)(torch.ones(2, 3)).sum().backward()
    reports = [block.forward.report for block in blocks]
    assert {(len(report.graphs), report.num_fallbacks) for report in reports} == {(1, 0)}
    for size in range(3, LIMIT + 5):  # those of one target still count
        blocks[0](torch.ones(size, 3))
    assert len(reports[0].graphs) == LIMIT and reports[0].num_fallbacks


def test_a_part_past_the_limit_is_an_error_where_that_is_asked_for():
    call = aottrain.compile(broken, on_unsupported="error")
    for i in range(LIMIT):
        call(ONE, i + 0.5)
    for _ in range(2):
        with pytest.raises(aottrain.UnsupportedError, match="16 programs"):
            call(ONE, 100.0)
    assert torch.equal(call(ONE, 0.5), broken(ONE, 0.5))


def test_after_a_reset_programs_are_made_again():
    call = aottrain.compile(twice)
    of_many_shapes(call)
    torch._dynamo.reset()
    call(torch.ones(LIMIT + 1))
    assert call.report.num_fallbacks == 0 and len(call.report.graphs) == 1


@pytest.mark.parametrize("kept", [True, False], ids=["while the old report is held", "while nobody holds it"])
def test_after_a_reset_no_report_has_what_was_before(kept):
    """TorchDynamo numbers pieces of code anew then: another program may get the number of an earlier one."""
    before = {id(report) for report in aottrain.reports()}
    held = []
    for function in (twice, scaled_thrice):
        torch._dynamo.reset()
        call = torch.compile(function, backend="aottrain")
        call(ONE)
        made = [report for report in aottrain.reports() if id(report) not in before]
        (report,) = [report for report in made if report not in held]
        assert len(report.graphs) == 1
        held += [report] * kept
        before.add(id(report))


def scaled_thrice(x):
    return x * 3


def test_nothing_to_compile_is_no_fallback():
    call = aottrain.compile(lambda x: x, on_unsupported="error")
    assert call(ONE) is ONE and call(ONE) is ONE and not call.report.fallbacks


def test_a_call_in_which_torch_compiles_nothing():
    call = aottrain.compile(twice)
    with torch.compiler.set_stance("force_eager"):
        call(ONE)
    assert call.report.num_fallbacks == 1
    call = aottrain.compile(twice, on_unsupported="error")
    with torch.compiler.set_stance("force_eager"), pytest.raises(aottrain.UnsupportedError, match="no graph"):
        call(ONE)


@pytest.mark.parametrize("capture", ["dynamo", "trace"])
def test_the_line_of_the_program_is_named(capture):
    def program(x):
        y = x + 1
        return y.multinomial(1, generator=torch.Generator().manual_seed(0))

    call = aottrain.compile(program, capture=capture)
    call(ONE)
    first = program.__code__.co_firstlineno
    if call.report.fallbacks:  # else TorchDynamo broke the graph there
        assert [value.source for value in call.report.fallbacks] == [f"test_counting.py:{first + 2}"]
    else:
        assert f"test_counting.py:{first + 2}" in {value.source for value in call.report.graph_breaks}


def test_a_line_of_the_backward():
    class Draws(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * torch.rand(3)

    call = aottrain.compile(lambda x: Draws.apply(x), capture="trace")
    call(torch.ones(3, requires_grad=True))
    (fallback,) = call.report.fallbacks
    assert "draws" in fallback.reason and fallback.source.startswith("test_counting.py:")


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
def test_memory_that_is_put_behind_a_tensor_is_named(capture):
    def f(x):
        x.data = x.data * 2
        return x + 1

    call = aottrain.compile(f, capture=capture)
    call(torch.ones(3))
    assert [fallback.reason for fallback in call.report.fallbacks] == [
        "the program puts other memory behind a tensor by .data"
    ]


def test_a_reason_is_warned_of_once():
    call = torch.compile(writes, backend="aottrain")
    memory = torch.ones(6)
    call(torch.ones(3), torch.ones(3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            call(memory[:3], memory[1:4])
    assert len([one for one in said if "shares its memory" in str(one.message)]) == 1
    found = [report for report in aottrain.reports() if report.target.startswith("writes (test_counting.py:")]
    found = [report for report in found if report.num_fallbacks == 3]
    assert len(found) == 1 and len(found[0].graphs) == 1


def test_reports_of_what_is_alive():
    def function(x):
        return x.sin()

    gc.collect()  # TorchDynamo numbers code anew after a reset: no report of an earlier test may be alive
    earlier = aottrain.reports()
    call, other = aottrain.compile(function, capture="trace"), torch.compile(function, backend="aottrain")
    call(ONE)
    other(ONE)
    other(torch.ones(4))
    made = [(report.target, len(report.graphs)) for report in aottrain.reports()[len(earlier) :]]
    assert [count for _, count in made] == [1, 2] and "function" in made[0][0]
    del call, other, function
    torch._dynamo.reset()
    gc.collect()
    assert len(aottrain.reports()) <= len(earlier)


def test_a_report_of_what_torch_compile_was_given_has_its_name():
    class Net(nn.Sequential):
        def forward(self, x):
            y = super().forward(x)
            print(end="")  # a graph break
            return y.sin()

    def loss(x):
        return x.sin().sum()

    gc.collect()
    earlier = {id(report) for report in aottrain.reports()}
    net, function = Net(nn.Linear(2, 2)), torch.compile(loss, backend="aottrain")
    compiled = torch.compile(net, backend="aottrain")
    compiled(torch.ones(3, 2)), function(ONE)
    names = [report.target for report in aottrain.reports() if id(report) not in earlier]
    first, resumed, last = [name.partition(" (")[0] for name in names]
    assert (first, resumed) == ("Net", "forward, after a graph break") and last.endswith("loss")
    assert all(re.search(r" \([\w.]+:\d+\)$", name) for name in names)


@pytest.mark.parametrize("frontend", ["dynamo", "trace", "torch.compile"])
def test_a_budget_error_arrives_as_it_is(frontend):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    if frontend == "torch.compile":
        call = torch.compile(model, backend="aottrain", options={"budget": "100B"})
    else:
        call = aottrain.compile(model, budget="100B", capture=frontend)
    for _ in range(2):
        with pytest.raises(aottrain.BudgetError, match="^a budget of 100B cannot be met: ") as found:
            call(torch.ones(4, 8))
        assert type(found.value) is aottrain.BudgetError and "\n" not in str(found.value)


def test_wrong_options_arrive_as_they_are():
    with pytest.raises(aottrain.ConfigError, match="budgit"):
        torch.compile(twice, backend="aottrain", options={"budgit": 1})(ONE)


def test_every_public_name_is_there():
    assert all(getattr(aottrain, name) is not None for name in aottrain.__all__)
    assert aottrain.errors.UnsupportedError is aottrain.UnsupportedError
    assert {"reports", "UnsupportedError", "errors"} <= set(dir(aottrain))


def test_an_error_survives_pickling():
    error = pickle.loads(pickle.dumps(aottrain.UnsupportedError("why", "a.py:3")))
    assert (error.reason, error.source, str(error)) == ("why", "a.py:3", "why (a.py:3)")


def test_bisect_takes_one_input():
    model = nn.Linear(3, 3)
    assert aottrain.bisect(model, torch.ones(2, 3)).stage is None
    assert aottrain.bisect(model, [torch.ones(2, 3)]).stage is None


def test_where_torch_dynamo_itself_fails_python_runs():
    """torch 2.13 asserts where a hook of a value that it traces is removed."""

    def program(x):
        y = x.sin()
        handle = y.register_hook(lambda gradient: gradient * 5)
        z = y * 2
        handle.remove()
        return z.sum()

    call = aottrain.compile(program)
    for _ in range(2):
        ours, eagers = ONE.clone().requires_grad_(), ONE.clone().requires_grad_()
        call(ours).backward()
        program(eagers).backward()
        assert torch.equal(ours.grad, eagers.grad)
    assert call.report.graphs or call.report.num_fallbacks == 2
    torch._dynamo.reset()
    if call.report.fallbacks:
        with pytest.raises(aottrain.UnsupportedError, match="cannot trace"):
            aottrain.compile(program, on_unsupported="error")(ONE)


@pytest.mark.parametrize("frontend", ["dynamo", "trace"])
def test_a_wrong_shape_is_eager_s_error_without_torch_s_log_of_the_trace(frontend):
    logged = []
    listening = logging.Handler(logging.ERROR)
    listening.emit = logged.append
    logging.getLogger("torch").addHandler(listening)
    logging.getLogger().addHandler(listening)
    call = aottrain.compile(nn.Linear(8, 8), capture=frontend)
    with pytest.warns(UserWarning, match="runs this call eagerly"), pytest.raises(RuntimeError, match="cannot be mult"):
        call(torch.ones(2, 5))
    for name in ("torch", ""):
        logging.getLogger(name).removeHandler(listening)
    assert not logged
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    assert not logger.disabled
