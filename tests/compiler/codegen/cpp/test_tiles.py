"""Kernels across memory run in tiles; what does not, or needs single elements, does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.codegen.cpp.tiles import find_tile
from aottrain.compiler.codegen.row_passes import plan_passes
from aottrain.compiler.passes.splits.norms import split_norms
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.kernel import levels
from aottrain.toolchain.native import find_compiler
from tests.compiler.programs import joint_of
from tests.numerics.tolerance import assert_close, assert_close_as_sums
from tests.sampling import crossed

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")


def added(x, y):
    return torch.tanh(x + y.movedim(-1, 1))


def two_results(x, y):
    z = x * 2 + y.movedim(-1, 1)
    return z.relu(), z.movedim(1, -1).contiguous() - 1


def along(x, y):
    return (x + y.movedim(-1, 1)) * x[:, :, :1, :1]


def copied(x, y):
    return y.movedim(-1, 1).contiguous() + 1


def masked(x, y):
    return torch.where(x > 0, y.movedim(-1, 1), x).to(torch.bfloat16)


CASES = (added, two_results, along, copied, masked)
SHAPES = ((2, 16, 64, 64), (3, 17, 37, 29), (1, 130, 9, 31), (2, 40, 8, 130))


def tile_of(function, *args):
    (call,) = schedule(joint_of(function, *args).graph).kernels
    known = levels(call.kernel)
    return find_tile(call.kernel, known, plan_passes(call.kernel, can_hold=True)), call.kernel


@needs_compiler
@pytest.mark.parametrize(("shape", "function"), crossed(SHAPES, CASES, one_in=2))
def test_a_tile_gives_what_eager_gives(shape, function):
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = torch.randn(shape).to(dtype)
        y = torch.randn(shape[0], *shape[2:], shape[1]).to(dtype)
        tile, kernel = tile_of(function, x, y)
        if dtype is torch.float32 and function is not copied:
            assert tile is not None
            assert "alignas(64)" in render_cpp(kernel)
        got = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")(x, y)
        torch.testing.assert_close(got, function(x, y), rtol=2e-2 if got_low(got) else 1e-5, atol=1e-5)


def got_low(got) -> bool:
    return (got[0] if isinstance(got, tuple) else got).dtype is torch.bfloat16


def test_both_directions_are_copied_by_lines():
    tile, _ = tile_of(two_results, torch.ones(2, 16, 64, 64), torch.ones(2, 64, 64, 16))
    assert tile is not None
    assert len(tile.loads) + len(tile.stores) == 2


@pytest.mark.parametrize(
    "function",
    (
        lambda x, y: x + y.reshape(x.shape),
        lambda x, y: (x + y.movedim(-1, 1)).sum((2, 3)),
        lambda x, y: torch.cat((x, y.movedim(-1, 1)), 1),
        lambda x, y: torch.sin(x + y.movedim(-1, 1)),
        lambda x, y: x + y.movedim(-1, 1)[:, :, :, :4].repeat(1, 1, 1, 16),
    ),
    ids=("contiguous", "sum", "guarded", "sine", "looked up"),
)
def test_what_has_no_tile(function):
    assert tile_of(function, torch.ones(2, 16, 64, 64), torch.ones(2, 64, 64, 16))[0] is None


def test_a_copy_whose_lines_stay_near_needs_no_tile():
    near, far = ((8, 96, 24, 24), (4, 32, 64, 64))
    found = [tile_of(lambda x: x.movedim(1, -1).contiguous(), torch.ones(shape))[0] for shape in (near, far)]
    assert found[0] is None
    assert found[1] is not None


def to_channels_last(x):
    y = F.silu(F.group_norm(x, 4))
    return y.movedim(1, -1).contiguous()


def from_channels_last(x):
    y = x.movedim(-1, 1)
    return F.group_norm(y.contiguous(), 4) * torch.sigmoid(y)


def of_both(x):
    """The sums are of what lies in memory's order, beside what does not."""
    turned = x.movedim(-1, 1)
    return ((turned * 2).flatten(2).softmax(-1) * x.reshape(turned.shape).flatten(2)).sum((1, 2))


def rendered_from(function, *args):
    """The text of each of a program's kernels."""
    kernels = [call.kernel for call in schedule(split_norms(joint_of(function, *args)).graph).kernels]
    return {kernel.name: render_cpp(kernel) for kernel in kernels}


@needs_compiler
@pytest.mark.parametrize("size", ((8, 16), (16, 13), (9, 15)), ids=str)
@pytest.mark.parametrize("function", (to_channels_last, from_channels_last, of_both))
def test_a_row_of_several_loops_goes_across_memory_in_pieces(function, size):
    for dtype in (torch.float32, torch.float64):
        shape = (2, 16, *size) if function is to_channels_last else (2, *size, 16)
        x = torch.randn(shape, dtype=dtype, requires_grad=True)
        compiled = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
        got, wanted = compiled(x), function(x)
        assert_close(got, wanted)
        cotangent = torch.randn_like(wanted)
        assert_close_as_sums(*(torch.autograd.grad(y, x, cotangent)[0] for y in (got, wanted)), x.numel())


def test_the_loops_of_a_row_are_in_the_order_of_what_is_read_again_and_again():
    """A group norm reads its input three times and writes its result once, whose copy goes across memory."""
    (text,) = rendered_from(to_channels_last, torch.randn(2, 128, 16, 16)).values()
    *sums, last = text.split("for (i64 first = 0; first < 256; first += 64)")
    assert len(sums) == 1 and sums[0].count("+ i3]") == 2  # along memory in the two passes that add up
    assert "z0[i2 * 68 + i3 - first] = " in last and "= z0[i2 * 68 + i3 - first];" in last


def test_the_innermost_loop_of_a_row_fills_a_vector():
    """Though what is read lies the other way: groups of four channels of images in channels_last."""
    texts = rendered_from(from_channels_last, torch.randn(2, 8, 16, 16)).values()
    assert any("for (i64 i3 = first; i3 < last; i3++)" in text for text in texts)


@pytest.mark.parametrize(
    "function, channels",
    (
        (lambda x: F.group_norm(x, 4), 16),
        (lambda x: F.group_norm(x, 1).movedim(1, -1).contiguous(), 512),
        (lambda x: torch.sin(F.group_norm(x, 4)).movedim(1, -1).contiguous(), 16),
    ),
    ids=("nothing goes across", "more channels than are copied", "sine"),
)
def test_what_has_no_pieces(function, channels):
    texts = rendered_from(function, torch.randn(2, channels, 16, 16)).values()
    assert texts and not any("first += 64" in text for text in texts)


def beside(x):
    """Its transposed, and as many elements that lie in that order."""
    turned = x.transpose(1, 2)
    return turned, x.reshape(turned.shape)


def norm_across(x):
    """A row is read across memory in each of its passes, and its results go both ways."""
    turned, along = beside(x)
    y = F.layer_norm(turned + along, x.shape[1:2])
    return y * along, y + along, y.transpose(1, 2).sigmoid().contiguous(), (y > 0).transpose(1, 2).contiguous()


def loss_across(x):
    """Sums over rows of what lies across memory."""
    turned, along = beside(x)
    return (turned.sigmoid() * along).sum((0, 1)), along.relu() / turned.shape[0]


def cut_across(x):
    """A row that is in two parts for one of its terms, and lies across memory in the other."""
    turned, along = beside(x)
    half = x.shape[1] // 2
    parts = torch.cat([along[..., :half].exp(), along[..., half:].sin()], -1)
    return (parts * turned).softmax(-1) * parts, turned.exp() * along


@needs_compiler
@pytest.mark.parametrize("size", ((96, 40), (67, 5), (17, 130)), ids=str)
@pytest.mark.parametrize("function", (norm_across, loss_across, cut_across))
def test_elements_that_lie_apart_are_copied_for_a_loop_of_vectors(function, size):
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(3, *size, dtype=dtype, requires_grad=True)
        compiled = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
        results = [y if isinstance(y, tuple) else (y,) for y in (compiled(x), function(x))]
        for one, other in zip(*results, strict=True):
            assert one.stride() == other.stride()
            assert_close_as_sums(one.to(dtype), other.to(dtype), x.numel())
        kept = [[y for y in each if y.requires_grad] for each in results]
        cotangents = [torch.randn_like(y) for y in kept[1]]
        one, other = (torch.autograd.grad(each, x, cotangents)[0] for each in kept)
        assert_close_as_sums(one, other, x.numel())


def test_what_lies_apart_is_read_and_written_beside_the_loop():
    text = "".join(rendered_from(norm_across, torch.randn(3, 96, 40)).values())
    assert text.count("for (i64 i2 = 0; i2 < 96; i2++) x") > 1  # in each pass
    assert text.count("] = z") == 2


@pytest.mark.parametrize(
    "function",
    (
        lambda x: beside(x)[1].exp().sum((0, 1)) * 2,
        lambda x: x.transpose(1, 2).contiguous() + 1,
        lambda x: x.sin() * x.exp(),
        lambda x: beside(x)[1].gather(2, beside(x)[1].long().abs()).exp() * beside(x)[0],
    ),
    ids=("along memory", "hardly more than a copy", "nothing lies apart", "no vectors in any case"),
)
def test_what_needs_no_copy_of_what_lies_apart(function):
    texts = rendered_from(function, torch.randn(3, 24, 40)).values()
    assert texts and not any("++) x" in text or "] = z" in text for text in texts)
