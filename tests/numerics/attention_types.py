"""Types of heads that ATen's attention takes here."""

from __future__ import annotations

import pytest
import torch


def _is_refused() -> bool:
    """An ATen that is told to use few instruction sets asks oneDNN for products by tiles all the same, on a processor
    that has them, and then refuses to pack their operands."""
    heads = torch.ones(1, 1, 65, 32, dtype=torch.bfloat16)
    try:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(heads, heads, heads)
    except RuntimeError as error:
        return "only supported when avx512" in str(error)
    return False


in_bfloat16 = pytest.mark.skipif(
    _is_refused(), reason="this ATen refuses attention in bfloat16 by few instruction sets"
)
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=in_bfloat16)]
