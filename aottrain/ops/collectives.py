"""Collectives as operators of a program: pure functions of what all processes of a group give, so that capture, merging
and planning see one operator each. All processes of a group make the same calls in the same order.

They have a namespace of their own: operators of `aottrain` may run on made-up inputs while a program is compiled, and a
collective that one process alone runs never ends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAMESPACE = "aottrain_parallel"

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("all_sum(Tensor value, str group) -> Tensor")
_library.define("gather_rows(Tensor shard, int rows, int world, str group) -> Tensor")
_library.define("scatter_sum(Tensor value, int world, str group) -> Tensor")


def rows_of_shard(rows: int, world: int) -> int:
    """Of each process's part of so many rows, the last of which are padding where they do not divide evenly."""
    return -(-rows // world)


def padded(value: Tensor, rows: int) -> Tensor:
    """With rows of zeros up to so many."""
    return value if value.shape[0] == rows else F.pad(value, [0, 0] * (value.dim() - 1) + [0, rows - value.shape[0]])


def _flat(value: Tensor) -> Tensor:
    """All elements of a tensor without gaps, in the order in which they lie."""
    return value.as_strided((value.numel(),), (1,), value.storage_offset())


def _functional() -> Any:
    return torch.ops._c10d_functional


def _all_sum(value: Tensor, group: str) -> Tensor:
    out = value.clone()
    _functional().wait_tensor(_functional().all_reduce_(_flat(out), "sum", group))
    return out


def _gather_rows(shard: Tensor, rows: int, world: int, group: str) -> Tensor:
    whole = _functional().wait_tensor(_functional().all_gather_into_tensor(shard.contiguous(), world, group))
    return whole if whole.shape[0] == rows else whole.narrow(0, 0, rows).clone()


def _scatter_sum(value: Tensor, world: int, group: str) -> Tensor:
    whole = padded(value, rows_of_shard(value.shape[0], world) * world).contiguous()
    return _functional().wait_tensor(_functional().reduce_scatter_tensor(whole, "sum", world, group))


for _name, _function in {
    "all_sum": _all_sum,
    "gather_rows": _gather_rows,
    "scatter_sum": _scatter_sum,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::all_sum")
def _(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value)


@torch.library.register_fake(f"{NAMESPACE}::gather_rows")
def _(shard: Tensor, rows: int, world: int, group: str) -> Tensor:
    return shard.new_empty((rows, *shard.shape[1:]))


@torch.library.register_fake(f"{NAMESPACE}::scatter_sum")
def _(value: Tensor, world: int, group: str) -> Tensor:
    return value.new_empty((rows_of_shard(value.shape[0], world), *value.shape[1:]))
