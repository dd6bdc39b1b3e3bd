"""Half-precision parameters with float32 copies in the optimizer: by generated kernels, and by torch's own step."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from aottrain.ops.optimizers.masters import MASTER, MasterWeights
from aottrain.toolchain.native import find_compiler
from tests.compiler.optimizers.optimizing import CASES, FUSED, gradients, in_groups, made
from tests.numerics.comparison import assert_same
from tests.numerics.tolerance import assert_close

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")
SIZES = ((63,), (4097,), (0,), (3, 5, 7))
KERNELS = [pytest.param("cpp", marks=needs_compiler), "evaluate", "torch"]


def optimizer_of(name, kernel, parameters):
    ours, theirs, options = CASES[name]
    if kernel != "torch":
        return ours(in_groups(parameters), master_weights=True, kernel=kernel, **options)
    fused = {"fused": True} if theirs in FUSED else {}
    return MasterWeights(partial(theirs, **options, **fused), in_groups(parameters))


def mixed():
    """Of bfloat16, float32 and float16."""
    types = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16)
    return [nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(made(torch.float32, SIZES), types, strict=True)]


def take(optimizer, parameters, step, dtype=None):
    for parameter, gradient in zip(parameters, gradients(step, torch.float32, SIZES), strict=True):
        parameter.grad = gradient.to(dtype or parameter.dtype).to(parameter.dtype)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + step)
    optimizer.step()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CASES)
def test_copies_are_trained_as_float32_and_parameters_are_their_rounding(name, kernel):
    """Also over a checkpoint in the middle, which torch would round to the parameters' types."""
    parameters = mixed()
    wide = [nn.Parameter(p.detach().float().clone()) for p in parameters]
    optimizer, exact = optimizer_of(name, kernel, parameters), CASES[name][1](in_groups(wide), **CASES[name][2])
    for step in range(6):
        take(optimizer, parameters, step)
        for parameter, other in zip(parameters, wide, strict=True):
            other.grad = parameter.grad.float()
        for group in exact.param_groups:
            group["lr"] = 1e-3 / (1 + step)
        exact.step()
        if step == 2:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_of(name, kernel, parameters)
            optimizer.load_state_dict(saved)
    for parameter, other in zip(parameters, wide, strict=True):
        state = optimizer.state[parameter]
        if parameter.dtype is torch.float32:
            assert MASTER not in state
            assert_close(parameter.detach(), other.detach())
            continue
        assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(state, torch.float32)
        assert_close(state[MASTER], other.detach())
        assert_same(parameter.detach(), state[MASTER].to(parameter.dtype))


@needs_compiler
@pytest.mark.parametrize("name", ["adamw", "sgd momentum", "lion"])
def test_either_goes_on_with_the_others_state(name):
    ends = []
    for kernels in (("cpp", "torch"), ("torch", "cpp")):
        parameters = mixed()
        optimizer = optimizer_of(name, kernels[0], parameters)
        take(optimizer, parameters, 0)
        saved = copy.deepcopy(optimizer.state_dict())
        optimizer = optimizer_of(name, kernels[1], parameters)
        optimizer.load_state_dict(saved)
        take(optimizer, parameters, 1)
        ends.append([optimizer.state[p].get(MASTER, p).detach() for p in parameters])
    for a, b in zip(*ends, strict=True):
        assert_close(a, b)


def test_steps_too_small_for_bfloat16_add_up():
    """At 1 a bfloat16's next number is 2^-7 away, and half of that is lost by each step without a copy."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = MasterWeights(partial(torch.optim.SGD, lr=2.0**-10), [{"params": [parameter]}])
    for _ in range(16):
        parameter.grad = torch.ones(4, dtype=torch.bfloat16)
        optimizer.step()
    assert_same(parameter.detach(), torch.full((4,), 1 - 2.0**-6, dtype=torch.bfloat16))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_step_that_is_left_out_changes_nothing(kernel):
    parameters = mixed()
    optimizer = optimizer_of("adamw", kernel, parameters)
    take(optimizer, parameters, 0)
    before = copy.deepcopy([parameters, [dict(optimizer.state[p]) for p in parameters]])
    optimizer.found_inf = torch.ones(())
    take(optimizer, parameters, 1)
    for parameter, state, old, old_state in zip(parameters, map(optimizer.state.get, parameters), *before, strict=True):
        assert_same(parameter.detach(), old.detach())
        for key, value in old_state.items():
            assert_same(state[key], value)
    del optimizer.found_inf
    take(optimizer, parameters, 2)
    assert all((p != old).any() for p, old in zip(parameters, before[0], strict=True) if p.numel())
