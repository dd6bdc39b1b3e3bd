"""The kernels of a program as Triton modules."""

from __future__ import annotations

from collections.abc import Sequence

from aottrain.compiler.codegen.triton.render import render_code, render_triton
from aottrain.ir.schedule import KernelCall
from aottrain.runtime.cuda.triton_launch import Launch, triton_launch


def link_triton(kernels: Sequence[KernelCall]) -> dict[str, Launch]:
    """What runs each kernel. Equal ones, as those of repeated blocks, are one module: its comment is the first's."""
    launch_by_code: dict[str, Launch] = {}
    launches: dict[str, Launch] = {}
    for call in kernels:
        code = render_code(call.kernel)
        if code not in launch_by_code:
            launch_by_code[code] = triton_launch(render_triton(call.kernel))
        launches[call.kernel.name] = launch_by_code[code]
    return launches
