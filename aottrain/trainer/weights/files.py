"""Weights as safetensors: a file of tensors by name that other tools open, and that holds nothing which could run.

The file begins with the length of a header (8 bytes, the lowest first), then the header, JSON of each tensor's type,
shape and place, then the tensors' bytes. It is written here, piece by piece, so that no second copy of all weights is
made and a signal can end it between two pieces; it is read by the package `safetensors`, which trusts no header.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PIECE = 4 << 20  # bytes that are written at once
_TYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_RESERVED = "__metadata__"


@dataclass(frozen=True)
class Parts:
    """A state_dict in two: what such a file can hold, and the rest."""

    tensors: dict[str, torch.Tensor]
    """Each once: of tensors that are the same memory seen alike, as tied weights are, the first."""
    names: dict[str, str]
    """Of each value that is in the file: the tensor there."""
    rest: dict[str, Any]
    """All keys in their order, with None for what is in the file."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Parts:
        tensors: dict[str, torch.Tensor] = {}
        names: dict[str, str] = {}
        first: dict[tuple[Any, ...], str] = {}
        for name, value in values.items():
            if name != _RESERVED and _fits(value):
                seen = value.device, value.data_ptr(), value.dtype, value.shape, value.stride()
                names[name] = first.setdefault(seen, name)
                tensors[names[name]] = value
        rest = OrderedDict((name, None if name in names else value) for name, value in values.items())
        vars(rest).update(getattr(values, "__dict__", {}))  # a state_dict has its modules' versions there
        return cls(tensors, names, rest)

    def joined(self) -> dict[str, Any]:
        """The state_dict again."""
        for name, stored in self.names.items():
            self.rest[name] = self.tensors[stored]
        return self.rest

    @property
    def tied(self) -> dict[str, str]:
        """For the header, as `safetensors.torch.save_model` has it: the names that are left out, and of which tensor
        each is another name."""
        return {name: stored for name, stored in self.names.items() if name != stored}


def has_place_for(dtype: torch.dtype) -> bool:
    return dtype in _TYPES


def _fits(value: Any) -> bool:
    """Not sparse, quantized or complex tensors, those of classes of their own, nor what is no tensor."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return value.layout == torch.strided and value.dtype in _TYPES and not value.is_neg()


def write_tensors(
    write: Callable[[Any], Any], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """A whole file, by calls of `write` with bytes."""
    header: dict[str, Any] = {_RESERVED: {"format": "pt", **metadata}}
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())  # so that each is aligned
    place = 0
    for name in ordered:
        tensor = tensors[name]
        end = place + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, end]}
        place = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write(len(text).to_bytes(8, "little") + text)
    for name in ordered:
        pieces = memoryview(tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        for begin in range(0, len(pieces), _PIECE):
            write(pieces[begin : begin + _PIECE])


def opened(path: Path) -> Any:
    """A file, to read tensors from, or slices of them, which lie in its mapping: others may cut it. OSError,
    SafetensorError: it cannot be read, or is none."""
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, in memory of their own. OSError, SafetensorError: it cannot be read, or is none."""
    with opened(path) as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
