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
from collections import deque
from collections.abc import Callable, Sequence
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
    """Memory for the temporaries of one call at a time."""

    memory: Tensor
    """Its bytes."""
    holder: object
    """Only programs of this holder use it."""
    views: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """By a layout's key, its tensors in this arena."""


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, in malloc.h
_LARGEST_IN_HEAP = 32 << 20  # bytes: glibc takes no more; its default is 128 KiB, growing with what is freed
_MOST_KEPT = 1 << 30  # bytes at the end of the heap

_lock = threading.Lock()
_keys = itertools.count()
_idle: list[Arena] = []
# By holder and size (or _ANY_SIZE), that first which was taken the longest ago: programs of many steps have a
# thousand of one size.
_blocks: dict[tuple[object, int, torch.device], deque[torch.UntypedStorage]] = {}
_holders: list[object] = [None]  # whose program ran last
_ANY_SIZE = -1  # in the place of a size: blocks of those that had to be large enough
_MOST_IDLE = 1 << 16  # bytes that others may keep while a program runs


class ArenaLayout:
    """The temporaries of one program: `take` gives an arena with its tensors, `give` returns it."""

    def __init__(self, size: int, tensor_specs: Sequence[tuple[TensorSpec, int]], device: torch.device, holder: object):
        """tensor_specs: type, and offset in bytes, of each tensor. holder: programs of the same share arenas."""
        self.size, self.tensor_specs, self.device, self.holder = size, tuple(tensor_specs), device, holder
        self.key = next(_keys)

    def take(self) -> Arena:
        arena = _lease(self.size, self.device, self.holder)
        if self.key not in arena.views:
            arena.views[self.key] = tuple(
                view(arena.memory.untyped_storage(), spec, offset) for spec, offset in self.tensor_specs
            )
        return arena

    def tensors(self, arena: Arena) -> tuple[Tensor, ...]:
        return arena.views[self.key]

    def give(self, arena: Arena) -> None:
        """Only after a call that has ended well: an interrupted one may still use its arena, which is freed with it."""
        with _lock:
            _idle.append(arena)

    def __del__(self) -> None:
        for arena in list(_idle):
            arena.views.pop(self.key, None)


def _lease(size: int, device: torch.device, holder: object) -> Arena:
    """The holder's smallest idle arena that is large enough; else a new one in the place of the largest that is not."""
    with _lock:
        fitting = [a for a in _idle if a.memory.device == device and a.holder is holder]
        large = [a for a in fitting if a.memory.numel() >= size]
        if large:
            arena = min(large, key=lambda a: a.memory.numel())
            _idle.remove(arena)
            return arena
        if fitting:
            _idle.remove(max(fitting, key=lambda a: a.memory.numel()))
    return Arena(_bytes(size, device), holder)


def _bytes(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)


def view(storage: Any, spec: TensorSpec, offset: int) -> Tensor:
    empty = torch.empty(0, dtype=spec.dtype, device=spec.device)
    return empty.set_(storage, offset // spec.dtype.itemsize, spec.shape, spec.stride)


def begin(holder: object) -> None:
    """Before each run of a holder's program: idle memory of other holders is freed, where it is more than some pages.

    What a program keeps fits beside what it computes itself. Where TorchDynamo made several programs of a model, or two
    models take turns, none of them counts what the others keep.
    """
    if _holders[0] is holder:
        return
    with _lock:
        _holders[0] = holder
        others = [arena for arena in _idle if arena.holder is not holder]
        blocks = [
            (storages, storage)
            for (owner, *_), storages in _blocks.items()
            if owner is not holder
            for storage in storages
            if storage_use_count(storage) == 1
        ]
        idle = sum(arena.memory.numel() for arena in others) + sum(storage.nbytes() for _, storage in blocks)
        if idle > _MOST_IDLE:
            for arena in others:
                _idle.remove(arena)
            for storages, storage in blocks:
                storages.remove(storage)
            for key in [key for key, storages in _blocks.items() if not storages]:
                del _blocks[key]


def residual(holder: object, spec: TensorSpec) -> Tensor:
    """A tensor for a residual, in a block of the holder's that no other tensor uses."""
    size = spec.span_bytes
    with _lock:
        storages = _blocks.setdefault((holder, size, spec.device), deque())
        for _ in range(len(storages)):
            storage = storages[0]
            storages.rotate(-1)
            if storage_use_count(storage) == 1:
                return view(storage, spec, 0)
        _free_idle_blocks(size)
        storage = _bytes(size, spec.device).untyped_storage()
        storages.append(storage)
        return view(storage, spec, 0)


def slab(holder: object, size: int, device: torch.device) -> Tensor:
    """At least `size` bytes of the holder's that no other tensor uses: the smallest of its slabs that is large enough,
    else a new one in the place of the largest that is not."""
    with _lock:
        storages = _blocks.setdefault((holder, _ANY_SIZE, device), deque())
        idle = sorted((s for s in storages if storage_use_count(s) == 1), key=lambda s: s.nbytes())
        storage = next((s for s in idle if s.nbytes() >= size), None)
        if storage is None:
            if idle:
                storages.remove(idle[-1])
                idle.clear()
            storage = _bytes(size, device).untyped_storage()
            storages.append(storage)
        return view(storage, TensorSpec((size,), (1,), torch.uint8, device, size), 0)


def _free_idle_blocks(size: int) -> None:
    """Before new memory is taken, give back at least as much of what is idle in other sizes."""
    for storages in _blocks.values():
        for storage in list(storages):
            if size <= 0:
                return
            if storage_use_count(storage) == 1:
                storages.remove(storage)
                size -= storage.nbytes()


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
        for key, storages in _blocks.items():
            _blocks[key] = deque(storage for storage in storages if storage_use_count(storage) > 1)
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def release_idle() -> Callable[[], None]:
    """Free what no call is using; the function that this returns takes as much again, for the same holders.

    A profiler that was started in between sees it all, and sees it go where other programs run, see `begin`.
    """
    with _lock:
        arenas, _idle[:] = list(_idle), []
        blocks = []
        for key, storages in _blocks.items():
            in_use = [storage for storage in storages if storage_use_count(storage) > 1]
            blocks.append((key, [storage.nbytes() for storage in storages if storage_use_count(storage) == 1]))
            _blocks[key] = deque(in_use)
    sizes = [(arena.memory.numel(), arena.memory.device, arena.holder) for arena in arenas]

    def take_again() -> None:
        with _lock:
            _idle.extend(Arena(_bytes(size, device), holder) for size, device, holder in sizes)
            for key, num_bytes in blocks:
                storages = _blocks.setdefault(key, deque())
                storages.extend(_bytes(size, key[2]).untyped_storage() for size in num_bytes)

    return take_again


def held_bytes() -> int:
    """Bytes of idle arenas and of all blocks."""
    with _lock:
        arenas = sum(arena.memory.numel() for arena in _idle)
        return arenas + sum(storage.nbytes() for storages in _blocks.values() for storage in storages)
