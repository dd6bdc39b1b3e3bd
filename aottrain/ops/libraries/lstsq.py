"""Least squares as an op whose results have sizes that are known before its values.

ATen leaves the residuals empty where "gelsd" or "gelss" detects that a matrix has not full rank. Here full rank is
assumed, as by "gels". Where a matrix has not full rank the op raises, so that eager runs the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from aottrain.compat_dispatch import register_fake

Results = tuple[Tensor, Tensor, Tensor, Tensor]
_library = torch.library.Library("aottrain", "FRAGMENT")
_library.define("lstsq(Tensor a, Tensor b, float? rcond, str driver) -> (Tensor, Tensor, Tensor, Tensor)")


def _lstsq(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> Results:
    """As aten.linalg_lstsq: a (batch, rows, columns), b (batch, rows, sides) -> solution (batch, columns, sides),
    residuals (batch, sides) or empty, ranks (batch) or empty, singular values (batch, least of rows and columns) or
    empty. Raises RuntimeError where the residuals are other than those of full rank."""
    results = torch.ops.aten.linalg_lstsq.default(a, b, rcond, driver=driver)
    if tuple(results[1].shape) != _residuals(a, b, driver):
        raise RuntimeError("least squares of a matrix that has not full rank")
    return results


def _residuals(a: Tensor, b: Tensor, driver: str) -> tuple[int, ...]:
    rows, columns = a.shape[-2:]
    return (*a.shape[:-2], b.shape[-1]) if driver != "gelsy" and rows > columns else (0,)


_library.impl("lstsq", _lstsq, "CPU")


@register_fake(_library, "lstsq")
def _(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> Results:
    *batch, rows, columns = a.shape
    sides = b.shape[-1]
    # One column after another, each as long as the longer of what comes in and what goes out.
    memory = b.new_empty((*batch, sides, max(rows, columns)))
    solution = torch.empty_strided((*batch, columns, sides), memory.mT.stride(), dtype=b.dtype, device=b.device)
    residuals = a.new_empty(_residuals(a, b, driver), dtype=a.dtype.to_real())
    ranks = a.new_empty((0,) if driver == "gels" else tuple(batch), dtype=torch.int64)
    by_values = driver in ("gelsd", "gelss")
    singular = a.new_empty((*batch, min(rows, columns)) if by_values else (0,), dtype=a.dtype.to_real())
    return solution, residuals, ranks, singular
