"""Recorders for a CPU: a replay runs the same again, from the addresses and to the memory of the recorded run."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class Address:
    """What a CUDA graph knows of an input: where it is. It keeps no memory alive."""

    def __init__(self, value):
        self.start, self.dtype, self.shape, self.stride = value.data_ptr(), value.dtype, value.shape, value.stride()
        steps = zip(self.shape, self.stride, strict=True)
        self.count = 0 if 0 in self.shape else 1 + sum((size - 1) * stride for size, stride in steps)

    def tensor(self):
        if not self.count:
            return torch.empty(self.shape, dtype=self.dtype)
        raw = (ctypes.c_byte * (self.count * self.dtype.itemsize)).from_address(self.start)
        return torch.frombuffer(raw, dtype=self.dtype).as_strided(self.shape, self.stride)


class Again:
    """As a CUDA graph it computes nothing while it records: the results hold other numbers until the first replay."""

    def __init__(self, device=None):
        self.stream = 0

    def queue(self):
        return self.stream

    def record(self, run, inputs):
        known = [Address(value) if isinstance(value, Tensor) else value for value in inputs]
        given = set(map(id, inputs))
        results = run(list(inputs))
        owned = [value if isinstance(value, Tensor) and id(value) not in given else None for value in results]
        for value in owned:
            if value is not None:
                value.fill_(float("nan") if value.is_floating_point() else 77)

        def replay():
            new = run([value.tensor() if isinstance(value, Address) else value for value in known])
            for mine, value in zip(owned, new, strict=True):
                if mine is not None:
                    mine.copy_(value)

        return results, replay


class Broken(Again):
    def record(self, run, inputs):
        run(list(inputs))
        raise RuntimeError("operation not permitted when stream is capturing\nand more")
