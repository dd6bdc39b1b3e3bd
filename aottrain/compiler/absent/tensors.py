"""A model and its batch as fake tensors on a device: shapes, types and ties, and no memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from aottrain.compat import FakeTensorMode


def absent(module: nn.Module, mode: FakeTensorMode, device: torch.device) -> nn.Module:
    """The module itself, each parameter and buffer of which is now a fake one on the device; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # so that no other tensor takes the identity of one that is gone

    def stand_in(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            kept.append(tensor)
            fake = fake_of(tensor, mode, device)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        return made[id(tensor)]

    for child in module.modules():
        for table in (child._parameters, child._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = stand_in(tensor)  # type: ignore[assignment]  # of a parameter it is one
    return module


def absent_batch(batch: Sequence[Tensor], mode: FakeTensorMode, device: torch.device) -> tuple[Tensor, ...]:
    """A tensor that is there twice is one tensor here, too."""
    made = {id(tensor): fake_of(tensor, mode, device) for tensor in batch}
    return tuple(made[id(tensor)] for tensor in batch)


def fake_of(tensor: Tensor, mode: FakeTensorMode, device: torch.device) -> Tensor:
    """Of the same type and shape, and in memory as the tensor is there: one that moves to another device is without the
    gaps of a view, one that stays holds all the memory that it is a view of."""
    moves = tensor.device.type not in (device.type, "meta")
    like = torch.empty_like(tensor, device="meta") if moves else tensor
    with mode:
        fake = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
        num_bytes = like.untyped_storage().nbytes()
        if num_bytes != fake.untyped_storage().nbytes():
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
            fake.set_(memory, like.storage_offset(), like.shape, like.stride())
        return fake
