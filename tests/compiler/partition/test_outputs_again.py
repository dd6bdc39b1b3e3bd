"""Results that the backward computes again instead of reading them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.link.room import fusion_model
from aottrain.compiler.options import CompileOptions
from aottrain.compiler.partition.split import apply_partition
from aottrain.compiler.partition.strategies import plan_partition
from aottrain.ir.graph import placeholders
from aottrain.ir.verify import verify_partition
from tests.compiler.programs import joint_of, leaf


def planned(function, *args, kernel):
    joint = joint_of(function, *args)
    plan = plan_partition(joint, "min_cut", fusion=fusion_model(joint, CompileOptions(kernel=kernel)))
    return joint, plan


def scaled(x, w):
    return F.relu(x * w + 1)


def test_a_result_that_follows_from_what_is_read_anyway_is_handed_over_and_not_read():
    joint, plan = planned(scaled, leaf(64, 512), leaf(512), kernel="cpp")
    assert plan.saved == ("relu",) and plan.recomputed == ("mul", "add", "relu")
    parts = apply_partition(joint, plan)
    verify_partition(joint, parts)
    (handed,) = [node for node in placeholders(parts.backward) if node.name == "relu"]
    assert not handed.users


def large(dtype):
    return leaf(64, 1024).to(dtype).detach().requires_grad_()


@pytest.mark.parametrize(
    "function, dtype, kernels",
    [
        (lambda x: F.relu(x), torch.float32, ""),  # of what nothing else reads
        (lambda x, w: torch.softmax(x * w, -1), torch.float32, "triton"),  # exponentials take longer on a CPU
        (lambda x, w: F.relu(x * w + 1), torch.bfloat16, "triton"),  # and so do roundings
        # But what is compared alone is not rounded, if no step before it is either.
        (lambda x, w: F.relu(x * w), torch.bfloat16, "cpp triton"),
        (lambda x, w: F.relu(x * w.exp()), torch.float32, "cpp triton"),  # of what is small, exponentials are quick
    ],
)
def test_only_where_it_takes_no_longer(function, dtype, kernels):
    args = large(dtype), torch.ones(1024, dtype=dtype, requires_grad=True)
    for kernel in ("cpp", "triton"):
        _, plan = planned(function, *args[: function.__code__.co_argcount], kernel=kernel)
        assert bool({*plan.saved} & {*plan.recomputed}) == (kernel in kernels), (kernel, plan)


@pytest.mark.parametrize("kernel", ["cpp", "triton"])
def test_products_are_not_run_again_for_it(kernel):
    _, plan = planned(lambda x, w: F.relu((x * w) @ x.T), leaf(256, 256), leaf(256), kernel=kernel)
    assert "relu" in plan.saved and not {*plan.saved} & {*plan.recomputed}, plan


def test_what_may_be_written_before_is_saved_for_it():
    """An input that eager does not keep: it is read through a copy."""

    def shifted(x, w, b):
        return F.relu(x * w + b)

    x, w = leaf(64, 512), leaf(512)
    compiled = aottrain.compile(shifted, capture="trace", kernel="cpp", on_unsupported="error")
    gradients = []
    for function in (shifted, compiled):
        b = torch.linspace(-1, 1, 512)
        y = function(x, w, b)
        b.add_(5)
        gradients.append(torch.autograd.grad(y.square().sum(), (x, w)))
    torch.testing.assert_close(gradients[1], gradients[0])


def test_a_later_write_to_it_raises_as_in_eager():
    x, w = leaf(64, 512), leaf(512)
    compiled = aottrain.compile(scaled, capture="trace", kernel="cpp", on_unsupported="error")
    gradients = []
    for function in (scaled, compiled):
        y = function(x, w)
        gradients.append(torch.autograd.grad(y.square().sum(), (x, w)))
        y = function(x, w)
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    torch.testing.assert_close(gradients[1], gradients[0])
