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


_stood_for: list[str] = []


@contextmanager
def imagined_processes(size: int, by: str = "") -> Iterator[None]:
    """Inside, this process is the first of so many, of which no other is there: what it sends goes nowhere, and what it
    would be given is whatever memory holds. by: the backend that would connect them, whose memory plans count."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this makes the backend known

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    _stood_for.append(by)
    try:
        yield
    finally:
        _stood_for.pop()
        dist.destroy_process_group()


def connected_by() -> str:
    """The backend that connects this process with others, or would connect it with imagined ones; "" where it is
    alone."""
    if not dist.is_available() or not dist.is_initialized():
        return ""
    return (_stood_for and _stood_for[-1]) or str(dist.get_backend())
