"""Memory of programs whose sizes each call has its own of: where buffers lie is planned at the first call of a size.

Which buffers are alive at once is the same in every call, so a layout takes only their bytes: each is first fit, and
checked (law 5), when the size is first seen, and remembered for the sizes that were called last.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from aottrain.ir.analysis.placement import extent, first_fit, verify_offsets
from aottrain.ir.kernels.alignment import aligned
from aottrain.ir.sizes.polynomials import sizes_at
from aottrain.ir.tensor import TensorSpec
from aottrain.runtime.arena import ArenaLayout, slab, view

_MOST_LAYOUTS = 64  # of a graph: each has as many tensors as the graph has temporaries

T = TypeVar("T")


@dataclass(frozen=True)
class Place:
    """A buffer of the arena."""

    num_bytes: Callable[[], int]
    """Inside `sizes_at`."""
    first: int
    """The first call that touches it."""
    last: int
    spec: TensorSpec | None = None
    """None: bytes that a call computes in."""


class _BySizes(Generic[T]):
    """What `make` gives for the sizes of a call, remembered for those that were called last."""

    def __init__(self, names: Sequence[str], make: Callable[[Mapping[str, int]], T]):
        self._names, self._make = tuple(names), make
        self._known: OrderedDict[tuple[int, ...], T] = OrderedDict()
        self._lock = threading.Lock()

    def __call__(self, *sizes: int) -> T:
        with self._lock:
            found = self._known.get(sizes)
            if found is not None:
                self._known.move_to_end(sizes)
                return found
        values = dict(zip(self._names, sizes, strict=True))
        with sizes_at(values):
            found = self._make(values)
        with self._lock:
            self._known[sizes] = found
            if len(self._known) > _MOST_LAYOUTS:
                self._known.popitem(last=False)
        return found


def open_layouts(
    names: Sequence[str], places: Sequence[Place], device: torch.device, holder: object
) -> Callable[..., ArenaLayout]:
    """For the sizes of a call, in the order of `names`, where its temporaries lie. holder: as of `ArenaLayout`."""

    def make(values: Mapping[str, int]) -> ArenaLayout:
        sizes = {i: aligned(place.num_bytes()) for i, place in enumerate(places)}
        born, last = ({i: getattr(place, name) for i, place in enumerate(places)} for name in ("first", "last"))
        offsets = first_fit(sizes, born, last)
        verify_offsets(offsets, sizes, born, last)
        specs = [
            TensorSpec((sizes[i],), (1,), torch.uint8, device, sizes[i])
            if place.spec is None
            else place.spec.at(values)
            for i, place in enumerate(places)
        ]
        tensor_specs = [(spec, offsets[i]) for i, spec in enumerate(specs)]
        return ArenaLayout(extent(offsets, sizes), tensor_specs, device, holder)

    return _BySizes(names, make)


@dataclass(frozen=True)
class _Blocks:
    """Where the residuals of a call of some size lie in their memory."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    size: int
    holder: object

    def take(self) -> Iterator[Tensor]:
        """One after the other, in memory that no other tensor refers to."""
        whole = slab(self.holder, self.size, self.specs[0].device)
        for spec, offset in zip(self.specs, self.offsets, strict=True):
            yield view(whole.untyped_storage(), spec, offset)


def open_blocks(names: Sequence[str], specs: Sequence[TensorSpec], holder: object) -> Callable[..., _Blocks]:
    """For the sizes of a call, in the order of `names`, memory for its residuals: all of a call share one block, which
    is free once nothing refers to any of them."""

    def make(values: Mapping[str, int]) -> _Blocks:
        known = tuple(spec.at(values) for spec in specs)
        ends = list(accumulate(aligned(spec.span_bytes) for spec in known))
        return _Blocks(known, (0, *ends[:-1]), ends[-1], holder)

    return _BySizes(names, make)
