"""What changes between two calls: each time the answer is eager's, and a new program is counted."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aottrain
from aottrain.guards.containers import Comparison, Items, unknown
from tests.numerics.comparison import assert_same, compiled, gradients_of, metadata


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("offset", torch.ones(2))
        self.scale = 2.0

    def forward(self, x):
        return self.second(self.norm(self.first(x)).tanh()) * self.scale + self.offset


def check(model, call, x, num_programs):
    """Outputs and gradients of a call are eager's; so many programs exist afterwards."""
    state = {name: value.clone() for name, value in model.named_buffers()}
    got = call(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    got_gradients = gradients_of(got, parameters)
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(state[name])
    wanted = model(x)
    assert_same(got, wanted)
    assert got.requires_grad is wanted.requires_grad and metadata(got) == metadata(wanted)
    assert_same(got_gradients, gradients_of(wanted, parameters))
    assert len(call.report.graphs) == num_programs


def change_attribute(model):
    model.scale = 3.0


def swap_parameter(model):
    model.first.weight = nn.Parameter(torch.randn(4, 4))


def swap_buffer(model):
    model.offset = torch.full((2,), 5.0)


def swap_module(model):
    model.first = nn.Linear(4, 4)


def freeze(model):
    model.first.weight.requires_grad_(False)


def drop_bias(model):
    model.second.bias = None


def add_hook(model):
    model.first.register_forward_hook(lambda module, args, out: out * 100)


def wider(model):
    model.double()


def evaluation(model):
    model.eval()


def one_submodule_in_evaluation(model):
    model.norm.eval()


CHANGES = [
    change_attribute,
    swap_parameter,
    swap_buffer,
    swap_module,
    freeze,
    drop_bias,
    add_hook,
    evaluation,
    one_submodule_in_evaluation,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_module(change):
    model, x = Net(), torch.randn(5, 4)
    call = compiled(model)
    check(model, call, x, 1)
    check(model, call, x, 1)
    change(model)
    check(model, call, x, 2)
    check(model, call, x, 2)


def test_another_type_of_the_whole_model():
    model, x = Net(), torch.randn(5, 4)
    call = compiled(model)
    check(model, call, x, 1)
    wider(model)
    check(model, call, x.double(), 2)


def test_going_back_finds_the_first_program():
    model, x = Net(), torch.randn(5, 4)
    call = compiled(model)
    for training in (True, False, True, False):
        model.train(training)
        check(model, call, x, 1 if training and len(call.report.graphs) < 2 else 2)


def test_new_values_of_the_same_parameter_need_no_new_program():
    model, x = Net(), torch.randn(5, 4)
    call = compiled(model)
    for _ in range(3):
        check(model, call, x, 1)
        with torch.no_grad():
            model.first.weight.add_(0.1)
    model.load_state_dict(Net().state_dict())
    check(model, call, x, 1)
    model.first.weight.data = torch.randn(4, 4)
    check(model, call, x, 1)


ARGUMENTS = {
    "shape": (torch.ones(3, 4), torch.ones(5, 4)),
    "rank": (torch.ones(4), torch.ones(1, 4)),
    "stride": (torch.ones(4, 4), torch.arange(16.0).view(4, 4).t()),
    "expanded": (torch.ones(4, 4), torch.ones(1, 4).expand(4, 4)),
    "dtype": (torch.ones(4), torch.ones(4, dtype=torch.float64)),
    "complex": (torch.ones(4), torch.ones(4, dtype=torch.complex64)),
    "offset": (torch.arange(8.0)[:4], torch.arange(8.0)[4:]),
    "requires_grad": (torch.ones(4), torch.ones(4, requires_grad=True)),
    "int and float": (1, 1.0),
    "int and bool": (1, True),
    "float and bool": (1.0, True),
    "zeros": (0.0, -0.0),
    "none and zero": (None, 0),
    "number and tensor": (2.0, torch.tensor(2.0)),
    "list and tuple": ([torch.ones(2)], (torch.ones(2),)),
    "string": ("sum", "mean"),
    "more": ([torch.ones(2)], [torch.ones(2), torch.ones(2)]),
}


def describe(x, argument):
    """A function whose answer shows every difference that a program may see."""
    if isinstance(argument, (list, tuple)):
        return type(argument).__name__, [x * v.sum() for v in argument]
    if isinstance(argument, torch.Tensor):
        return argument.dim(), (argument * 2).clone(), x.sum() * argument.sum()
    if isinstance(argument, str):
        return getattr(x, argument)()
    if argument is None:
        return x * 2
    return (
        x.to(torch.int32) + argument,
        torch.atan2(torch.zeros(()), torch.tensor(float(argument))),
        x / (argument + 1.0),
    )


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_changed_arguments(kind):
    call, x = compiled(describe), torch.randn(3)
    for i in (0, 1, 0, 1):
        argument = ARGUMENTS[kind][i]
        got, wanted = call(x, argument), describe(x, argument)
        assert_same(got, wanted)
        for a, b in zip(
            got if isinstance(got, tuple) else [], wanted if isinstance(wanted, tuple) else [], strict=True
        ):
            if isinstance(a, torch.Tensor):
                assert metadata(a) == metadata(b) and a.requires_grad is b.requires_grad
    assert 1 <= len(call.report.graphs) <= 2 and call.report.num_fallbacks == 0


def test_keywords_and_positions_are_told_apart():
    def function(a, b=None, c=None):
        return a * 2 if c is None else a * c

    call, x = compiled(function), torch.ones(2)
    assert_same(call(x, b=x), x * 2)
    assert_same(call(x, c=x * 5), x * 5)
    assert_same(call(x, None, x * 7), x * 7)


def test_grad_mode_inference_mode_and_autocast():
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)
    call = compiled(linear)
    assert call(x).requires_grad
    with torch.no_grad():
        assert not call(x).requires_grad
    with torch.inference_mode():
        assert call(x).is_inference() == linear(x).is_inference()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(call(x), linear(x))
        assert call(x).dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert call(x).dtype == linear(x).dtype
    assert call(x).dtype == torch.float32 and call(x).requires_grad


def test_default_type_and_device_are_guarded():
    def function(x):
        return x * 2, torch.ones(2)

    call, x = compiled(function), torch.ones(2)
    assert call(x)[1].dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert call(x)[1].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert call(x)[1].dtype == torch.float32
    # Refused is as good as right.
    with torch.device("meta"), contextlib.suppress(aottrain.errors.UnsupportedError):
        assert call(x)[1].device.type == "meta"
    assert call(x)[1].device.type == "cpu"


def test_inputs_that_come_to_share_memory():
    def function(a, b):
        a.add_(1)
        return b * 2

    call = aottrain.compile(function, capture="trace")
    assert_same(call(torch.zeros(2), torch.zeros(2)), torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = torch.zeros(2)
        assert_same(call(both, both), torch.full((2,), 2.0))
        whole = torch.zeros(4)
        assert_same(call(whole[:2], whole[:2]), torch.full((2,), 2.0))
        whole = torch.zeros(4)
        assert_same(call(whole[0:2], whole[2:4]), torch.zeros(2))
    assert_same(call(torch.zeros(2), torch.zeros(2)), torch.zeros(2))


def test_one_tensor_twice_without_mutation():
    def function(a, b):
        return a * b

    call = compiled(function)
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    assert_same(torch.autograd.grad(call(x, y).sum(), [x, y]), (y.detach(), x.detach()))
    assert_same(torch.autograd.grad(call(x, x).sum(), x)[0], 2 * x.detach())


def test_a_parameter_given_as_an_argument():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x):
            return x * self.weight

    model = Adds()
    call = compiled(model)
    call(torch.ones(3))
    got = torch.autograd.grad(call(model.weight).sum(), model.weight)[0]
    assert_same(got, 2 * model.weight.detach())


def test_past_the_limit_calls_run_eagerly_and_are_counted():
    from aottrain.compiler.frontends import api

    call = aottrain.compile(lambda x: F.relu(x) * 2, capture="trace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in range(1, api.RECOMPILE_LIMIT + 4):
            x = torch.randn(size)
            assert_same(call(x), F.relu(x) * 2)
    assert len(call.report.graphs) == api.RECOMPILE_LIMIT
    assert call.report.num_fallbacks == 3


def test_past_the_limit_is_an_error_where_that_is_asked_for():
    from aottrain.compiler.frontends import api

    call = compiled(lambda x: x * 2)
    for size in range(1, api.RECOMPILE_LIMIT + 1):
        call(torch.ones(size))
    with pytest.raises(aottrain.errors.UnsupportedError, match=str(api.RECOMPILE_LIMIT)):
        call(torch.ones(100))
    assert_same(call(torch.ones(1)), torch.full((1,), 2.0))


def test_what_is_refused_in_training_may_be_compiled_in_evaluation():
    class Sometimes(nn.Module):
        def forward(self, x):
            return x * float(x.detach().sum()) if self.training else x * 2

    model = Sometimes()
    call = aottrain.compile(model, capture="trace")
    with pytest.warns(UserWarning, match="runs this call eagerly"):
        call(torch.ones(2))
    model.eval()
    call(torch.ones(2))
    assert len(call.report.graphs) == 1 and call.report.num_fallbacks == 1


def test_an_argument_that_cannot_be_guarded_runs_eagerly():
    class Thing:
        factor = 3.0

    call = aottrain.compile(lambda x, thing: x * thing.factor, capture="trace")
    with pytest.warns(UserWarning, match="Thing"):
        assert_same(call(torch.ones(2), Thing()), torch.full((2,), 3.0))
    assert call.report.num_fallbacks == 1


class Unreadable(list):
    """As long as it was, but what it held cannot be read."""

    error: type[Exception] | None = None

    def __getitem__(self, index):
        if self.error:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("error", (IndexError, ReferenceError))
def test_what_cannot_be_read_any_more_holds_no_more(error):
    items = Unreadable([object()])
    comparison = Comparison([(Items(items), 0, items[0])], [], [(items, 1)])
    assert comparison.holds()
    items.error = error
    assert not comparison.holds() and comparison.difference() is unknown
