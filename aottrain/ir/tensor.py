"""The static type of one tensor value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TensorSpec:
    """shape and stride in elements; storage_bytes is the size of the whole storage that the value lives in."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    storage_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves; an expanded view counts each logical element."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}[{', '.join(map(str, self.shape))}]"


def tensor_spec(value: torch.Tensor) -> TensorSpec:
    """The spec of a real or fake tensor with static sizes."""
    return TensorSpec(
        shape=tuple(int(size) for size in value.shape),
        stride=tuple(int(step) for step in value.stride()) if value.layout == torch.strided else (),
        dtype=value.dtype,
        device=value.device,
        storage_bytes=int(value.untyped_storage().nbytes()) if value.layout == torch.strided else 0,
    )
