"""Kernels over blocks of many tensors: how they are called."""

from __future__ import annotations

import pytest
import torch

from aottrain.compiler.optimizers.formulas import SGD, Segment, optimizer_step
from aottrain.runtime.multi_tensor import TensorTables, cpp_run


class Called:
    """In the place of a function of ctypes."""

    def __call__(self, memory, sizes, first, last, num_threads):
        self.with_ = list(sizes), first, last, num_threads


@pytest.mark.parametrize(("num_elements", "num_threads"), [(32767, 1), (32768, 3), (40000, 3)])
def test_few_elements_are_not_worth_a_second_thread(monkeypatch, num_elements, num_threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    program = optimizer_step(SGD, (Segment(torch.float32, ()),))
    tables = TensorTables(program, [[num_elements - 7, 7]], torch.device("cpu"))
    function = Called()
    cpp_run(function, tables)([], 0, 2)
    assert function.with_ == ([2, tables.num_blocks, *tables.segment_blocks], 0, 2, num_threads)
