"""Depth: more blocks are more calls of the same kernels, and a new process compiles nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import aottrain
from aottrain.explain.report import GraphReport
from aottrain.toolchain import native
from aottrain.toolchain.native import find_compiler
from tests.zoo import FeedForward

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler on this machine")


def compiled(depth: int) -> tuple[nn.Module, GraphReport]:
    torch.manual_seed(0)
    model = nn.Sequential(*(FeedForward(16, 32) for _ in range(depth)))
    step = aottrain.compile(model, capture="trace", kernel="cpp", on_unsupported="error")
    return step, step.prepare(torch.ones(8, 16))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("AOTTRAIN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", {})
    return tmp_path


def making(report: GraphReport) -> str:
    return next(stage.note for stage in report.stages if stage.name == "make_kernels")


def test_blocks_share_their_kernels(folder):
    _, shallow = compiled(3)
    _, deep = compiled(6)
    assert len(shallow.kernels) < len(deep.kernels)
    assert 0 < shallow.num_kernel_functions == deep.num_kernel_functions < len(shallow.kernels)


def test_a_warm_start_compiles_nothing_and_computes_the_same(folder):
    def run() -> tuple[list[Tensor], str]:
        step, report = compiled(3)
        torch.manual_seed(1)
        step(torch.ones(8, 16)).sum().backward()
        return [parameter.grad for parameter in step.parameters()], making(report)

    cold, note = run()
    assert " 0 of " not in note
    objects = {path: path.stat().st_mtime_ns for path in folder.glob("*.so")}
    native._loaded.clear()  # as in a new process
    warm, note = run()
    assert " 0 of " in note and "found on disk" in note
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.so")} == objects
    assert all(torch.equal(one, other) for one, other in zip(cold, warm, strict=True))


def test_garbage_is_collected_again_after_compiling(folder):
    import gc

    assert gc.isenabled()
    compiled(1)
    assert gc.isenabled()
    with pytest.raises(aottrain.errors.UnsupportedError):
        step = aottrain.compile(lambda x: print(x), capture="trace", on_unsupported="error")
        step(torch.ones(2))
    assert gc.isenabled()


def test_what_compiling_made_is_not_looked_through_at_once(folder):
    import gc

    gc.collect()
    rounds = [found["collections"] for found in gc.get_stats()]
    frozen = gc.get_freeze_count()
    compiled(1)
    assert gc.get_freeze_count() >= 0.99 * frozen  # what was frozen stays so; a few of them may die
    # The least that a compile of this size would have set off is a collection of the middle generation.
    assert gc.get_stats()[1]["collections"] <= rounds[1] + 1
    assert gc.get_count()[0] < gc.get_threshold()[0] + 1
