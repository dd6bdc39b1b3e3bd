"""Covariance without a look at its values: torch's own functions branch on them to raise or to warn.

What they would raise for is checked by the program. What they would warn of is, too: eager then runs the call again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aottrain.ops.random.ranges import check_values


def cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """As torch.cov: (variables, observations) -> (variables, variables), op by op."""
    weights = [weight for weight in (fweights, aweights) if weight is not None]
    count = input.shape[-1] if input.dim() else 1
    if (
        input.dim() > 2
        or not count
        or any(weight.shape != (count,) for weight in weights)
        or not _may_be(input, fweights, aweights)
    ):
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    if not weights and count <= correction:
        return torch.cov(input, correction=correction)
    x = input.reshape(1, -1) if input.dim() < 2 else input
    for weight_tensor in weights:
        check_values(weight_tensor.min() >= 0, "cov(): weights cannot be negative")
    weight = weights[0] * weights[1] if len(weights) == 2 else next(iter(weights), None)
    total = torch.scalar_tensor(count, dtype=torch.int64, device=x.device) if weight is None else weight.sum()
    if weight is not None:
        check_values(total != 0, "cov(): weights sum to zero, can't be normalized")
    mean = (x if weight is None else x * weight).sum(1) / total
    freedom = total - correction
    if weight is not None and aweights is not None and correction:
        freedom = total - correction * (weight * aweights).sum() / total
    if weight is not None:
        check_values(freedom > 0, "cov(): degrees of freedom is <= 0")
    x = x - mean.unsqueeze(1)
    product = torch.mm(x, (x if weight is None else x * weight).t().conj())
    return torch.true_divide(product, freedom).squeeze()


def corrcoef(input: Tensor) -> Tensor:
    """As torch.corrcoef."""
    if input.dim() > 2:
        return torch.corrcoef(input)
    c = cov(input)
    if c.dim() == 0:
        return c / c
    variances = c.diag()
    deviations = (variances.real if c.is_complex() else variances).sqrt()
    c = c / deviations.view(-1, 1) / deviations.view(1, -1)
    return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1)) if c.is_complex() else c.clip(-1, 1)


def _may_be(input: Tensor, fweights: Tensor | None, aweights: Tensor | None) -> bool:
    """Whether torch takes these types: elsewhere it says what it does not."""
    integers = fweights is None or fweights.dtype in (torch.int64, torch.int32)
    return integers and (aweights is None or aweights.is_floating_point()) and input.dtype is not torch.bool


REPLACEMENTS: dict[Any, Any] = {torch.cov: cov, Tensor.cov: cov, torch.corrcoef: corrcoef, Tensor.corrcoef: corrcoef}
