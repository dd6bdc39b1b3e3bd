"""Blocks of residuals: found at once however many there are, and never one that a tensor still refers to."""

from __future__ import annotations

import torch

from aottrain.ir.tensor import tensor_spec
from aottrain.runtime import arena

_COUNT = 64


def test_a_block_is_found_at_once_where_a_program_has_many_of_one_size(monkeypatch):
    """A recurrent network keeps some values of each step. Blocks come free in the order in which they were taken."""
    holder, spec = object(), tensor_spec(torch.zeros(8, 32))
    looked_at = []
    use_count = arena.storage_use_count
    monkeypatch.setattr(arena, "storage_use_count", lambda s: looked_at.append(s) or use_count(s))
    first = [arena.residual(holder, spec) for _ in range(_COUNT)]
    addresses = {tensor.data_ptr() for tensor in first}
    assert len(addresses) == _COUNT
    first.clear()
    looked_at.clear()
    again = [arena.residual(holder, spec) for _ in range(_COUNT)]
    assert {tensor.data_ptr() for tensor in again} == addresses
    assert len(looked_at) == _COUNT


def test_a_block_that_something_still_refers_to_is_passed_over():
    """Also where it is the next in turn: those behind it are free."""
    holder, spec = object(), tensor_spec(torch.zeros(8, 32))
    taken = [arena.residual(holder, spec) for _ in range(4)]
    addresses, kept = [tensor.data_ptr() for tensor in taken], taken[1]
    taken.clear()
    again = [arena.residual(holder, spec) for _ in range(3)]
    assert {tensor.data_ptr() for tensor in again} == {*addresses} - {kept.data_ptr()}
    assert arena.residual(holder, spec).data_ptr() not in addresses
