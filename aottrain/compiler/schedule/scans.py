"""choose_scans: running sums and logarithms of running sums of exponentials that a function of our own does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import calls, spec_of
from aottrain.ir.schedule import OWN_CUMSUM, OWN_LOGCUMSUMEXP
from aottrain.ir.tensor import contiguous_strides
from aottrain.toolchain.native import find_compiler

aten = torch.ops.aten

_OWN: dict[Any, str] = {aten.cumsum.default: OWN_CUMSUM, aten.logcumsumexp.default: OWN_LOGCUMSUMEXP}
# So many neighbours, or rows, fill a vector of float64.
_FEWEST = 8
_REASON = "neighbours are added up in vectors, which ATen does one by one"


def choose_scans(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """For each scan that our own function does: its name in `ops.scans.SCANS`, and the reason. A running sum along rows
    is left to ATen: it costs a load of its own for each row."""
    chosen = [node for node in calls(graph) if node.target in _OWN and _is_plain(node)]
    if not chosen or find_compiler() is None:
        return {}
    return {node: (_OWN[node.target], _REASON) for node in chosen}


def _is_plain(node: fx.Node) -> bool:
    """Contiguous, float32, of fixed size, with enough to add up side by side."""
    source, dim = node.args[:2]
    spec, own = spec_of(source) if isinstance(source, fx.Node) else None, spec_of(node)
    if spec is None or own is None or spec.symbolic is not None or node.kwargs or not isinstance(dim, int):
        return False
    if {spec.dtype, own.dtype} != {torch.float32} or spec.device.type != "cpu" or not spec.shape or not spec.numel:
        return False
    if any(each.stride != contiguous_strides(spec.shape) for each in (spec, own)):
        return False
    dim %= len(spec.shape)
    inner, outer = math.prod(spec.shape[dim + 1 :]), math.prod(spec.shape[:dim])
    return inner >= _FEWEST or (inner == 1 and outer >= _FEWEST and node.target is aten.logcumsumexp.default)
