"""Attention by our own function: against float64, and against ATen's own, whose place it takes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from aottrain.ir.kernels.attention import BLOCKS, scratch_floats, tile_floats
from aottrain.ops import attention as module
from aottrain.ops.attention import attention, attention_backward, written_attention, written_attention_backward
from aottrain.ops.native.tile_attention import tile_attention_sources
from aottrain.toolchain.native import find_compiler
from tests.numerics.attention_types import DTYPES, in_bfloat16
from tests.numerics.tolerance import sum_error

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
aten = torch.ops.aten

# Batch, heads (of queries, of keys), queries, keys, width: blocks that are full, cut off, one, many; more keys than
# queries, and fewer.
SHAPES = [(2, 3, 3, 65, 65, 32), (1, 2, 2, 256, 256, 48), (2, 1, 1, 7, 7, 8), (1, 2, 2, 30, 300, 64),
          (1, 2, 2, 300, 64, 20), (1, 1, 1, 1, 1, 16), (3, 1, 1, 129, 33, 80), (2, 6, 2, 70, 70, 32)]  # fmt: skip


def made(shape, dtype, spread=1.0):
    """Query, key, value and a gradient of the result; queries as a linear layer leaves them, keys in heads."""
    batch, heads, key_heads, queries, keys, width = shape
    torch.manual_seed(0)
    rows = torch.randn(batch, queries, 2, heads, width)
    query, gradient = (part.transpose(1, 2) for part in rows.unbind(2))
    key, value = (torch.randn(batch, key_heads, keys, width) for _ in range(2))
    return [x.to(dtype) for x in (spread * query, key, value, gradient)]


def by_aten(query, key, value, gradient, causal, scale=None, mask=None):
    rule = {"attn_mask": mask, "scale": scale}
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal, **rule)
    given = (gradient, query, key, value, out, sums, 0.0, causal)
    return out, sums, *aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, **rule)


def by_us(query, key, value, gradient, causal, scale=None, mask=None):
    rule = {"attn_mask": mask, "scale": scale}
    out, sums = attention(query, key, value, 0.0, causal, **rule)
    given = (gradient, query, key, value, out, sums, 0.0, causal)
    return out, sums, *attention_backward(*given, **rule)


def exactly(query, key, value, gradient, causal, scale=None, mask=None):
    inputs = [x.double().requires_grad_() for x in (query, key, value)]
    keys, values = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in inputs[1:])
    scores = inputs[0] @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if mask is not None:
        scores = scores + mask.double()
    out = scores.softmax(-1) @ values
    return out, scores.logsumexp(-1), *torch.autograd.grad(out, inputs, gradient.double())


def check_exactness(inputs, *rule):
    results = (function(*inputs, *rule) for function in (by_us, by_aten, exactly))
    for ours, theirs, exact in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
        # A rounding to the type, or a few of the terms of a short sum.
        rounding = max(torch.finfo(ours.dtype).eps / 2, 8 * torch.finfo(torch.float32).eps) * exact.abs().max()
        assert (ours - exact).abs().max() <= 1.5 * (theirs - exact).abs().max() + rounding


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_is_as_exact_as_aten(shape, dtype, causal):
    check_exactness(made(shape, dtype), causal, 0.3)


# Of batch, heads, queries and keys those that a mask has; the others are broadcast.
@pytest.mark.parametrize("dims", [(0, 1, 2, 3), (0, 3), (1, 2, 3), (2, 3), (0, 1, 2), ()])
@pytest.mark.parametrize("types", [
    (torch.float32,) * 2,
    pytest.param((torch.bfloat16,) * 2, marks=in_bfloat16),
    pytest.param((torch.bfloat16, torch.float32), marks=in_bfloat16),
])  # fmt: skip
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], SHAPES[4], SHAPES[-1]])
def test_with_a_mask(shape, types, dims):
    batch, heads, _, queries, keys, _ = shape
    sizes = [size if d in dims else 1 for d, size in enumerate((batch, heads, queries, keys))]
    inputs, mask = made(shape, types[0]), torch.randn(sizes)
    if 3 in dims:
        mask[torch.rand(sizes) < 0.3] = -math.inf
        mask[..., -1] = 0.5  # each query sees a key
    check_exactness(inputs, False, 0.3, mask.to(types[1]))
    if dims == (2, 3):
        check_exactness(inputs, False, None, mask[0, 0].to(types[1]))


def test_a_mask_in_any_layout():
    inputs, mask = made(SHAPES[0], torch.float32), torch.randn(2, 3, 65, 65)
    check_exactness(inputs, False, None, mask.transpose(2, 3))
    check_exactness(inputs, False, None, mask[:, :1, :, :1].expand(2, 3, 65, 65))


def test_a_query_that_sees_no_key_gives_zeros():
    inputs, mask = made(SHAPES[0], torch.float32), torch.zeros(2, 1, 65, 65)
    mask[0, 0, 7] = mask[1, 0, :, 40:] = -math.inf
    for ours, theirs in zip(by_us(*inputs, False, None, mask), by_aten(*inputs, False, None, mask), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not by_us(*inputs, False, None, mask)[0][0, :, 7].any()


@pytest.mark.parametrize("number", [math.inf, math.nan])
def test_what_is_no_number_in_a_mask_shows(number):
    inputs, mask = made(SHAPES[0], torch.float32), torch.zeros(2, 1, 65, 65)
    mask[1, 0, 3, 5] = number
    for ours, theirs in zip(by_us(*inputs, False, None, mask), by_aten(*inputs, False, None, mask), strict=True):
        shows = ours.isnan()  # where ATen has an infinity or a 0 times it
        assert shows[~theirs.isfinite()].all() and torch.equal(shows[0], theirs[0].isnan())
        torch.testing.assert_close(ours[~shows], theirs[~shows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [-0.7, 0.0])
def test_a_scale_that_is_not_positive(scale):
    """Of which ATen's makes NaN under a causal mask: what is hidden from a query is -inf before it is scaled."""
    for shape in (SHAPES[0], SHAPES[3]):
        inputs = made(shape, torch.float32)
        keys, width = inputs[1].shape[2:4]
        # A score is a sum over the width, and as much as it is off each probability is, above and below the line, and
        # again in the backward; a result is a sum over the keys.
        rounding = 4 * abs(scale) * sum_error(width, torch.float32) + sum_error(keys, torch.float32)
        for ours, exact in zip(by_us(*inputs, True, scale), exactly(*inputs, True, scale), strict=True):
            assert (ours - exact).abs().max() <= rounding * exact.abs().max()


def test_long_sums_keep_their_digits():
    inputs = made((1, 1, 1, 1500, 1500, 32), torch.float32)
    for ours, exact in zip(by_us(*inputs, True), exactly(*inputs, True), strict=True):
        assert (ours - exact).abs().max() <= 4e-7 * exact.abs().max() + 1e-6


def test_large_scores_are_exact():
    """Rows whose probabilities are 0 and 1, and sums of exponentials that no float32 holds."""
    inputs = made((1, 2, 2, 100, 100, 32), torch.float32, spread=300.0)
    results = (function(*inputs, True) for function in (by_us, by_aten, exactly))
    for ours, theirs, exact in zip(*results, strict=True):
        assert ours.isfinite().all()
        assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max() + 1e-6 * exact.abs().max()


def written_out(query, key, value, mask, scale):
    return (query @ key.transpose(-2, -1) * scale + mask).softmax(-1) @ value


def results_of(written, inputs, tangent):
    given = [x.detach().requires_grad_() for x in inputs]
    result = written(*given)
    return [x.double() for x in (result.detach(), *torch.autograd.grad(result, given, tangent))]


@pytest.mark.parametrize("mask", [None, 0.0, 1.5])
@pytest.mark.parametrize("scale", [0.25, 5.0, 50.0, 1e3, 1e20])
def test_saturated_weights_are_as_exact_as_those_of_products(scale, mask):
    """A weight is made again of its score in the backward: the same score, rounded as in the forward. Where a query has
    one key its weight is 1, and what is noise in the gradient of its score would be scaled."""
    torch.manual_seed(0)
    *inputs, tangent = (torch.randn(1, 2, 150, 16) for _ in range(4))
    rule = {"scale": scale, "fill": 0.0, "safe": False, "draw": 0, "keep": 1.0}
    added = None if mask is None else torch.full((1, 1, 1, 150), mask)
    mixed, sums = written_attention(*inputs, added, None, **rule)
    gradients = written_attention_backward(tangent, *inputs, mixed, sums, added, None, **rule)
    written = partial(written_out, mask=mask or 0.0, scale=scale)
    theirs = results_of(written, inputs, tangent)
    exact = results_of(written, [x.double() for x in inputs], tangent.double())
    for a, b, c in zip((mixed, *gradients), theirs, exact, strict=True):
        rounding = 2 * torch.finfo(torch.float32).eps * c.abs().max()
        assert (a - c).square().mean().sqrt() <= 1.3 * (b - c).square().mean().sqrt() + rounding


def test_a_key_that_no_query_sees_may_be_anything():
    query, key, value, gradient = made((1, 1, 1, 30, 300, 32), torch.float32)
    key[0, 0, 50] = value[0, 0, 40] = math.nan
    for result in by_us(query, key, value, gradient, True)[2:]:
        assert result.isfinite().all()


def test_not_a_number_stays_in_its_rows():
    query, key, value, gradient = made((1, 2, 2, 70, 70, 32), torch.float32)
    query[0, 1, 5, 3] = math.nan
    out, sums, dq, dk, _ = by_us(query, key, value, gradient, True)
    assert out[0, 1, 5].isnan().all() and sums[0, 1, 5].isnan() and dq[0, 1, 5].isnan().all()
    assert dk[0, 1, :6].isnan().all() and dk[0, 0].isfinite().all()
    out[0, 1, 5], dq[0, 1, 5] = 0.0, 0.0
    assert out.isfinite().all() and dq.isfinite().all()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_it(threads):
    inputs = made((2, 6, 3, 65, 65, 32), torch.bfloat16)
    expected = by_us(*inputs, True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert all(torch.equal(a, b) for a, b in zip(expected, by_us(*inputs, True), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("contiguous", [True, False])
def test_results_lie_as_those_of_aten(contiguous):
    inputs = made((2, 3, 3, 16, 16, 32), torch.float32)
    inputs[0] = inputs[0].contiguous() if contiguous else inputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    for ours, theirs in zip(by_us(*inputs, True), by_aten(*inputs, True), strict=True):
        assert ours.stride() == theirs.stride()


@pytest.mark.parametrize("backward", [False, True])
def test_scratch_is_less_than_the_scores(backward):
    found = scratch_floats(2048, 2048, 64, backward)
    assert found < 2048 * 2048 / 3 and found % 16 == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (65, 33, 17), (31, 129, 64)])
def test_it_stays_within_its_scratch(sizes, backward):
    """Sizes just above those of a block, whose memory is larger by a whole one."""
    check_scratch(sizes, backward, torch.float32)


def check_scratch(sizes, backward, dtype):
    queries, keys, width = sizes
    query, key, value, gradient = made((1, 1, 1, queries, keys, width), dtype)
    planned = 4 * module.scratch_floats(queries, keys, width, backward, dtype == torch.bfloat16)
    memory = torch.full((planned + 4 * 16,), 0x5A, dtype=torch.uint8)  # less than a second thread needs
    results = attention(query, key, value, scratch=None if backward else memory)
    if backward:
        attention_backward(gradient, query, key, value, *results, 0.0, False, scratch=memory)
    assert (memory[planned:] == 0x5A).all() and (memory[:planned] != 0x5A).any()


@pytest.mark.parametrize("backward", [False, True])
def test_scratch_is_enough_for_any_processor(monkeypatch, backward):
    planned = scratch_floats(70, 70, 33, backward)
    for blocks in BLOCKS.values():
        monkeypatch.setattr("aottrain.ir.kernels.attention._LARGEST", blocks)
        assert scratch_floats(70, 70, 33, backward) <= planned


PROCESSOR, LOOPS = "by the processor", "by loops"
# Beside those above: one query or key, widths of one square and less, of several, and such that fill none.
TILE_SHAPES = [*SHAPES, (1, 2, 1, 1, 40, 8), (2, 2, 2, 40, 1, 128), (1, 4, 2, 97, 161, 256), (1, 1, 1, 290, 290, 33)]


@pytest.fixture
def use_tiles(monkeypatch):
    """Lets heads of bfloat16 be multiplied by other tiles than this processor's own, or none."""

    def use(tiles):
        if tiles == PROCESSOR and found != PROCESSOR:
            pytest.skip("this processor has no tiles")
        monkeypatch.setattr(module, "how_tiles_multiply", lambda: tiles)

    found = module.how_tiles_multiply()
    return use


@pytest.fixture(params=[PROCESSOR, LOOPS])
def tiles(use_tiles, request):
    use_tiles(request.param)


def check_closeness(inputs, *rule):
    """As `check_exactness`, where ATen has nothing to be compared to: in probabilities that are rounded."""
    for ours, exact in zip(by_us(*inputs, *rule), exactly(*inputs, *rule), strict=True):
        assert (ours - exact).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * exact.abs().max() + 1e-6


@in_bfloat16
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", TILE_SHAPES)
def test_tiles_are_as_exact_as_aten(tiles, shape, causal):
    for scale in (0.3, None):
        check_exactness(made(shape, torch.bfloat16), causal, scale)


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.7])
def test_any_scale_by_tiles(tiles, scale):
    check_closeness(made(SHAPES[0], torch.bfloat16), True, scale)
    check_closeness(made(SHAPES[4], torch.bfloat16), False, scale)


def test_the_processor_s_tiles_and_loops_give_the_same(use_tiles):
    for shape in TILE_SHAPES:
        inputs, results = made(shape, torch.bfloat16), []
        for tiles in (PROCESSOR, LOOPS):
            use_tiles(tiles)
            results.append(by_us(*inputs, True))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=2**-8, atol=1e-6)


@in_bfloat16
@pytest.mark.parametrize("causal", [True, False])
def test_large_scores_by_tiles(tiles, causal):
    """Sums of exponentials that no float32 holds."""
    inputs = made((1, 2, 2, 100, 200, 32), torch.bfloat16, spread=300.0)
    assert all(result.isfinite().all() for result in by_us(*inputs, causal))
    check_exactness(inputs, causal)


def test_a_query_with_one_key_leaves_no_gradient(tiles):
    """Its probability is 1: what its product with the gradient is, and what is taken off that, are the same sum."""
    for scale in (0.2, 50.0, 1e20):
        out, sums, dq, dk, _ = by_us(*made((2, 3, 3, 65, 1, 80), torch.bfloat16), False, scale)
        assert out.isfinite().all() and sums.isfinite().all() and not dq.any() and not dk.any()
        assert not by_us(*made((2, 3, 3, 65, 70, 48), torch.bfloat16), True, scale)[2][:, :, 0].any()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", range(4))
def test_what_is_no_number_shows_as_without_tiles(use_tiles, place, number, causal):
    inputs, results = made((1, 2, 2, 70, 75, 40), torch.bfloat16), []
    inputs[place][0, 1, 37, 3] = number
    for tiles in ("", LOOPS, PROCESSOR):
        use_tiles(tiles)
        results.append(by_us(*inputs, causal))
        for theirs, ours in zip(results[0], results[-1], strict=True):
            # An infinity may come out as NaN, or be one where sums are in another order.
            finite = theirs.isfinite() & ours.isfinite()
            assert torch.equal(theirs.isfinite(), ours.isfinite())
            torch.testing.assert_close(ours[finite], theirs[finite], rtol=0.02, atol=0.05)


def test_keys_that_no_query_sees_may_be_anything_by_tiles(tiles):
    query, key, value, gradient = made((1, 1, 1, 30, 300, 32), torch.bfloat16)
    key[0, 0, 50] = value[0, 0, 40] = math.nan
    for result in by_us(query, key, value, gradient, True):
        assert result.isfinite().all()


def test_written_attention_by_tiles(tiles, use_tiles):
    """Which keeps two numbers of each row, and gives NaN where all scores are -inf."""
    rule = {"scale": 0.2, "fill": 0.0, "safe": False, "draw": 0, "keep": 1.0}

    def called(query, key, value, tangent):
        mixed, sums = written_attention(query, key, value, None, None, **rule)
        return sums, mixed, *written_attention_backward(tangent, query, key, value, mixed, sums, None, None, **rule)

    inputs = made((2, 2, 2, 70, 130, 48), torch.bfloat16)
    inputs[0][0, 0, 7] = -math.inf
    inputs[1][0, 0] = inputs[1][0, 0].abs() + 1
    ours = called(*inputs)
    use_tiles("")
    assert ours[1][0, 0, 7].isnan().all()
    for one, other in zip(ours, called(*inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.05, equal_nan=True)


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_do_not_change_what_tiles_give(tiles, threads):
    test_threads_do_not_change_it(threads)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (65, 33, 17), (31, 129, 64), (130, 140, 48)])
def test_tiles_stay_within_their_scratch(monkeypatch, tiles, sizes, backward):
    assert tile_floats(*sizes, backward) <= scratch_floats(*sizes, backward, narrow=True)
    monkeypatch.setattr(module, "scratch_floats", lambda *sizes: tile_floats(*sizes[:4]))
    check_scratch(sizes, backward, torch.bfloat16)


@pytest.mark.parametrize("tiles", ["", LOOPS])
def test_what_runs_is_what_is_compiled_beside_a_program(monkeypatch, use_tiles, tiles):
    compiled, require_all = [], module.require_all
    monkeypatch.setattr(module, "require_all", lambda sources: compiled.extend(sources) or require_all(sources))
    use_tiles(tiles)
    module._functions.cache_clear()
    by_us(*made(SHAPES[2], torch.bfloat16), True)
    assert compiled == module.native_sources(torch.bfloat16, True)
    assert ("EMULATED" in compiled[0].text) == bool(tiles)


# What is wrong of pairs, of the line above which nothing is seen, and of what is taken off.
@pytest.mark.parametrize("right, wrong", [
    ("pair[1] = b.x[i];", "pair[1] = a.x[i];"),
    ("turn(rows + t, HALF, to.turned + at + t, HALF);", "memcpy(to.turned + at + t, rows + t, 2 * TILE);"),
    ("causal ? first - start : num", "num"),
    ("if (j > hidden)", "if (j >= hidden + 2)"),
    ("~(causal ? first_of(key - first) : 0)", "~0u"),
    ("causal && query - SIDE < start + SIDE", "causal && query - SIDE < start"),
    (" * kept[i / HALF % 2]", ""),
    ("- delta[h])", "+ delta[h])"),
    ("i / SIDE * SIDE * w.width + d * SIDE + i % SIDE * SIDE", "i * w.width + d * SIDE"),
])  # fmt: skip
def test_what_is_planted_is_seen(monkeypatch, use_tiles, right, wrong):
    def planted(emulated):
        texts = tile_attention_sources(emulated)
        assert any(right in text for text in texts)
        return tuple(text.replace(right, wrong) for text in texts)

    use_tiles(LOOPS)
    monkeypatch.setattr(module, "tile_attention_sources", planted)
    module._functions.cache_clear()
    try:
        with pytest.raises(AssertionError):
            for shape in [(1, 2, 2, 290, 290, 48), (2, 2, 1, 33, 65, 64)]:
                check_closeness(made(shape, torch.bfloat16, spread=3.0), True)
    finally:
        module._functions.cache_clear()
