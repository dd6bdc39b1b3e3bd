"""torch.compile(backend=...) without aottrain.compile around it: the guards that TorchDynamo leaves out."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import aottrain
from aottrain.compiler.frontends.dynamo import backend
from tests.conformance import harness
from tests.conformance.guards import test_guards, test_guards_of_modules

CASES = [
    "hook_added_and_removed",
    "hook_added_to_the_target",
    "backward_hook_added_later",
    "instance_attribute_hides_class_attribute",
    "method_replaced_on_class",
    "forward_replaced_on_class",
    "submodule_replaced",
    "parameter_replaced",
]


@pytest.mark.parametrize("name", CASES)
def test_guarded(name):
    program = getattr(test_guards, name, None) or getattr(test_guards_of_modules, name)
    torch._dynamo.reset()
    wanted = harness.freeze(program(lambda target: target))
    got = harness.freeze(program(lambda target: torch.compile(target, backend=backend)))
    assert harness.difference(wanted, got, close=False) is None


def test_submodule_hidden_by_an_attribute():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    compiled = torch.compile(model, backend=backend)
    x = torch.ones(2)
    compiled(x)
    object.__setattr__(model[0], "bias", torch.full((2,), 5.0))
    assert torch.equal(compiled(x), model(x))


def test_hooks_of_all_modules():
    model = torch.nn.Linear(2, 2)
    compiled = torch.compile(lambda x: model(x), backend=backend)
    x = torch.ones(2)
    before = compiled(x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, out: out * 3)
    try:
        assert torch.equal(compiled(x), before * 3)
    finally:
        handle.remove()
    assert torch.equal(compiled(x), before)


def test_a_backward_within_the_call_is_not_traced():
    """The function breaks at .backward(); TorchDynamo, which still looks at each frame, leaves the compiled one be."""
    weight = torch.ones(3, requires_grad=True)
    watched = []

    def kernel(graph, _):
        def run(*inputs):
            watched.append(torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None)
            return graph(*inputs)

        return run

    def step(x):
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    torch._dynamo.reset()
    compiled = aottrain.compile(step, kernel=kernel)
    assert torch.equal(compiled(torch.arange(3.0)), torch.tensor(3.0))
    assert torch.equal(weight.grad, torch.arange(3.0))
    assert len(watched) >= 2 and not any(watched)


def scaled(x):
    return (x.sin() * 2).sum()


WRAPPERS = {
    "torch.compile": lambda target: torch.compile(target, backend="aot_eager"),
    "its eager backend": lambda target: torch.compile(target, backend="eager"),
    "dynamo": aottrain.compile,
    "trace": lambda target: aottrain.compile(target, capture="trace"),
}


def gradient(function, x):
    x = x.clone().requires_grad_()
    return function(x).detach(), *torch.autograd.grad(function(x), x)


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("whole", [True, False], ids=["itself", "a part of it"])
def test_what_is_compiled_already_is_compiled_once_more(wrapper, capture, whole):
    """The outer program holds the inner one's code. What torch.compile made runs eagerly within a direct trace."""
    torch._dynamo.reset()
    inner = WRAPPERS[wrapper](scaled)
    plain = scaled if whole else lambda x: scaled(x * 2) + x.sum()
    compiled = aottrain.compile(inner if whole else lambda x: inner(x * 2) + x.sum(), capture=capture)
    x = torch.linspace(0, 1, 5)
    torch.testing.assert_close(gradient(compiled, x), gradient(plain, x))
    if capture == "trace" and not whole and wrapper in ("torch.compile", "its eager backend"):
        assert compiled.report.fallbacks
    else:
        assert compiled.report.fallbacks == [] and len(compiled.report.graphs) == 1


@pytest.mark.parametrize("capture", ["trace", "dynamo"])
@pytest.mark.parametrize("kernel", ["aten", "cpp"])
def test_repeats_of_a_marked_dimension(capture, kernel):
    """How many rows there are depends on an input's values, or on its marked size."""
    programs = [
        lambda x, repeats: x.repeat_interleave(repeats, 0),
        lambda x, repeats: x.repeat_interleave(repeats.shape[0], 0),
        lambda x, repeats: (x * 2).repeat_interleave(repeats, 0, output_size=6),
        lambda x, repeats: torch.repeat_interleave(x, 2) + repeats.sum(),
    ]
    for program in programs:
        torch._dynamo.reset()
        compiled = aottrain.compile(program, capture=capture, kernel=kernel)
        for repeats in (torch.tensor([1, 2, 0, 3]), torch.tensor([1, 2, 0, 2, 1])):
            x = torch.randn(len(repeats), 3, requires_grad=True)
            for value in (x, repeats):
                torch._dynamo.mark_dynamic(value, 0)
            wanted, got = program(x, repeats), compiled(x, repeats)
            assert torch.equal(got, wanted)
            assert torch.equal(*(torch.autograd.grad(out.sin().sum(), x)[0] for out in (got, wanted)))


def test_the_registered_backend_tells_methods_of_tensor_apart():
    """Which TorchDynamo itself does not; in a process that has not compiled anything."""
    program = """
import torch
g = torch.compile(lambda x, f: f(x), backend="aottrain")
x = torch.ones(2)
assert torch.equal(g(x, torch.Tensor.cos), x.cos()) and torch.equal(g(x, torch.Tensor.sin), x.sin())
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("options", [3, "budget", ["budget"]])
def test_options_that_are_no_dict(options):
    torch._dynamo.reset()
    with pytest.raises(aottrain.ConfigError, match="options is a "):
        torch.compile(scaled, backend="aottrain", options=options)(torch.ones(3))
