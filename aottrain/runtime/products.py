"""Matrix products by oneDNN, where it is the faster library on this processor."""

from __future__ import annotations

import hashlib
import os
from functools import partial

import torch
from torch import Tensor

from aottrain.ir.schedule import is_dense
from aottrain.runtime.cache import table
from aottrain.runtime.calls import environment, quiet
from aottrain.runtime.timings import seconds_of

# Of the product that the two libraries are compared by: large enough to be bound by arithmetic, done in milliseconds.
_SIDES = (512, 256, 1024)
_CPU = torch.device("cpu")
_known: dict[str, float] = {}


def onednn_speed() -> float:
    """How many times faster oneDNN multiplies than aten.mm, under the present settings. Measured once, kept on disk.

    0 where this build of torch has no oneDNN; 1 under AOTTRAIN_RATES=default, where nothing is measured.
    """
    if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return 0.0
    if os.environ.get("AOTTRAIN_RATES") == "default":
        return 1.0
    name = f"products-{hashlib.sha256(environment(_CPU).encode()).hexdigest()[:16]}"
    if name not in _known:
        kept = table(name)
        found = kept.get("onednn_speed")
        if found is None:
            with quiet() as allowed:
                if not allowed:
                    return 1.0  # for this time
                found = _compare()
            kept.add({"onednn_speed": found})
        _known[name] = found
    return _known[name]


def _compare() -> float:
    """The best times of both, measured in turns."""
    rows, inner, columns = _SIDES
    a, b = torch.ones(rows, inner), torch.ones(inner, columns)
    best = [float("inf")] * 2
    for _ in range(3):
        for i, run in enumerate((partial(torch.mm, a, b), partial(product, a, b))):
            best[i] = min(best[i], *seconds_of(run, _CPU, max_runs=3, max_seconds=0.02))
    return best[0] / best[1]


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
