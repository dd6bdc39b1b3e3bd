"""Matrix products by oneDNN."""

from __future__ import annotations

import torch
from torch import Tensor

from aottrain.ir.schedule import is_dense


def has_onednn() -> bool:
    """Whether this build of torch has its product."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


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
