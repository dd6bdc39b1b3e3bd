"""choose_products: what does each matrix product, and why; placed_convolutions: those that take memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from aottrain.ir.graph import calls, required_spec, spec_of
from aottrain.ir.schedule import OWN_BIASED_PRODUCT, OWN_PRODUCT, copied_bytes
from aottrain.ir.settings.decisions import ATEN, ONEDNN, OWN, SOURCES, Decision
from aottrain.ir.sizes.polynomials import open_sizes
from aottrain.ops.convolutions import can_convolve_into
from aottrain.ops.products.libraries import (
    BIASED,
    PLAIN,
    TRANSPOSED,
    choose_library,
    multiplies_narrow,
    multiplies_transposed,
    multiplies_transposed_by_tiles,
)

aten = torch.ops.aten

_PRODUCTS = (aten.mm.default, aten.addmm.default)
# A smaller product is over before a library's choice matters.
_SMALLEST_FLOPS = 1 << 20
# Below so many terms of a sum, the copies that a transposed product needs take longer than what it saves.
_MANY_TERMS = 1024
# By an estimate of packing beside multiplying: so that packing is less than about a third of both.
_LEAST_SIDE, _FEWEST_TERMS = 48, 32


def choose_products(graph: fx.Graph, may_copy: bool = True) -> dict[fx.Node, tuple[str, str]]:
    """For each product that ATen does not do: how (a key of `ops.products.libraries.PRODUCTS`), and the reason.

    may_copy: also where it needs memory for a copy of an operand.
    """
    candidates = [node for node in calls(graph) if node.target in _PRODUCTS and _has_elements(node)]
    with open_sizes(None):  # right at any size, and chosen by those that were traced
        return _chosen([node for node in candidates if _is_plain(node)], may_copy)


def _chosen(candidates: Sequence[fx.Node], may_copy: bool) -> dict[fx.Node, tuple[str, str]]:
    narrow = [node for node in candidates if required_spec(node).dtype == torch.bfloat16]
    choices = {node: how for node in narrow if may_copy and (how := _narrow_choice(node)) is not None}
    candidates = [node for node in candidates if required_spec(node).dtype == torch.float32]
    if not candidates:
        return choices
    decision = choose_library()
    if decision is None or decision.choice not in (ONEDNN, OWN):
        return choices
    reason = _reason(decision)
    if decision.choice == OWN:
        packed = [node for node in candidates if may_copy and _is_worth_packing(node)]
        return choices | {node: (_own_name(node), reason) for node in packed if _is_faster_by_tiles(node)}
    for node in candidates:
        if node.target is aten.addmm.default:
            choices[node] = "onednn with bias", reason
        elif _is_transposed(node):
            is_tall = _is_tall(node)
            decision = multiplies_transposed(is_tall)
            if decision.choice == ONEDNN:
                name = "onednn transposed" if is_tall else "onednn"
                choices[node] = name, f"{_reason(decision)}; the left operand is a transposed view"
        else:
            choices[node] = "onednn", reason
    return {node: how for node, how in choices.items() if may_copy or not copied_bytes(node, how[0])}


def _is_faster_by_tiles(node: fx.Node) -> bool:
    """Of a product of float32, where tiles are the fastest of those without a transposed operand."""
    is_asked = node.target is aten.mm.default and _is_transposed(node)
    return not is_asked or multiplies_transposed_by_tiles().choice == OWN


def _narrow_choice(node: fx.Node) -> tuple[str, str] | None:
    """Of a product of bfloat16."""
    if not _is_worth_packing(node):
        return None
    form = BIASED if node.target is aten.addmm.default else TRANSPOSED if _is_transposed(node) else PLAIN
    decision = multiplies_narrow(form)
    return None if decision is None or decision.choice != OWN else (_own_name(node), _reason(decision))


def _own_name(node: fx.Node) -> str:
    return OWN_BIASED_PRODUCT if node.target is aten.addmm.default else OWN_PRODUCT


def _reason(decision: Decision) -> str:
    own = "a function of our own" + ("" if decision.key.startswith("bfloat16") else ", in pieces of bfloat16,")
    name = "oneDNN" if decision.choice == ONEDNN else own
    if not decision.times:
        return f"{name} multiplies, {SOURCES[decision.source]}"
    speed = decision.times[ATEN].seconds / decision.times[str(decision.choice)].seconds
    return f"{name} multiplies {speed:.2f} times as fast as aten.mm, {SOURCES[decision.source]}"


def _has_elements(node: fx.Node) -> bool:
    specs = [spec_of(source) for source in node.args if isinstance(source, fx.Node)]
    return all(spec is not None and spec.is_known and all(size > 0 for size in spec.shape) for spec in specs)


def _is_plain(node: fx.Node) -> bool:
    """A product of float32 or bfloat16 on a CPU, into a contiguous result; of addmm with a bias per column."""
    own = spec_of(node)
    if own is None or own.dtype not in (torch.float32, torch.bfloat16) or own.device.type != "cpu":
        return False
    rows, columns = own.shape
    operands = [spec_of(source) for source in node.args if isinstance(source, fx.Node)]
    if any(spec is None for spec in operands) or own.stride != (columns, 1):
        return False
    left = operands[-2]
    assert left is not None
    if 2 * rows * columns * left.shape[1] < _SMALLEST_FLOPS:
        return False
    if node.target is aten.mm.default:
        return True
    bias = operands[0]
    return bias is not None and bias.shape == (columns,) and bias.stride == (1,) and not node.kwargs


def _is_worth_packing(node: fx.Node) -> bool:
    """Each operand is packed once for so many rows or columns of the other, and lies in rows or in columns."""
    own, operands = spec_of(node), [spec_of(source) for source in node.args if isinstance(source, fx.Node)]
    left, right = operands[-2:]
    assert own is not None and left is not None and right is not None
    if any(spec.symbolic is not None or 1 not in spec.stride for spec in (own, left, right)):
        return False
    return 1 / own.shape[0] + 1 / own.shape[1] <= 1 / _LEAST_SIDE and left.shape[1] >= _FEWEST_TERMS


def _is_transposed(node: fx.Node) -> bool:
    """Whether the left operand of a product is a transposed view."""
    spec = spec_of(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    return spec is not None and spec.stride[0] == 1 and spec.stride[1] > 1


def _is_tall(node: fx.Node) -> bool:
    """Whether the transpose of the result is multiplied faster: it has few columns, each a sum of many terms."""
    own, left = spec_of(node), required_spec(node.args[0])
    assert own is not None
    return left.shape[1] >= _MANY_TERMS and own.shape[0] >= 2 * own.shape[1]


def placed_convolutions(graph: fx.Graph) -> frozenset[fx.Node]:
    """Convolutions of images in channels_last into such, of which oneDNN writes the result to planned memory."""
    convolutions = [node for node in calls(graph) if node.target is aten.convolution.default and not node.args[6]]
    if not convolutions or not can_convolve_into():
        return frozenset()
    return frozenset(node for node in convolutions if _is_in_channels_last(node) and _is_in_channels_last(node.args[0]))


def _is_in_channels_last(node: Any) -> bool:
    """Float32 on a CPU, of fixed size, and in no other layout as well."""
    spec = spec_of(node)
    if spec is None or spec.symbolic is not None or spec.dtype is not torch.float32 or spec.device.type != "cpu":
        return False
    if len(spec.shape) != 4 or min(spec.shape) < 2:
        return False
    _, channels, height, width = spec.shape
    return spec.stride == (channels * height * width, 1, channels * width, channels)
