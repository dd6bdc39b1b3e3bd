"""Kernels of rows that only padding reads: one kernel with it, of the same values, NaN beside them included."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import aottrain
from aottrain.compiler.codegen.cpp.render import Renderer
from aottrain.compiler.codegen.evaluation import evaluate
from aottrain.compiler.schedule.order import schedule
from aottrain.ir.kernels.traffic import moved_bytes
from tests.compiler.programs import joint_of, leaf
from tests.compiler.schedule.test_scheduling import library_calls, schedules
from tests.numerics.tolerance import assert_close


def shifted(x):
    tokens = torch.arange(4 * 17).reshape(4, 17) % 96
    return F.cross_entropy(x[:, :-1].reshape(-1, 96), tokens[:, 1:].reshape(-1), ignore_index=5)


def softmax(x):
    return x.softmax(-1)


PADDED = {
    "the loss of next tokens": (shifted, (4, 17, 96)),
    "the loss of next tokens in halves": (lambda x: shifted(x.bfloat16().float()), (4, 17, 96)),
    "rows at the end": (lambda x: softmax(x[:, 3:]), (4, 20, 96)),
    "rows in the middle": (lambda x: softmax(x[2:-1]) * 2, (24, 96)),
    "rows of two dimensions": (lambda x: softmax(x[1:].flatten(-2)), (9, 8, 12)),
    "dimensions in another order": (lambda x: softmax(x[:, 1:].transpose(0, 1)), (4, 17, 96)),
    "a number other than zero": (lambda x: F.pad(softmax(x), (0, 0, 1, 2), value=0.5) + 1, (24, 96)),
    "two dimensions": (lambda x: F.pad(softmax(x), (0, 0, 1, 0, 1, 1)), (20, 20, 96)),
    "what is added": (lambda x: F.pad(softmax(x), (0, 0, 0, 2)) + torch.ones(96), (24, 96)),
    "rows on the diagonal": (lambda x: softmax(x[:, :-1].triu()), (4, 17, 96)),
}


@pytest.mark.parametrize("name", PADDED)
@pytest.mark.parametrize("kernel", ["cpp", "aten"])
def test_values_are_those_of_eager(name, kernel):
    function, shape = PADDED[name]
    x = leaf(*shape)
    for fill in (None, torch.nan):
        if fill is not None:
            x = x.detach().clone()
            x[:, -1], x[0], x[:, 0] = fill, fill, fill
            x.requires_grad_()
        compiled = aottrain.compile(function, capture="trace", kernel=kernel, on_unsupported="error")
        got, wanted = compiled(x), function(x)
        assert_close(got, wanted)
        assert got.stride() == wanted.stride()
        cotangent = torch.rand(wanted.shape)
        assert_close(*(torch.autograd.grad(y, x, cotangent)[0] for y in (got, wanted)))


@pytest.mark.parametrize("name", [name for name in PADDED if "halves" not in name])  # which is read twice
def test_padding_writes_nothing_of_its_own(name):
    """Each of both directions reads and writes what it must, and rows with their padding are one kernel."""
    function, shape = PADDED[name]
    forward, backward, _ = schedules(function, leaf(*shape))
    assert library_calls(forward) == library_calls(backward) == []
    size = 4 * torch.Size(shape).numel()
    rows = [call for part in (forward, backward) for call in part.kernels if call.kernel.row_size >= 96]
    assert len(rows) == 2
    assert sum(moved_bytes(call.kernel) for call in rows) < 5.6 * size


LEFT = {
    "the rows are a result, too": (lambda x: ((y := softmax(x)), F.pad(y, (0, 0, 0, 2))), (24, 96)),
    "another one reads the rows": (lambda x: F.pad(y := softmax(x), (0, 0, 0, 2)).sum(0) + (y @ x.t()).sum(), (24, 96)),
    "rows are padded": (lambda x: F.pad(softmax(x), (0, 2)), (24, 96)),
    "most is padding": (lambda x: F.pad(softmax(x), (0, 0, 0, 24)), (24, 96)),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_rows_are_kernels_of_their_own(name):
    function, shape = LEFT[name]
    x = leaf(*shape).detach()
    kernels = schedule(joint_of(function, x).graph).kernels
    assert not any("_softmax" in text and "constant_pad" in text for text in map(sources, kernels))
    compiled = aottrain.compile(function, capture="trace", kernel="cpp", on_unsupported="error")
    torch.utils._pytree.tree_map(assert_close, compiled(x), function(x))


def sources(call):
    return " ".join(call.kernel.sources)


@pytest.mark.parametrize("name", PADDED)
def test_the_kernel_means_what_its_cpp_does(name):
    """`evaluate` reads nothing where a row is padding: memory there does not exist."""
    function, shape = PADDED[name]
    x = leaf(*shape).detach()
    for call in schedule(joint_of(function, x).graph).kernels:
        guards = {i.guard for i in call.kernel.body if hasattr(i, "guard")}
        if len(call.kernel.ranges) < 2 or guards == {None}:
            continue
        memory = {
            node: torch.rand(p.span).to(p.dtype) for node, p in zip(call.buffers, call.kernel.parameters, strict=True)
        }
        memory = {n: torch.randint(96, m.shape) if not m.is_floating_point() else m for n, m in memory.items()}
        evaluate(call.kernel, [memory[node] for node in call.buffers])
        for node in call.writes:
            assert memory[node].isfinite().all()


def test_rows_of_padding_are_filled_and_skipped():
    _, backward, _ = schedules(shifted, leaf(4, 17, 96))
    (call,) = [call for call in backward.kernels if "slice_backward" in sources(call)]
    renderer = Renderer(call.kernel)
    text = renderer.render()
    assert renderer.skipping is not None and "continue;" in text and "blend_" not in text
    assert renderer.tile is None and renderer.lanes is None
