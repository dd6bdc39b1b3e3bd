"""choose_kernel: what a program's graphs run as, and why."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from aottrain.compiler.lowering import rules_for
from aottrain.compiler.options import Kernel
from aottrain.ir.graph import InputKind, PartitionedGraph, calls, value_of
from aottrain.runtime.native import find_compiler

# Below this much memory traffic in calls that could be fused, a program is over before generated kernels pay for the
# second that their compilation takes.
_WORTH_COMPILING_BYTES = 1 << 20


def choose_kernel(kernel: Kernel, parts: PartitionedGraph) -> tuple[Kernel, str]:
    """The backend that runs these graphs, and the reason where it is not the one that was asked for by name.

    "auto" means generated kernels where they pay: C++ on a CPU. What they do not cover runs as "aten".
    """
    if not isinstance(kernel, str) or kernel in ("aten", "inductor"):
        return kernel, ""
    if any(value.kind is InputKind.SIZE for value in parts.signature.inputs):
        return "aten", "kernels are generated for fixed sizes, and this program's are symbolic"
    if any(value.spec.device.type != "cpu" for value in parts.signature.inputs):
        return "aten", "C++ kernels run on a CPU, and this program has inputs elsewhere"
    if find_compiler() is None:
        return "aten", "no C++ compiler was found on this machine (g++, clang++, c++ or $CXX)"
    if kernel == "auto":
        traffic = sum(_fusible_bytes(parts.forward))
        if parts.backward is not None:
            traffic += sum(_fusible_bytes(parts.backward))
        if traffic < _WORTH_COMPILING_BYTES:
            return "aten", f"kernel=auto: only {traffic} bytes are computed by calls that could be fused"
    return "cpp", ""


def _fusible_bytes(graph: fx.Graph) -> Iterator[int]:
    for node in calls(graph):
        if rules_for(node):
            value = value_of(node)
            results = value if isinstance(value, (tuple, list)) else [value]
            yield sum(t.numel() * t.element_size() for t in results if isinstance(t, torch.Tensor))
