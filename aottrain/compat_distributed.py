"""What is asked of torch.distributed beside its collectives: tensors in parts, and a private part of it, which torch's
own tests of several processes in one are made with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor, nn


def in_parts(tensor: Tensor) -> str:
    """Of a DTensor what to write instead, to follow its name; "" of any other."""
    if type(tensor).__name__ != "DTensor":
        return ""
    whole = "by full_tensor()"
    if isinstance(tensor, nn.Parameter):
        whole = "as what fully_shard gathers is: module.forward = aottrain.compile(module.forward)"
    return f", of which this process has a part: give it whole, {whole}"


@contextmanager
def imagined_processes(size: int) -> Iterator[None]:
    """Inside, this process is the first of so many, of which no other is there: what it sends goes nowhere, and what it
    would be given is whatever memory holds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
