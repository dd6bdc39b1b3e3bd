"""A graph to a function that runs it by generated kernels, and libraries between them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from aottrain.compiler.codegen.cpp import render_cpp, scratch_bytes
from aottrain.compiler.codegen.cpp_library import LIBRARY
from aottrain.compiler.scheduling.order import schedule
from aottrain.ir.schedule import KernelCall
from aottrain.runtime.executor import Runner
from aottrain.runtime.launch import Launch, cpp_launch, scheduled_runner
from aottrain.runtime.native import load

FLAGS = ("-fopenmp", "-fno-trapping-math", "-fwrapv")


def cpp_runner(graph: fx.Graph) -> Runner:
    """The graph's boxed function."""
    planned = schedule(graph)
    launches = _link(planned.kernels)
    return scheduled_runner(graph, planned, launches)


def _link(kernels: Sequence[KernelCall]) -> dict[str, Launch]:
    """Equal kernels, as those of repeated blocks, are one function."""
    source, functions = cpp_source(kernels)
    if not functions:
        return {}
    library = load(source, FLAGS)
    assert library is not None
    return {
        call.kernel.name: cpp_launch(getattr(library, functions[call.kernel.name]), scratch_bytes(call.kernel))
        for call in kernels
    }


def cpp_source(kernels: Sequence[KernelCall]) -> tuple[str, dict[str, str]]:
    """One self-contained C++ text, and the function of each kernel."""
    parts, known, functions = [LIBRARY], {}, {}  # type: tuple[list[str], dict[str, str], dict[str, str]]
    for call in kernels:
        kernel = call.kernel
        text = re.sub(rf"\b{kernel.name}\b", "KERNEL", render_cpp(kernel))
        if text not in known:
            known[text] = f"kernel_{len(known)}"
            header = [f"// {line}" for line in str(kernel).splitlines() if line.strip()]
            parts.append("\n".join(header) + "\n" + text.replace("static int KERNEL", f'extern "C" int {known[text]}'))
        functions[kernel.name] = known[text]
    return "\n".join(parts), functions
