"""Kernels compiled to a GPU's machine code, which needs no GPU. Run by test_triton.py, without the interpreter."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import aottrain
from aottrain.compiler.codegen.triton.multi_tensor import render_triton_multi_tensor
from aottrain.compiler.codegen.triton.render import render_triton
from aottrain.compiler.link import backends, programs
from aottrain.compiler.optimizers.formulas import ADAMW, LION, SGD, Formula, Segment, optimizer_step
from aottrain.ir.kernels.kernel import Address, Compute, KernelIR, Load, Parameter, Store
from aottrain.ir.kernels.multi_tensor import Base, Over
from aottrain.ir.kernels.open_sizes import size_names
from aottrain.ir.schedule import KernelCall
from aottrain.runtime.cuda.triton_launch import load_module
from tests.compiler.codegen.triton.triton_kernels import (
    ANGLES,
    BF16,
    F16,
    F32,
    F64,
    I64,
    UNARY,
    at,
    draw,
    gather,
    pointwise,
    reduction,
    several,
)
from tests.sampling import crossed

TYPES = {
    F32: "fp32", F64: "fp64", BF16: "bf16", F16: "fp16", I64: "i64", torch.int32: "i32", torch.int8: "i8",
    torch.bool: "i1",
}  # fmt: skip
HOPPER = GPUTarget("cuda", 90, 32)


def assemble(kernel: KernelIR, target: GPUTarget = HOPPER) -> list[str]:
    """The assembly of a module's kernels, with the options that they are launched with."""
    source = render_triton(kernel)
    module = load_module(source)
    types = {f"p{i}": f"*{TYPES[p.dtype]}" for i, p in enumerate(kernel.parameters)}
    scratch, launches = _launches(kernel, module)
    types |= {f"s{k}": f"*{TYPES[getattr(torch, name)]}" for k, (name, _) in enumerate(scratch)}
    options = {"enable_fp_fusion": False, "debug": "fn.check_index(" in source, "sanitize_overflow": False}
    found = []
    for function, _, warps, names in launches:
        numbers = {name: "i32" for name in function.arg_names if name not in names}
        numbers = {name: "i64" for name in names if name[0] == "d"} | numbers
        buffers = {name: types[name] for name in names if name not in numbers}
        signature = {**buffers, **numbers}
        attributes = {(number,): [["tt.divisibility", 16]] for number in range(len(buffers))} if numbers else {}
        made = ASTSource(function, signature=signature, constexprs={}, attrs=attributes)
        compiled = triton.compile(made, target=target, options={**options, "num_warps": warps})
        assert compiled.asm["cubin"]
        found.append(compiled.asm["ptx"])
    return found


def _launches(kernel: KernelIR, module: Any) -> tuple[Any, list[tuple[Any, ...]]]:
    """Scratch buffers and kernels of a module; where each call has sizes of its own, for one of 7."""
    if not (sizes := size_names(kernel)):
        return module.SCRATCH, list(module.LAUNCHES)
    scratch, launches = module.launches(*(7 for _ in sizes))
    assert launches[0][1] > 0 and [each[0] for each in module.launches(*(900 for _ in sizes))[1]] == [
        each[0] for each in launches
    ]
    return scratch, [each[:4] for each in launches]


@pytest.mark.parametrize("first", range(0, len(UNARY), 8))
def test_functions_compile(first):
    assemble(several((*UNARY, *ANGLES)[first : first + 8], 4097, F32))


@pytest.mark.parametrize(
    "kernel",
    [
        reduction("sum", 300, 63), reduction("max", 3, 17001), reduction("min", 7, 13, I64), reduction("prod", 3, 5),
        reduction("max", 7, 4097, BF16, F32), reduction("sum", 7, 13, F64), draw(5, 64), draw(5, 63, False),
        pointwise("pow", 40, F64, 2), pointwise("xor", 40, torch.int8, 2),
        pointwise("atan2", 40, F32, 2), pointwise("fmod", 40, F32, 2), pointwise("fma", 40, F32, 3),
        pointwise("div", 40, I64, 2),
    ],
)  # fmt: skip
def test_kernels_compile(kernel):
    assemble(kernel)


def test_an_index_is_asserted_on_the_device():
    assert "trap" in "".join(assemble(gather(5, 7))) or "assertfail" in "".join(assemble(gather(5, 7)))


def test_a_cast_to_8_bits_keeps_the_lowest_of_more():
    """As eager's. By 16 bits, and back to a float, it would be a number that 8 bits do not hold."""
    inputs, output = Parameter("x", F32, False, 40), Parameter("y", F32, True, 40)
    casts = Compute("cast", (0,), torch.int8), Compute("cast", (1,), F32)
    loads, stores = (Load(0, Address(at(1)), F32), *casts), (Store(1, Address(at(1)), 2),)
    (text,) = assemble(KernelIR("kernel_0", (40,), 0, (inputs, output), loads, stores, ()))
    assert "cvt.rzi.s32.f32" in text


def test_products_and_sums_are_not_contracted():
    """As in eager, where they are two kernels: each is rounded."""
    (text, *_) = assemble(reduction("sum", 5, 63))
    assert "fma.rn.f32" not in text


@pytest.mark.parametrize(
    ("dtype", "update"),
    crossed(
        [F32, BF16, F64],
        [(ADAMW, ("exp_avg", "exp_avg_sq")), (LION, ("exp_avg",)), (SGD, ("momentum_buffer",)), (SGD, ())],
        one_in=3,
    ),
)
def test_optimizer_steps_compile_and_move_16_bytes_at_a_time(dtype, update: tuple[Formula, tuple[str, ...]]):
    formula, states = update
    program = optimizer_step(formula, (Segment(dtype, states),))
    module = load_module(render_triton_multi_tensor(program))
    for (function, _, _, warps, _), stage in zip(module.STAGES, program.stages, strict=True):
        over_blocks = stage.over is Over.BLOCKS
        first = ("owner", "origins", "counts") if over_blocks else ()
        types = {**{name: "*i64" for name in first}, ("first_block" if over_blocks else "count"): "i32"}
        for number, (parameter, base) in enumerate(zip(stage.kernel.parameters, stage.bases, strict=True)):
            kind = "i64" if base is Base.LIST else TYPES[parameter.dtype]
            types[f"{'m' if over_blocks else 'p'}{number}"] = f"*{kind}"
        constants = {"ALIGNMENT": 16} if over_blocks else {}
        made = ASTSource(function, signature={**types, **dict.fromkeys(constants, "constexpr")}, constexprs=constants)
        options = {"enable_fp_fusion": False, "sanitize_overflow": False, "num_warps": warps}
        compiled = triton.compile(made, target=HOPPER, options=options)
        assert compiled.asm["cubin"]
        if stage.kernel.name == "update_0":
            wide = "v2.b64" if dtype is F64 else "v4.b32"
            assert f"ld.global.{wide}" in compiled.asm["ptx"] and f"st.global.{wide}" in compiled.asm["ptx"]


def open_kernels() -> list[KernelIR]:
    """Of a norm, a softmax and pointwise work, forward and backward, for sizes that each call has its own of."""
    found: list[KernelIR] = []

    def model(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.layer_norm(x, (64,), weight, bias)
        return (
            torch.softmax(y @ x.transpose(1, 2), -1).amax(-1) * y.sum(-1) + x.mean((1, 2), keepdim=True).exp()[..., 0]
        )

    def remember(kernels: list[KernelCall]) -> tuple[dict[str, None], int, str]:
        found.extend(call.kernel for call in kernels)
        for kernel in found:
            render_triton(kernel)  # what it assumes of the sizes becomes a guard
        return {call.kernel.name: None for call in kernels}, 0, ""

    with mock.patch.object(programs, "_link_triton", remember), mock.patch.object(backends, "check_device"):
        call = aottrain.compile(model, capture="trace", dynamic=True, kernel="triton", on_unsupported="error")
        x = torch.randn(4, 700, 64, requires_grad=True)
        call.prepare(x, torch.randn(64, requires_grad=True), torch.randn(64, requires_grad=True))
    return [kernel for kernel in found if size_names(kernel)]


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_kernels_of_open_sizes_compile_once_for_all_sizes(arch):
    """A text and a binary do not depend on the sizes; rows of a fixed length are moved by 16 bytes."""
    kernels = open_kernels()
    assert len(kernels) >= 3 and any(kernel.columns for kernel in kernels)
    for kernel in kernels:
        texts = assemble(kernel, GPUTarget("cuda", arch, 32))
        if all(isinstance(size, int) for size in kernel.ranges[kernel.num_outer :]) and kernel.row_size % 64 == 0:
            assert "ld.global.v4" in texts[0]
