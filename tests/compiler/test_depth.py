"""Depth: more blocks are more calls of the same kernels, and a new process compiles nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import aottrain
from aottrain.compiler.codegen.cpp.render import render_cpp
from aottrain.compiler.link import programs
from aottrain.explain.report import GraphReport
from aottrain.ir.kernels.affine import Affine
from aottrain.ir.kernels.kernel import Address, Compute, Constant, KernelIR, Load, Parameter, Store, made_of
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


def test_kernels_of_further_blocks_are_not_rendered_again(folder, monkeypatch):
    rendered = []
    monkeypatch.setattr(programs, "render_cpp", lambda kernel: rendered.append(kernel.name) or render_cpp(kernel))
    counts = []
    for depth in (5, 12):
        rendered.clear()
        _, report = compiled(depth)
        counts.append(len(rendered))
        assert len(report.kernels) > len(rendered)
    assert counts[0] == counts[1]


def test_kernels_are_equal_where_all_but_names_and_draws_are_the_same(folder):
    """By the objects that they are made of: a number that only prints alike is another one."""
    offset, step, one = Address(Affine((), 1)), Address(Affine(((0, 1),))), Constant(1.0, torch.float32)
    parameters = (Parameter("state", torch.int64, False, 2), Parameter("y", torch.float32, True, 64))
    loads, stores = (Load(0, offset, torch.int64), Load(0, step, torch.int64), one), (Store(1, step, 5),)
    add, draw = Compute("add", (0, 3), torch.int64), Compute("philox", (1, 4, 1), torch.float32)

    def kernel(number: int, name: str = "k") -> KernelIR:
        body = (*loads, Constant(number, torch.int64), add, draw)
        return KernelIR(name, ranges, 0, parameters, body, stores, ())

    ranges = (64,)
    assert made_of(kernel(1)) == made_of(kernel(2, "other"))
    named = tuple(replace(each, name=f"{each.name}_1") for each in parameters)
    assert made_of(kernel(1)) == made_of(replace(kernel(1), parameters=named))
    for changed in (
        {"body": (*loads[:2], Constant(2.0, torch.float32), *kernel(1).body[3:])},
        {"body": (*kernel(1).body[:4], replace(add, op="sub"), draw)},
        {"stores": (replace(stores[0], value=2),)},
        {"ranges": (8, 8)},
        {"parameters": (parameters[0], replace(parameters[1], dtype=torch.float64))},
        {"parameters": (parameters[0], replace(parameters[1], span=1 << 20))},
        {"num_outer": 1},
    ):
        assert made_of(kernel(1)) != made_of(replace(kernel(1), **changed)), changed


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
