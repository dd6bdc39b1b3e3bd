"""Repeated heads of keys and values: where attention reads each once, and that values and gradients stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.pipeline import share_heads
from aottrain.ir.graph import calls, info, spec_of
from tests.compiler.programs import joint_of
from tests.numerics.tolerance import assert_close_as_sums
from tests.sampling import crossed

BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"


def expanded(x, times, dim=1):
    shape = list(x.shape)
    whole = x.unsqueeze(dim + 1).expand(*shape[: dim + 1], times, *shape[dim + 1 :])
    return whole.reshape(*shape[:dim], shape[dim] * times, *shape[dim + 1 :])


def by_expansion(q, k, v):
    return F.scaled_dot_product_attention(q, expanded(k, 4), expanded(v, 4), is_causal=True)


def by_repetition(q, k, v):
    return F.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1), scale=0.3)


def by_turned_expansion(q, k, v):
    """As (batch, keys, heads, width), turned for attention."""
    k, v = (expanded(x.transpose(1, 2), 4, dim=2).transpose(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_computed_keys(q, k, v):
    return by_expansion(q, (k * 2).cos(), v.sin()) * 3


def by_repetition_of_the_whole(q, k, v):
    """The heads in turns, not each in a row."""
    return F.scaled_dot_product_attention(q, k.repeat(1, 4, 1, 1), v.repeat(1, 4, 1, 1))


def unlike(q, k, v):
    return F.scaled_dot_product_attention(q, expanded(k, 4), expanded(v[:, :1], 8))


def in_turns(q, k, v):
    """As many times as there are heads, so that the shapes are those of heads that stand in rows."""
    k, v = (x.unsqueeze(1).expand(-1, 2, -1, -1, -1).reshape(2, 4, 36, 16) for x in (k, v))
    return F.scaled_dot_product_attention(q[:, :4], k, v).repeat(1, 2, 1, 1)


def of_strided_rows(q, k, v):
    """The elements of a row do not stand side by side before they are repeated."""
    k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v))
    return by_expansion(q, k, v)


def read_twice(q, k, v):
    k = expanded(k, 4)
    return F.scaled_dot_product_attention(q, k, expanded(v, 4)) + k.exp()


SHARED = [by_expansion, by_repetition, by_turned_expansion, of_computed_keys]
LEFT = [by_repetition_of_the_whole, unlike, in_turns, of_strided_rows]


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(2, heads, 36, 16, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)]


def names(joint):
    return [info(node).name for node in calls(joint.graph)]


def gradients_of(joint):
    """The shapes of what attention's backward gives, item by item."""
    (node,) = (node for node in calls(joint.graph) if info(node).name == BACKWARD)
    return [spec_of(item).shape for item in sorted(node.users, key=lambda item: item.args[1])]


@pytest.mark.parametrize("program", SHARED)
def test_heads_are_not_repeated(program):
    joint = share_heads(joint_of(program, *inputs()))
    assert "aten.sum.dim_IntList" not in names(joint)
    assert gradients_of(joint) == [(2, 8, 36, 16), (2, 2, 36, 16), (2, 2, 36, 16)]
    assert not any(spec.shape == (2, 2, 4, 36, 16) for node in calls(joint.graph) if (spec := spec_of(node)))


@pytest.mark.parametrize("program", LEFT)
def test_what_is_no_row_of_equal_heads_stays(program):
    joint = joint_of(program, *inputs())
    assert share_heads(joint) is joint


def test_a_gradient_that_is_read_otherwise_stays():
    joint = share_heads(joint_of(read_twice, *inputs()))
    assert gradients_of(joint) == [(2, 8, 36, 16)] * 3


def test_inside_a_checkpoint_of_the_user_nothing_is_moved():
    def program(q, k, v):
        return torch.utils.checkpoint.checkpoint(by_expansion, q, k, v, use_reentrant=False)

    joint = joint_of(program, *inputs())
    assert share_heads(joint) is joint


@pytest.mark.parametrize(
    ("dtype", "program", "wanted"),
    crossed(
        [torch.float32, torch.float64],
        [*SHARED, *LEFT, read_twice],
        [(0,), (1,), (2,), (0, 2), (0, 1, 2)],
        one_in=4,
    ),
)
def test_values_and_gradients_are_those_of_eager(dtype, program, wanted):
    given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs(dtype))]
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    tangent = torch.randn(2, 8, 36, 16, dtype=dtype)
    found = []
    for call in (compiled, program):
        result = call(*given)
        found.append([result, *torch.autograd.grad(result, [given[i] for i in wanted], tangent)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.stride() == theirs.stride()
        assert_close_as_sums(ours, theirs, 4 * 36)  # heads and rows
