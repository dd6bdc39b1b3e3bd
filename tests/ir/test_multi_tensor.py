"""Programs over many tensors: what verification refuses, of updates in place and of blocks that could meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aottrain.compiler.codegen.cpp.multi_tensor import render_multi_tensor
from aottrain.compiler.codegen.triton.multi_tensor import render_triton_multi_tensor
from aottrain.compiler.optimizers.formulas import ADAMW, LION, SGD, Segment, optimizer_step
from aottrain.errors import VerificationError
from aottrain.ir.kernels.affine import ZERO, Affine
from aottrain.ir.kernels.kernel import (
    Address,
    Compute,
    Constant,
    KernelIR,
    Load,
    Parameter,
    Reduce,
    Store,
)
from aottrain.ir.kernels.multi_tensor import BLOCK, Base, MultiTensorIR, Over, Stage, at_count, verify_multi_tensor
from aottrain.ir.kernels.verify import verify_kernel

F32 = torch.float32
EACH = Address(Affine(((0, 1),)))
SEGMENT = Segment(F32, ("exp_avg", "exp_avg_sq"))


def in_place(load: Address = EACH, store: Address = EACH, size: int = 8, more: tuple = ()) -> KernelIR:
    """x = x * 2, each element by itself."""
    body = (Load(0, load, F32), Constant(2.0, F32), Compute("mul", (0, 1), F32), *more)
    return KernelIR("kernel_0", (size,), 0, (Parameter("x", F32, True, 2 * size),), body, (Store(0, store, 2),), ())


def test_an_update_in_place_is_allowed_and_shown():
    verify_kernel(in_place())
    assert "p0: inout float32[16] x" in str(in_place())


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (in_place(load=Address(Affine(((0, 1),), 1))), "at another address"),
        (in_place(load=Address(ZERO), store=Address(ZERO)), "by several iterations"),
        (replace(in_place(), stores=(Store(0, EACH, 2), Store(0, Address(Affine(((0, 1),), 8)), 2))), "more than once"),
        (in_place(more=(Reduce("sum", 0, F32), Compute("sub", (0, 3), F32))), "in a pass after"),
    ],
)
def test_an_update_in_place_that_depends_on_the_order_is_refused(kernel, message):
    if message == "by several iterations":  # the store itself is one per row, and so allowed
        constant = (Load(0, Address(ZERO), F32), Constant(2.0, F32), Compute("mul", (0, 1), F32))
        kernel = replace(kernel, body=constant)
    with pytest.raises(VerificationError, match=message):
        verify_kernel(kernel)


def overlapping() -> KernelIR:
    """Two loops whose rows overlap: elements 0 to 3, 2 to 5, ..."""
    place = Address(Affine(((0, 2), (1, 1))))
    body = (Load(0, place, F32),)
    return KernelIR("kernel_0", (3, 4), 1, (Parameter("x", F32, True, 8),), body, (Store(0, place, 0),), ())


def test_rows_that_overlap_are_refused():
    with pytest.raises(VerificationError, match="by several iterations"):
        verify_kernel(overlapping())


def scaling(
    base: Base = Base.LIST, over: Over = Over.BLOCKS, span: int = BLOCK, place: Address = EACH
) -> MultiTensorIR:
    kernel = in_place(place, place, BLOCK)
    kernel = replace(kernel, parameters=(Parameter("x", F32, True, span),))
    return MultiTensorIR("scale", (F32,), (Stage(kernel, (base,), over),), 0, ("x",), ())


def test_blocks_that_keep_to_themselves_are_allowed():
    verify_multi_tensor(scaling())
    verify_multi_tensor(scaling(Base.WHOLE, Over.ALL_TENSORS, 3 * BLOCK, Address(Affine(((0, 3),), 2))))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (scaling(span=2 * BLOCK), "has not 1 elements for each iteration"),
        (scaling(span=2 * BLOCK, place=Address(Affine(((0, 2),), 1))), "blocks would overlap"),
        (scaling(Base.WHOLE), "blocks would overlap"),
        (scaling(Base.ROW, Over.ALL_TENSORS), "the stage runs once"),
        (scaling(span=2 * BLOCK, place=Address(Affine(((0, 1),), 5))), "by whole rows"),
        (replace(scaling(), stages=(Stage(in_place(), (Base.LIST,), Over.BLOCKS),)), "is not one loop"),
    ],
)
def test_blocks_that_could_meet_are_refused(program, message):
    with pytest.raises(VerificationError, match=message):
        verify_multi_tensor(program)


def test_each_stage_is_a_kernel_that_is_valid_by_itself():
    (stage,) = scaling().stages
    twice = replace(stage.kernel, stores=stage.kernel.stores * 2)
    with pytest.raises(VerificationError, match="more than once"):
        verify_multi_tensor(replace(scaling(), stages=(replace(stage, kernel=twice),)))


def test_what_many_blocks_would_write_is_refused():
    body = (Constant(1.0, F32),)
    kernel = KernelIR("k", (BLOCK,), 0, (Parameter("t", F32, True, 1),), body, (Store(0, Address(ZERO), 0),), ())
    program = MultiTensorIR("set", (F32,), (Stage(kernel, (Base.WHOLE,), Over.BLOCKS),), 0, (), ("t",))
    with pytest.raises(VerificationError, match="written by several blocks"):
        verify_multi_tensor(program)


@pytest.mark.parametrize("count", [0, 1, 4095, 100_000])
def test_kernels_of_another_count_stay_within_their_memory(count):
    for stage in optimizer_step(ADAMW, (SEGMENT,)).stages:
        kernel = at_count(stage.kernel, count)
        assert kernel.ranges == (count,)
        if count:
            verify_kernel(kernel)


@pytest.mark.parametrize("formula", [ADAMW, LION, SGD], ids=lambda formula: formula.name)
def test_the_text_depends_on_types_alone(formula):
    states = {"adamw": SEGMENT.states, "lion": ("exp_avg",), "sgd": ("momentum_buffer",)}[formula.name]
    segments = tuple(Segment(dtype, states) for dtype in (torch.bfloat16, F32))
    first, second = (optimizer_step.__wrapped__(formula, segments) for _ in range(2))
    assert first == second and str(first) == str(second)
    for render in (render_multi_tensor, render_triton_multi_tensor):
        assert render(first) == render(second)
        assert "update_0" in render(first) and "update_1" in render(first)
    # One parallel region, and between the parts of different segments no waiting.
    assert render_multi_tensor(first).count("#pragma omp parallel num_threads") == 1
    assert render_multi_tensor(first).count("#pragma omp barrier") == 3
