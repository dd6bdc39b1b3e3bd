"""The kernels of a program as Triton modules."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial

from aottrain.compiler.codegen.triton.render import render_code, render_triton
from aottrain.ir.kernels.kernel import KernelIR, draw_numbers, made_of
from aottrain.ir.schedule import KernelCall
from aottrain.runtime.cuda.triton_launch import Launch, triton_launch


def link_triton(kernels: Sequence[KernelCall]) -> tuple[dict[str, Launch], int]:
    """What runs each kernel, and how many modules they are. Equal ones, as those of repeated blocks, are one module:
    its comment is the first's."""
    launch_by_code: dict[str, Launch] = {}
    known: dict[Hashable, Launch] = {}  # of kernels that need not be rendered to see that they are equal
    launches: dict[str, Launch] = {}
    for call in kernels:
        parts = made_of(call.kernel)
        if parts not in known:
            code = render_code(call.kernel)
            if code not in launch_by_code:
                launch_by_code[code] = triton_launch(render_triton(call.kernel))
            known[parts] = launch_by_code[code]
        launches[call.kernel.name] = with_draws(known[parts], call.kernel)
    return launches, len(launch_by_code)


def with_draws(launch: Launch, kernel: KernelIR) -> Launch:
    """What runs a kernel by the module that it shares with others, which draw other random numbers."""
    numbers = draw_numbers(kernel)
    return partial(launch, draws=numbers) if numbers else launch
