"""Products by oneDNN: right for every layout of their operands, and never given a right operand that it is slow for."""

from __future__ import annotations

import pytest
import torch

from aottrain.ops.products import onednn as products

if not (torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
    pytest.skip("this build of torch has no oneDNN", allow_module_level=True)

_RIGHT = {
    "contiguous": lambda: torch.randn(32, 16),
    "transposed": lambda: torch.randn(16, 32).t(),
    "a part of its columns": lambda: torch.randn(32, 48)[:, 16:32],
    "a part of its columns, transposed": lambda: torch.randn(16, 80)[:, :32].t(),
    "every other row": lambda: torch.randn(64, 16)[::2],
    "expanded": lambda: torch.randn(32, 1).expand(32, 16),
}


@pytest.mark.parametrize("layout", _RIGHT)
def test_a_right_operand_of_any_layout(layout, monkeypatch):
    """What is not dense is copied: oneDNN multiplies such operands a number at a time."""
    given = []
    real = torch.ops.mkldnn._linear_pointwise

    def record(a, weight, *rest):
        given.append(weight.t())
        return real(a, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", record)
    a, b = torch.randn(24, 32), _RIGHT[layout]()
    torch.testing.assert_close(products.product(a, b), a @ b)
    torch.testing.assert_close(products.product_by_transpose(a, b), a @ b)
    assert all(products.is_dense(right.shape, right.stride()) for right in given)
