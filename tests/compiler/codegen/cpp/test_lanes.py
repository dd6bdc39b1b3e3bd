"""C++ kernels whose vectors go over rows: values, and which kernels are written so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.codegen.cpp import render
from aottrain.toolchain.native import find_compiler
from tests.numerics.tolerance import assert_close, assert_close_as_sums

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def leaf(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def softmax(dim):
    return lambda x: (x * 1.5).softmax(dim)


def masked(x):
    """Truth values that are known of each row."""
    kept = (x.detach().amax(1, keepdim=True) > 1.0) & (x.detach().amin(1, keepdim=True) < 0)
    return torch.where(kept, x.log_softmax(1), x)


def normalised(x):
    mean = x.mean(1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(1, keepdim=True) + 1e-5).sqrt()


def overlap(x):
    """Sums of all rows of an image, for each channel."""
    share = x.softmax(1)
    return (share * share.detach()).sum((2, 3)) / share.sum((2, 3))


def segmented(x):
    target = torch.arange(x.numel() // x.shape[1]).reshape(x.shape[0], *x.shape[2:]) % x.shape[1]
    return F.cross_entropy(x, target, ignore_index=2)


ROWS = {
    "channels": (softmax(1), leaf(3, 21, 40, 33)),
    "channels, blocks that are not full": (softmax(1), leaf(3, 5, 150)),
    "channels, the logarithm": (lambda x: x.log_softmax(1), leaf(2, 9, 96, 20)),
    "channels in bfloat16": (softmax(1), leaf(2, 21, 40, 32, dtype=torch.bfloat16)),
    "channels in float64": (softmax(1), leaf(2, 21, 40, 32, dtype=torch.float64)),
    "channels_last": (softmax(1), leaf(2, 21, 40, 33).detach().to(memory_format=torch.channels_last).requires_grad_()),
    "short rows": (softmax(-1), leaf(3000, 21)),
    "rows of three": (softmax(-1), leaf(9000, 3)),
    "rows of several dimensions": (lambda x: x - x.logsumexp((1, 2), keepdim=True), leaf(2, 3, 2, 900)),
    "long rows": (softmax(1), leaf(2, 300, 64)),
    "the first dimension": (softmax(0), leaf(200, 200)),
    "truth values": (masked, leaf(2, 17, 1500)),
    "a norm": (normalised, leaf(2, 6, 40, 40)),
    "infinities": (lambda x: x.masked_fill(x > 1, -torch.inf).softmax(1), leaf(2, 2, 9000)),
}


@pytest.fixture
def written(monkeypatch):
    """How each kernel is written: with vectors over rows, or not."""
    kinds = []
    plain = render.Renderer.render

    def noted(self):
        text = plain(self)
        kinds.append(self.lanes is not None)
        return text

    monkeypatch.setattr(render.Renderer, "render", noted)
    return kinds


def compare(function, x, count):
    compiled = aottrain.compile(function, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = compiled(x), function(x)
    assert got.stride() == wanted.stride() and got.dtype is wanted.dtype
    assert_close(got, wanted)
    cotangent = leaf(*wanted.shape, dtype=wanted.dtype, seed=1).detach()
    one, other = (torch.autograd.grad(y, x, cotangent)[0] for y in (got, wanted))
    assert one.stride() == other.stride()
    if x.dtype is torch.bfloat16:
        assert_close(one, other)
    else:
        assert torch.equal(one.isnan(), other.isnan())
        assert_close_as_sums(one.nan_to_num(), other.nan_to_num(), count)


@pytest.mark.parametrize("name", ROWS)
def test_rows_side_by_side(name, written):
    function, x = ROWS[name]
    compare(function, x, 64 * max(x.shape[1], 8))
    assert any(written)


@pytest.mark.parametrize("images", [1, 2, 8])
def test_sums_over_the_rows_of_an_image(images, written):
    """One image is shared by threads as rows are; of many each is one thread's; of few, they are written as rows."""
    compare(overlap, leaf(images, 6, 40, 30), 4096)
    assert any(written)


def test_a_norm_of_short_rows(written):
    """The gradients of its scale and shift are sums over all rows."""
    inputs = leaf(40, 48, 24), leaf(24, seed=1), leaf(24, seed=2)

    def norm(x, scale, shift):
        return F.layer_norm(x, (24,), scale, shift)

    compiled = aottrain.compile(norm, kernel="cpp", capture="trace", on_unsupported="error")
    cotangent = leaf(40, 48, 24, seed=3).detach()
    results = [torch.autograd.grad(function(*inputs), inputs, cotangent) for function in (compiled, norm)]
    for one, other in zip(*results, strict=True):
        assert_close_as_sums(one, other, 40 * 48)
    assert written and all(written)


@pytest.mark.parametrize("dear", [True, False])
def test_rows_of_three_fill_vectors_where_their_elements_are_dear(written, dear):
    """An image in channels_last beside one that is not: the loop over channels would fill no vector."""
    images = leaf(4, 3, 20, 20).detach().to(memory_format=torch.channels_last).requires_grad_()
    others = leaf(4, 3, 20, 20, seed=1).detach()

    def loss(images):
        return (images.exp().tanh() if dear else images.relu()) * others

    compiled = aottrain.compile(loss, kernel="cpp", capture="trace", on_unsupported="error")
    got, wanted = compiled(images), loss(images)
    assert got.stride() == wanted.stride()
    assert_close(got, wanted)
    assert_close(*(torch.autograd.grad(y, images, others)[0] for y in (got, wanted)))
    assert any(written) == dear


def test_a_sum_over_everything(written):
    compare(lambda x: x.softmax(1).square().sum(), leaf(2, 7, 4000), 4096)
    assert any(written)


def test_a_sum_of_two_that_lie_in_memory_in_two_orders(written):
    """No row has a sum of its own: one of the two would be read a cache line for each element."""
    other = leaf(2, 256, 512, seed=2).detach()
    compare(lambda x: (x.tanh() * other.mT).sum(), leaf(2, 512, 256), 4096)
    assert any(written)


def test_a_cross_entropy_of_channels(written):
    compare(segmented, leaf(2, 21, 40, 40), 4096)
    assert any(written)


@pytest.mark.parametrize(
    "function, x",
    [
        (softmax(-1), leaf(300, 128)),
        (lambda x: x.sin().softmax(1), leaf(2, 21, 2000)),  # sines are written otherwise
        (softmax(1), leaf(4, 300, 4)),  # too few neighbours
    ],
    ids=["long rows in memory's order", "sines", "few neighbours"],
)
def test_others_are_written_row_by_row(function, x, written):
    compare(function, x, 64 * x.shape[1])
    assert written and not any(written)


def test_results_do_not_hang_on_the_number_of_threads():
    x = leaf(5, 11, 70, 31)
    compiled = aottrain.compile(lambda x: (x.softmax(1), x.log_softmax(1)), kernel="cpp", capture="trace")
    threads = torch.get_num_threads()
    results = []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            results.append(compiled(x))
    finally:
        torch.set_num_threads(threads)
    for others in results[1:]:
        assert all(map(torch.equal, others, results[0]))
