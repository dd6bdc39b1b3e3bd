"""Weights of which each process holds a part: rows of the first dimension, the last of them padding with zeros.

A part stands in its module where the weight did, under the same name and with as many dimensions, so that an optimizer
that treats each element alike, and groups by names and dimensions, does what it does for the whole. Where the model
runs, each weight is gathered; its gradient is summed over all processes, and each gets its rows. Both are operators of
the program that is compiled, which decides by its budget which weights stay for the backward and which it gathers
again (Rajbhandari et al., 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from aottrain.errors import ConfigError, ResumeError
from aottrain.ops.collectives import padded, rows_of_shard
from aottrain.trainer.parallel.world import World
from aottrain.trainer.weights.pieces import Stored

_parallel: Any = torch.ops.aottrain_parallel


class _Gather(torch.autograd.Function):
    """A weight from its parts; the gradient of a part from that of the weight, summed over the processes that have
    the parts."""

    @staticmethod
    def forward(ctx: Any, shard: Tensor, rows: int, world: int, group: str) -> Tensor:
        ctx.world, ctx.group = world, group
        return _parallel.gather_rows(shard, rows, world, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        return _parallel.scatter_sum(gradient, ctx.world, ctx.group), None, None, None


@dataclass(frozen=True)
class _Place:
    """Where a weight stands in the model."""

    module: nn.Module
    attribute: str
    key: str
    """Its path."""
    name: str
    """Of the weight, the path of its first place."""


class Shards:
    """Of one model: the parts of its weights that this process holds."""

    def __init__(self, model: nn.Module, world: World):
        """Takes the weights of the model, which all processes have alike, and leaves their parts in their places."""
        self.world, self.group = world, world.parts_group
        self.shapes: dict[str, torch.Size] = {}
        self.places: list[_Place] = []
        self._is_whole = False
        parts: dict[Tensor, tuple[str, nn.Parameter]] = {}
        for prefix, module in model.named_modules():
            if isinstance(module, nn.RNNBase):
                text = "keeps a list of its weights, which would stay whole"
                raise ConfigError(f"parallel=shard: {prefix or 'the model'} ({type(module).__name__}) {text}; use ddp")
            for attribute, weight in list(module._parameters.items()):
                if weight is None:
                    continue
                key = f"{prefix}.{attribute}" if prefix else attribute
                if weight not in parts:
                    name = key
                    self.shapes[name] = weight.shape
                    part = nn.Parameter(self.cut(weight.detach()), requires_grad=weight.requires_grad)
                    parts[weight] = name, part
                name, part = parts[weight]
                module._parameters[attribute] = part
                self.places.append(_Place(module, attribute, key, name))

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        raise TypeError("the parts of a model's weights are not copied")

    def cut(self, whole: Tensor) -> Tensor:
        """This process's rows."""
        whole = whole if whole.ndim else whole.reshape(1)
        count = rows_of_shard(whole.shape[0], self.world.num_parts)
        first = self.world.part * count
        return padded(whole[first : first + count], count).clone(memory_format=torch.contiguous_format)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """The whole of what this process holds a part of, of the shape of the weight of this name."""
        shape = self.shapes[name]
        rows = shape[0] if shape else 1
        whole = _Gather.apply(part, rows, self.world.num_parts, self.group)
        return whole if len(shape) else whole.reshape(())

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Inside, the model has its weights, gathered in the order of the model."""
        if self._is_whole:
            yield
            return
        wholes: dict[str, Tensor] = {}
        for place in self.places:
            if place.name not in wholes:
                part = place.module._parameters[place.attribute]
                wholes[place.name] = self.gather(place.name, part)  # type: ignore[arg-type]
        with self.replaced(wholes):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside, the model has these in the places of its weights, by their names."""
        parts = [place.module._parameters[place.attribute] for place in self.places]
        try:
            for place in self.places:
                place.module._parameters[place.attribute] = values[place.name]  # type: ignore[assignment]
            yield
        finally:
            for place, part in zip(self.places, parts, strict=True):
                place.module._parameters[place.attribute] = part

    @torch.no_grad()
    def consolidated(self, value: Any, name: str) -> Any:
        """Of a tensor that is a part as the weight of this name is, the whole one on the CPU, in the first process; the
        others get none, but take part where they are of its replica. Other values as they are."""
        if not isinstance(value, Tensor) or not value.ndim:
            return value
        whole = self.gather(name, value) if self.world.is_of_first_replica else None
        return whole.cpu() if whole is not None and self.world.is_first else None

    def part_of(self, value: Any, name: str) -> Any:
        """The other way: this process's part of a whole tensor, or of one that is on the disk. ResumeError: its shape
        is not that of the weight, or it cannot be read."""
        if not isinstance(value, Tensor | Stored):
            return value
        if (isinstance(value, Stored) or value.ndim) and value.shape != self.shapes[name]:
            here = f"{list(self.shapes[name])} in this model"
            raise ResumeError(f"is of another model: {name} is {list(value.shape)} there, {here}")
        if isinstance(value, Tensor):
            return self.cut(value)
        count = rows_of_shard(value.shape[0] if value.shape else 1, self.world.num_parts)
        try:
            return value.rows(self.world.part * count, count)
        except Exception as error:  # safetensors has its own
            raise ResumeError(f"a piece of {value.name} cannot be read ({type(error).__name__}: {error})") from error
