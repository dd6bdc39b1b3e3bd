"""Memory that compiled programs use again: arenas for the temporaries of one call, blocks for its residuals.

Fresh memory is slow on a CPU: the first touch of each page is a page fault. A call leases one arena and gives it back
when it ends; calls in flight have one each. A residual's block is free again when no tensor refers to it any more; its
storage's reference count says so. What autograd, hooks or retained graphs still hold stays untouched.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from aottrain.compat import storage_use_count
from aottrain.ir.tensor import TensorSpec


@dataclass(eq=False)  # one is itself alone: tensors do not compare to a truth value
class Arena:
    """memory: bytes; views: by program, the tensors that it has made in this arena."""

    memory: Tensor
    views: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_LARGEST_IN_HEAP = 32 << 20  # bytes: glibc takes no more; its default is 128 KiB, growing with what is freed
_MOST_KEPT = 1 << 30  # bytes at the end of the heap

_lock = threading.Lock()
_keys = itertools.count()
_idle: list[Arena] = []
_blocks: dict[tuple[int, torch.device], list[torch.UntypedStorage]] = {}


class ArenaLayout:
    """The temporaries of one program: `take` gives an arena with its tensors, `give` returns it."""

    def __init__(self, size: int, places: Sequence[tuple[TensorSpec, int]], device: torch.device):
        """places: type and offset in bytes of each tensor."""
        self.size, self.places, self.device = size, tuple(places), device
        self.key = next(_keys)

    def take(self) -> Arena:
        arena = _lease(self.size, self.device)
        if self.key not in arena.views:
            arena.views[self.key] = tuple(_view(arena.memory.untyped_storage(), *place) for place in self.places)
        return arena

    def tensors(self, arena: Arena) -> tuple[Tensor, ...]:
        return arena.views[self.key]

    def give(self, arena: Arena) -> None:
        """Only of a call that has ended well: what an interrupted one may still use is left to die."""
        with _lock:
            _idle.append(arena)

    def __del__(self) -> None:
        for arena in list(_idle):
            arena.views.pop(self.key, None)


def _lease(size: int, device: torch.device) -> Arena:
    """The smallest idle arena that is large enough; else a new one in the place of the largest that is not."""
    with _lock:
        fitting = [a for a in _idle if a.memory.device == device]
        large = [a for a in fitting if a.memory.numel() >= size]
        if large:
            arena = min(large, key=lambda a: a.memory.numel())
            _idle.remove(arena)
            return arena
        if fitting:
            _idle.remove(max(fitting, key=lambda a: a.memory.numel()))
    return Arena(torch.empty(size, dtype=torch.uint8, device=device))


def _view(storage: Any, spec: TensorSpec, offset: int) -> Tensor:
    empty = torch.empty(0, dtype=spec.dtype, device=spec.device)
    return empty.set_(storage, offset // spec.dtype.itemsize, spec.shape, spec.stride)


def residual(spec: TensorSpec) -> Tensor:
    """A tensor for a residual, in a block that nothing else refers to."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    size = span * spec.dtype.itemsize
    with _lock:
        known = _blocks.setdefault((size, spec.device), [])
        for storage in known:
            if storage_use_count(storage) == 1:
                return _view(storage, spec, 0)
        _free_idle_blocks(size)
        storage = torch.empty(size, dtype=torch.uint8, device=spec.device).untyped_storage()
        known.append(storage)
        return _view(storage, spec, 0)


def _free_idle_blocks(wanted: int) -> None:
    """Before new memory is taken, give back at least as much of what is idle in other sizes."""
    for known in _blocks.values():
        for storage in list(known):
            if wanted <= 0:
                return
            if storage_use_count(storage) == 1:
                known.remove(storage)
                wanted -= storage.nbytes()


@cache
def settle_allocator() -> None:
    """Once in a process: the C library's allocator keeps what is freed, for the next step to take.

    glibc maps a block above a threshold anew each time, and gives back what is free at the end of its heap; the first
    touch of each page is then a page fault. The settings bound neither what is alive nor where it lies, and those that
    the user made by environment variables stand.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)
        mallopt(_TRIM_THRESHOLD, _MOST_KEPT)


def empty_cache() -> None:
    """Free all arenas and blocks that no call is using, and give what the C library's allocator keeps to the system."""
    with _lock:
        _idle.clear()
        for known in _blocks.values():
            known[:] = [storage for storage in known if storage_use_count(storage) > 1]
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def held_bytes() -> int:
    """Bytes of idle arenas and of all blocks."""
    with _lock:
        arenas = sum(arena.memory.numel() for arena in _idle)
        return arenas + sum(storage.nbytes() for known in _blocks.values() for storage in known)
