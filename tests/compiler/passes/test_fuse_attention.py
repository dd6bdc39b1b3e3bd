"""Attention that a program writes out: what becomes one op, what stays, and that values and gradients are eager's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import aottrain
from aottrain.compiler.passes import fuse_attention as stage
from aottrain.compiler.pipeline import fuse_attention
from aottrain.ir.graph import calls, info
from aottrain.ir.settings.decisions import ONE_OP, PRODUCTS, Timing
from aottrain.measure.decisions import Timed
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_of
from tests.sampling import crossed, thinned

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
FORWARD, BACKWARD = "aottrain.written_attention.default", "aottrain.written_attention_backward.default"
BATCH, HEADS, QUERIES, KEYS, WIDTH = 2, 3, 37, 40, 16


@pytest.fixture(autouse=True)
def faster(monkeypatch):
    monkeypatch.setattr(stage, "_is_faster", lambda ours, theirs: True)


def hidden(dims):
    """A third of the keys of each query, or of each row of the batch."""
    sizes = [size if d in dims else 1 for d, size in enumerate((BATCH, HEADS, QUERIES, KEYS))]
    mask = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) < 0.3
    mask[..., -1] = False
    return mask


def products(q, k, v, _):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def scaled(q, k, v, _):
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(WIDTH) * 0.7
    return F.softmax(scores, dim=-1, dtype=torch.float32) @ v


def causal(q, k, v, _):
    mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(-2, -1) * 0.25).masked_fill(mask, float("-inf"))
    return F.dropout(scores.softmax(-1), 0.1) @ v


def filled(q, k, v, mask):
    return ((q @ k.transpose(-2, -1)) * 0.25).masked_fill(mask, float("-inf")).softmax(-1) @ v


def filled_with_little(q, k, v, mask):
    return ((q @ k.transpose(-2, -1)) * 0.25).masked_fill(mask, -2.0).softmax(-1) @ v


def added(q, k, v, mask):
    return ((q @ k.transpose(-2, -1)) * 0.25 + mask * -1e9).softmax(-1) @ v


def in_place(q, k, v, mask):
    scores = q @ k.transpose(-2, -1)
    scores *= 0.5
    scores.div_(2).masked_fill_(mask, float("-inf"))
    return scores.softmax(-1) @ v


def added_in_place(q, k, v, mask):
    scores = q @ k.transpose(-2, -1)
    scores /= 4
    scores += mask * -1e9
    return scores.softmax(-1) @ v


def dropped(q, k, v, _):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)


def dropped_causally(q, k, v, _):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)


def dropped_with_a_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, ~mask, dropout_p=0.3, scale=0.4)


def by_batches(q, k, v, _):
    """Batch and heads in one dimension, from the start."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    weights = F.dropout(torch.softmax(torch.bmm(q, k.transpose(1, 2)) * 0.3, -1), 0.2)
    return torch.bmm(weights, v).view(BATCH, HEADS, QUERIES, WIDTH)


def of_one_projection(q, k, v, _):
    """Heads as they come out of one linear layer, and go back into one."""
    q, k, v = (x.transpose(1, 2).reshape(BATCH, -1, HEADS * WIDTH) * 2 for x in (q, k, v))
    q, k, v = (x.view(BATCH, -1, HEADS, WIDTH).transpose(1, 2) for x in (q, k, v))
    mixed = F.dropout((q @ k.transpose(-2, -1) * 0.25).softmax(-1), 0.1) @ v
    return mixed.transpose(1, 2).contiguous().view(BATCH, QUERIES, HEADS, WIDTH).transpose(1, 2)


KNOWN = [products, scaled, causal, filled, filled_with_little, added, in_place, added_in_place, dropped,
         dropped_causally, dropped_with_a_mask, by_batches, of_one_projection]  # fmt: skip
MASKED = [filled, filled_with_little, added, in_place, dropped_with_a_mask]


def weights_too(q, k, v, _):
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v + weights.sum(-1, keepdim=True) * weights[..., :1]


def scores_too(q, k, v, _):
    scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v + scores.mean(-1, keepdim=True)


def a_bias_that_learns(q, k, v, _):
    return (q @ k.transpose(-2, -1) + k.sum(-1)[:, :, None, :]).softmax(-1) @ v


def over_queries(q, k, v, _):
    return (q @ k.transpose(-2, -1)).softmax(-2) @ v


def a_changed_product(q, k, v, _):
    return (q @ k.transpose(-2, -1)).relu().softmax(-1) @ v


def powers(q, k, v, _):
    """No attention: its weights are multiplied by themselves."""
    weights = (q @ q.transpose(-2, -1)).softmax(-1)
    return weights @ weights @ q


def wider_values(q, k, v, _):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ torch.cat([v, v * 2], -1)[..., :-1]


def narrower_values(q, k, v, _):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v[..., :8]


def over_parts_of_rows(q, k, v, _):
    """No attention: each half of a row of scores sums up to 1."""
    scores = (q @ k.transpose(-2, -1)).view(BATCH, HEADS, QUERIES * 2, KEYS // 2)
    return scores.softmax(-1).view(BATCH, HEADS, QUERIES, KEYS) @ v


def a_mask_of_parts(q, k, v, mask):
    """The scores are masked as (batch, heads * queries, keys), each head by other numbers."""
    scores = (q @ k.transpose(-2, -1)).view(BATCH, HEADS * QUERIES, KEYS)
    scores = scores + torch.linspace(-1, 1, HEADS * QUERIES)[:, None] * torch.linspace(0, 1, KEYS)
    return scores.view(BATCH, HEADS, QUERIES, KEYS).softmax(-1) @ v


def in_a_checkpoint(q, k, v, _):
    return checkpoint(products, q, k, v, None, use_reentrant=False)


OTHERS = [weights_too, scores_too, a_bias_that_learns, over_queries, a_changed_product, powers, wider_values,
          narrower_values, over_parts_of_rows, a_mask_of_parts, in_a_checkpoint]  # fmt: skip


def inputs(dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (BATCH, HEADS, QUERIES, WIDTH), *((BATCH, HEADS, KEYS, WIDTH),) * 2
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def names(joint):
    return [info(node).name for node in calls(joint.graph)]


def run(call, given, mask, tangent):
    torch.manual_seed(3)
    result = call(*given, mask)
    wanted = [x for x in given if x.requires_grad]
    return [result, *torch.autograd.grad(result, wanted, tangent, allow_unused=True)]


def check(program, given, mask):
    """Each result at most a few roundings of its largest number from eager's, and laid out as that."""
    compiled = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error")
    tangent = torch.randn_like(program(*given, mask))
    ours = run(compiled, given, mask, tangent)
    with aottrain.philox_eager():
        theirs = run(program, given, mask, tangent)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert a.stride() == b.stride() and a.dtype == b.dtype
            largest = float(b.detach().abs().nan_to_num().max())
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * largest, equal_nan=True)
    return compiled


@pytest.mark.parametrize("program", KNOWN)
def test_is_one_op_forward_and_one_backward(program):
    joint = fuse_attention(joint_of(program, *inputs(), hidden((0, 2, 3))))
    found = names(joint)
    assert found.count(FORWARD) == found.count(BACKWARD) == 1
    assert not {"aten.bmm.default", "aten._softmax.default", "aten._safe_softmax.default"} & set(found)


@pytest.mark.parametrize("program", OTHERS)
def test_other_forms_stay(program):
    joint = joint_of(program, *inputs(), hidden((0, 2, 3)))
    assert fuse_attention(joint) is joint


@pytest.mark.parametrize("program", [*KNOWN, *OTHERS])
def test_values_and_gradients_are_those_of_eager(program):
    check(program, inputs(), hidden((0, 3)))


@pytest.mark.parametrize(("program", "dims"), crossed(MASKED, [(2, 3), (1, 3), (0, 1, 2, 3)], one_in=2))
def test_masks_are_broadcast(program, dims):
    check(program, inputs(), hidden(dims))


@pytest.mark.parametrize(
    ("program", "wanted"),
    crossed([causal, dropped_with_a_mask, by_batches], [(), (0,), (1,), (2,), (0, 2), (1, 2)], one_in=3),
)
def test_gradients_that_nobody_wants_are_not_made(program, wanted):
    given = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs())]
    if wanted:
        check(program, given, hidden((0, 3)))
        return
    compiled, mask = aottrain.compile(program, capture="trace", kernel="cpp", on_unsupported="error"), hidden((0, 3))
    torch.manual_seed(3)
    ours = compiled(*given, mask)
    torch.manual_seed(3)
    with aottrain.philox_eager():
        torch.testing.assert_close(ours, program(*given, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("program", thinned(MASKED, one_in=2))
def test_a_query_that_sees_no_key(program):
    """NaN where a softmax of -inf alone is NaN, zeros where ATen gives zeros."""
    mask = hidden((0, 1, 2, 3))
    mask[0, 1, 5] = mask[1, :, 7] = True
    check(program, inputs(), mask)


@pytest.mark.parametrize("program", thinned(MASKED, one_in=2))
def test_an_example_that_sees_no_key(program):
    """All of its blocks are hidden; but where its weights are NaN, so are the gradients of its values."""
    mask = hidden((0, 1, 2, 3))
    mask[1] = True
    check(program, inputs(), mask)


def test_a_mask_that_repeats_the_scores():
    """One product of scores for several masks."""
    q, k, v = torch.randn(1, QUERIES, WIDTH), torch.randn(1, KEYS, WIDTH), torch.randn(4, KEYS, WIDTH)
    masks = torch.randn(4, QUERIES, KEYS)
    compiled = aottrain.compile(added, capture="trace", kernel="cpp", on_unsupported="error")
    torch.testing.assert_close(compiled(q, k, v, masks), added(q, k, v, masks), rtol=1e-5, atol=1e-5)


def test_hidden_numbers_are_not_read():
    """What is filled hides NaN in the scores, and whole blocks of keys."""
    given, mask = inputs(), torch.zeros(BATCH, 1, 1, KEYS, dtype=torch.bool)
    mask[..., 20:] = True
    with torch.no_grad():
        given[1][:, :, 30] = math.nan
    check(filled, given, mask)


@pytest.mark.parametrize("budget", [1.0, 0.3, 0.0])
def test_the_same_weights_are_dropped_at_any_budget(budget):
    given, tangent = inputs(), torch.randn(BATCH, HEADS, QUERIES, WIDTH)
    plain = aottrain.compile(causal, capture="trace", kernel="cpp")
    planned = aottrain.compile(causal, capture="trace", kernel="cpp", budget=budget)
    for ours, theirs in zip(run(planned, given, None, tangent), run(plain, given, None, tangent), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_saves_no_scores():
    call = aottrain.compile(causal, capture="trace", kernel="cpp")
    call(*inputs(), None).sum().backward()
    # The result, and two numbers for each row; and the mask or what it is made of.
    assert call.report.graphs[0].saved_bytes <= 4 * BATCH * HEADS * QUERIES * (WIDTH + 2) + QUERIES * KEYS


@pytest.mark.parametrize("program", [scores_too, weights_too])
def test_scores_that_something_else_reads_stay_where_nothing_is_differentiated(program):
    joint = joint_of(program, *(x.detach() for x in inputs()), None)
    assert fuse_attention(joint) is joint


def test_other_types_stay():
    joint = joint_of(products, *inputs(torch.float64), None)
    assert fuse_attention(joint) is joint


@pytest.mark.parametrize(("batch", "rows", "expected"), [(16, 128, 1), (2, 32, 0)])
def test_without_a_clock_it_is_the_op_where_scores_are_large(monkeypatch, batch, rows, expected):
    monkeypatch.undo()  # the clock is off in all tests: see conftest
    given = [torch.randn(batch, 6, rows, 32, requires_grad=True) for _ in range(3)]
    assert names(fuse_attention(joint_of(products, *given, None))).count(FORWARD) == expected


@pytest.mark.parametrize(("batch", "rows", "share", "expected"), [
    (16, 128, 0.95, 1), (16, 128, 0.8, 0), (2, 32, 0.95, 0), (2, 32, 1.1, 1),
])  # fmt: skip
def test_the_op_stays_where_products_are_little_faster_and_take_more_memory(monkeypatch, batch, rows, share, expected):
    monkeypatch.undo()
    monkeypatch.delenv("AOTTRAIN_RATES")
    times = {PRODUCTS: Timing(share), ONE_OP: Timing(1.0)}
    monkeypatch.setattr(stage, "sums_timed", lambda calls: Timed(times, "measured"))
    given = [torch.randn(batch, 6, rows, 32, requires_grad=True) for _ in range(3)]
    assert names(fuse_attention(joint_of(products, *given, None))).count(FORWARD) == expected
