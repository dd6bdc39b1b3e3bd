"""Memory that compiled programs use again: arenas for the temporaries of one call, blocks for its residuals.

Fresh memory is slow on a CPU: the first touch of each page is a page fault. A call leases one arena and gives it back
when it ends; calls in flight have one each. A residual's block is free again when no tensor refers to it any more; its
storage's reference count says so. What autograd, hooks or retained graphs still hold stays untouched.
"""

from __future__ import annotations

import ctypes
import itertools
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


_LARGEST_LEARNED = (32 << 20) - (64 << 10)  # glibc's limit, with room for its own words

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
    """Once in a process: the C library's allocator learns to keep what is freed.

    What libraries allocate themselves at each step is out of its reach. glibc gives memory back to the system, to be
    mapped and cleared anew, until a block as large has been freed once; this is the largest from which it learns. The
    block is never touched.
    """
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.malloc.restype, library.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        library.malloc.argtypes = (ctypes.c_size_t,)
        library.free(library.malloc(_LARGEST_LEARNED))


def empty_cache() -> None:
    """Free all arenas and blocks that no call is using."""
    with _lock:
        _idle.clear()
        for known in _blocks.values():
            known[:] = [storage for storage in known if storage_use_count(storage) > 1]


def held_bytes() -> int:
    """Bytes of idle arenas and of all blocks."""
    with _lock:
        arenas = sum(arena.memory.numel() for arena in _idle)
        return arenas + sum(storage.nbytes() for known in _blocks.values() for storage in known)
