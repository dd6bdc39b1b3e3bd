"""choose_attentions: which calls of attention our own function runs instead of ATen's, and why.

Forward and backward are measured apart: both functions keep the same of a row, so either backward may follow either
forward. Our own takes a few times as much memory as ATen's while it runs: it is not taken where memory matters most.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import fx

from aottrain.compiler.graphs.measured_calls import call_of
from aottrain.ir.graph import calls, spec_of
from aottrain.ir.settings.decisions import ATEN, OWN, SOURCES, Decision, Timing
from aottrain.ir.tensor import TensorSpec
from aottrain.ir.units import format_seconds
from aottrain.measure.calls import OpCall
from aottrain.measure.decisions import decide
from aottrain.measure.timings import calls_timed
from aottrain.ops.attention import DTYPES
from aottrain.toolchain.native import find_compiler

aten, own = torch.ops.aten, torch.ops.aottrain

_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
# The op that replaces it, its name among libraries, and the slice of its arguments: query, key and value.
_OWN: dict[Any, tuple[Any, str, slice]] = {
    _FORWARD: (own.attention.default, "own attention", slice(0, 3)),
    _BACKWARD: (own.attention_backward.default, "own attention backward", slice(1, 4)),
}
_FASTER = 1.05


def choose_attentions(graph: fx.Graph) -> dict[fx.Node, tuple[str, str]]:
    """For each attention that our own function does: its name in `ops.attention.ATTENTIONS`, and the reason."""
    choices: dict[fx.Node, tuple[str, str]] = {}
    for node in calls(graph):
        if node.target in _OWN and _is_plain(node):
            decision = _decision(node)
            if decision is not None and decision.choice == OWN:
                choices[node] = _OWN[node.target][1], _reason(decision)
    return choices


def _decision(node: fx.Node) -> Decision | None:
    """ATEN or OWN; ATen's where nothing is measured. None where there is nothing to decide: no compiler is found."""
    call = call_of(node)
    if call is None or call.plain_text is None or find_compiler() is None:
        return None
    own_call = OpCall(_OWN[node.target][0], call.args, call.kwargs, call.result_bytes)
    measure = partial(calls_timed, {ATEN: call, OWN: own_call})
    return decide("attention", call.plain_text, ATEN, measure, _prefer)


def _prefer(times: Mapping[str, Timing]) -> str:
    return OWN if times[ATEN].seconds > _FASTER * times[OWN].seconds else ATEN


def _reason(decision: Decision) -> str:
    if not decision.times:
        return SOURCES[decision.source]
    own_time, aten_time = (format_seconds(decision.times[name].seconds) for name in (OWN, ATEN))
    return f"{own_time}, ATen's own {aten_time}"


def _is_plain(node: fx.Node) -> bool:
    """Heads of one fixed size and one type that the function knows, no dropout, a mask of their type or wider."""
    _, _, operands = _OWN[node.target]
    query, key, value = (spec_of(operand) for operand in node.args[operands])  # type: ignore[arg-type]
    specs = [spec_of(operand) for operand in node.all_input_nodes]
    if any(spec is None or spec.symbolic is not None or not spec.numel for spec in specs):
        return False
    assert query is not None and key is not None and value is not None
    dropout = (*node.args[operands.stop + 2 * (node.target is _BACKWARD) :], node.kwargs.get("dropout_p", 0.0))[0]
    mask = node.kwargs.get("attn_mask")
    if dropout != 0.0 or (isinstance(mask, fx.Node) and not _is_supported_mask(mask, query)):
        return False
    same_heads = key.shape == value.shape and query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    same_heads &= query.shape[1] % key.shape[1] == 0
    return same_heads and query.dtype in DTYPES and query.device.type == "cpu"


def _is_supported_mask(mask: fx.Node, query: TensorSpec) -> bool:
    spec = spec_of(mask)
    return spec is not None and spec.dtype in (torch.float32, query.dtype)
