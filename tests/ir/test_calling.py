"""What is said of a call's results."""

from __future__ import annotations

import pytest
import torch

from aottrain.ir.calling import is_pair

F32, F64, C64, C128, I64 = torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int64


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [(F32, C64, True), (C128, F64, True), (F32, C128, False), (C64, F64, False), (F32, F64, False), (F64, F64, False),
     (C64, C64, False), (I64, C64, False), (C64, I64, False), (F32, torch.int32, False)],
)  # fmt: skip
def test_a_complex_type_and_that_of_its_numbers_are_a_pair(one, other, wanted):
    assert is_pair(one, other) is wanted
