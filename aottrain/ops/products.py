"""Matrix products by oneDNN, where it is the faster library on this processor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from aottrain.ir.schedule import is_dense
from aottrain.ir.settings.decisions import ATEN, ONEDNN, Decision, Timing
from aottrain.measure.decisions import decide
from aottrain.measure.stopwatch import Run
from aottrain.measure.timings import timed

# Of the product that the two libraries are compared by: large enough to be bound by arithmetic, done in milliseconds.
_SIDES = (512, 256, 1024)
_CPU = torch.device("cpu")
_FASTER = 1.05


def choose_library() -> Decision | None:
    """Which library multiplies float32 matrices on a CPU, ATEN or ONEDNN. None: this build of torch has no oneDNN."""
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return None
    return decide("products", "float32", ATEN, partial(timed, "products", "float32", _runs, _CPU), _prefer)


def multiplies_by_onednn() -> bool:
    decision = choose_library()
    return decision is not None and decision.choice == ONEDNN


def _prefer(times: Mapping[str, Timing]) -> str:
    return ONEDNN if times[ATEN].seconds > _FASTER * times[ONEDNN].seconds else ATEN


def _runs() -> dict[str, Run]:
    rows, inner, columns = _SIDES
    a, b = torch.ones(rows, inner), torch.ones(inner, columns)
    return {ATEN: Run(partial(torch.mm, a, b)), ONEDNN: Run(partial(product, a, b))}


def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b (+ bias, one number per column): (m, k), (k, n) -> (m, n), float32, contiguous.

    Of a part of a matrix on the right oneDNN multiplies a number at a time, a thousand times as slowly: it is copied.
    """
    if not is_dense(b.shape, b.stride()):
        b = b.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, b.t(), bias, "none", [], "")


def product_by_transpose(a: Tensor, b: Tensor) -> Tensor:
    """a @ b as the transpose of b^T @ a^T: faster where `a` is a transposed view and the result has many rows."""
    return product(b.t(), a.t()).t().contiguous()


def biased_product(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """bias + a @ b, as addmm has its arguments."""
    return product(a, b, bias)


PRODUCTS = {"onednn": product, "onednn transposed": product_by_transpose, "onednn with bias": biased_product}
