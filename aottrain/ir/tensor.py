"""The static type of one tensor value."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from aottrain.ir.sizes.expressions import Size, SizeExpression, hint, is_symbolic, resolve, size_of, traced
from aottrain.ir.sizes.polynomials import SizeFacts, UndecidedError, current_values, is_open, same

_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class TensorSpec:
    """The type and layout of a tensor. Where sizes are symbolic the numbers are those of the call that was traced.

    Two specs of one program are equal only where their layouts are equal at every size.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """In elements."""
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int
    """Of the whole storage that the value lives in."""
    symbolic: tuple[tuple[Size, ...], tuple[Size, ...]] | None = None
    """(shape, stride) as expressions, where sizes are symbolic."""
    symbolic_bytes: Size = 0
    """storage_bytes as an expression, where sizes are symbolic."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves; an expanded view counts each logical element."""
        return self.numel * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Elements from the first one to the last, these and the gaps between them included; 0 where there are none.
        Of open sizes it is a polynomial, for those from 1 on: to ask whether one is 0 would add a guard."""
        if any(same(size, 0) for size in self.shape):
            return 0
        # A sparse tensor has no strides.
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=False))

    @property
    def span_bytes(self) -> int:
        return self.span * self.dtype.itemsize

    def layout(self, values: Mapping[str, Any] = _NOTHING) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(shape, stride) in a call in which the symbols have these values."""
        if self.symbolic is None:
            return self.shape, self.stride
        return resolve(self.symbolic[0], values), resolve(self.symbolic[1], values)

    def empty(self, values: Mapping[str, Any] = _NOTHING) -> torch.Tensor:
        """Fresh memory with this dtype, device and layout."""
        shape, stride = self.layout(values)
        return torch.empty_strided(shape, stride, dtype=self.dtype, device=self.device)

    def same_shape(self, other: TensorSpec) -> bool:
        """At every size."""
        return self.sizes == other.sizes

    def same_layout(self, other: TensorSpec) -> bool:
        """The same shape and strides, at every size."""
        return self.same_shape(other) and self.strides == other.strides

    def opened(self, facts: SizeFacts) -> TensorSpec:
        """With polynomials for its symbolic sizes; unchanged where one of them is none, as `s0 // 2`."""
        if self.symbolic is None:
            return self
        try:
            shape, stride = (tuple(opened(size, facts) for size in sizes) for sizes in self.symbolic)
        except UndecidedError:
            return self
        return replace(self, shape=shape, stride=stride)

    def at(self, values: Mapping[str, Any]) -> TensorSpec:
        """As it is in a call in which the symbols have these values."""
        if self.symbolic is None:
            return self
        shape, stride = self.layout(values)
        (num_bytes,) = resolve((self.symbolic_bytes,), values)
        return TensorSpec(shape, stride, self.dtype, self.device, num_bytes)

    def at_hand(self) -> TensorSpec:
        """Inside `sizes_at` as it is in that call; else unchanged."""
        values = current_values()
        return self if values is None else self.at(values)

    @property
    def is_known(self) -> bool:
        """Whether shape and strides are right at every size, be it as polynomials."""
        return self.symbolic is None or is_open(*self.shape, *self.stride)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self.shape if self.symbolic is None else self.symbolic[0]

    @property
    def strides(self) -> tuple[Size, ...]:
        return self.stride if self.symbolic is None else self.symbolic[1]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.sizes))}]"


def opened(size: Size, facts: SizeFacts) -> Any:
    """A size as a polynomial of its symbols. Raises UndecidedError where it is none."""
    if not isinstance(size, SizeExpression):
        return size
    try:
        return size.of({name: facts.symbol(name) for name in size.names})
    except (TypeError, KeyError, AttributeError) as error:  # a function of sizes that takes numbers alone
        raise UndecidedError(f"{size} is no polynomial") from error


def sizes_text(sizes: Sequence[Size]) -> str:
    """A shape or strides as Python text, in which symbols have their names."""
    return f"({', '.join(map(str, sizes))}{',' * bool(sizes)})"


def tensor_spec(value: torch.Tensor) -> TensorSpec:
    """The spec of a real or fake tensor."""
    strided = value.layout == torch.strided
    shape, stride = tuple(value.shape), tuple(value.stride()) if strided else ()
    symbolic, num_bytes = None, value.untyped_storage().nbytes() if strided else 0
    if any(map(is_symbolic, (*shape, *stride))):
        symbolic = tuple(map(size_of, shape)), tuple(map(size_of, stride))
    return TensorSpec(
        shape=tuple(map(traced, shape)),
        stride=tuple(map(traced, stride)),
        dtype=value.dtype,
        device=value.device,
        storage_bytes=traced(num_bytes),
        symbolic=symbolic,
        symbolic_bytes=0 if symbolic is None else size_of(num_bytes),
    )


def is_injective(view: torch.Tensor) -> bool:
    """Whether no two elements are known to lie in the same place, by the sizes of this call where they are symbolic."""
    dims = [(hint(stride), hint(size)) for size, stride in zip(view.shape, view.stride(), strict=True)]
    if any(size == 0 for _, size in dims):
        return True
    reach = 0
    for stride, size in sorted(dim for dim in dims if dim[1] > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(int(size), 1))
    return tuple(reversed(strides)) if shape else ()


def fills_memory(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether each element has a place of its own, without gaps."""
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1:
            if step != expected:
                return False
            expected *= size
    return True


def strides_without_gaps(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Those given where the elements fill their memory, each once; else those of a contiguous copy."""
    return tuple(stride) if fills_memory(shape, stride) else contiguous_strides(shape)


def start_of(value: torch.Tensor) -> int | None:
    """Where in its memory it begins, in elements; None for what only symbols tell."""
    start = value.storage_offset()
    return start if isinstance(start, int) else None


def version_of(value: torch.Tensor) -> int | None:
    """How often a tensor was written; None for a tensor of inference mode, where nobody counts."""
    return None if value.is_inference() else value._version
