"""Collectives as operators of a program: pure functions of what all processes of a group give, so that capture, merging
and planning see one operator each. All processes of a group make the same calls in the same order.

They have a namespace of their own: operators of `aottrain` may run on made-up inputs while a program is compiled, and a
collective that one process alone runs never ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from aottrain.compat_dispatch import register_fake
from aottrain.ir.tensor import fills_memory

NAMESPACE = "aottrain_parallel"
PARTS, COPIES = "parts", "copies"
"""Groups by what their processes are to each other: those that hold all weights together, those that hold the same.
Each process is in one of each kind, which torch gives another name, but all processes have one program."""

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("all_sum(Tensor value, str group) -> Tensor")
_library.define("gather_rows(Tensor shard, int rows, int world, str group) -> Tensor")
_library.define("scatter_sum(Tensor value, int world, str group) -> Tensor")
# The same in two halves: what a start gives is there once it has arrived, and is not to be touched before.
_library.define("sum_start(Tensor[] values, str group) -> Tensor[]")
_library.define("gather_start(Tensor shard, int rows, int world, str group) -> Tensor")
_library.define("scatter_start(Tensor[] values, int world, str group) -> Tensor[]")
_library.define("arrived(Tensor(a) value) -> Tensor(a)")


_named: dict[str, str] = {}


@contextmanager
def groups_named(names: Mapping[str, str]) -> Iterator[None]:
    """Inside, a program that says one of these means the process group that torch knows by the name beside it."""
    _named.update(names)
    try:
        yield
    finally:
        for name in names:
            del _named[name]


def _known(group: str) -> str:
    return _named.get(group, group)


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
    _functional().wait_tensor(_functional().all_reduce_(_flat(out), "sum", _known(group)))
    return out


def _begin_gather(shard: Tensor, world: int, group: str) -> Tensor:
    """Into memory that is made here: where several gathers are under way on gloo, the operator that makes it itself
    damages the heap sooner or later (torch 2.13)."""
    whole = shard.new_empty((shard.shape[0] * world, *shard.shape[1:]))
    return _functional().all_gather_into_tensor_out(shard.contiguous(), world, _known(group), out=whole)


def _gather_rows(shard: Tensor, rows: int, world: int, group: str) -> Tensor:
    whole = _functional().wait_tensor(_begin_gather(shard, world, group))
    return whole if whole.shape[0] == rows else whole.narrow(0, 0, rows).clone()


def _scatter_sum(value: Tensor, world: int, group: str) -> Tensor:
    whole = padded(value, rows_of_shard(value.shape[0], world) * world).contiguous()
    return _functional().wait_tensor(_functional().reduce_scatter_tensor(whole, "sum", world, _known(group)))


def _sum_start(values: list[Tensor], group: str) -> list[Tensor]:
    """Of copies of the values, one after the other in one piece of memory, which the results share."""
    dense = [value if fills_memory(value.shape, value.stride()) else value.clone() for value in values]
    flat = torch.cat([_flat(value) for value in dense])
    _functional().all_reduce_(flat, "sum", _known(group))
    parts = flat.split([value.numel() for value in dense])
    return [
        part.as_strided(value.shape, value.stride(), part.storage_offset())
        for part, value in zip(parts, dense, strict=True)
    ]


def _gather_start(shard: Tensor, rows: int, world: int, group: str) -> Tensor:
    """The shard is read until the result has arrived."""
    whole = _begin_gather(shard, world, group)
    return whole if whole.shape[0] == rows else whole.narrow(0, 0, rows)


def _scatter_start(values: list[Tensor], world: int, group: str) -> list[Tensor]:
    """Of copies of the values; the results share one piece of memory."""
    counts = [rows_of_shard(value.shape[0], world) for value in values]
    pieces = [padded(value, count * world).reshape(world, -1) for value, count in zip(values, counts, strict=True)]
    flat = _functional().reduce_scatter_tensor(torch.cat(pieces, 1).view(-1), "sum", world, _known(group))
    parts = flat.split([piece.shape[1] for piece in pieces])
    return [part.view(count, *value.shape[1:]) for part, count, value in zip(parts, counts, values, strict=True)]


def _arrived(value: Tensor) -> Tensor:
    """Waits for all that is under way in the memory of the value."""
    return _functional().wait_tensor(value)


for _name, _function in {
    "all_sum": _all_sum,
    "gather_rows": _gather_rows,
    "scatter_sum": _scatter_sum,
    "sum_start": _sum_start,
    "gather_start": _gather_start,
    "scatter_start": _scatter_start,
    "arrived": _arrived,
}.items():
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@register_fake(_library, "all_sum")
def _(value: Tensor, group: str) -> Tensor:
    return torch.empty_like(value)


@register_fake(_library, "gather_rows")
def _(shard: Tensor, rows: int, world: int, group: str) -> Tensor:
    return shard.new_empty((rows, *shard.shape[1:]))


@register_fake(_library, "scatter_sum")
def _(value: Tensor, world: int, group: str) -> Tensor:
    return value.new_empty((rows_of_shard(value.shape[0], world), *value.shape[1:]))


@register_fake(_library, "sum_start")
def _(values: list[Tensor], group: str) -> list[Tensor]:
    return [torch.empty_like(value) for value in values]


@register_fake(_library, "gather_start")
def _(shard: Tensor, rows: int, world: int, group: str) -> Tensor:
    return shard.new_empty((world * shard.shape[0], *shard.shape[1:])).narrow(0, 0, rows)  # in memory with the padding


@register_fake(_library, "scatter_start")
def _(values: list[Tensor], world: int, group: str) -> list[Tensor]:
    return [value.new_empty((rows_of_shard(value.shape[0], world), *value.shape[1:])) for value in values]


@register_fake(_library, "arrived")
def _(value: Tensor) -> Tensor:
    return value.view_as(value)
